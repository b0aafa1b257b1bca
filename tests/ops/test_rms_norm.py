"""rms_norm: shapes that take each kernel variant, cast orders, extreme rows, rejected inputs."""

import pytest
import torch

from csrc_meta import SPECS, Sample
from csrc_meta.errors import UnsupportedDtypeError, UnsupportedInputError
from fusedops import functional
from tests.ops.compare import assert_close_to_eager, rejection, run, snapshot

EAGER = SPECS["rms_norm"].eager
CASTS = ("llama", "gemma", "float32")


def sample(device, rows, columns, dtype=torch.float32, weight_dtype=None, **kwargs) -> Sample:
    x = torch.randn(rows, columns, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(columns, device=device, dtype=weight_dtype or dtype).requires_grad_()
    return Sample("", (x, weight, 1e-6), kwargs)


# Several rows in a tile and more tiles than programs; one row in a tile; widths that are no power of two; rows that are
# walked in blocks in the backward pass alone (from 32 KiB on) and in both passes (16384 < N), the last block short.
SHAPES = ((450, 128), (13, 2048), (9, 8192), (27, 8200), (3, 16400))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_shapes(device, shape, dtype):
    assert_close_to_eager(functional.rms_norm, EAGER, sample(device, *shape, dtype))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("columns", [64, 16400])
def test_rms_norm_casts(device, columns, cast, weight_offset, weight_dtype):
    """float16, which the interpreter rounds as a GPU does: nearly all elements are bitwise eager's."""
    case = sample(device, 4, columns, torch.float16, weight_dtype, cast=cast, weight_offset=weight_offset)
    assert_close_to_eager(functional.rms_norm, EAGER, case)
    got, wanted = functional.rms_norm(*case.args, **case.kwargs), EAGER(*case.args, **case.kwargs)
    # rstd may differ in its last bit, which tips the rounding of a few.
    if wanted.dtype == torch.float16:
        assert (got != wanted).float().mean() < 0.01


def test_rms_norm_cast_orders_differ(device):
    """The measure of the test above: another order changes far more elements than it lets pass."""
    args = sample(device, 4, 256, torch.float16).args
    assert (functional.rms_norm(*args, cast="llama") != functional.rms_norm(*args, cast="gemma")).float().mean() > 0.1


@pytest.mark.parametrize("columns", [64, 16400])
def test_rms_norm_without_weight(device, columns):
    x = torch.randn(5, columns, device=device).requires_grad_()
    assert_close_to_eager(functional.rms_norm, EAGER, Sample("", (x, None, 1e-6)))


@pytest.mark.parametrize("columns", [48, 16400])
@pytest.mark.parametrize(("needs_x", "needs_weight"), [(True, False), (False, True)])
def test_rms_norm_one_gradient(device, needs_x, needs_weight, columns):
    x, weight, eps = sample(device, 7, columns).args
    case = Sample("", (x.detach().requires_grad_(needs_x), weight.detach().requires_grad_(needs_weight), eps))
    assert_close_to_eager(functional.rms_norm, EAGER, case)


@pytest.mark.parametrize("columns", [33, 64])
def test_rms_norm_strided_gradient(device, columns):
    """Gradients arrive transposed from attention and expanded from sum()."""
    case = sample(device, 6, columns)
    for upstream in (
        torch.randn(columns, 6, device=device).t(),
        torch.randn((), device=device).expand(6, columns),
        torch.randn(6, 2 * columns, device=device)[:, 1 : columns + 1],
    ):
        got = run(functional.rms_norm, case, upstream)
        wanted = run(functional.rms_norm, case, upstream.contiguous())
        torch.testing.assert_close(got.tensors(), wanted.tensors(), atol=1e-6, rtol=1e-5)


def test_rms_norm_extreme(device):
    x = torch.randn(6, 40, device=device)
    x[0, 3], x[1, 3], x[2, 3] = torch.nan, torch.inf, -torch.inf
    x[3] = 0.0
    x[4] *= 1e18
    x[5] *= 1e-18
    weight = torch.randn(40, device=device)
    got = functional.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, EAGER(x, weight, 1e-6), equal_nan=True, atol=1e-7, rtol=1e-5)


def test_rms_norm_bad_rows_stay_alone(device):
    """A NaN in one row of a tile must not reach the others."""
    x = torch.randn(8, 16, device=device)
    x[2, 5] = torch.nan
    x.requires_grad_()
    y = functional.rms_norm(x)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert torch.equal(y.isnan().any(1).nonzero().flatten(), torch.tensor([2], device=device))
    assert torch.equal(dx.isnan().any(1).nonzero().flatten(), torch.tensor([2], device=device))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0,), (3, 0)], ids=str)
def test_rms_norm_empty(device, shape):
    x = torch.randn(shape, device=device).requires_grad_()
    weight = torch.randn(shape[-1], device=device).requires_grad_()
    y = functional.rms_norm(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros_like(weight))


def test_rms_norm_autocast(device):
    """Under autocast it computes what it is given, in float32 within: what the HuggingFace spelling does too."""
    for dtype in (torch.float32, torch.bfloat16):
        case = sample(device, 4, 64, dtype)
        with torch.autocast(device.type, torch.bfloat16):
            assert_close_to_eager(functional.rms_norm, EAGER, case)


def test_rms_norm_rejects_integer_input():
    message = rejection(UnsupportedDtypeError, lambda: functional.rms_norm(torch.ones(2, 4, dtype=torch.int64)))
    snapshot(
        message,
        """fusedops.rms_norm: x: got (2, 4) int64 on cpu, wants one of bfloat16, float16, float32, float64. Cast it to a floating-point dtype.""",
    )


def test_rms_norm_rejects_weight_of_another_shape():
    message = rejection(UnsupportedInputError, lambda: functional.rms_norm(torch.ones(2, 4), torch.ones(3)))
    snapshot(
        message,
        """fusedops.rms_norm: weight: got (3,) float32 on cpu, wants shape (4,). The weight has one element for each column of x.""",
    )


def test_rms_norm_rejects_weight_on_another_device():
    weight = torch.ones(4, device="meta")
    message = rejection(UnsupportedInputError, lambda: functional.rms_norm(torch.ones(2, 4), weight))
    snapshot(
        message,
        """fusedops.rms_norm: weight: got (4,) float32 on meta, wants the device of x, cpu. Move it: weight.to(x.device).""",
    )


def test_rms_norm_rejects_unknown_cast():
    message = rejection(UnsupportedInputError, lambda: functional.rms_norm(torch.ones(2, 4), cast="bf16"))
    snapshot(
        message, """fusedops.rms_norm: cast: got 'bf16', wants one of 'llama', 'gemma', 'float32'. Pass one of these."""
    )


def test_rms_norm_rejects_a_scalar():
    message = rejection(UnsupportedInputError, lambda: functional.rms_norm(torch.ones(())))
    snapshot(
        message,
        """fusedops.rms_norm: x: got () float32 on cpu, wants at least one dimension. Normalise over the last dimension: x[None].""",
    )
