"""layer_norm: shapes that take each kernel variant, means far from zero, optional parameters, rejected inputs."""

import pytest
import torch

from csrc_meta import SPECS, Sample
from csrc_meta.errors import UnsupportedDtypeError, UnsupportedInputError
from fusedops import functional
from tests.ops.compare import assert_close_to_eager, rejection, run, snapshot

EAGER = SPECS["layer_norm"].eager


def sample(device, rows, columns, dtype=torch.float32, weighted=True, biased=True) -> Sample:
    x = torch.randn(rows, columns, device=device, dtype=dtype) + 0.5
    weight, bias = (torch.randn(columns, device=device, dtype=dtype) for _ in range(2))
    leaves = (
        x.requires_grad_(),
        *(v.requires_grad_() if given else None for v, given in ((weight, weighted), (bias, biased))),
    )
    return Sample("", (*leaves, 1e-5))


# Several rows in a tile and more tiles than programs; one row in a tile; widths that are no power of two; rows that are
# walked in blocks in the backward pass alone (float32) and in both passes (16384 < N), the last block short.
SHAPES = ((450, 128), (13, 2048), (3, 8200), (3, 16400))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer_norm_shapes(device, shape, dtype):
    assert_close_to_eager(functional.layer_norm, EAGER, sample(device, *shape, dtype))


@pytest.mark.parametrize(("weighted", "biased"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("columns", [48, 16400])
def test_layer_norm_optional_parameters(device, columns, weighted, biased):
    assert_close_to_eager(functional.layer_norm, EAGER, sample(device, 3, columns, torch.float32, weighted, biased))


@pytest.mark.parametrize("columns", [48, 16400])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_layer_norm_one_gradient(device, columns, kept):
    *tensors, eps = sample(device, 5, columns).args
    leaves = (t.detach().requires_grad_(i == kept) for i, t in enumerate(tensors))
    assert_close_to_eager(functional.layer_norm, EAGER, Sample("", (*leaves, eps)))


@pytest.mark.parametrize("columns", [64, 16400])
def test_layer_norm_mean_far_from_zero(device, columns):
    """A variance as mean(x^2) - mean(x)^2 would have no digit left."""
    x = torch.randn(4, columns, device=device, dtype=torch.float64)
    got = functional.layer_norm((x + 4096.0).float())
    wanted = torch.nn.functional.layer_norm((x + 4096.0).float().double(), (columns,))
    torch.testing.assert_close(got.double(), wanted, atol=1e-3, rtol=0)


def test_layer_norm_strided_gradient(device):
    case = sample(device, 6, 33)
    for upstream in (torch.randn(33, 6, device=device).t(), torch.randn((), device=device).expand(6, 33)):
        got, wanted = (run(functional.layer_norm, case, u).tensors() for u in (upstream, upstream.contiguous()))
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_layer_norm_extreme(device):
    x = torch.randn(6, 40, device=device)
    x[0, 3], x[1, 3], x[2, 3] = torch.nan, torch.inf, -torch.inf
    x[3] = 7.0
    x[4] *= 1e18
    x[5] *= 1e-18
    weight, bias = torch.randn(40, device=device), torch.randn(40, device=device)
    got = functional.layer_norm(x, weight, bias)
    # Of float64: on a GPU eager's own mean of equal elements is not quite theirs, and eps makes much of the difference.
    wanted = EAGER(x.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(got.double(), wanted, equal_nan=True, atol=1e-6, rtol=1e-5)
    assert torch.equal(got[3], bias)


def test_layer_norm_bad_rows_stay_alone(device):
    x = torch.randn(8, 16, device=device)
    x[2, 5] = torch.nan
    x.requires_grad_()
    y = functional.layer_norm(x)
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    for t in (y, dx):
        assert torch.equal(t.isnan().any(1).nonzero().flatten(), torch.tensor([2], device=device))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0,), (3, 0)], ids=str)
def test_layer_norm_empty(device, shape):
    x = torch.randn(shape, device=device).requires_grad_()
    weight, bias = (torch.randn(shape[-1], device=device).requires_grad_() for _ in range(2))
    y = functional.layer_norm(x, weight, bias)
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    assert y.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros_like(weight))
    assert torch.equal(dbias, torch.zeros_like(bias))


def test_layer_norm_rejects_integer_input():
    snapshot(
        rejection(UnsupportedDtypeError, lambda: functional.layer_norm(torch.ones(2, 4, dtype=torch.int64))),
        """fusedops.layer_norm: x: got (2, 4) int64 on cpu, wants one of bfloat16, float16, float32, float64. Cast it to a floating-point dtype.""",
    )


def test_layer_norm_rejects_bias_of_another_shape():
    call = lambda: functional.layer_norm(torch.ones(2, 4), torch.ones(4), torch.ones(1))  # noqa: E731
    snapshot(
        rejection(UnsupportedInputError, call),
        """fusedops.layer_norm: bias: got (1,) float32 on cpu, wants shape (4,). It has one element for each column of x.""",
    )


def test_layer_norm_rejects_weight_on_another_device():
    call = lambda: functional.layer_norm(torch.ones(2, 4), torch.ones(4, device="meta"))  # noqa: E731
    snapshot(
        rejection(UnsupportedInputError, call),
        """fusedops.layer_norm: weight: got (4,) float32 on meta, wants the device of x, cpu. Move it: weight.to(x.device).""",
    )


def test_layer_norm_rejects_a_scalar():
    snapshot(
        rejection(UnsupportedInputError, lambda: functional.layer_norm(torch.ones(()))),
        """fusedops.layer_norm: x: got () float32 on cpu, wants at least one dimension. Normalise over the last dimension: x[None].""",
    )
