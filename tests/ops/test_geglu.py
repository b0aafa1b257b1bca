"""geglu: its two formulas; layouts are those of swiglu, whose kernels it shares."""

import functools

import pytest
import torch

from csrc_meta import SPECS, Sample
from csrc_meta.errors import UnsupportedDtypeError, UnsupportedInputError
from fusedops import functional
from tests.ops.compare import assert_close_to_eager, rejection, run, snapshot
from tests.ops.test_swiglu import Layer, assert_extremes, sample

EAGER = SPECS["geglu"].eager

each_formula = pytest.mark.parametrize("approximate", ["none", "tanh"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
@each_formula
def test_geglu_formulas(device, approximate, packed, dtype):
    case = sample(device, 5, 1501, dtype=dtype, packed=packed)
    assert_close_to_eager(functional.geglu, EAGER, Sample("", case.args, {"approximate": approximate}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@each_formula
def test_geglu_over_the_whole_range(device, approximate, dtype):
    """From where the activation vanishes to where it is the identity."""
    gate = torch.linspace(-12, 12, 5000, device=device, dtype=dtype).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    assert_close_to_eager(functional.geglu, EAGER, Sample("", (gate, up), {"approximate": approximate}))


@each_formula
def test_geglu_rounds_the_activation(device, approximate):
    """float16, which the interpreter rounds as a GPU does: nearly all elements are bitwise eager's."""
    args = sample(device, 8, 500, dtype=torch.float16).args
    got, wanted = functional.geglu(*args, approximate=approximate), EAGER(*args, approximate=approximate)
    assert (got != wanted).float().mean() < 0.01


def test_geglu_formulas_differ(device):
    gate, up = sample(device, 4, 64).args
    exact, by_tanh = functional.geglu(gate, up), functional.geglu(gate, up, approximate="tanh")
    assert 1e-5 < (exact - by_tanh).abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@each_formula
def test_geglu_extreme(device, approximate, dtype):
    functions = (functools.partial(f, approximate=approximate) for f in (functional.geglu, EAGER))
    # On some CPUs eager's vectorised gelu(inf) is NaN, while that of a single element is inf.
    infinite_gates = device.type != "cpu" or approximate == "tanh"
    assert_extremes(*functions, device, dtype, infinite_gates)


@each_formula
@pytest.mark.parametrize(("needs_gate", "needs_up"), [(True, False), (False, True)])
def test_geglu_one_gradient(device, approximate, needs_gate, needs_up):
    gate, up = sample(device, 7, 33).args
    args = gate.detach().requires_grad_(needs_gate), up.detach().requires_grad_(needs_up)
    assert_close_to_eager(functional.geglu, EAGER, Sample("", args, {"approximate": approximate}))


def test_geglu_strided_gradient(device):
    case = sample(device, 6, 40, packed=True)
    upstream = torch.randn(40, 6, device=device).t()
    got, wanted = run(functional.geglu, case, upstream), run(functional.geglu, case, upstream.contiguous())
    torch.testing.assert_close(got.tensors(), wanted.tensors(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@each_formula
def test_geglu_gradients_take_over_dead_tensors(device, approximate, packed):
    layer = Layer(device, packed)
    got = layer.gradient(function=functools.partial(functional.geglu, approximate=approximate))
    assert layer.taken_over
    torch.testing.assert_close(got, layer.gradient(function=functools.partial(EAGER, approximate=approximate)))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_geglu_empty(device, shape):
    case = sample(device, *shape)
    y = functional.geglu(*case.args)
    gradients = torch.autograd.grad(y, case.args, torch.ones_like(y))
    assert [*map(torch.Tensor.size, (y, *gradients))] == [shape] * 3


def test_geglu_rejects_unknown_approximation():
    gate = torch.ones(2, 4)
    snapshot(
        rejection(UnsupportedInputError, lambda: functional.geglu(gate, gate, approximate="erf")),
        """fusedops.geglu: approximate: got 'erf', wants one of 'none', 'tanh'. Pass one of these.""",
    )


def test_geglu_rejects_dtypes():
    gate = torch.ones(2, 4)
    snapshot(
        rejection(UnsupportedDtypeError, lambda: functional.geglu(gate, gate.half())),
        """fusedops.geglu: up: got (2, 4) float16 on cpu, wants the dtype of gate, torch.float32. Cast one of them: up.to(gate.dtype).""",
    )
