"""What can only be seen on a GPU: real sizes, 64-bit offsets, no host synchronisation, assertions on the device."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from csrc_meta import SPECS, Sample
from fusedops import functional
from tests.ops.compare import EAGER_FACTOR, TOLERANCES, assert_close_to_eager, in_dtype, op, run, upstream_like

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    torch.cuda.empty_cache()


@DTYPES
@pytest.mark.parametrize("columns", [128, 4096, 8192, 16384, 65536])
def test_rms_norm_real_sizes(device, columns, dtype):
    x = torch.randn(4096, columns, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(columns, device=device, dtype=dtype).requires_grad_()
    assert_close_to_eager(functional.rms_norm, SPECS["rms_norm"].eager, Sample("", (x, weight, 1e-6)))


@DTYPES
def test_cross_entropy_real_size(device, dtype):
    logits = torch.randn(4096, 128256, device=device, dtype=dtype).mul_(4).requires_grad_()
    labels = torch.randint(0, 128256, (4096,), device=device)
    labels[::3] = -100
    assert_close_to_eager(
        functional.cross_entropy, SPECS["cross_entropy"].eager, Sample("", (logits, labels), {"label_smoothing": 0.1})
    )


def largest_relative_error(a: torch.Tensor, truth: torch.Tensor) -> float:
    return float((a.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@DTYPES
def test_linear_cross_entropy_real_size(device, dtype, reduction):
    """Norms, since single elements of sums over 128256 products differ in eager itself, by GEMM tile."""
    hidden = torch.randn(4096, 2048, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(128256, 2048, device=device) / 45).to(dtype).requires_grad_()
    labels = torch.randint(0, 128256, (4096,), device=device)
    labels[::3] = -100
    case = Sample("", (hidden, weight, labels), {"reduction": reduction})
    function, eager = functional.linear_cross_entropy, SPECS["linear_cross_entropy"].eager
    upstream = upstream_like(function(*case.args, **case.kwargs))
    ours, theirs = run(function, case, upstream).tensors(), run(eager, case, upstream).tensors()
    truths = run(eager, in_dtype(case, torch.float64), upstream).tensors()
    for a, b, truth in zip(ours, theirs, truths, strict=True):
        bound = EAGER_FACTOR * largest_relative_error(b, truth) + TOLERANCES[dtype].rtol
        assert largest_relative_error(a, truth) < bound


def test_rms_norm_beyond_32_bit_offsets(device):
    """2^31 elements and some: the last rows are right, forward and backward."""
    rows, columns = 2**31 // 4096 + 64, 4096
    x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(columns, device=device, dtype=torch.bfloat16)
    y = functional.rms_norm(x, weight)
    dy = torch.randn(64, columns, device=device, dtype=torch.bfloat16)
    upstream = torch.zeros_like(y)
    upstream[-64:] = dy
    (dx,) = torch.autograd.grad(y, x, upstream)
    tail = x.detach()[-64:].clone().requires_grad_()
    tail_y = functional.rms_norm(tail, weight)
    (tail_dx,) = torch.autograd.grad(tail_y, tail, dy)
    assert torch.equal(y[-64:], tail_y)
    assert torch.equal(dx[-64:], tail_dx)
    assert not dx[:-64].any()


def test_cross_entropy_beyond_32_bit_offsets(device):
    rows, columns = 2**31 // 65536 + 8, 65536
    logits = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, columns, (rows,), device=device)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    (dlogits,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    tail = logits.detach()[-8:].clone().requires_grad_()
    tail_losses = functional.cross_entropy(tail, labels[-8:], reduction="none")
    (tail_dlogits,) = torch.autograd.grad(tail_losses, tail, torch.ones_like(tail_losses))
    assert torch.equal(losses[-8:], tail_losses)
    assert torch.equal(dlogits[-8:], tail_dlogits)


@pytest.mark.parametrize("name", SPECS)
def test_no_host_synchronisation(device, name):
    for sample in SPECS[name].samples(device, torch.bfloat16):
        upstream = upstream_like(op(SPECS[name])(*sample.args, **sample.kwargs))
        run(op(SPECS[name]), sample, upstream)  # compiles, which may synchronise
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(op(SPECS[name]), sample, upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", SPECS)
def test_cuda_graph(device, name):
    """Capture and replay: new inputs in the same buffers give their own result."""
    sample = next(iter(SPECS[name].samples(device, torch.float32)))
    upstream = upstream_like(op(SPECS[name])(*sample.args, **sample.kwargs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(op(SPECS[name]), sample, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(op(SPECS[name]), sample, upstream)
    sample.args[0].data.mul_(2.0)
    graph.replay()
    for a, b in zip(captured.tensors(), run(op(SPECS[name]), sample, upstream).tensors(), strict=True):
        assert torch.equal(a, b)


def test_number_of_rows_compiles_nothing_new(device):
    from fusedops.kernels import cross_entropy, rms_norm

    kernels = (
        *(rms_norm.rms_norm_fwd_kernel, rms_norm.rms_norm_bwd_kernel),
        *(cross_entropy.cross_entropy_fwd_kernel, cross_entropy.cross_entropy_bwd_kernel),
        cross_entropy.assert_labels_kernel,
    )

    def step(rows: int) -> int:
        x = torch.randn(rows, 256, device=device).requires_grad_()
        weight = torch.randn(256, device=device).requires_grad_()
        labels = torch.randint(0, 256, (rows,), device=device)
        functional.cross_entropy(functional.rms_norm(x, weight), labels).backward()
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels)

    compiled = step(48)
    assert [step(rows) for rows in (1, 2, 7, 16, 4096)] == [compiled] * 5


@pytest.mark.parametrize("call", ["cross_entropy(logits, labels)", "linear_cross_entropy(logits, weight, labels)"])
@pytest.mark.parametrize("label", [-1, 64])
def test_label_out_of_range_stops_the_device(call, label):
    """In a process of its own: after the assertion, its device is gone."""
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import torch, fusedops\n"
            "logits, weight = torch.randn(8, 64, device='cuda'), torch.randn(64, 64, device='cuda')\n"
            f"labels = torch.full((8,), {label}, device='cuda')\n"
            f"loss = fusedops.functional.{call}\n"
            "print('value', loss.item())\n",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    assert "value" not in done.stdout
    assert "device-side assert" in done.stderr
    assert "fusedops: labels" in done.stderr


def test_runs_on_the_device_of_its_inputs():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    x = torch.randn(16, 256, device=other).requires_grad_()
    labels = torch.randint(0, 256, (16,), device=other)
    loss = functional.cross_entropy(functional.rms_norm(x), labels)
    loss.backward()
    wanted = F.cross_entropy(F.rms_norm(x, (256,), eps=1e-6), labels)
    torch.testing.assert_close(loss, wanted)
    assert torch.cuda.current_device() == 0
