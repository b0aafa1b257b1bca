"""What a compilation did: sites replaced, sites declined and why, failures of ours."""

from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch.fx import GraphModule, Node


@dataclass(frozen=True)
class Site:
    """A subgraph that became an operator."""

    rule: str
    op: str
    module: str


@dataclass(frozen=True)
class Declined:
    """A subgraph that looks like a site and was left as it is."""

    anchor: str
    module: str
    reason: str


@dataclass
class Report:
    """Filled by every compilation it is given to: ``options={"report": report}``.

    Attributes:
        sites: replaced subgraphs, in graph order.
        declined: recognisable subgraphs left alone, each with the reason.
        graphs: number of graphs compiled; more than one means that Dynamo broke or recompiled the model.
        graph_modules: the rewritten graphs (the captured one where nothing was replaced).
        failures: what went wrong in fusedops; the graph in question runs as captured.
    """

    sites: list[Site] = field(default_factory=list)
    declined: list[Declined] = field(default_factory=list)
    graphs: int = 0
    graph_modules: list[GraphModule] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Report") -> None:
        """Append what another report says."""
        self.sites += other.sites
        self.declined += other.declined
        self.graphs += other.graphs
        self.graph_modules += other.graph_modules
        self.failures += other.failures

    def counts(self) -> dict[str, int]:
        """Number of replaced sites per operator."""
        return {op: sum(s.op == op for s in self.sites) for op in sorted({s.op for s in self.sites})}

    def table(self) -> Group:
        """The report as rich tables; equal sites of numbered layers share a row."""
        replaced = Table("operator", "rule", "module", "sites", title="Replaced", title_justify="left")
        for (op, rule, module), n in _tally((s.op, s.rule, _family(s.module)) for s in self.sites).items():
            replaced.add_row(op, rule, module, str(n))
        parts: list[Table | Text] = [replaced if self.sites else Text("Nothing was replaced.")]
        if self.declined:
            declined = Table("looks like", "module", "why it was left", "sites", title="Declined", title_justify="left")
            for (anchor, module, reason), n in _tally(
                (d.anchor, _family(d.module), d.reason) for d in self.declined
            ).items():
                declined.add_row(anchor, module, reason, str(n))
            parts.append(declined)
        parts += [Text(f"Failed, running as captured: {f}") for f in self.failures]
        parts.append(Text(f"{self.graphs} graph{'s' if self.graphs != 1 else ''} captured."))
        return Group(*parts)

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def module_path(node: Node) -> str:
    """The path of the module whose forward a node comes from, as ``named_modules`` spells it."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    for prefix in ("L['self'].", "L['fn'].", "L['self']", "L['fn']"):
        path = path.removeprefix(prefix)
    return path.replace("._modules['", ".").replace("']", "").replace("['", ".")


def _family(path: str) -> str:
    """model.layers.3.norm -> model.layers.*.norm"""
    return ".".join("*" if part.isdigit() else part for part in path.split(".")) or "(the model itself)"


def _tally(rows) -> dict[tuple[str, str, str], int]:
    counts: dict[tuple[str, str, str], int] = {}
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return counts
