"""linear_cross_entropy without gradients, by the kernel that stores no logits: against float64, and when it is taken."""

import pytest
import torch

from fusedops import functional
from tests.conftest import DEVICE, INTERPRETED

pytest.importorskip("triton")

from fusedops.kernels import projected_losses, projection, tuned

HAS_TILES = tuned.architecture(DEVICE) in projection.TILES and (INTERPRETED or DEVICE.type == "cuda")
pytestmark = pytest.mark.skipif(not HAS_TILES, reason="an architecture whose tiles were not measured")

DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
OPTIONS = {"label_smoothing": 0.1, "softcap": 20.0, "logit_scale": 1.5, "z_loss": 0.01}
# Neither rows nor columns nor the hidden size are multiples of a tile, unless they are all whole.
UNEVEN, WHOLE = ((37, 40, 75), (32, 64, 96)) if INTERPRETED else ((300, 200, 1000), (256, 256, 1024))


@pytest.fixture
def calls(monkeypatch):
    """Rows of each launch of the kernel."""
    seen, launched = [], projected_losses._projected
    monkeypatch.setattr(projected_losses, "_projected", lambda *args: seen.append(len(args[1])) or launched(*args))
    return seen


def inputs(shape, dtype=torch.float16, bias=False):
    rows, hidden, vocabulary = shape

    def tensor(*sizes):
        return torch.randn(sizes, device=DEVICE).to(dtype)

    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    hidden, weight = 3.0 * tensor(rows, hidden), tensor(vocabulary, hidden) / hidden**0.5
    labels[1::2] = (hidden.double() @ weight.double().t()).argmax(-1)[1::2]
    labels[::5] = -100
    return hidden, weight, labels, tensor(vocabulary) / 4 if bias else None


def in_double(args):
    return [a.double() if a is not None and a.is_floating_point() else a for a in args]


def flat(result):
    loss, metrics = result
    return [loss, *metrics]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [UNEVEN, WHOLE], ids=["uneven", "whole"])
@pytest.mark.parametrize(("options", "reduction"), [({}, "none"), (OPTIONS, "mean")], ids=["plain", "all options"])
def test_losses_and_metrics_are_those_of_float64(calls, dtype, shape, options, reduction):
    """Nothing is rounded to the dtype of the inputs on the way."""
    args, kwargs = inputs(shape, dtype, bias=bool(options)), {"reduction": reduction, **options}
    if options:
        kwargs["class_weight"] = torch.rand(shape[2], device=DEVICE) + 0.5
    got = flat(functional.linear_cross_entropy_with_metrics(*args, **kwargs))
    plain = functional.linear_cross_entropy(*args, **kwargs)
    assert len(calls) == 2
    wanted = flat(functional.linear_cross_entropy_with_metrics(*in_double(args), **kwargs))
    assert 0 < wanted[3] < 1
    for result, truth in zip((*got, plain), (*wanted, wanted[0]), strict=True):
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), truth, atol=5e-5, rtol=1e-5)


def test_more_rows_than_are_held_at_a_time(calls, monkeypatch):
    monkeypatch.setattr(projected_losses, "ROWS", 16)
    args = inputs(UNEVEN)
    got = functional.linear_cross_entropy(*args, reduction="none")
    assert len(calls) > 1 and max(calls) == 16
    torch.testing.assert_close(
        got.double(), functional.linear_cross_entropy(*in_double(args), reduction="none"), atol=5e-5, rtol=1e-5
    )


def test_columns_that_cannot_occur(calls):
    """As models mask what pads the vocabulary: whole tiles of minus infinity, and a row of nothing else."""
    hidden, weight, labels, _ = inputs(UNEVEN)
    bias = torch.zeros(UNEVEN[2], device=DEVICE, dtype=hidden.dtype)
    bias[20:] = -torch.inf
    labels[:] = torch.arange(UNEVEN[0], device=DEVICE) % 20
    args = (hidden, weight, labels, bias)
    got = flat(functional.linear_cross_entropy_with_metrics(*args))
    wanted = flat(functional.linear_cross_entropy_with_metrics(*in_double(args)))
    assert calls and wanted[0].isfinite()
    for result, truth in zip(got, wanted, strict=True):
        torch.testing.assert_close(result.double(), truth, atol=5e-5, rtol=1e-5)
    bias[:] = -torch.inf
    assert functional.linear_cross_entropy(*args).isnan()


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (lambda h, w: (h, w), True),
        (lambda h, w: (h.float(), w.float()), False),
        (lambda h, w: (h[:, 1:], w[:, 1:]), False),  # begins between two words of TMA
        (lambda h, w: (h[:, :33].contiguous(), w[:, :33].contiguous()), False),  # so do its rows
        (lambda h, w: (h, w.t().contiguous().t()), False),
        (lambda h, w: (h[:, ::2], w[:, ::2]), False),
        (lambda h, w: (h[:, :32], w[:, :32]), True),
        (lambda h, w: (h.requires_grad_(), w), False),
        (lambda h, w: (h, w.requires_grad_()), False),
    ],
)
def test_when_the_kernel_is_taken(calls, change, taken):
    """Not for layouts it can't read, nor beside gradients: these are made of logits as they are stored."""
    hidden, weight, labels, _ = inputs(UNEVEN)
    hidden, weight = change(hidden, weight)
    loss = functional.linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert bool(calls) == taken
    truth = functional.linear_cross_entropy(
        hidden.detach().double(), weight.detach().double(), labels, reduction="none"
    )
    torch.testing.assert_close(loss.detach().double(), truth, atol=1e-2, rtol=1e-2)
    with torch.no_grad():
        calls.clear()
        functional.linear_cross_entropy(hidden, weight, labels)
        assert bool(calls) == (taken or hidden.requires_grad or weight.requires_grad)


@pytest.mark.gpu
def test_no_logits_at_real_size(calls):
    """4096 x 128256 logits are 1 GiB; a replayed graph reads new hidden states."""
    hidden, weight, labels, _ = inputs((4096, 1024, 128256), torch.bfloat16)
    functional.linear_cross_entropy(hidden, weight, labels)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = functional.linear_cross_entropy(hidden, weight, labels)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20
    for _ in range(2):
        graph.replay()
        wanted = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels)
        torch.testing.assert_close(loss, wanted, atol=2e-4, rtol=1e-4)
        hidden.normal_()
    assert calls
