"""Comparing an operator with eager: both against a float64 truth, so that eager's own rounding sets the measure."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from csrc_meta import Sample, Spec
from tests.conftest import INTERPRETED

# How far from the truth an operator may be, in units of eager's largest error.
EAGER_FACTOR = 2.0


class Tolerance(NamedTuple):
    atol: float
    rtol: float


# Added to eager's error, which is 0 where eager happens to round to the truth.
TOLERANCES = {
    torch.float64: Tolerance(1e-13, 1e-11),  # not in the paper; sums of up to 64k terms at 2e-16 each
    torch.float32: Tolerance(1e-7, 1e-5),  # arXiv 2410.10989
    torch.bfloat16: Tolerance(1e-3, 1e-2),  # arXiv 2410.10989; more than one step of bfloat16 (2^-8 to 2^-7)
    torch.float16: Tolerance(1e-4, 2e-3),  # not in the paper; two steps of float16 (2^-11 to 2^-10)
}

# One step of bfloat16, for results of a wider dtype: the interpreter truncates intermediates where a GPU rounds them.
TRUNCATION = 2.0**-7 if INTERPRETED else 0.0


# What an operator returns, and a gradient for it: a tensor or several.
Tensors = Tensor | tuple[Tensor, ...]


class Result(NamedTuple):
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.outputs, *(g for g in self.gradients if g is not None))

    def names(self) -> list[str]:
        gradients = [f"gradient {i}" for i, g in enumerate(self.gradients) if g is not None]
        return [f"output {i}" for i in range(len(self.outputs))] + gradients


def op(spec: Spec) -> Callable[..., Tensors]:
    return getattr(torch.ops.fusedops, spec.name)


def leaves(sample: Sample) -> list[Tensor]:
    return [a for a in sample.args if isinstance(a, Tensor) and a.requires_grad]


def in_dtype(sample: Sample, dtype: torch.dtype) -> Sample:
    """The same numbers in another dtype, as new leaves."""

    def cast(a: Any) -> Any:
        if isinstance(a, Tensor) and a.is_floating_point():
            return a.detach().to(dtype).requires_grad_(a.requires_grad)
        return a

    return Sample(sample.label, tree_map(cast, sample.args), sample.kwargs)


def several(tensors: Tensors) -> tuple[Tensor, ...]:
    return (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)


def run(function: Callable[..., Tensors], sample: Sample, upstream: Tensors) -> Result:
    outputs = several(function(*sample.args, **sample.kwargs))
    wanted = leaves(sample)
    pairs = [(o, u.to(o.dtype)) for o, u in zip(outputs, several(upstream), strict=True) if o.requires_grad]
    differentiated, gradients_of = zip(*pairs, strict=True) if pairs else ((), ())
    gradients = torch.autograd.grad(differentiated, wanted, gradients_of, allow_unused=True) if wanted else ()
    return Result(tuple(o.detach() for o in outputs), gradients)


def upstream_like(outputs: Tensors) -> Tensors:
    """Gradients that no kernel can mistake for ones, exact in every dtype."""
    upstream = [torch.randint(-4, 5, o.shape, device=o.device).to(o.dtype) / 2 + 0.25 for o in several(outputs)]
    return upstream[0] if isinstance(outputs, Tensor) else tuple(upstream)


def assert_close_to_eager(function: Callable[..., Tensors], eager: Callable[..., Tensors], sample: Sample) -> None:
    """``function``'s outputs and gradients are as close to float64's as eager's are, in the dtype of the sample."""
    upstream = upstream_like(function(*sample.args, **sample.kwargs))
    ours, theirs = run(function, sample, upstream), run(eager, sample, upstream)
    truths = run(eager, in_dtype(sample, torch.float64), upstream)
    slack = TRUNCATION if any(t.dtype == torch.bfloat16 for t in sample.args if isinstance(t, Tensor)) else 0.0
    for name, got, reference, truth in zip(
        ours.names(), ours.tensors(), theirs.tensors(), truths.tensors(), strict=True
    ):
        assert got.dtype == reference.dtype, f"{name}: {got.dtype}, eager {reference.dtype}"
        assert_bounded(name, got, reference, truth, slack)


def assert_bounded(name: str, got: Tensor, reference: Tensor, truth: Tensor, slack: float = 0.0) -> None:
    """got is no further from the truth (float64) than the reference's largest error allows."""
    assert got.shape == reference.shape, f"{name}: {tuple(got.shape)}, eager {tuple(reference.shape)}"
    atol, rtol = TOLERANCES[got.dtype]
    got, reference, truth = got.double(), reference.double(), truth.double()
    plain = truth.isfinite() & reference.isfinite()
    torch.testing.assert_close(got[~plain], reference[~plain], equal_nan=True, msg=lambda m: f"{name}: {m}")
    got, reference, truth = got[plain], reference[plain], truth[plain]
    if got.numel():
        error = (got - truth).abs()
        bound = EAGER_FACTOR * (reference - truth).abs().max() + atol + (rtol + slack) * truth.abs()
        worst = int((error - bound).argmax())
        assert bool((error <= bound).all()), (
            f"{name}: element {worst}: got {got[worst]:.9g}, truth {truth[worst]:.9g}, eager {reference[worst]:.9g}, "
            f"error {error[worst]:.3g} above {bound[worst]:.3g}"
        )


class Recorder(TorchDispatchMode):
    """Calls of primitive operators, with their arguments, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fusedops":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))

    def arguments(self, primitive: str) -> list[tuple[Any, ...]]:
        return [args for func, args in self.calls if func._schema.name == f"fusedops::{primitive}"]


def rejection(error: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the error that a call raises, of exactly that class."""
    try:
        call()
    except Exception as e:
        assert type(e) is error, f"{type(e).__name__}: {e}"
        return str(e)
    raise AssertionError(f"{error.__name__} was not raised")


def snapshot(text: str, expected: str) -> None:
    """Compare with the literal in the test; EXPECTTEST_ACCEPT=1 rewrites it."""
    pytest.importorskip("expecttest").assert_expected_inline(text, expected, skip=1)
