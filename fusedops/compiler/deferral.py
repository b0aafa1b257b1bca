"""Takes logits out of a graph's outputs and makes them on demand after the graph has run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusedops.compiler.engine import ON_DEMAND, concrete
from fusedops.logits import logits_on_demand

LINEAR = torch.ops.aten.linear.default


@dataclass(frozen=True)
class _Operand:
    """Where an operand is found when the graph has run: among its inputs, or among what it returns."""

    index: int
    is_input: bool

    def fetch(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        return (inputs if self.is_input else outputs)[self.index]


@dataclass(frozen=True)
class _Steps:
    """What a graph does to the result of a linear, one call after the other, each with numbers beside it."""

    calls: tuple[tuple[Callable[..., Any], tuple[Any, ...]], ...]  # None stands for the tensor

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        for function, args in self.calls:
            t = function(*(t if a is None else a for a in args))
        return t


@dataclass(frozen=True)
class _Deferred:
    """Logits to be made on demand: their places, operands, dtype, what is done to them, and if autograd records them."""

    places: tuple[int, ...]
    operands: tuple[_Operand | None, ...]
    dtype: torch.dtype
    then: _Steps | None
    records: bool


def defer_logits(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a rewritten graph return hidden states in place of logits that only the caller may read.

    Returns:
        A decorator for the compiled graph, which puts logits on demand back into their places.
    """
    output = gm.graph.output_node()
    outputs = list(output.args[0])
    logits = [n for n in dict.fromkeys(outputs) if isinstance(n, Node) and n.meta.get(ON_DEMAND)]
    if not logits:
        return lambda compiled: compiled
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    kept = [i for i, o in enumerate(outputs) if o not in logits]
    returned = [outputs[i] for i in kept]

    def operand(node: Node | None) -> _Operand | None:
        if node is None:
            return None
        if node in inputs:
            return _Operand(inputs.index(node), True)
        returned.append(node)
        return _Operand(len(returned) - 1, False)

    deferred = []
    for node in logits:
        linear, steps = _steps_behind(node)
        deferred.append(
            _Deferred(
                tuple(i for i, o in enumerate(outputs) if o is node),
                tuple(operand(a) for a in (*linear.args, None)[:3]),
                node.meta["val"].dtype,
                steps,
                _records(node),
            )
        )
    output.args = (type(output.args[0])(returned),)
    for node in logits:
        for each in list(_back_to_linear(node)):
            if not each.users:
                gm.graph.erase_node(each)
    gm.graph.lint()
    gm.recompile()

    def decorate(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> list[Any]:
            returned = compiled(*args)
            results: list[Any] = [None] * len(outputs)
            for place, value in zip(kept, returned, strict=False):
                results[place] = value
            for d in deferred:
                tensors = [o and o.fetch(args, returned) for o in d.operands]
                with torch.set_grad_enabled(d.records):
                    made = logits_on_demand(*tensors, d.dtype, d.then)
                for place in d.places:
                    results[place] = made
            return results

        return run

    return decorate


def _back_to_linear(node: Node) -> Iterator[Node]:
    """Logits, and what they come from up to the linear."""
    yield node
    while node.target is not LINEAR:
        # A number may stand before the tensor.
        (node,) = (n for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor))
        yield node


def _steps_behind(node: Node) -> tuple[Node, _Steps | None]:
    """The linear that logits come from, and what is done to its result."""
    *mapped, linear = _back_to_linear(node)
    calls = tuple((n.target, tuple(None if a in (*mapped, linear) else concrete(a) for a in n.args)) for n in mapped)
    return linear, _Steps(calls[::-1]) if calls else None


def _records(node: Node) -> bool:
    """Whether grad mode is on at a node: as around the compilation, which Dynamo guards, but for the graph's switches."""
    enabled = torch.is_grad_enabled()
    for before in node.graph.nodes:
        if before is node:
            break
        if before.target is torch._C._set_grad_enabled:
            enabled = before.args[0]
    return enabled
