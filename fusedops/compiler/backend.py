"""The entry points: ``torch.compile(model, backend="fusedops")``, a pre-grad pass for Inductor, and ``explain``."""

import logging
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import RestartAnalysis, SkipFrame
from torch.fx import GraphModule

from csrc_meta.errors import FusedopsWarning, OptionError, message
from fusedops.compiler.deferral import defer_logits
from fusedops.compiler.engine import Policy, rewrite
from fusedops.compiler.normalise import normalise
from fusedops.compiler.report import Report
from fusedops.rules import all_rules

log = logging.getLogger("fusedops")
Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def fusedops(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that ``torch.compile(model, backend="fusedops")`` finds by name.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs.
        mode: as for ``backend="inductor"``.
        options: ``"disable"``: names of operators or rules to leave alone; ``"report"``: a :class:`Report` to fill.
            Every other option goes to Inductor.

    Raises:
        OptionError: an option has a wrong type or names an operator that does not exist.
    """
    rest = dict(options or {})
    settings = Settings.of(rest.pop("disable", ()), rest.pop("report", None))
    return compile_graph(gm, example_inputs, settings, _inductor(mode, rest))


@dataclass(frozen=True)
class Settings:
    disabled: tuple[str, ...] = ()
    report: Report | None = None

    @classmethod
    def of(cls, disable: Any, report: Any) -> "Settings":
        known = sorted({name for rule in all_rules() for name in (rule.op, rule.name)})
        if isinstance(disable, str) or not all(isinstance(n, str) and n in known for n in disable):
            wants = f"a list of operators or rules out of {', '.join(known)}"
            raise OptionError(message("compile", "disable", repr(disable), wants, 'For example ["rms_norm"].'))
        if not isinstance(report, Report | None):
            raise OptionError(message("compile", "report", report, "a fusedops.Report", "Pass one, or leave it out."))
        return cls(tuple(disable), report)


def _inductor(mode: str | None, options: Mapping[str, Any]) -> Compiler:
    # torch's own reading of mode and options: unknown ones are refused with its message.
    return torch._TorchCompileInductorWrapper(mode, dict(options) or None, None)


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], settings: Settings, compiler: Compiler
) -> Callable[..., Any]:
    """Rewrite a graph and compile it; if anything of ours fails, warn and compile the graph as it was captured."""
    report = Report(graphs=1)
    try:
        rewritten = rewritten_copy(gm, Policy(all_rules(), settings.disabled), report)
        report.graph_modules.append(rewritten or gm)
        if rewritten is None:
            return compiler(gm, example_inputs)
        restore_logits = defer_logits(rewritten)
        return restore_logits(compiler(rewritten, example_inputs))
    except (RestartAnalysis, SkipFrame):
        raise  # Dynamo's own control flow
    except Exception as error:
        if not report.sites and report.graph_modules:
            raise  # nothing was rewritten: the failure is not ours
        report = failed(gm, error)
        return compiler(gm, example_inputs)
    finally:
        publish(report, settings.report)


def rewritten_copy(gm: GraphModule, policy: Policy, report: Report) -> GraphModule | None:
    """A captured graph with operators in it, or None where there was nothing to replace; ``gm`` stays as it is."""
    if any(isinstance(p, torch.nn.Parameter) for p in gm.parameters()):
        return None  # the graph of an optimizer, say: those of models have parameters as inputs
    copy = normalise(gm)
    return copy if rewrite(copy, policy, report) else None


def failed(gm: GraphModule, error: Exception) -> Report:
    reason = "".join(traceback.format_exception_only(error)).strip()
    warnings.warn(
        f"fusedops could not rewrite a graph, which runs as captured: {reason} (report: options={{'report': fusedops.Report()}})",
        FusedopsWarning,
        stacklevel=2,
    )
    log.debug("rewriting failed", exc_info=error)
    return Report(graphs=1, graph_modules=[gm], failures=[reason])


def publish(report: Report, to: Report | None) -> None:
    log.info("%s", report)
    if to is not None:
        to.add(report)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """What ``backend="fusedops"`` would do to one call of a model, without compiling it.

    The call is captured, rewritten and reported; what runs is the captured graph as it is, and random number
    generators are left where they were.

    Args:
        model: a module or function.
        *args, **kwargs: of the call.

    Returns:
        report: prints as a table; see :class:`Report` for its parts.
    """
    report = Report()

    def capture(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compile_graph(gm, example_inputs, Settings(report=report), lambda graph, _: graph.forward)
        return gm.forward

    with torch.random.fork_rng():
        torch.compile(_uncompiled(model), backend=capture)(*args, **kwargs)
    return report


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compile(model)`` or ``model.compile()`` was given: its own compilation would hide the call."""
    model = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))
    if isinstance(model, torch.nn.Module) and model._compiled_call_impl is not None:
        return model._call_impl
    return model
