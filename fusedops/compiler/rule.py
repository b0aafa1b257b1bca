"""A rule: a spelling, what takes its place, and when it may.

Both sides are plain Python functions. The pattern is written the way a model writes it and traced the way a model is
traced, once for each set of example inputs, so that casts which vanish in float32 and stay in bfloat16 need no rule of
their own.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node

from fusedops.compiler.normalise import trace

if TYPE_CHECKING:
    from fusedops.compiler.match import Match


@dataclass(frozen=True)
class Capture:
    """A number in a pattern that the rule reads instead of prescribing: an eps, an ignore_index."""

    name: str


def accept(match: "Match") -> str | None:
    return None


@dataclass(frozen=True)
class Rule:
    """One rewriting rule.

    Attributes:
        name: ``<op>.<spelling>``.
        op: the operator put in; ``options={"disable": [op]}`` turns its rules off.
        pattern: takes the tensors of an example and the captured numbers by name. Returns the result to be replaced,
            or a tuple of it and of intermediate values that others may still read (the logits of a loss).
        replacement: takes the same names and returns the new result.
        examples: sets of example tensors by name, made under FakeTensorMode; each is traced. Shapes don't matter to the match, ranks and dtypes do.
        numbers: captured numbers by name, each with a value that occurs nowhere else in the pattern.
        anchor: the ATen operator by which a reader recognises such a site: one that is left over is reported as declined.
        guard: reads a structural match; returns None, or the reason for declining.
    """

    name: str
    op: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Tensor]
    examples: Callable[[], Iterable[Mapping[str, Tensor]]]
    anchor: torch._ops.OpOverload
    numbers: Mapping[str, float | int] = field(default_factory=dict)
    guard: Callable[["Match"], str | None] = accept

    @cached_property
    def patterns(self) -> "list[Pattern]":
        """The distinct graphs that the pattern traces to; made when first asked for."""
        unique: dict[str, Pattern] = {}
        # Whatever is switched on around the first compilation must not become part of the pattern.
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.inference_mode(False), FakeTensorMode():
            for example in self.examples():
                pattern = Pattern.of(self, example)
                unique.setdefault(pattern.key(), pattern)
        return list(unique.values())


@dataclass(frozen=True, eq=False)
class Pattern:
    """A traced pattern: its graph, the name each placeholder binds, and its outputs (the first is replaced)."""

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
        outputs = gm.graph.output_node().args[0]
        outputs = tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        return cls(rule, gm, dict(zip(placeholders, names, strict=True)), outputs)

    @property
    def size(self) -> int:
        return len(self.graph_module.graph.nodes)

    def key(self) -> str:
        dtypes = [str(n.meta["val"].dtype) for n in self.graph_module.graph.nodes if n.op == "call_function"]
        return f"{self.graph_module.graph} {dtypes}"


def _capture(value: Any, captures: Mapping[tuple[type, Any], Capture]) -> Any:
    return captures.get((type(value), value), value) if isinstance(value, int | float) else value
