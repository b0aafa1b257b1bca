"""Compiled models on a GPU: CUDA graphs, and foreign kernels that read logits by address."""

import pytest
import torch

import fusedops
from tests.conftest import DEVICE
from tests.rewriting import distance, sites, step, tiny, tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_modes_train_alike(mode) -> None:
    torch._dynamo.reset()
    model, report = tiny(), fusedops.Report()
    # torch.compile takes a mode or options, not both.
    how = {"options": {"report": report}} if mode == "default" else {"mode": mode}
    call = torch.compile(model, backend="fusedops", **how)
    for _ in range(4):  # CUDA graphs warm up, record, and replay
        ids = tokens()
        expected, expected_gradients = step(model, model, ids)
        expected_logits = expected.logits.detach().clone()
        out, gradients = step(model, call, ids)
        torch.testing.assert_close(out.loss.detach().clone(), expected.loss.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.logits.detach().clone(), expected_logits, rtol=1e-5, atol=1e-5)
        assert distance(expected_gradients, gradients) < 1e-5
    assert mode != "default" or report.counts() == sites()


def test_foreign_triton_kernel_reads_logits() -> None:
    """A kernel that knows nothing of the library gets a pointer to the values, inside a custom autograd.Function."""
    import triton
    import triton.language as tl

    @triton.jit
    def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y_ptr + i, 2 * tl.load(x_ptr + i, mask=i < n), mask=i < n)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
            double_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 1024)
            return y

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    torch._dynamo.reset()
    model, ids = tiny(), tokens()
    call = torch.compile(model, backend="fusedops")
    _, expected = step(model, model, ids, lambda out: out.loss + (2 * out.logits).pow(2).mean())
    _, gradients = step(model, call, ids, lambda out: out.loss + Double.apply(out.logits).pow(2).mean())
    assert distance(expected, gradients) < 1e-5


def test_out_of_range_label_raises_before_the_step_ends() -> None:
    """In a process of its own: a device-side assertion leaves CUDA unusable."""
    import subprocess
    import sys

    script = """
import torch, fusedops
from tests.rewriting import tiny, tokens
model, ids = tiny(), tokens()
labels = ids.clone()
labels[0, 3] = 5000
torch.compile(model, backend="fusedops")(input_ids=ids, labels=labels).loss.backward()
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0 and "device-side assert" in done.stderr, done.stderr[-2000:]
    assert DEVICE.type == "cuda"
