"""Does a graph contain a pattern at this node? If not, where do they part?"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Node

from fusedops.compiler.rule import ANY_SIZE, Capture, Pattern, Rule

aten = torch.ops.aten
_COMMUTATIVE = {aten.mul.Tensor, aten.add.Tensor}
_RESHAPES = {*ANY_SIZE, aten.flatten.using_ints}
# Their dimensions are those of the result, which has one more than the operand.
_ADDS_A_DIMENSION = {aten.unsqueeze.default, aten.stack.default}


@dataclass
class Match:
    """A pattern found in a graph: which node stands for which, and what the names are bound to."""

    pattern: Pattern
    nodes: dict[Node, Node] = field(default_factory=dict)
    bindings: dict[str, Any] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)  # what keeps an equal structure from being the same spelling

    @property
    def rule(self) -> Rule:
        return self.pattern.rule

    @property
    def root(self) -> Node:
        """The first result: where the match began."""
        return self.nodes[self.pattern.outputs[0]]

    @property
    def results(self) -> list[Node]:
        """The nodes whose values are replaced."""
        return [self.nodes[n] for n in self.pattern.outputs[: self.rule.results]]

    @property
    def observed(self) -> list[Node]:
        """Intermediate values that others may read."""
        return [self.nodes[n] for n in self.pattern.outputs[self.rule.results :]]

    @property
    def interior(self) -> list[Node]:
        """The graph's nodes that the pattern covers, the results included."""
        return list(dict.fromkeys(g for p, g in self.nodes.items() if p.op != "placeholder"))

    @property
    def place(self) -> Node | None:
        """The last of its nodes that stands after everything it reads and before everything that reads its results.

        There is none if an operand of one result is computed from another result.
        """
        interior, results = set(self.interior), self.results
        inputs = [b for b in self.bindings.values() if isinstance(b, Node)]
        if any(i in results for i in inputs):
            return None
        readers = [u for r in results for u in r.users if u not in interior]
        return max((n for n in interior if max(inputs) < n and (not readers or n < min(readers))), default=None)

    def value(self, name: str) -> Any:
        """The fake tensor, or the number, that a name of the rule is bound to."""
        bound = self.bindings[name]
        return bound.meta.get("val") if isinstance(bound, Node) else bound

    def copy(self) -> "Match":
        return Match(self.pattern, dict(self.nodes), dict(self.bindings), list(self.differences))


@dataclass
class Mismatch:
    """Why a pattern does not fit. The further it got, the more its reason says about the site."""

    reason: str
    match: Match
    complete: bool = False

    @property
    def coverage(self) -> tuple[bool, int]:
        """Orders mismatches: one that the whole pattern led to tells more than one on the way."""
        return self.complete, len(self.match.nodes)


def matches(pattern: Pattern, node: Node) -> Iterator[Match | Mismatch]:
    """Every way in which a pattern fits, its first output standing at a node; at least one Mismatch if there is none.

    From an output the pattern is followed upwards. An output that is not met on the way (the rotated keys beside the
    rotated queries) is looked for among the nodes around, nearest first.
    """
    search = _Search(pattern)
    fits = False
    for found in search.outputs(pattern.outputs, [node], Match(pattern)):
        fits = True
        reason = found.differences[0] if found.differences else _escaping(found) or _torn(found)
        yield Mismatch(reason, found, complete=True) if reason else found
    if not fits:
        yield search.furthest


def arguments(node: Node) -> list[Any]:
    """All arguments of a call in the order of its schema, defaults filled in, dimensions counted from the end."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return [*node.args, *node.kwargs.values()]
    values = []
    for i, argument in enumerate(node.target._schema.arguments):
        if i < len(node.args):
            value = node.args[i]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            value = argument.default_value if argument.has_default_value() else None
        values.append(_from_the_end(value, _rank(node)) if argument.name == "dim" else value)
    return values


@functools.cache
def _pattern_arguments(node: Node) -> list[Any]:
    return arguments(node)  # patterns do not change


def _rank(node: Node) -> int:
    operand = node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]
    return operand.meta["val"].dim() + (node.target in _ADDS_A_DIMENSION)


def _from_the_end(dim: Any, rank: int) -> Any:
    if isinstance(dim, int):
        return dim - rank if dim >= 0 else dim
    return [_from_the_end(d, rank) for d in dim] if isinstance(dim, list | tuple) else dim


def _around(node: Node) -> Iterator[Node]:
    """All other nodes of a graph, nearest first."""
    for pair in zip_longest(_walk(node, "next"), _walk(node, "prev")):
        yield from (n for n in pair if n is not None)


def _walk(node: Node, step: str) -> Iterator[Node]:
    while (node := getattr(node, step)).op != "root":
        yield node


class _Search:
    """Depth-first search with backtracking over the operand orders of commutative operators."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.furthest = Mismatch("", Match(pattern))

    def fail(self, match: Match, reason: str, *values: Any) -> None:
        """Remember a reason with the values it is about, if no other branch of the search got as far."""
        if len(match.nodes) > len(self.furthest.match.nodes) or not self.furthest.reason:
            self.furthest = Mismatch(reason.format(*map(_name, values)), match)

    def outputs(self, wanted: Sequence[Node], around: Iterable[Node], match: Match) -> Iterator[Match]:
        """Cover outputs one after the other, each at one of the given nodes if no other has led to it."""
        wanted = [w for w in wanted if w not in match.nodes]
        if not wanted or match.differences:  # no partner makes up for a difference
            yield match
            return
        first, *rest = wanted
        taken = set(match.nodes.values())
        for candidate in around:
            if candidate.target is first.target and candidate not in taken:
                for partial in self.node(first, candidate, match):
                    yield from self.outputs(rest, _around(candidate), partial)

    def node(self, want: Node, got: Any, match: Match) -> Iterator[Match]:
        if want in match.nodes:
            if match.nodes[want] is got:
                yield match
            else:
                self.fail(match, f"{self.pattern.names.get(want, want.target)} would be two different values")
            return
        if want.op == "placeholder":
            yield from self.bind(want, got, match)
            return
        if not isinstance(got, Node) or got.op != "call_function":
            self.fail(match, "expected {}, found {}", want, got)
            return
        any_size = want.target in ANY_SIZE
        if any_size and got.target not in _RESHAPES:
            # What has the wanted shape already need not be reshaped.
            yield from self.node(want.args[0], got, match)
            return
        if got.target is not want.target and not any_size:
            self.fail(match, "expected {}, found {}", want, got)
            return
        match = match.copy()
        match.nodes[want] = got
        match.differences += _different_dtype(want, got)
        wanted, given = _pattern_arguments(want), arguments(got)
        if any_size:
            wanted, given = wanted[:1], given[:1]
        yield from self.values(want, wanted, given, match)
        if want.target in _COMMUTATIVE:
            yield from self.values(want, wanted, [given[1], given[0], *given[2:]], match)

    def values(self, at: Node, wanted: list[Any], given: list[Any], match: Match) -> Iterator[Match]:
        if not wanted:
            yield match
            return
        for partial in self.one_value(at, wanted[0], given[0], match):
            yield from self.values(at, wanted[1:], given[1:], partial)

    def one_value(self, at: Node, want: Any, got: Any, match: Match) -> Iterator[Match]:
        if isinstance(want, Node):
            yield from self.node(want, got, match)
        elif isinstance(want, Capture):
            yield from self.capture(at, want, got, match)
        elif isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(want) == len(got):
            yield from self.values(at, list(want), list(got), match)
        elif type(want) is type(got) and want == got:
            yield match
        else:
            self.fail(match, "{}: expected {}, found {}", at, want, got)

    def bind(self, want: Node, got: Any, match: Match) -> Iterator[Match]:
        name = self.pattern.names[want]
        value = got.meta.get("val") if isinstance(got, Node) else None
        if type(value) is not FakeTensor:
            kind = f" ({type(value).__name__})" if isinstance(got, Node) else ""
            self.fail(match, name + ": expected a plain tensor, found {}" + kind, got)
            return
        match = match.copy()
        match.nodes[want] = got
        match.bindings[name] = got
        yield match

    def capture(self, at: Node, want: Capture, got: Any, match: Match) -> Iterator[Match]:
        value = got.meta.get("val") if isinstance(got, Node) else got
        if not isinstance(value, int | float | torch.SymFloat):
            self.fail(match, "{}: {}: expected a number, found {}", at, want, got)
        elif match.bindings.get(want.name, got) is not got and match.bindings[want.name] != got:
            self.fail(match, f"{want.name} would be two different numbers")
        else:
            match = match.copy()
            match.bindings[want.name] = got
            yield match


def _different_dtype(want: Node, got: Node) -> list[str]:
    """Cast order is part of a spelling: every intermediate value has to have the dtype that the pattern's has."""
    a, b = want.meta.get("val"), got.meta.get("val")
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype != b.dtype:
        return [f"{got.target} computes in {b.dtype}, the pattern in {a.dtype}"]
    return []


def _escaping(match: Match) -> str | None:
    """A value inside the pattern that something outside reads would still have to be computed."""
    covered = set(match.interior)
    visible = {*match.results, *match.observed}
    for node in match.interior:
        outside = next((u for u in node.users if u not in covered), None)
        if outside is not None and node not in visible:
            return f"{node.target} inside the pattern is also read by {_name(outside)}"
    return None


def _torn(match: Match) -> str | None:
    return None if match.place else "one of its results is read before all its inputs are there"


def _name(x: Any) -> str:
    if isinstance(x, Node):
        kinds = {"call_function": str(x.target), "output": "the graph's output", "placeholder": f"the input {x.name}"}
        return kinds.get(x.op, f"{x.op} {x.name}")
    return repr(x)
