"""The record of bench.sweeps as two figures: time and peak memory, a panel for each operator and axis."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.figures import NO_FIGURE, finish, pyplot
from bench.operator_tables import fastest_peer, mib, ms
from bench.peers.operator import COMPILE, EAGER, LIGER, OURS, TORCH

# Okabe and Ito's colours, told apart by marker and line as well.
STYLES: dict[str, dict[str, Any]] = {
    EAGER: {"color": "#999999", "marker": "s", "linestyle": "-"},
    TORCH: {"color": "#E69F00", "marker": "^", "linestyle": "-."},
    COMPILE: {"color": "#0072B2", "marker": "D", "linestyle": "--"},
    LIGER: {"color": "#D55E00", "marker": "v", "linestyle": ":"},
    OURS: {"color": "#000000", "marker": "o", "linestyle": "-", "markerfacecolor": "none", "markersize": 8},
}
MEASURES = {
    "sweeps_time.png": ("Device time of forward plus backward, ms", "log", lambda peer: peer["device"]["median"]),
    "sweeps_memory.png": ("Peak memory beyond the inputs, MiB", "linear", lambda peer: peer["peak_mib"]),
}
VERSIONS = ("fusedops", "torch", "triton", "transformers", "liger_kernel")
COLUMNS = 3

Read = Callable[[dict[str, Any]], float]


def draw(record: dict[str, Any], folder: Path) -> Iterator[str]:
    """Write the figures; answers with a line on each for the reader."""
    if pyplot() is None:
        yield NO_FIGURE
        return
    for name, (what, scale, read) in MEASURES.items():
        if panels(record):
            _figure(record, what, scale, read, folder / name)
            yield f"Figure: {folder / name}"


def panels(record: dict[str, Any]) -> list[tuple[dict[str, str], list[dict[str, Any]]]]:
    """Each panel with its cases, from small to large."""
    found: dict[tuple[str, ...], tuple[dict[str, str], list[dict[str, Any]]]] = {}
    for case in record["cases"]:
        panel = case["panel"]
        found.setdefault(tuple(panel.values()), (panel, []))[1].append(case)
    return [(panel, sorted(cases, key=lambda case: case["x"])) for panel, cases in found.values()]


def table(record: dict[str, Any]) -> Table:
    """fusedops at every point, beside eager and the fastest peer."""
    names = ("operator", "axis", "at", "ms", "eager, ms", "fastest peer", "its ms", "peak MiB", "eager's", "its")
    result = Table(*names, title="The points of the sweeps", title_justify="left")
    for panel, cases in panels(record):
        for case in cases:
            ours, eager, fastest = _peer(case, OURS), _peer(case, EAGER), fastest_peer(case)
            cells = [panel["op"], f"{panel['axis']}, {panel['fixed']}", str(case["x"]), ms(ours), ms(eager)]
            cells += [fastest["name"] if fastest else "-", ms(fastest), mib(ours), mib(eager), mib(fastest)]
            result.add_row(*cells)
    for case in record["not_run"]:
        panel = case["panel"]
        result.add_row(panel["op"], f"{panel['axis']}, {panel['fixed']}", str(case["x"]), "not run", *[""] * 6)
    return result


def caption(record: dict[str, Any]) -> str:
    machine = record["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in VERSIONS if name in machine)
    return f"{machine.get('gpu', machine['device'])}, bfloat16; {versions}"


def _figure(record: dict[str, Any], what: str, scale: str, read: Read, path: Path) -> None:
    shown = panels(record)
    rows = -(-len(shown) // COLUMNS)
    figure, grid = pyplot().subplots(rows, COLUMNS, figsize=(12, 3.3 * rows + 1), layout="constrained", squeeze=False)
    lines: dict[str, Any] = {}
    for axes, (panel, cases) in zip(grid.flat, shown, strict=False):
        for kind, style in STYLES.items():
            points = [(case["x"], read(peer)) for case in cases if (peer := _peer(case, kind))]
            if points:
                (lines[kind],) = axes.plot(*zip(*points, strict=True), label=kind, **({"markersize": 5} | style))
        axes.set_title(f"{panel['op']}, {panel['fixed']}", fontsize=10)
        axes.set_xlabel(panel["axis"])
        # Both axes alike: what grows in proportion is a straight line, also between ends that alone were measured.
        axes.set_xscale(scale)
        axes.set_yscale(scale)
        sizes = [case["x"] for case in cases]
        axes.set_xticks(sizes, map(str, sizes))
        axes.set_xticks([], minor=True)
        if scale == "linear":
            axes.set_ylim(bottom=0)
        else:
            axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(visible=True, which="both", axis="y", alpha=0.25)
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    finish(figure, f"{what}\n{caption(record)}", {kind: lines[kind] for kind in STYLES if kind in lines}, path)


def _peer(case: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """The implementation of a kind that was measured, where there is one."""
    return next((p for p in case["peers"] if p["kind"] == kind and "device" in p), None)
