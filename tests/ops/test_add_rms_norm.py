"""add_rms_norm: shapes that take each kernel variant, each upstream gradient alone, rounding of the sum, rejections."""

import pytest
import torch

from csrc_meta import SPECS, Sample
from csrc_meta.errors import UnsupportedDtypeError, UnsupportedInputError
from fusedops import functional
from tests.ops.compare import Recorder, assert_close_to_eager, rejection, snapshot

EAGER = SPECS["add_rms_norm"].eager


def sample(device, rows, columns, dtype=torch.float32, **kwargs) -> Sample:
    x, residual = (torch.randn(rows, columns, device=device, dtype=dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(columns, device=device, dtype=dtype).requires_grad_()
    return Sample("", (x, residual, weight, 1e-6), kwargs)


# As for rms_norm: tiles of several rows and of one, no powers of two, rows walked in blocks backward and both ways.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(450, 128), (13, 2048), (3, 8200), (3, 16400)], ids=str)
def test_add_rms_norm_shapes(device, shape, dtype):
    assert_close_to_eager(functional.add_rms_norm, EAGER, sample(device, *shape, dtype))


@pytest.mark.parametrize("cast", ["llama", "gemma", "float32"])
@pytest.mark.parametrize("columns", [64, 16400])
def test_add_rms_norm_casts(device, columns, cast):
    case = sample(device, 4, columns, torch.float16, cast=cast, weight_offset=1.0)
    assert_close_to_eager(functional.add_rms_norm, EAGER, case)


def test_add_rms_norm_is_the_two_operators(device):
    """Bitwise: the sum is rounded before it is normalised."""
    x, residual, weight, eps = sample(device, 7, 96, torch.float16).args
    y, total = functional.add_rms_norm(x, residual, weight, eps)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, functional.rms_norm(total, weight, eps))


@pytest.mark.parametrize("columns", [48, 16400])
@pytest.mark.parametrize("used", [0, 1])
def test_add_rms_norm_one_result_used(device, used, columns):
    case = sample(device, 5, columns)
    for function in (functional.add_rms_norm, EAGER):
        result = function(*case.args)[used]
        got = torch.autograd.grad(result, case.args[:3], torch.ones_like(result), allow_unused=True)
        if function is functional.add_rms_norm:
            ours = got
    for a, b in zip(ours, got, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_add_rms_norm_sum_alone_runs_no_kernel(device):
    x, residual, weight, eps = sample(device, 5, 32).args
    with Recorder() as recorder:
        _, total = functional.add_rms_norm(x, residual, weight, eps)
        torch.autograd.grad(total, (x, residual), torch.ones_like(total))
    assert not recorder.arguments("add_rms_norm_backward")


def test_add_rms_norm_frozen_inputs(device):
    x, residual, weight, eps = sample(device, 5, 32).args
    y, total = functional.add_rms_norm(x.detach(), residual.detach(), weight, eps)
    (dweight,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    y, _ = EAGER(x.detach(), residual.detach(), weight, eps)
    torch.testing.assert_close(dweight, torch.autograd.grad(y, weight, torch.ones_like(y))[0])
    assert not total.requires_grad or total.grad_fn is not None


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (3, 0)], ids=str)
def test_add_rms_norm_empty(device, shape):
    x = torch.randn(shape, device=device).requires_grad_()
    y, total = functional.add_rms_norm(x, x.detach())
    (dx,) = torch.autograd.grad((y, total), x, (torch.ones_like(y), torch.ones_like(total)))
    assert y.shape == total.shape == dx.shape == shape


def test_add_rms_norm_extreme(device):
    x = torch.randn(5, 40, device=device)
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    x[3] = 0.0
    x[4] *= 1e18
    residual = torch.randn(5, 40, device=device)
    residual[1, 3], residual[3] = -torch.inf, 0.0
    for got, wanted in zip(functional.add_rms_norm(x, residual), EAGER(x, residual, None, 1e-6), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True, atol=1e-6, rtol=1e-5)


def test_add_rms_norm_rejects_residual_of_another_dtype():
    call = lambda: functional.add_rms_norm(torch.ones(2, 4), torch.ones(2, 4).half())  # noqa: E731
    snapshot(
        rejection(UnsupportedDtypeError, call),
        """fusedops.add_rms_norm: residual: got (2, 4) float16 on cpu, wants the dtype of x, torch.float32. Cast one of them: residual.to(x.dtype).""",
    )


def test_add_rms_norm_rejects_broadcast_residual():
    call = lambda: functional.add_rms_norm(torch.ones(2, 4), torch.ones(4))  # noqa: E731
    snapshot(
        rejection(UnsupportedInputError, call),
        """fusedops.add_rms_norm: residual: got (4,) float32 on cpu, wants shape (2, 4). It has the shape of x: expand it, if it is broadcast.""",
    )
