"""The direct way from a primitive operator to its kernel, and everyone for whom a call has to take the dispatcher's."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode

from csrc_meta import plain, rms_norm
from fusedops import functional
from tests.ops.compare import Recorder, upstream_like


@pytest.fixture
def without_dispatcher(monkeypatch):
    """Calls through the dispatcher fail."""

    def refuse(*args, **kwargs):
        raise AssertionError("went through the dispatcher")

    for primitive in (rms_norm._forward_op, rms_norm._backward_op):
        monkeypatch.setattr(primitive, "overload", refuse)
    monkeypatch.setattr(rms_norm.operator, "op", refuse)


def inputs(device):
    x, weight = torch.randn(4, 16, device=device), torch.randn(16, device=device)
    return x.requires_grad_(), weight.requires_grad_()


def step(x, weight):
    y = functional.rms_norm(x, weight)
    return y, *torch.autograd.grad(y, (x, weight), torch.ones_like(y))


@pytest.mark.usefixtures("without_dispatcher")
def test_eager_calls_are_direct(device):
    assert all(t.isfinite().all() for t in step(*inputs(device)))


def test_both_ways_give_the_same(device):
    x, weight = inputs(device)
    direct = step(x, weight)
    with Recorder() as recorder:
        dispatched = step(x, weight)
    assert [func._schema.name for func, _ in recorder.calls] == [
        "fusedops::rms_norm_forward",
        "fusedops::rms_norm_backward",
    ]
    for a, b in zip(direct, dispatched, strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("without_dispatcher")
def test_fake_tensors_take_the_dispatcher(device):
    with FakeTensorMode(), pytest.raises(AssertionError, match="dispatcher"):
        functional.rms_norm(torch.randn(4, 16, device=device))


@pytest.mark.usefixtures("without_dispatcher")
def test_first_call_under_a_mode_teaches_nothing(device):
    plain._plain_tensor_keys.cache_clear()
    plain._plain_thread_keys.cache_clear()
    with FakeTensorMode(), pytest.raises(AssertionError, match="dispatcher"):
        functional.rms_norm(torch.randn(4, 16, device=device))
    functional.rms_norm(torch.randn(4, 16, device=device))


@pytest.mark.usefixtures("without_dispatcher")
@pytest.mark.parametrize(
    "watched",
    [
        pytest.param(lambda device: torch.autocast(device, torch.bfloat16), id="autocast"),
        pytest.param(lambda device: BaseTorchFunctionMode(), id="function mode"),
        pytest.param(lambda device: torch.profiler.profile(), id="profiler"),
    ],
)
def test_who_watches_sees_the_operator(device, watched):
    with watched(torch.device(device).type), pytest.raises(AssertionError, match="dispatcher"):
        functional.rms_norm(torch.randn(4, 16, device=device))


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traces_have_the_operator(device, pre_dispatch):
    graph = make_fx(lambda x: functional.rms_norm(x), pre_dispatch=pre_dispatch)(torch.randn(4, 16, device=device))
    (target,) = (n.target for n in graph.graph.nodes if str(n.target).startswith("fusedops"))
    assert target == (torch.ops.fusedops.rms_norm if pre_dispatch else torch.ops.fusedops.rms_norm_forward).default


@pytest.mark.parametrize("wrong", [{"eps": "1e-6"}, {"weight": [1.0]}, {"cast": None}])
def test_arguments_of_wrong_types_are_refused_as_by_any_operator(device, wrong):
    with pytest.raises((TypeError, RuntimeError), match=f"rms_norm_forward.*{next(iter(wrong))}"):
        functional.rms_norm(torch.randn(4, 16, device=device), **wrong)


@pytest.mark.usefixtures("without_dispatcher")
def test_transforms_take_the_dispatcher(device):
    with pytest.raises(AssertionError, match="dispatcher"):
        torch.func.grad(lambda x: functional.rms_norm(x).sum())(torch.randn(4, 16, device=device))


@pytest.mark.usefixtures("without_dispatcher")
def test_subclasses_take_the_dispatcher(device):
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    wrapped = torch.Tensor._make_subclass(Wrapper, torch.randn(4, 16, device=device))
    with pytest.raises(AssertionError, match="dispatcher"):
        functional.rms_norm(wrapped)


def test_lazily_negated_tensors_are_negated(device):
    x = torch.randn(4, 16, dtype=torch.complex64, device=device).conj().imag
    assert x.is_neg()
    assert torch.equal(functional.rms_norm(x), functional.rms_norm(x.resolve_neg()))


def test_parameters_and_inference_tensors_are_ordinary(device, without_dispatcher):
    with torch.inference_mode():
        x = torch.randn(4, 16, device=device)
        assert not functional.rms_norm(x, torch.nn.Parameter(torch.ones(16, device=device))).requires_grad


def test_saved_tensor_hooks_see_what_is_saved(device):
    x, weight = inputs(device)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = functional.rms_norm(x, weight)
    assert [tuple(t.shape) for t in packed] == [(4, 16), (16,), (4,)]
    torch.autograd.grad(y, x, upstream_like(y))
