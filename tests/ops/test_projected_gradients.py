"""linear_cross_entropy's gradients without a pass over the logits: against float64, at the ends of their range, when taken."""

import pytest
import torch

from csrc_meta import chunks, cross_entropy
from fusedops import functional
from tests.conftest import DEVICE, INTERPRETED

pytest.importorskip("triton")

from fusedops.kernels import projected_gradients, projection, tuned

HAS_TILES = tuned.architecture(DEVICE) in projection.TILES and (INTERPRETED or DEVICE.type == "cuda")
pytestmark = pytest.mark.skipif(not HAS_TILES, reason="an architecture whose tiles were not measured")

DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
# float32 sums of float32, or of products of what was rounded to bfloat16 twice (a matrix and what it is multiplied with).
TOLERANCE = 2e-6 if INTERPRETED else 4e-3
# Neither rows nor columns nor the hidden size are multiples of a tile, unless they are all whole.
UNEVEN, WHOLE = ((37, 40, 75), (32, 64, 96)) if INTERPRETED else ((700, 200, 1000), (512, 256, 1024))
STEP = 16 if INTERPRETED else 256


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Rows of each chunk: STEP, but for the first where sums are wider than it, and for the last."""
    seen, fill = [], projected_gradients.Exponentials.fill
    monkeypatch.setattr(
        projected_gradients.Exponentials, "fill", lambda *args: seen.append(len(args[2])) or fill(*args)
    )
    monkeypatch.setattr(chunks, "chunk_rows", lambda *args: STEP)
    return seen


def inputs(shape=UNEVEN, scale=3.0):
    rows, hidden, vocabulary = shape
    states = (scale * torch.randn(rows, hidden, device=DEVICE)).to(DTYPE)
    weight = (torch.randn(vocabulary, hidden, device=DEVICE) / hidden**0.5).to(DTYPE)
    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    labels[1::2] = (states.double() @ weight.double().t()).argmax(-1)[1::2]
    labels[::5] = -100
    labels[3::4] = 7  # a frequent one
    return states.requires_grad_(), weight.requires_grad_(), labels


def loss_and_gradients(args, upstream, **kwargs):
    loss = functional.linear_cross_entropy(*args, **kwargs)
    return loss, *torch.autograd.grad(loss, args[:2], upstream.to(loss.dtype))


def error(got, truth):
    return (got.double() - truth).norm() / truth.norm()


def compare(args, tolerance=TOLERANCE, upstream=1.5, **kwargs):
    """The results, after a comparison with float64's."""
    upstream = torch.as_tensor(upstream, device=DEVICE)
    if kwargs.get("reduction") == "none":
        upstream = upstream * torch.rand(len(args[2]), device=DEVICE)
    results = loss_and_gradients(args, upstream, **kwargs)
    in_double = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    truth = loss_and_gradients(in_double, upstream, **kwargs)
    loss_tolerance = 1e-5 if INTERPRETED or kwargs.get("reduction") != "none" else 0.2  # of logits as they are stored
    torch.testing.assert_close(results[0].double(), truth[0], rtol=1e-5, atol=loss_tolerance)
    for got, wanted in zip(results[1:], truth[1:], strict=True):
        assert error(got, wanted) <= tolerance
    return results


OPTIONS = {"softcap": 20.0, "logit_scale": 1.5, "z_loss": 0.01}


@pytest.mark.parametrize("shape", [UNEVEN, WHOLE], ids=["uneven", "whole"])
@pytest.mark.parametrize(
    ("options", "reduction"),
    [({}, "mean"), ({}, "none"), ({"z_loss": 0.01, "logit_scale": -0.5}, "sum"), (OPTIONS, "mean"), (OPTIONS, "none")],
    ids=["plain", "plain, none", "scaled", "all options", "all options, none"],
)
def test_gradients_are_those_of_float64(made, shape, options, reduction):
    kwargs = {"reduction": reduction, **options}
    if "softcap" in options:
        kwargs["class_weight"] = torch.rand(shape[2], device=DEVICE) + 0.5
    compare(inputs(shape), **kwargs)
    assert (made[0] == STEP) == INTERPRETED  # where sums are wider, the first chunk is what the others leave


def test_divided_by_a_count(made):
    compare(inputs(), reduction="sum", divisor=torch.tensor(17, device=DEVICE))
    assert made


@pytest.mark.parametrize("scale", [1e-3, 10.0, 300.0, 3000.0])
def test_logits_of_any_size(made, scale):
    """From losses that are all log(V) to those beyond what exponentials hold, beside rows that are certain of their label."""
    args = inputs(scale=scale)
    with torch.no_grad():
        losses = functional.linear_cross_entropy(*args, reduction="none")
    assert (losses.max() > 97.0) == (scale > 10.0)
    compare(args)
    assert made


def test_a_row_that_is_nearly_certain(made):
    """What is left of its gradient is exact: no difference of nearly equal numbers is taken."""
    rows, hidden, vocabulary = UNEVEN
    states = torch.zeros(rows, hidden, device=DEVICE)
    states[:, 0] = torch.linspace(20, 28, rows, device=DEVICE)
    weight = torch.zeros(vocabulary, hidden, device=DEVICE)
    weight[3, 0] = 1.0
    labels, one = torch.full((rows,), 3, device=DEVICE), torch.ones((), device=DEVICE)
    args, in_double = (
        (states.to(DTYPE).to(d).requires_grad_(), weight.to(d).requires_grad_(), labels) for d in (DTYPE, torch.float64)
    )
    got, truth = (loss_and_gradients(a, one, reduction="sum") for a in (args, in_double))
    torch.testing.assert_close(got[0].double(), truth[0], rtol=0, atol=1e-7 * rows)
    for row, wanted in zip(got[1], truth[1], strict=True):
        assert error(row, wanted) <= max(TOLERANCE, 1e-5)  # float32 rounds a logit of 28 by 1e-6
    assert 0 < truth[1][-1].norm() < 1e-7
    assert made


def test_every_row_of_one_label(made):
    args = inputs()
    args[2][:] = 5
    compare(args)
    assert made


def test_ignored_rows_may_hold_anything(made):
    """They are known to the device alone while a CUDA graph is captured: all rows are kept."""
    with pytest.MonkeyPatch.context() as patch:
        from fusedops.kernels import linear_cross_entropy

        patch.setattr(
            linear_cross_entropy,
            "KERNELS",
            linear_cross_entropy.KERNELS._replace(kept=lambda *args: None),
        )
        hidden, weight, labels = inputs()
        with torch.no_grad():
            hidden[::5] = 1e30
        labels[::5] = -100
        results = loss_and_gradients((hidden, weight, labels), torch.ones((), device=DEVICE))
    kept = labels != -100
    truth = loss_and_gradients(
        (hidden.detach()[kept].double().requires_grad_(), weight.detach().double().requires_grad_(), labels[kept]),
        torch.ones((), device=DEVICE),
    )
    assert not results[1][~kept].any()
    assert error(results[1][kept], truth[1]) <= TOLERANCE
    assert error(results[2], truth[2]) <= TOLERANCE
    assert made


def test_some_gradients_alone(made):
    hidden, weight, labels = inputs()
    both = loss_and_gradients((hidden, weight, labels), torch.ones((), device=DEVICE))
    for i, args in enumerate(((hidden, weight.detach(), labels), (hidden.detach(), weight, labels))):
        made.clear()
        (got,) = torch.autograd.grad(functional.linear_cross_entropy(*args), args[i])
        # Without sums of weight's gradient the chunks, and so the order of what is added up, are others.
        torch.testing.assert_close(got, both[1 + i], rtol=max(torch.finfo(DTYPE).eps, 1e-5), atol=1e-7)
        assert made


def test_sums_have_one_order(made):
    results = [loss_and_gradients(args, torch.ones((), device=DEVICE)) for args in [inputs()] * 2]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    assert made


@pytest.mark.parametrize(
    ("kwargs", "taken"),
    [
        ({}, True),
        ({"label_smoothing": 0.1}, False),
        ({"bias": True}, False),
        pytest.param({"accum_dtype": torch.bfloat16}, False, marks=pytest.mark.gpu),
        ({"metrics": True}, False),
    ],
    ids=str,
)
def test_when_they_are_taken(made, kwargs, taken):
    """Where a row has one factor, and sums are wide enough for labels' terms, which nearly cancel the others'."""
    args, kwargs = inputs(), dict(kwargs)
    bias = torch.randn(UNEVEN[2], device=DEVICE).to(DTYPE) if kwargs.pop("bias", False) else None
    if kwargs.pop("metrics", False):
        functional.linear_cross_entropy_with_metrics(*args, bias, **kwargs)
    else:
        functional.linear_cross_entropy(*args, bias, **kwargs)
    assert bool(made) == taken


@pytest.mark.skipif(INTERPRETED, reason="of bfloat16, which the interpreter does not multiply")
@pytest.mark.parametrize("trained", [False, True], ids=["untrained", "trained"])
def test_error_is_that_of_one_product(made, monkeypatch, trained):
    """Of weight's gradient, rounded once: with labels' terms outside, and where they cancel the other rows'."""
    rows, hidden, vocabulary = 4096, 256, 512
    weight = torch.randn(vocabulary, hidden, device=DEVICE).to(DTYPE) / hidden**0.5
    states = (1.5 * torch.randn(rows, hidden, device=DEVICE) + 1.0).to(DTYPE)
    logits = states.float() @ weight.float().t()
    labels = torch.multinomial(logits.softmax(-1), 1).squeeze(1) if trained else torch.arange(rows, device=DEVICE) % 512
    args = (states.requires_grad_(), weight.requires_grad_(), labels)
    got = loss_and_gradients(args, torch.ones((), device=DEVICE))[2]
    assert sum(made) == rows and len(made) > 1
    dlogits = logits.double().softmax(-1)
    dlogits[torch.arange(rows, device=DEVICE), labels] -= 1
    truth = (dlogits / rows).t() @ states.detach().double()
    product = (dlogits / rows).to(DTYPE).t() @ states.detach()
    assert error(got, truth) <= 1.1 * error(product, truth)


def test_columns_may_be_in_several_places():
    """Some in one matrix and some in another, as in one."""
    rows, _, vocabulary = UNEVEN
    states, weight, labels = inputs()
    split = 64 if INTERPRETED else 512
    whole, left, right = (
        torch.empty(rows, -(-n // 8) * 8, device=DEVICE, dtype=DTYPE) for n in (vocabulary, split, vocabulary - split)
    )
    results = []
    for parts in ([(slice(0, vocabulary), whole)], [(slice(0, split), left), (slice(split, vocabulary), right)]):
        matrices = [(columns, matrix[:, : columns.stop - columns.start]) for columns, matrix in parts]
        losses, stats, one = (torch.ones(n, device=DEVICE) for n in ((rows,), (2, rows), ()))
        made = projected_gradients.factored(
            states, weight, None, labels, None, cross_entropy.Options(), losses, stats, None, one, None
        )
        made.fill(slice(0, rows), states, matrices)
        results.append((torch.cat([matrix for _, matrix in matrices], 1), losses, stats, made.factors, made.of_label))
    for one_matrix, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one_matrix, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0][0], results[1][0])


def test_a_sum_with_a_product_is_rounded_once():
    """Uneven tiles; in the place of sums that are no longer needed."""
    rows, hidden, vocabulary = UNEVEN
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    aligned = -(-vocabulary // 8) * 8 + 8  # rows begin where the operator's buffers may have them begin
    matrix, states = (torch.randn(rows, n, device=DEVICE).to(dtype) for n in (aligned, hidden))
    weight, labels = states.new_empty((vocabulary, hidden)), torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    results = torch.empty(3, rows, device=DEVICE)
    of_rows = (cross_entropy.Options(), results[0], results[1:], None, results.new_ones(()), None)
    made = projected_gradients.factored(states, weight, None, labels, None, *of_rows)
    total = torch.randn(vocabulary, hidden, device=DEVICE)
    truth = total.double() + matrix[:, :vocabulary].double().t() @ states.double()
    out = torch.empty_like(total, dtype=dtype)
    made.add_rounded(total, matrix[:, :vocabulary], states, out)
    torch.testing.assert_close(out.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.gpu
def test_a_captured_graph_repairs_what_overflows(made):
    """The device decides whether exponentials are computed anew."""
    hidden, weight, labels = inputs()
    one = torch.ones((), device=DEVICE)
    loss_and_gradients((hidden, weight, labels), one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = loss_and_gradients((hidden, weight, labels), one)
    for scale in (1.0, 300.0, 1.0):
        with torch.no_grad():
            hidden.normal_().mul_(scale)
        graph.replay()
        in_double = (hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_(), labels)
        truth = loss_and_gradients(in_double, one)
        assert results[0].isfinite()
        for got, wanted in zip(results[1:], truth[1:], strict=True):
            assert error(got, wanted) <= TOLERANCE
    assert made
