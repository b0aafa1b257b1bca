"""Applies rules to a normalised graph: in order, guarded, one site at a time, with a reason for each one left."""

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from fusedops.compiler.match import Match, Mismatch, matches
from fusedops.compiler.normalise import REGIONS, autocast_regions, open_autocast, trace
from fusedops.compiler.report import Declined, Report, Site, module_path
from fusedops.compiler.rule import Pattern, Rule, outputs

ON_DEMAND = "fusedops_on_demand"
# To AOTAutograd's partitioner an operator that it does not know is too dear to be computed twice. In what activation
# checkpointing marks in this way, the id tells regions apart; here all is one region.
_RECOMPUTED = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": 0}
_DEVICES = ("cpu", "cuda", "xpu")
_PURE = {torch.tensor, torch.sym_float, torch.sym_int, torch.sym_max, torch.sym_min, torch.sym_not}


@dataclass(frozen=True)
class Policy:
    """What the caller of the engine allows.

    Attributes:
        rules: the candidates, in any order.
        disabled: operators and rules that are matched and reported, but not replaced.
        defers_outputs: whether the graph's outputs can be computed on demand after the graph has run.
    """

    rules: Sequence[Rule]
    disabled: Collection[str] = ()
    defers_outputs: bool = True


def rewrite(gm: GraphModule, policy: Policy, report: Report) -> int:
    """Rewrite a normalised graph and the bodies of its higher-order operators in place; the number of sites replaced."""
    replaced = 0
    graphs = [m for m in gm.modules() if isinstance(m, GraphModule)]
    for module in graphs:
        # Only the outermost graph's outputs reach the user.
        allowed = policy if module is gm else Policy(policy.rules, policy.disabled, defers_outputs=False)
        # Where there are bodies, checkpointed ones may say what is recomputed; two opinions would not go together.
        replaced += _GraphRewriter(module, allowed, report, recomputes=len(graphs) == 1).run()
        if module is not gm:
            _forget_output_values(module.graph)
    return replaced


def _forget_output_values(graph: Graph) -> None:
    """AOTAutograd reads from a body's outputs which of them require grad, and fakes traced before autograd don't say."""
    for node in graph.output_node().all_input_nodes:
        node.meta.pop("val", None)


class _GraphRewriter:
    def __init__(self, gm: GraphModule, policy: Policy, report: Report, recomputes: bool) -> None:
        self.gm, self.policy, self.report, self.recomputes = gm, policy, report, recomputes
        self.epochs = _epochs(gm.graph)
        self.attempts: dict[Node, Mismatch] = {}
        self.replacements: dict[str, GraphModule] = {}

    def run(self) -> int:
        places = {node: i for i, node in enumerate(self.gm.graph.nodes)}
        calls: dict[Any, list[Node]] = {}
        for node in places:
            calls.setdefault(node.target, []).append(node)
        sites: list[tuple[int, Site]] = []
        # What covers more goes first: a loss with its projection before a loss on logits, a norm with its casts before
        # one without.
        for pattern in sorted(self.patterns(calls), key=lambda p: -p.size):
            for node in calls.get(pattern.outputs[0].target, ()):
                site = self.try_pattern(pattern, node) if node in self.epochs else None  # it may be erased by now
                if site is not None:
                    sites.append((places[node], site))
        self.report.sites += [site for _, site in sorted(sites, key=operator.itemgetter(0))]
        self.report_leftovers()
        if sites:
            self.gm.graph.lint()
            self.gm.recompile()
        return len(sites)

    def patterns(self, targets: Collection[Any]) -> list[Pattern]:
        values = (node.meta.get("val") for node in self.gm.graph.nodes)
        # In float32 a pattern has no casts: where a model leaves them out, the float32 one gets furthest and says why not.
        dtypes = {torch.float32} | {v.dtype for v in values if isinstance(v, Tensor)}
        return [p for rule in self.policy.rules if rule.anchor in targets for p in rule.patterns(dtypes, targets)]

    def try_pattern(self, pattern: Pattern, node: Node) -> Site | None:
        rule = pattern.rule
        for found in matches(pattern, node):
            if isinstance(found, Match):
                reason = self.decline(found) or self.replace(found)
                if reason is None:
                    return Site(rule.name, rule.op, module_path(node))
                self.remember(rule, Mismatch(reason, found, complete=True))
                return None
            self.remember(rule, found)
        return None

    def remember(self, rule: Rule, mismatch: Mismatch) -> None:
        """Keep the reason of the attempt that covered most of an anchor's surroundings."""
        for node in mismatch.match.interior:  # not its operands, which may be anything
            if node.target is rule.anchor:
                known = self.attempts.get(node)
                if known is None or mismatch.coverage > known.coverage:
                    self.attempts[node] = mismatch

    def decline(self, match: Match) -> str | None:
        rule = match.rule
        for name in (rule.op, rule.name):
            if name in self.policy.disabled:
                return f"{name} is disabled by options"
        if len({self.epochs[n] for n in match.interior}) > 1:
            return "something between its nodes writes to tensors or switches grad mode or autocast"
        value = match.root.meta["val"]
        if value.device.type not in _DEVICES:
            return f"no kernel for device {value.device.type}"
        for logits in match.observed:
            outside = [u for u in logits.users if u not in match.interior]
            if any(u.op != "output" for u in outside):
                reader = next(u for u in outside if u.op != "output")
                return f"its {logits.target} is also read by {reader.target}"
            if outside and not self.policy.defers_outputs:
                return "its logits are returned, which only backend='fusedops' can compute on demand"
            if outside and any(_writes(n) for n in _after(logits)):
                return (
                    "its logits are returned, and something after them writes to tensors that they may be computed from"
                )
        return rule.guard(match)

    def replace(self, match: Match) -> str | None:
        """Put the replacement in the pattern's place; a reason, and an unchanged graph, where it would differ."""
        place = match.place
        assert place is not None, "matches() yields no match without a place"
        tensors = {n: b for n, b in match.bindings.items() if n not in match.rule.numbers}
        numbers = {n: concrete(b) for n, b in match.bindings.items() if n in match.rule.numbers}
        try:
            new = self.traced(match.rule, {n: b.meta["val"] for n, b in tensors.items()}, numbers, place)
        except Exception as error:  # whatever the operator refuses, the model may keep
            return f"{match.rule.op} refuses: {error}"
        results = outputs(new.graph)
        for old, result in zip(match.results, results, strict=True):
            reason = _observable_difference(old.meta["val"], result.meta["val"])
            if reason:
                return reason
        meta = match.root.meta | (_RECOMPUTED if match.rule.recomputes and self.recomputes else {})
        copies = self.copy_before(place, new.graph, list(tensors.values()), meta)
        interior = set(match.interior)
        for old, result in zip(match.results, results, strict=True):
            old.replace_all_uses_with(copies[result], delete_user_cb=lambda user: user not in interior)
        for logits in match.observed:
            if logits.users:
                logits.meta[ON_DEMAND] = True
        for node in sorted(interior, reverse=True):
            if not node.users:
                self.gm.graph.erase_node(node)
                del self.epochs[node]
        return None

    def traced(self, rule: Rule, tensors: dict[str, Tensor], numbers: dict[str, Any], place: Node) -> GraphModule:
        """The graph of a replacement: one for all sites that are alike, as those of a model's layers are."""
        regions = [*self.gm.meta.get(REGIONS, ()), *open_autocast(place)]
        # Sizes as text: a symbolic one has no hash, and none is to be fixed by a comparison.
        kinds = [(n, str(t.shape), str(t.stride()), t.dtype, t.device, t.requires_grad) for n, t in tensors.items()]
        key = f"{rule.name} {kinds} {numbers} {regions}"
        if key not in self.replacements:
            names = list(tensors)

            def call(*values):
                return rule.replacement(**dict(zip(names, values, strict=True)), **numbers)

            with autocast_regions(regions):
                self.replacements[key] = trace(call, list(tensors.values()))
        return self.replacements[key]

    def copy_before(self, place: Node, graph: Graph, inputs: list[Node], meta: dict[str, Any]) -> dict[Node, Node]:
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        env = dict(zip(placeholders, inputs, strict=True))
        with self.gm.graph.inserting_before(place):
            for node in graph.nodes:
                if node.op == "call_function":
                    env[node] = self.gm.graph.node_copy(node, env.__getitem__)
                    env[node].meta = {**meta, "val": node.meta.get("val")}
                    self.epochs[env[node]] = self.epochs[place]
        return env

    def report_leftovers(self) -> None:
        anchors = {rule.anchor for rule in self.policy.rules}
        for node in self.gm.graph.nodes:
            if node.op == "call_function" and node.target in anchors:
                attempt = self.attempts.get(node)
                reason = attempt.reason if attempt else "no rule describes its surroundings"
                self.report.declined.append(Declined(str(node.target), module_path(node), reason))


def _observable_difference(old: Tensor, new: Tensor) -> str | None:
    for what, a, b in (
        ("dtype", old.dtype, new.dtype),
        ("device", old.device, new.device),
        ("rank", old.dim(), new.dim()),
    ):
        if a != b:
            return f"its {what} would change from {a} to {b}"
    for what, a, b in (("shape", tuple(old.shape), tuple(new.shape)), ("strides", old.stride(), new.stride())):
        if not all(statically_known_true(x == y) for x, y in zip(a, b, strict=True)):
            return f"its {what} would change from {a} to {b}"
    return None


def concrete(value: object) -> object:
    """dynamic=True makes a module's float a graph input: fix it, with a guard that recompiles when it changes."""
    if isinstance(value, Node):
        value = value.meta["val"]
    return value.node.guard_float(__file__, 0) if isinstance(value, torch.SymFloat) else value


def _epochs(graph: Graph) -> dict[Node, int]:
    """Numbers the stretches between barriers: nodes of one stretch see the same tensors in the same modes."""
    epochs, current = {}, 0
    for node in graph.nodes:
        current += _is_barrier(node)
        epochs[node] = current
    return epochs


def _is_barrier(node: Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return _writes(node) or not _is_pure(node)


def _writes(node: Node) -> bool:
    """Whether a call may write to a tensor. A call that only switches a mode does not."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        attributes = [getattr(node.graph.owning_module, str(a.target), None) for a in node.all_input_nodes]
        bodies = [b for b in attributes if isinstance(b, GraphModule)]
        # Without a body (a Triton kernel of the user's) there is nothing to see what it writes to.
        return not bodies or any(_writes(n) for b in bodies for n in b.graph.nodes)
    return node.op in ("call_method", "call_module")


def _is_pure(node: Node) -> bool:
    """Whether a call computes something and leaves grad mode, autocast and the like alone."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator) or target in _PURE:
        return True
    return getattr(target, "__module__", "") in (operator.__name__, "_operator", "math")


def _after(node: Node) -> Iterator[Node]:
    while node.op != "output":
        node = node.next
        yield node
