"""swiglu: layouts that take each path of the kernels it shares with geglu, memory taken over, rejected inputs."""

import gc

import pytest
import torch
from torch import Tensor

from csrc_meta import SPECS, Sample
from csrc_meta.errors import UnsupportedDtypeError, UnsupportedInputError
from fusedops import functional
from tests.conftest import INTERPRETED
from tests.ops.compare import TOLERANCES, TRUNCATION, assert_close_to_eager, in_dtype, rejection, run, snapshot

EAGER = SPECS["swiglu"].eager


def sample(device, *shape: int, dtype=torch.float32, packed: bool = False) -> Sample:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    return Sample("", (tensor(*shape[:-1], 2 * shape[-1]),) if packed else (tensor(*shape), tensor(*shape)))


# Two tensors are one long row: within a tile, several tiles, the last one short. Halves are rows: many to a tile, few to
# a tile, several tiles to a row.
SHAPES = ((7, 100), (3, 2048), (5, 1501))
PACKED = ((1500, 3), (31, 300), (3, 2100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "packed"), [*((s, False) for s in SHAPES), *((s, True) for s in PACKED)], ids=lambda p: str(p)
)
def test_swiglu_shapes(device, shape, packed, dtype):
    assert_close_to_eager(functional.swiglu, EAGER, sample(device, *shape, dtype=dtype, packed=packed))


@pytest.mark.parametrize("packed", [False, True])
def test_swiglu_rounds_the_activation(device, packed):
    """float16, which the interpreter rounds as a GPU does: nearly all elements are bitwise eager's."""
    case = sample(device, 8, 500, dtype=torch.float16, packed=packed)
    wanted = EAGER(*case.args)
    assert (functional.swiglu(*case.args) != wanted).float().mean() < 0.01
    # The measure: rounding once, after the product, changes far more.
    unrounded = EAGER(*in_dtype(case, torch.float32).args).half()
    assert (unrounded != wanted).float().mean() > 0.1


def test_swiglu_packed_is_the_same_as_separate(device):
    (gate,) = sample(device, 6, 50, packed=True).args
    upstream = torch.randn(6, 50, device=device)
    packed = run(functional.swiglu, Sample("", (gate,)), upstream)
    separate = run(
        functional.swiglu, Sample("", tuple(t.detach().requires_grad_() for t in gate.chunk(2, -1))), upstream
    )
    assert torch.equal(packed.output, separate.output)
    assert torch.equal(packed.gradients[0], torch.cat(separate.gradients, -1))
    assert packed.gradients[0].is_contiguous()


@pytest.mark.parametrize("packed", [False, True])
def test_swiglu_strided_gradient(device, packed):
    case = sample(device, 6, 40, packed=packed)
    for upstream in (
        torch.randn(40, 6, device=device).t(),
        torch.randn((), device=device).expand(6, 40),
        torch.randn(6, 90, device=device)[:, 1:41],
    ):
        got = run(functional.swiglu, case, upstream)
        wanted = run(functional.swiglu, case, upstream.contiguous())
        torch.testing.assert_close(got.tensors(), wanted.tensors(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("needs_gate", "needs_up"), [(True, False), (False, True)])
def test_swiglu_one_gradient(device, needs_gate, needs_up):
    gate, up = sample(device, 7, 33).args
    case = Sample("", (gate.detach().requires_grad_(needs_gate), up.detach().requires_grad_(needs_up)))
    assert_close_to_eager(functional.swiglu, EAGER, case)


def test_swiglu_of_one_tensor_twice(device):
    (x, _) = sample(device, 4, 16).args
    y = functional.swiglu(x * 1.0, x * 1.0)
    both = x * 1.0
    (got,) = torch.autograd.grad(functional.swiglu(both, both), x, torch.ones_like(y))
    (wanted,) = torch.autograd.grad(EAGER(x, x), x, torch.ones_like(y))
    torch.testing.assert_close(got, wanted)


# Whatever eager gives is right, infinities and NaN included.
EXTREMES = (0.0, -0.0, 1e-30, 20.0, -20.0, 100.0, -100.0, 1e5, -1e5, 1e15, -1e15, 1e30, -1e30)
EXTREMES += (float("inf"), float("-inf"), float("nan"))


def assert_extremes(function, eager, device, dtype, infinite_gates=True) -> None:
    """Each value as gate beside each as up; large ones become infinite in float16."""
    values = torch.tensor(EXTREMES, device=device).to(dtype)
    gates = values if infinite_gates else values[~values.isposinf()]
    gate, up = (t.clone().requires_grad_() for t in torch.meshgrid(gates, values, indexing="ij"))
    case = Sample("", (gate, up))
    upstream = torch.full_like(gate, 0.5)
    ours, theirs = run(function, case, upstream).tensors(), run(eager, case, upstream).tensors()
    for name, got, wanted in zip(("y", "dgate", "dup"), ours, theirs, strict=True):
        torch.testing.assert_close(
            got,
            wanted,
            equal_nan=True,
            atol=TOLERANCES[dtype].atol,
            rtol=TOLERANCES[dtype].rtol + TRUNCATION,
            msg=lambda m, name=name: f"{name}: {m}",
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_swiglu_extreme(device, dtype):
    assert_extremes(functional.swiglu, EAGER, device, dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (3, 0), (0,)], ids=str)
def test_swiglu_empty(device, shape, packed):
    case = sample(device, *shape, packed=packed)
    y = functional.swiglu(*case.args)
    gradients = torch.autograd.grad(y, case.args, torch.ones_like(y))
    assert y.shape == shape
    assert all(g.shape == t.shape for g, t in zip(gradients, case.args, strict=True))


def test_swiglu_autocast(device):
    """Under autocast it computes what it is given, as silu and the product do."""
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device.type, torch.bfloat16):
            assert_close_to_eager(functional.swiglu, EAGER, sample(device, 4, 64, dtype=dtype))


class Layer:
    """leaf -> gate (and up) -> y, with a record of where gate, up and their gradients were in memory."""

    def __init__(self, device, packed: bool) -> None:
        self.leaf = torch.randn(6, 64, device=device).requires_grad_()
        self.packed = packed
        self.tensors: dict[str, int] = {}
        self.gradients: dict[str, int] = {}

    def inputs(self) -> tuple[Tensor, ...]:
        inputs = {"gate": self.leaf * 2.0} if self.packed else {"gate": self.leaf * 2.0, "up": self.leaf + 1.0}
        for name, t in inputs.items():
            self.tensors[name] = t.data_ptr()
            t.register_hook(lambda g, name=name: self.gradients.__setitem__(name, g.data_ptr()))
        return tuple(inputs.values())

    def gradient(self, hold=lambda *inputs: None, function=functional.swiglu, **kwargs) -> Tensor:
        """``hold``'s result stays alive during the backward pass; nothing else refers to gate and up then."""
        inputs = self.inputs()
        y = function(*inputs)
        held = hold(*inputs)
        del inputs
        if INTERPRETED:
            gc.collect()  # a launch under the interpreter leaves cycles behind that hold its arguments
        (gradient,) = torch.autograd.grad(y, self.leaf, torch.linspace(-1, 1, y.numel()).view_as(y).to(y), **kwargs)
        del held
        return gradient

    @property
    def taken_over(self) -> bool:
        kept = [name for name, address in self.gradients.items() if address != self.tensors[name]]
        assert not kept or len(kept) == len(self.tensors)
        return not kept


@pytest.fixture(params=[False, True], ids=["separate", "packed"])
def layer(request, device) -> Layer:
    return Layer(device, request.param)


def test_swiglu_gradients_take_over_dead_tensors(layer):
    got = layer.gradient()
    assert layer.taken_over
    torch.testing.assert_close(got, layer.gradient(function=EAGER))


READERS = {
    "reference": lambda *inputs: inputs[-1],
    "view": lambda *inputs: inputs[0].view(-1),
    "detach": lambda *inputs: inputs[-1].detach(),
    "node that saved it": lambda *inputs: inputs[0] * inputs[0],
    "another layer": lambda *inputs: functional.swiglu(*inputs),
}


@pytest.mark.parametrize("reader", READERS)
def test_swiglu_keeps_what_somebody_reads(layer, reader):
    got = layer.gradient(READERS[reader])
    assert not layer.taken_over
    torch.testing.assert_close(got, layer.gradient(function=EAGER))


def test_swiglu_keeps_inputs_of_a_retained_graph(layer):
    got = layer.gradient(retain_graph=True)
    assert not layer.taken_over
    torch.testing.assert_close(got, layer.gradient(function=EAGER))


def test_swiglu_keeps_leaves(device):
    gate, up = sample(device, 4, 16).args
    copies = gate.detach().clone(), up.detach().clone()
    for other in (up, up * 1.0):
        functional.swiglu(gate, other).sum().backward()
        assert torch.equal(gate, copies[0])
        assert torch.equal(up, copies[1])


def test_swiglu_keeps_an_input_without_gradient(device):
    """What needs no gradient is not this graph's to write over, though its gate is dead."""
    leaf, up = sample(device, 4, 16).args
    up = up.detach()
    before = up.clone()
    y = functional.swiglu(leaf * 2.0, up)
    (got,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    (wanted,) = torch.autograd.grad(EAGER(leaf * 2.0, up), leaf, torch.ones_like(y))
    torch.testing.assert_close(got, wanted)
    assert torch.equal(up, before)


def test_swiglu_mutating_variant_rejects_strides():
    gate, up, dy = (torch.ones(4, 6).t() for _ in range(3))
    snapshot(
        rejection(UnsupportedInputError, lambda: torch.ops.fusedops.swiglu_backward_(dy, gate, up, "silu")),
        """fusedops.swiglu_backward_: gate: got (6, 4) float32 on cpu with strides (1, 6), wants a contiguous tensor. Take swiglu_backward instead.""",
    )


def rejects(error: type[Exception], *args) -> str:
    return rejection(error, lambda: functional.swiglu(*args))


def test_swiglu_rejects_dtypes():
    snapshot(
        rejects(UnsupportedDtypeError, torch.ones(2, 4).int(), torch.ones(2, 4).int()),
        """fusedops.swiglu: gate: got (2, 4) int32 on cpu, wants one of bfloat16, float16, float32, float64. Cast it to a floating-point dtype.""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, torch.ones(2, 4), torch.ones(2, 4).half()),
        """fusedops.swiglu: up: got (2, 4) float16 on cpu, wants the dtype of gate, torch.float32. Cast one of them: up.to(gate.dtype).""",
    )


def test_swiglu_rejects_shapes():
    snapshot(
        rejects(UnsupportedInputError, torch.ones(2, 4), torch.ones(1, 4)),
        """fusedops.swiglu: up: got (1, 4) float32 on cpu, wants shape (2, 4). gate and up have one shape.""",
    )
    snapshot(
        rejects(UnsupportedInputError, torch.ones(2, 5)),
        """fusedops.swiglu: gate: got (2, 5) float32 on cpu, wants an even last dimension where up is None. Pass up too; gate alone holds both as halves.""",
    )
    snapshot(
        rejects(UnsupportedInputError, torch.ones(()), torch.ones(())),
        """fusedops.swiglu: gate: got () float32 on cpu, wants at least one dimension. Add one: gate[None].""",
    )


def test_swiglu_rejects_up_on_another_device():
    snapshot(
        rejects(UnsupportedInputError, torch.ones(2, 4), torch.ones(2, 4, device="meta")),
        """fusedops.swiglu: up: got (2, 4) float32 on meta, wants the device of gate, cpu. Move it: up.to(gate.device).""",
    )
