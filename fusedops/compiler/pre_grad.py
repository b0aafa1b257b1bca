"""The same rewriting as a pass of Inductor's, for frameworks that insist on ``backend="inductor"``."""

from collections.abc import Sequence
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from fusedops.cache_key import sources_digest
from fusedops.compiler.backend import Settings, failed, publish, rewritten_copy
from fusedops.compiler.engine import Policy
from fusedops.compiler.report import Report
from fusedops.rules import all_rules


def pre_grad_pass(*, disable: Sequence[str] = (), report: Report | None = None) -> CustomGraphPass:
    """A pass for ``torch.compile(model, options={"pre_grad_custom_pass": fusedops.pre_grad_pass()})``.

    It rewrites as ``backend="fusedops"`` does, with one limit: a pass cannot change what a graph returns, so a loss is
    fused with its projection only where the logits are not returned.

    Args:
        disable: names of operators or rules to leave alone.
        report: filled by every compilation that runs the pass; a graph found in Inductor's cache does not run it.

    Raises:
        OptionError: a name in ``disable`` does not exist.
    """
    return _PreGradPass(Settings.of(disable, report))


class _PreGradPass(CustomGraphPass):
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, graph: Graph) -> None:
        gm = graph.owning_module
        report = Report(graphs=1)
        try:
            rewritten = rewritten_copy(gm, Policy(all_rules(), self.settings.disabled, defers_outputs=False), report)
            if rewritten is not None:
                _become(gm, rewritten)
            report.graph_modules.append(gm)
        except Exception as error:
            report = failed(gm, error)
        publish(report, self.settings.report)

    def uuid(self) -> Any:
        return "fusedops", sources_digest(), self.settings.disabled


def _become(gm: GraphModule, other: GraphModule) -> None:
    """Replace all of a module's graph but its placeholders, which the pass's caller knows, by another's."""
    graph = gm.graph
    old = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    env = dict(zip((n for n in other.graph.nodes if n.op == "placeholder"), placeholders, strict=True))
    output = graph.output_node()
    with graph.inserting_before(output):
        for node in other.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            env[node] = graph.node_copy(node, env.__getitem__)
            if node.op == "get_attr":
                env[node].target = _adopt(gm, other, str(node.target))
    output.args = map_arg(other.graph.output_node().args, env.__getitem__)
    for node in reversed(old):
        graph.erase_node(node)
    graph.lint()
    gm.recompile()


def _adopt(gm: GraphModule, other: GraphModule, name: str) -> str:
    adopted = f"fusedops_{name.replace('.', '_')}"
    setattr(gm, adopted, getattr(other, name))
    return adopted
