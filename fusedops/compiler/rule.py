"""A rule: a spelling, what takes its place, and when it may.

Both sides are plain Python functions. The pattern is written the way a model writes it and traced the way a model is
traced, once for each set of example inputs, so that casts which vanish in float32 and stay in bfloat16 need no rule of
their own.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from fusedops.compiler.normalise import trace

if TYPE_CHECKING:
    from fusedops.compiler.match import Match

aten = torch.ops.aten
# In a pattern sizes are left to the model, and so is whether and how they are spelled. That rows stay rows is for the guard
# to see in the shapes.
ANY_SIZE = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


@dataclass(frozen=True)
class Capture:
    """A number in a pattern that the rule reads instead of prescribing: an eps, an ignore_index."""

    name: str

    def __repr__(self) -> str:
        return self.name


def accept(match: "Match") -> str | None:
    return None


@contextlib.contextmanager
def _neutral_modes() -> Iterator[None]:
    """Whatever is switched on around the first compilation must not become part of a pattern."""
    with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.inference_mode(False):
        yield


@dataclass(frozen=True)
class Rule:
    """One rewriting rule.

    Attributes:
        name: ``<op>.<spelling>``.
        op: the operator put in; ``options={"disable": [op]}`` turns its rules off.
        pattern: takes the tensors of an example and the captured numbers by name. Returns the results to be replaced,
            followed by intermediate values that others may still read (the logits of a loss).
        replacement: takes the same names and returns the new results.
        examples: sets of example tensors by name, made under FakeTensorMode; each is traced. Shapes don't matter to the
            match, ranks and dtypes do.
        numbers: captured numbers by name, each with a value that occurs nowhere else in the pattern. A size of the
            model is one too: sliced at its marker, one pattern serves every head size, and the guard compares sizes.
        results: how many results there are.
        recomputes: whether the backward pass computes the results again instead of keeping them. Meant for what is cheap
            to compute from operands that its own backward keeps in any case.
        anchor: an ATen operator in the pattern by which a reader recognises such a site: one that is left over is
            reported as declined, and a graph without any is not searched.
        guard: reads a structural match; returns None, or the reason for declining.
    """

    name: str
    op: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Tensor | tuple[Tensor, ...]]
    examples: Callable[[], Iterable[Mapping[str, Tensor]]]
    anchor: torch._ops.OpOverload
    numbers: Mapping[str, float | int] = field(default_factory=dict)
    results: int = 1
    recomputes: bool = False
    guard: Callable[["Match"], str | None] = accept

    def patterns(self, dtypes: Collection[torch.dtype], targets: Collection[Any]) -> "list[Pattern]":
        """The distinct graphs that the pattern traces to, as far as they may be of use.

        A trace takes some 10 ms, so each is made when first asked for: on an example of floating-point dtypes that the
        graph has, and after the first only if the graph has what that one calls.

        Args:
            dtypes: of the values in the graph to be searched.
            targets: of its calls.
        """
        unique: dict[str, Pattern] = {}
        for index, example in enumerate(self._examples):
            if {t.dtype for t in example.values() if t.is_floating_point()} <= set(dtypes):
                if index not in self._traced:
                    with _neutral_modes():
                        self._traced[index] = Pattern.of(self, example)
                pattern = self._traced[index]
                unique.setdefault(pattern.key, pattern)
                if not pattern.targets <= set(targets):
                    break
        return list(unique.values())

    @cached_property
    def _examples(self) -> list[Mapping[str, Tensor]]:
        with _neutral_modes(), FakeTensorMode():
            return list(self.examples())

    @cached_property
    def _traced(self) -> "dict[int, Pattern]":
        return {}


@dataclass(frozen=True, eq=False)
class Pattern:
    """A traced pattern: its graph, the name each placeholder binds, and its outputs (results first)."""

    rule: Rule
    graph_module: GraphModule
    names: Mapping[Node, str]
    outputs: tuple[Node, ...]

    @classmethod
    def of(cls, rule: Rule, tensors: Mapping[str, Tensor]) -> "Pattern":
        names = list(tensors)
        gm = trace(
            lambda *values: rule.pattern(**dict(zip(names, values, strict=True)), **rule.numbers),
            list(tensors.values()),
        )
        captures = {(type(v), v): Capture(k) for k, v in rule.numbers.items()}
        for node in gm.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, lambda a: _capture(a, captures))
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, lambda a: _capture(a, captures))
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        return cls(rule, gm, dict(zip(placeholders, names, strict=True)), outputs(gm.graph))

    @cached_property
    def size(self) -> int:
        return len(self.graph_module.graph.nodes)

    @cached_property
    def targets(self) -> set[Any]:
        """What it calls, but for what is there in one example and vanishes in another."""
        calls = {n.target for n in self.graph_module.graph.nodes if n.op == "call_function"}
        return calls - {aten.to.dtype, aten.alias.default, *ANY_SIZE}

    @cached_property
    def key(self) -> str:
        calls = [n for n in self.graph_module.graph.nodes if n.op == "call_function"]
        dtypes = [str(t.dtype) for n in calls for t in tree_leaves(n.meta["val"])]
        return f"{self.graph_module.graph} {dtypes}"


def outputs(graph: Graph) -> tuple[Node, ...]:
    """What a traced function returns, one value or several."""
    returned = graph.output_node().args[0]
    return tuple(returned) if isinstance(returned, list | tuple) else (returned,)


def _capture(value: Any, captures: Mapping[tuple[type, Any], Capture]) -> Any:
    return captures.get((type(value), value), value) if isinstance(value, int | float) else value
