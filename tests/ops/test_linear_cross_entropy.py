"""linear_cross_entropy: many chunks, what is held and computed, autocast, FLOPs, rejected inputs."""

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, nop
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from csrc_meta import SPECS, Sample, chunks, cross_entropy, linear_cross_entropy
from csrc_meta.errors import LabelOutOfRangeError, UnsupportedDtypeError, UnsupportedInputError
from csrc_meta.results import compute_dtype
from fusedops import functional
from tests.conftest import INTERPRETED
from tests.ops.compare import Recorder, assert_bounded, assert_close_to_eager, rejection, run, snapshot

EAGER = SPECS["linear_cross_entropy"].eager


OPTIONS = {"label_smoothing": 0.1, "softcap": 2.0, "logit_scale": 1.5, "z_loss": 0.01}


def sample(
    device, rows=14, hidden=16, vocabulary=50, dtype=torch.float32, bias=False, weighted=False, **kwargs
) -> Sample:
    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device=device) / 3).to(dtype).requires_grad_()

    labels = torch.randint(0, vocabulary, (rows,), device=device)
    labels[::5] = -100
    if weighted:
        kwargs["class_weight"] = torch.rand(vocabulary, device=device) + 0.5
    return Sample(
        "", (leaf(rows, hidden), leaf(vocabulary, hidden), labels, leaf(vocabulary) if bias else None), kwargs
    )


@pytest.fixture
def small_chunks(monkeypatch):
    """As many chunks as a large batch has, the last one short."""
    monkeypatch.setattr(chunks, "chunk_rows", lambda *args: 4)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("small_chunks")
def test_linear_cross_entropy_chunks(device, dtype, reduction):
    case = sample(device, dtype=dtype, bias=True, weighted=True, reduction=reduction, **OPTIONS)
    assert_close_to_eager(functional.linear_cross_entropy, EAGER, case)


@pytest.mark.skipif(INTERPRETED, reason="takes minutes: references and GPUs have every combination, here are samples")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "divided sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("small_chunks")
def test_linear_cross_entropy_every_combination(device, dtype, reduction):
    """All options beside each other, with and without bias and class weights, against float64."""
    kwargs = {"reduction": reduction}
    if reduction == "divided sum":
        kwargs = {"reduction": "sum", "divisor": torch.tensor(9, device=device)}
    for count in range(len(OPTIONS) + 1):
        for names in itertools.combinations(OPTIONS, count):
            given = kwargs | {name: OPTIONS[name] for name in names}
            for bias, weighted in itertools.product((False, True), repeat=2):
                case = sample(
                    device, rows=9, hidden=8, vocabulary=21, dtype=dtype, bias=bias, weighted=weighted, **given
                )
                assert_close_to_eager(functional.linear_cross_entropy, EAGER, case)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_weight_gradient_is_summed_in_float32(device, monkeypatch, reduction):
    """Many chunks are as near to float64 as one: twenty sums in bfloat16 would have three times the error."""
    case = sample(device, rows=80, hidden=16, vocabulary=32, dtype=torch.bfloat16, reduction=reduction)
    upstream = torch.ones(() if reduction == "mean" else (80,), device=device)
    in_double = [t.detach().double().requires_grad_() for t in case.args[:2]]
    loss = functional.linear_cross_entropy(*in_double, case.args[2], reduction=reduction)
    (truth,) = torch.autograd.grad(loss, in_double[1], upstream.double())
    errors = []
    for step in (4, 80):
        monkeypatch.setattr(chunks, "chunk_rows", lambda *args, step=step: step)
        errors.append((run(functional.linear_cross_entropy, case, upstream).tensors()[2] - truth).norm())
    many, one = errors
    assert many <= 1.5 * one


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_cross_entropy_upstream_gradient(device, dtype, reduction):
    """Other than one, and with the graph kept: what is multiplied in is not multiplied in again."""
    case = sample(device, dtype=dtype, bias=True, reduction=reduction)
    hidden, weight, _, bias = case.args
    loss = functional.linear_cross_entropy(*case.args, **case.kwargs)
    leaves = hidden, weight, bias
    upstreams = [torch.tensor(f, device=device) for f in (3.0, 1.0, -0.5)]
    kept = [torch.autograd.grad(loss, leaves, u, retain_graph=True) for u in upstreams]
    last = torch.autograd.grad(loss, leaves, upstreams[0])
    for u, gradients in zip((*upstreams, upstreams[0]), (*kept, last), strict=True):
        expected = torch.autograd.grad(EAGER(*case.args, **case.kwargs), leaves, u)
        tolerance = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        for got, wanted in zip(gradients, expected, strict=True):
            assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_linear_cross_entropy_takes_its_gradients_as_they_are(device):
    """An eager backward pass makes no second tensor of a gradient's size; with the graph kept it has to."""
    hidden, weight, labels, _ = sample(device).args

    def scaled(**kwargs) -> list[str]:
        loss = functional.linear_cross_entropy(hidden, weight, labels)
        seen = []
        with mock.patch.object(linear_cross_entropy, "_scale_op", lambda *args: seen.append("new") or args[1]):
            torch.autograd.grad(loss, (hidden, weight), **kwargs)
        return seen

    assert scaled() == [] and scaled(retain_graph=True) == ["new"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_cross_entropy_compiled_backward(device, dtype):
    """A multiplication that a compiler sees and can make in place, and no operator whose results are new tensors."""
    case, upstream, graphs = sample(device, dtype=dtype), torch.tensor(2.5, device=device), []

    def keep(gm, inputs):
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    call = torch.compile(functional.linear_cross_entropy, backend=aot_autograd(fw_compiler=nop, bw_compiler=keep))
    leaves = case.args[:2]
    gradients = torch.autograd.grad(call(*case.args), leaves, upstream)
    expected = torch.autograd.grad(functional.linear_cross_entropy(*case.args), leaves, upstream)
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    (backward,) = graphs
    assert not any("fusedops" in str(n.target) for n in backward.graph.nodes)


def test_linear_cross_entropy_hooks_keep_what_they_packed(device):
    """Saved tensors that hooks hold are not written to."""
    hidden, weight, labels, _ = sample(device).args
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        loss = functional.linear_cross_entropy(hidden, weight, labels)
    before = [t.clone() for t in packed]
    loss.backward(torch.tensor(2.0, device=device))
    assert len(packed) == 4
    for t, copy in zip(packed, before, strict=True):
        assert torch.equal(t, copy)


@pytest.mark.parametrize(
    ("rows", "hidden", "vocabulary", "saved", "wants"),
    [
        (32768, 4096, 128256, 2, 4096),
        (8192, 4096, 128256, 2, 8192),
        (8192, 4096, 128256, 0, 4096),
        (16384, 3072, 256000, 2, 2048),
        (32768, 2304, 262144, 2, 2048),
        (100, 4096, 128256, 2, 100),
        (9000, 4096, 128256, 2, 3072),
        (9000, 0, 128256, 0, 2048),
        (8192, 4096, 1000, 2, 8192),
        (0, 4096, 1000, 2, 1),
    ],
    ids=[
        "as large as the weight",
        "no more memory than a sum",
        "without that sum",
        "no power of two",
        "a power of two nearby",
        "few rows",
        "alike",
        "no gradient of the weight",
        "small vocabulary",
        "no rows",
    ],
)
def test_linear_cross_entropy_chunk_size(rows, hidden, vocabulary, saved, wants):
    assert chunks.chunk_rows(rows, hidden, vocabulary, 2, saved) == wants


@pytest.mark.parametrize(
    ("budget", "wants"), [(2**30, 4096), (2**31, 8192), (2**28, 1024), (2**18, 1), (1, 1)], ids=str
)
def test_linear_cross_entropy_chunk_size_by_a_budget(budget, wants):
    """Whole tiles of rows that fit, alike; all rows where their gradient needs no sum then."""
    assert chunks.chunk_rows(8192, 2048, 128256, 2, 2, budget) == wants


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_keeps_to_a_budget(device, reduction):
    case = sample(device, rows=80, hidden=8, vocabulary=50, reduction=reduction, chunk_bytes=5 * 50 * 4)
    taken = []

    def rows(*args, real=chunks.chunk_rows):
        taken.append(real(*args))
        return taken[-1]

    with mock.patch.object(chunks, "chunk_rows", rows):
        assert_close_to_eager(functional.linear_cross_entropy, EAGER, case)
    assert taken and set(taken) == {5}


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_linear_cross_entropy_computes_what_is_needed(device, reduction):
    case = sample(device, bias=True, reduction=reduction)
    hidden, weight, labels, bias = case.args
    inputs = {"hidden": hidden, "weight": weight, "bias": bias}
    for frozen in ((), ("weight",), ("hidden",), ("hidden", "weight"), ("weight", "bias")):
        given = {name: t.detach() if name in frozen else t for name, t in inputs.items()}
        with Recorder() as recorder:
            loss = functional.linear_cross_entropy(
                given["hidden"], given["weight"], labels, given["bias"], reduction=reduction
            )
            loss.sum().backward()
        wanted = [name not in frozen for name in inputs]
        (forward,) = recorder.arguments("linear_cross_entropy_forward")
        assert forward[6] == wanted
        if reduction == "none":
            (backward,) = recorder.arguments("linear_cross_entropy_backward")
            assert backward[7] == wanted


def test_linear_cross_entropy_without_grad_makes_no_gradients(device):
    hidden, weight, labels, _ = sample(device).args
    with torch.no_grad(), Recorder() as recorder:
        functional.linear_cross_entropy(hidden, weight, labels)
    (forward,) = recorder.arguments("linear_cross_entropy_forward")
    assert forward[6] == [False, False, False]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_linear_cross_entropy_each_option_matters(device, name, weighted):
    """Alone, beside class weights, and unlike the loss without it."""
    case = sample(device, weighted=weighted, **{name: OPTIONS[name]})
    assert_close_to_eager(functional.linear_cross_entropy, EAGER, case)
    with_it = functional.linear_cross_entropy(*case.args, **case.kwargs)
    without = functional.linear_cross_entropy(*case.args, **{k: v for k, v in case.kwargs.items() if k != name})
    assert abs(with_it - without) > 1e-4


def test_linear_cross_entropy_mean_is_by_class_weights(device):
    hidden, weight, labels, _ = sample(device).args
    class_weight = torch.rand(50, device=device) + 0.5
    options = {"class_weight": class_weight}
    total = class_weight[labels[labels != -100]].sum()
    mean, summed = (
        functional.linear_cross_entropy(hidden, weight, labels, reduction=r, **options) for r in ("mean", "sum")
    )
    torch.testing.assert_close(mean, summed / total)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_all_ignored(device, reduction):
    hidden, weight, labels, bias = sample(device, bias=True).args
    loss = functional.linear_cross_entropy(hidden, weight, labels.fill_(-100), bias, reduction=reduction)
    gradients = torch.autograd.grad(loss, (hidden, weight, bias), torch.ones_like(loss))
    assert bool(loss.isnan().all()) == (reduction == "mean")
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [37, 4.5, torch.tensor(37), torch.tensor(4.5)], ids=str)
def test_linear_cross_entropy_divisor(device, count, dtype):
    """num_items_in_batch: the sum over a batch, divided by the tokens of all accumulated batches."""
    count = count.to(device) if isinstance(count, torch.Tensor) else count
    case = sample(device, dtype=dtype, bias=True, reduction="sum", divisor=count)
    assert_close_to_eager(functional.linear_cross_entropy, EAGER, case)


def test_linear_cross_entropy_divisor_needs_no_second_pass(device):
    """Divided outside, the gradients would be multiplied by something other than one."""
    hidden, weight, labels, _ = sample(device).args
    factors = []
    with mock.patch.object(linear_cross_entropy, "_scale_op_", lambda factor, gradients: factors.append(factor)):
        options = {"reduction": "sum", "divisor": torch.tensor(37, device=device)}
        functional.linear_cross_entropy(hidden, weight, labels, **options).backward()
    assert [float(f) for f in factors] == [1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_linear_cross_entropy_divisor_zero(device, dtype):
    """A count of nothing is the caller's: infinite as in eager, not silently zero."""
    case = sample(device, dtype=dtype, reduction="sum", divisor=torch.tensor(0, device=device))
    loss = functional.linear_cross_entropy(*case.args, **case.kwargs)
    assert loss.isinf() and EAGER(*case.args, **case.kwargs).isinf()
    assert not torch.autograd.grad(loss, case.args[1])[0].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_linear_cross_entropy_leaves_ignored_rows_out(device, monkeypatch, dtype, reduction):
    """Nothing differs but what is computed: with all rows in the products, as in a captured graph, results are alike."""
    case = sample(device, rows=64, dtype=dtype, bias=True, weighted=True, reduction=reduction, **OPTIONS)
    case.args[2][20:50] = -100
    kept = int((case.args[2] != -100).sum())
    upstream = torch.randn(64 if reduction == "none" else (), device=device)
    kernels = _kernels(monkeypatch)
    seen = []
    monkeypatch.setattr(kernels, "kept_rows", lambda *args: seen.append(chunks.kept_ref(*args)) or seen[-1])
    without = run(functional.linear_cross_entropy, case, upstream).tensors()
    assert seen and all(len(index) == kept for index in seen)
    monkeypatch.setattr(kernels, "kept_rows", lambda *args: None)
    for got, wanted in zip(without, run(functional.linear_cross_entropy, case, upstream).tensors(), strict=True):
        tolerance = 8 * torch.finfo(got.dtype).eps * float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=0.0)


class _Kept:
    """Stands for ``Kernels.kept`` of the kernels that are in use, on whatever device."""

    def __init__(self) -> None:
        self.kept_rows = chunks.kept_ref


def _kernels(monkeypatch) -> _Kept:
    kept, make = _Kept(), chunks._Rows.__init__

    def patched(rows, kernels, *args):
        make(rows, kernels._replace(kept=lambda *given: kept.kept_rows(*given)), *args)

    monkeypatch.setattr(chunks._Rows, "__init__", patched)
    return kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [50, 200, 1000])
def test_linear_cross_entropy_rounds_sums_in_their_place(device, monkeypatch, rows, dtype):
    monkeypatch.setattr(chunks, "SCRATCH", 64)
    values = torch.randn(rows, 7, device=device)
    pieces = [values[p].clone() for p in chunks._pieces(rows, 4 // dtype.itemsize)]
    storage = pieces[0].data_ptr()
    result = chunks._one_after_another(pieces, dtype)
    assert torch.equal(result, values.to(dtype)) and result.is_contiguous() and result.data_ptr() == storage
    assert len(pieces) == (2 if rows > 512 and dtype == torch.bfloat16 else 1)


def test_linear_cross_entropy_sum_in_bfloat16(device, monkeypatch):
    """Less memory, and no more error than a rounding after each chunk makes."""
    monkeypatch.setattr(chunks, "chunk_rows", lambda *args: 16)
    case = sample(device, rows=64, dtype=torch.bfloat16)
    wide = Sample("", _double(case.args), case.kwargs)
    upstream = torch.tensor(1.0, device=device)
    truth = run(EAGER, wide, upstream).tensors()[2]
    errors = {}
    for dtype in (torch.bfloat16, torch.float32, None):
        narrow = Sample("", case.args, {"accum_dtype": dtype})
        got = run(functional.linear_cross_entropy, narrow, upstream).tensors()[2]
        errors[dtype] = float((got.double() - truth).norm() / truth.norm())
    assert errors[None] == errors[torch.float32] < errors[torch.bfloat16] < 2.5 * errors[None]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_linear_cross_entropy_loss_scale_in_float16(device, reduction):
    """65536 is what GradScaler starts with: the scaled gradients are right, and finite where eager's are."""
    case = sample(device, rows=64, vocabulary=300, dtype=torch.float16, reduction=reduction)
    upstream = torch.tensor(65536.0, device=device) if reduction == "mean" else torch.full((64,), 512.0, device=device)
    got, theirs = (run(f, case, upstream) for f in (functional.linear_cross_entropy, EAGER))
    wide = Sample("", tuple(t.detach().double().requires_grad_() for t in case.args[:2]) + case.args[2:], case.kwargs)
    truth = run(EAGER, wide, upstream)
    for a, b, c in zip(got.tensors(), theirs.tensors(), truth.tensors(), strict=True):
        assert a.isfinite().all()
        assert_bounded("gradient", a, b, c)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy_autocast(device, bias):
    """float32 parameters under autocast: the projection runs in the autocast dtype, as torch.nn.functional.linear."""
    case = sample(device, bias=bias)

    def under_autocast(function):
        def call(*args, **kwargs):
            with torch.autocast(device.type, torch.bfloat16):
                return function(*args, **kwargs)

        return call

    upstream = torch.tensor(1.5, device=device)
    got = run(under_autocast(functional.linear_cross_entropy), case, upstream)
    wanted = run(under_autocast(EAGER), case, upstream)
    truth = run(EAGER, Sample("", _double(case.args), case.kwargs), upstream)
    for a, b, c in zip(got.tensors(), wanted.tensors(), truth.tensors(), strict=True):
        assert a.dtype == b.dtype == torch.float32
        # Values are float32, rounding is bfloat16's: eager's error, and one step for the interpreter's truncation.
        assert_bounded("autocast", a, b, c, slack=2.0**-7)
    assert abs(got.output - truth.output) > 1e-6, "the projection ran in float32"


def _metrics(hidden, weight, labels, bias=None, **options):
    """Of all logits at once, as anyone would write it."""
    logits = F.linear(hidden, weight, bias)
    z, _ = cross_entropy.mapped(logits.to(compute_dtype(hidden)), cross_entropy.Options(-100, 0.0, **options))
    log_p = z.log_softmax(-1)
    kept = labels != -100
    index = labels.masked_fill(~kept, 0)
    log_probs = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1) * kept
    entropy = -(log_p.exp() * log_p).sum(-1) * kept
    return log_probs, entropy, ((z.argmax(-1) == index) & kept).sum() / kept.sum(), z.logsumexp(-1).square() * kept


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "logit_scale": 1.5, "z_loss": 0.01}], ids=["plain", "all"])
@pytest.mark.usefixtures("small_chunks")
def test_linear_cross_entropy_metrics(device, dtype, options, reduction):
    case = sample(device, rows=20, dtype=dtype, bias=True, weighted=True, reduction=reduction, **options)
    case.args[0].data.mul_(5.0)
    # Some labels are the likeliest.
    logits = F.linear(*_double(case.args)[:2], _double(case.args)[3])
    case.args[2][1:8:3] = logits.argmax(-1)[1:8:3]
    loss, metrics = functional.linear_cross_entropy_with_metrics(*case.args, **case.kwargs)
    log_probs, entropy, accuracy, squares = _metrics(*_double(case.args), **options)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.02}
    torch.testing.assert_close(metrics.log_probs.double(), log_probs, **tolerance)
    torch.testing.assert_close(metrics.entropy.double(), entropy, **tolerance)
    if dtype == torch.float32:
        assert metrics.accuracy == accuracy.float() and 0 < accuracy < 1
    of_label = case.kwargs["class_weight"][case.args[2].clamp(min=0)] * (case.args[2] != -100)
    z_loss = options.get("z_loss", 0.0) * squares * of_label
    if reduction != "none":
        z_loss = z_loss.sum() / (of_label.double().sum() if reduction == "mean" else 1.0)
    torch.testing.assert_close(metrics.z_loss.double(), z_loss, **tolerance)
    assert not any(m.requires_grad for m in metrics)
    # The loss and its gradients are those without metrics.
    plain = functional.linear_cross_entropy(*case.args, **case.kwargs)
    leaves = [case.args[i] for i in (0, 1, 3)]
    gradients = [torch.autograd.grad(x, leaves, torch.ones_like(x)) for x in (loss, plain)]
    for got, wanted in zip((loss, *gradients[0]), (plain, *gradients[1]), strict=True):
        # Compiled with metrics, a kernel may contract other products and sums.
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=2 * torch.finfo(got.dtype).eps)


def test_linear_cross_entropy_metrics_of_equal_and_infinite_logits(device):
    """Of equal logits the first is the argmax; what can't occur adds nothing to the entropy."""
    hidden, weight = torch.eye(4, device=device), torch.zeros(6, 4, device=device)
    weight[:, 1] = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -torch.inf], device=device)
    labels = torch.tensor([0, 1, -100, 2], device=device)
    _, metrics = functional.linear_cross_entropy_with_metrics(hidden, weight, labels, bias)
    assert abs(metrics.accuracy - 2 / 3) < 1e-6
    torch.testing.assert_close(metrics.entropy[[0, 3]], torch.tensor(5.0, device=device).log().expand(2))
    assert metrics.entropy[2] == metrics.log_probs[2] == 0.0


def test_linear_cross_entropy_metrics_under_compile(device):
    case = sample(device, reduction="sum", divisor=torch.tensor(5, device=device), z_loss=0.1)

    def function(*args):
        return functional.linear_cross_entropy_with_metrics(*args, **case.kwargs)

    (loss, metrics), (wanted, expected) = (
        torch.compile(function, backend="aot_eager", fullgraph=True)(*case.args),
        function(*case.args),
    )
    loss.backward()
    for got, other in zip((loss, *metrics), (wanted, *expected), strict=True):
        torch.testing.assert_close(got, other)


def test_linear_cross_entropy_metrics_reject_unknown_options():
    with pytest.raises(TypeError, match="label_smothing"):
        functional.linear_cross_entropy_with_metrics(HIDDEN, WEIGHT, LABELS, label_smothing=0.1)


def _double(args):
    return tuple(
        a.detach().double().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in args
    )


def test_linear_cross_entropy_flops(device):
    """A rewritten model reports the FLOPs that it reported before."""

    def count(function) -> int:
        args = sample(device).args
        with FlopCounterMode(display=False) as counter:
            function(*args).backward()
        return counter.get_total_flops()

    assert count(functional.linear_cross_entropy) == count(EAGER) > 0


def test_linear_cross_entropy_equals_cross_entropy_of_linear(device):
    hidden, weight, labels, bias = sample(device, bias=True).args
    logits = F.linear(hidden, weight, bias)
    torch.testing.assert_close(
        functional.linear_cross_entropy(hidden, weight, labels, bias),
        functional.cross_entropy(logits, labels),
        atol=1e-6,
        rtol=1e-6,
    )


def rejects(error: type[Exception], *args, **kwargs) -> str:
    return rejection(error, lambda: functional.linear_cross_entropy(*args, **kwargs))


HIDDEN, WEIGHT, LABELS = torch.ones(2, 4), torch.ones(8, 4), torch.zeros(2, dtype=torch.int64)


def test_linear_cross_entropy_rejects_labels_out_of_range():
    snapshot(
        rejects(LabelOutOfRangeError, HIDDEN, WEIGHT, LABELS + 8),
        """fusedops.linear_cross_entropy: labels: got 8, wants labels in [0, 8) or ignore_index=-100. Check the tokenizer against the vocabulary, or mark the position with ignore_index.""",
    )
    snapshot(
        rejects(LabelOutOfRangeError, HIDDEN, WEIGHT, LABELS - 1),
        """fusedops.linear_cross_entropy: labels: got -1, wants labels in [0, 8) or ignore_index=-100. Check the tokenizer against the vocabulary, or mark the position with ignore_index.""",
    )


def test_linear_cross_entropy_rejects_dtypes():
    snapshot(
        rejects(UnsupportedDtypeError, HIDDEN.int(), WEIGHT, LABELS),
        """fusedops.linear_cross_entropy: hidden: got (2, 4) int32 on cpu, wants one of bfloat16, float16, float32, float64. Cast it to a floating-point dtype.""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, HIDDEN, WEIGHT.half(), LABELS),
        """fusedops.linear_cross_entropy: weight: got (8, 4) float16 on cpu, wants the dtype of hidden, torch.float32. Cast one of them: weight.to(hidden.dtype).""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, HIDDEN, WEIGHT, LABELS, torch.ones(8).half()),
        """fusedops.linear_cross_entropy: bias: got (8,) float16 on cpu, wants the dtype of hidden, torch.float32. Cast one of them: bias.to(hidden.dtype).""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, HIDDEN, WEIGHT, torch.ones(2, 8)),
        """fusedops.linear_cross_entropy: labels: got (2, 8) float32 on cpu, wants one of int64, int32. Class probabilities are not supported: use torch.nn.functional.""",
    )


def test_linear_cross_entropy_rejects_shapes():
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT.t(), LABELS),
        """fusedops.linear_cross_entropy: weight: got (4, 8) float32 on cpu, wants shape (V, H) with the last dimension of hidden, (2, 4) float32 on cpu. Pass the projection as torch.nn.Linear stores it.""",
    )
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS[:1]),
        """fusedops.linear_cross_entropy: labels: got (1,) int64 on cpu, wants shape (2,). One label for each row of hidden.""",
    )
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, torch.ones(4)),
        """fusedops.linear_cross_entropy: bias: got (4,) float32 on cpu, wants shape (8,). One element for each row of weight.""",
    )


def test_linear_cross_entropy_rejects_class_weights():
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, class_weight=torch.ones(4)),
        """fusedops.linear_cross_entropy: class_weight: got (4,) float32 on cpu, wants shape (8,). One weight for each class.""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, HIDDEN, WEIGHT, LABELS, class_weight=torch.ones(8).int()),
        """fusedops.linear_cross_entropy: class_weight: got (8,) int32 on cpu, wants one of bfloat16, float16, float32, float64. Cast it to a floating-point dtype.""",
    )
    trained = torch.ones(8, requires_grad=True)
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, class_weight=trained),
        """fusedops.linear_cross_entropy: class_weight: got a tensor that requires grad, wants one that does not. Detach it: class_weight.detach().""",
    )


def test_linear_cross_entropy_rejects_divisors():
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, divisor=2),
        """fusedops.linear_cross_entropy: divisor: got () float64 on cpu, reduction='mean', wants a real number, for reduction='sum'. Divide the loss instead.""",
    )
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, reduction="sum", divisor=torch.ones(2)),
        """fusedops.linear_cross_entropy: divisor: got (2,) float32 on cpu, wants shape (). All rows are divided by one number.""",
    )
    trained = torch.ones((), requires_grad=True)
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, reduction="sum", divisor=trained),
        """fusedops.linear_cross_entropy: divisor: got a tensor that requires grad, wants one that does not. Detach it: divisor.detach().""",
    )


def test_linear_cross_entropy_rejects_accum_dtypes():
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, accum_dtype=torch.bfloat16),
        """fusedops.linear_cross_entropy: accum_dtype: got torch.bfloat16, wants one of None, torch.float32. Pass one of these.""",
    )
    snapshot(
        rejects(UnsupportedInputError, HIDDEN.half(), WEIGHT.half(), LABELS, accum_dtype=torch.float16),
        """fusedops.linear_cross_entropy: accum_dtype: got torch.float16, wants one of None, torch.float32. Pass one of these.""",
    )


def test_linear_cross_entropy_rejects_budgets():
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, chunk_bytes=0),
        """fusedops.linear_cross_entropy: chunk_bytes: got 0, wants a positive number of bytes, or None. Leave it out for as many as weight has.""",
    )


def test_linear_cross_entropy_rejects_another_device():
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT.to("meta"), LABELS),
        """fusedops.linear_cross_entropy: weight: got (8, 4) float32 on meta, wants the device of hidden, cpu. Move it: weight.to(hidden.device).""",
    )


def test_linear_cross_entropy_rejects_options():
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, reduction="batchmean"),
        """fusedops.linear_cross_entropy: reduction: got 'batchmean', wants one of 'none', 'mean', 'sum'. Pass one of these.""",
    )
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, label_smoothing=-0.1),
        """fusedops.linear_cross_entropy: label_smoothing: got -0.1, wants a number in [0, 1]. Pass the probability mass to spread.""",
    )
    snapshot(
        rejects(UnsupportedInputError, HIDDEN, WEIGHT, LABELS, softcap=0.0),
        """fusedops.linear_cross_entropy: softcap: got 0.0, wants a positive number or None. Pass the bound of the logits' magnitude.""",
    )
