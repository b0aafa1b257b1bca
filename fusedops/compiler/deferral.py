"""Takes logits out of a graph's outputs and makes them on demand after the graph has run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusedops.compiler.engine import ON_DEMAND
from fusedops.logits import logits_on_demand


@dataclass(frozen=True)
class _Operand:
    """Where an operand is found when the graph has run: among its inputs, or among what it returns."""

    index: int
    is_input: bool

    def fetch(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        return (inputs if self.is_input else outputs)[self.index]


@dataclass(frozen=True)
class _Deferred:
    """One output to be made on demand: its place, its operands, dtype, and whether autograd records it."""

    place: int
    operands: tuple[_Operand | None, ...]
    dtype: torch.dtype
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
    n_outputs = len(outputs)
    places = {node: [i for i, o in enumerate(outputs) if o is node] for node in logits}

    def operand(node: Node | None) -> _Operand | None:
        if node is None:
            return None
        if node in inputs:
            return _Operand(inputs.index(node), True)
        outputs.append(node)
        return _Operand(len(outputs) - 1, False)

    deferred = []
    for node in logits:
        operands = tuple(operand(a) for a in (*node.args, None)[:3])
        for place in places[node]:
            deferred.append(_Deferred(place, operands, node.meta["val"].dtype, _records(node)))
            outputs[place] = None
    output.args = (type(output.args[0])(outputs),)
    for node in logits:
        gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()

    def decorate(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> list[Any]:
            results = list(compiled(*args))
            made: dict[tuple[_Operand | None, ...], Any] = {}
            for d in deferred:
                if d.operands not in made:
                    tensors = [o and o.fetch(args, results) for o in d.operands]
                    with torch.set_grad_enabled(torch.is_grad_enabled() and d.records):
                        made[d.operands] = logits_on_demand(*tensors, d.dtype)
                results[d.place] = made[d.operands]
            return results[:n_outputs]

        return run

    return decorate


def _records(node: Node) -> bool:
    """Whether grad mode is on at a node, by the switches that the graph itself contains."""
    enabled = torch.is_grad_enabled()
    for before in node.graph.nodes:
        if before is node:
            break
        if before.target is torch._C._set_grad_enabled:
            enabled = before.args[0]
    return enabled
