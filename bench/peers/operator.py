"""What a measured operator is: its shapes, inputs, peers and the truth their results are checked against."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedops.functional
from csrc_meta import SPECS

EAGER = "eager"
COMPILE = "torch.compile"
TORCH = "torch"
LIGER = "Liger"
OURS = "fusedops"
KINDS = (EAGER, COMPILE, TORCH, LIGER, OURS)

Shape = tuple[int, ...]
Function = Callable[..., Any]  # returns a tensor or a tuple of them


@dataclass(frozen=True)
class Peer:
    """One implementation: `kind` is one of KINDS, `note` tells implementations of one kind apart or warns of one."""

    kind: str
    function: Function
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} ({self.note})" if self.note else self.kind


@dataclass(frozen=True)
class Inputs:
    """One call of the operator and the gradients of its results.

    Attributes:
        args: what the operator is called with.
        activations: arguments that are differentiated and that in a model an earlier layer has just made.
        parameters: arguments that are differentiated and that the model keeps.
        upstreams: a gradient for each result.
    """

    args: tuple[Any, ...]
    activations: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    upstreams: tuple[Tensor, ...]

    def forward_backward(self, function: Function) -> tuple[Tensor, ...]:
        """Results, then gradients of activations and parameters."""
        return self._differentiated(function(*self.args))

    def as_in_a_model(self, function: Function) -> tuple[Tensor, ...]:
        """The same where the activations were made by an operation just before and nobody else holds them."""
        return self._differentiated(function(*self._args_just_made()))

    def activation_bytes(self) -> int:
        return _bytes(self.activations)

    def bytes(self) -> int:
        return _bytes((*self.args, *self.upstreams))

    def _args_just_made(self) -> tuple[Any, ...]:
        made = {id(a): a.clone() for a in self.activations}
        return tuple(made.pop(id(a), a) for a in self.args)

    def _differentiated(self, results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        upstreams = [u.to(r.dtype) for r, u in zip(results, self.upstreams, strict=True)]
        gradients = torch.autograd.grad(results, (*self.activations, *self.parameters), upstreams)
        return (*(r.detach() for r in results), *gradients)


def _bytes(values: tuple[Any, ...]) -> int:
    tensors = {id(t): t for t in values if isinstance(t, Tensor)}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@dataclass(frozen=True)
class Operator:
    """One operator to measure.

    Attributes:
        name: what it is called here; `op` is the operator's own name, where that differs.
        letters: what the numbers of a shape are.
        shapes: the shapes that are measured on a GPU.
        results: names of what `Inputs.forward_backward` returns.
        inputs: random inputs of a shape.
        peers: every implementation, eager first and fusedops last.
        truth: the results in float64, rounded to float32 for keeping.
        floor: a step that does nothing but the work nobody can leave out and its name; None where that is to move
            the bytes.
    """

    name: str
    letters: str
    shapes: tuple[Shape, ...]
    results: tuple[str, ...]
    inputs: Callable[[Shape, torch.Generator], Inputs]
    peers: Callable[[], Iterator[Peer]]
    truth: Callable[[Inputs], tuple[Tensor, ...]]
    floor: tuple[str, Callable[[Inputs], Callable[[], None]]] | None = None
    op: str = ""

    def bytes_moved(self, inputs: Inputs) -> int:
        return SPECS[self.op or self.name].bytes_moved(*inputs.args)


def random(generator: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
    t = torch.empty(shape, device=generator.device, dtype=torch.bfloat16)
    return t.normal_(std=std, generator=generator)


def spellings(eager: Function) -> Iterator[Peer]:
    """HuggingFace's own spelling, plainly and compiled. SPEC's is more general, which costs time."""
    yield Peer(EAGER, eager, "as HF spells it")
    yield Peer(COMPILE, torch.compile(eager, dynamic=False))


def ours(op: str, **kwargs: Any) -> Peer:
    function = getattr(fusedops.functional, op)
    return Peer(OURS, functools.partial(function, **kwargs) if kwargs else function)


def liger() -> Any:
    """Liger's functions, where it is installed and imports."""
    try:
        from liger_kernel.transformers import functional
    except Exception:
        return None
    return functional


def wide(args: tuple[Any, ...]) -> Iterator[Any]:
    """Tensors in float64 and without a graph, everything else as it is."""
    return (a.detach().double() if isinstance(a, Tensor) else a for a in args)
