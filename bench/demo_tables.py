"""The demo's record as tables and as a picture. Works from the JSON alone, so that a page can be made from it later."""

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.figures import NO_FIGURE, pyplot

_STYLES = {"eager": ("0.6", "-"), "torch.compile": ("tab:blue", "--"), "fusedops": ("tab:red", ":")}


def show(console: Console, record: dict[str, Any]) -> None:
    for table in (losses(record), sites(record), declined(record), cost(record)):
        if table.row_count:
            console.print(table)
    for line in summary(record):
        console.print(line, highlight=False)
    for line in failures(record):
        console.print(line, style="bold red", markup=False)


def losses(record: dict[str, Any]) -> Table:
    """Loss per step side by side; the last rows are the largest differences from eager."""
    runs = record["runs"]
    table = Table("step", *(r["name"] for r in runs), title="Loss", title_justify="left")
    for column in table.columns:
        column.justify = "right"
    for step in range(max((len(r["losses"]) for r in runs), default=0)):
        table.add_row(str(step), *(f"{r['losses'][step]:.5f}" if step < len(r["losses"]) else "-" for r in runs))
    if table.row_count:
        table.add_section()
        differences = [largest_difference(runs[0], r) for r in runs[1:]]
        shown = ["-" if d is None else f"{d:.1e}" for d in differences]
        table.add_row("largest difference from eager", "", *shown)
    return table


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    pairs = list(zip(a["losses"], b["losses"], strict=False))
    return max(abs(x - y) for x, y in pairs) if pairs else None


def sites(record: dict[str, Any]) -> Table:
    table = Table("became", "by rule", "where", "sites", title="Replaced by fusedops", title_justify="left")
    _count(table, record, "sites", ("op", "rule", "module"))
    return table


def declined(record: dict[str, Any]) -> Table:
    table = Table("looks like", "where", "why it was left", "sites", title="Declined", title_justify="left")
    _count(table, record, "declined", ("anchor", "module", "reason"))
    return table


def _count(table: Table, record: dict[str, Any], kind: str, keys: tuple[str, ...]) -> None:
    def row(entry: dict[str, str]) -> tuple[str, ...]:
        return tuple(_layers_as_star(entry[k]) if k == "module" else entry[k] for k in keys)

    for column in table.columns:
        column.overflow = "fold"

    rows = Counter(row(entry) for run in record["runs"] for entry in run[kind])
    for cells, number in rows.items():
        table.add_row(*cells, str(number))


def _layers_as_star(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split(".")) or "-"


def cost(record: dict[str, Any]) -> Table:
    """Step time, and peak memory where the device has its own."""
    runs = record["runs"]
    on_gpu = any(r["peak_mib"] is not None for r in runs)
    gpu_columns = ("peak memory, MiB", "held between steps, MiB") if on_gpu else ()
    names = ("run", "step, ms", "20-80 %", "tokens/s", *gpu_columns, "first step, s")
    title = f"Cost of a step, after {record['settings']['warm-up steps']} for warm-up; compilation is in the first step"
    table = Table(*names, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for r in runs:
        time = r["step_ms"]
        cells = ["-"] * 3
        if time:
            cells = [f"{time['median']:.1f}", f"{time['q20']:.1f}-{time['q80']:.1f}", f"{r['tokens_per_s']:.0f}"]
        if on_gpu:
            cells += [_number(r["peak_mib"]), _number(r["held_mib"])]
        table.add_row(r["name"], *cells, _number(r["first_step_s"], 1))
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary(record: dict[str, Any]) -> list[str]:
    """Sites in numbers; peak memory and step time of fusedops beside the plain run's (torch.compile's, where it ran)."""
    *plain, ours = record["runs"]
    other = plain[-1]
    lines = [f"{len(ours['sites'])} sites were replaced and {len(ours['declined'])} declined."]
    for key, what in (("peak_mib", "peak memory"), ("step_ms", "time of a step")):
        a, b = (r[key]["median"] if isinstance(r[key], dict) else r[key] for r in (other, ours))
        if a and b:
            lines.append(f"{ours['name']} takes {b / a:.2f} times the {what} of {other['name']}.")
    return lines


def failures(record: dict[str, Any]) -> list[str]:
    lines = []
    for r in record["runs"]:
        if r["failure"]:
            lines.append(f"{r['name']} ended after {len(r['losses'])} steps: {r['failure']}")
        lines += [f"fusedops left a graph unrewritten: {text}" for text in r["fallbacks"]]
    return lines


def loss_picture(record: dict[str, Any], path: Path) -> str:
    """Draw the loss curves; answers with a line for the reader."""
    plot = pyplot()
    if plot is None:
        return NO_FIGURE
    figure, axes = plot.subplots(figsize=(7, 4), layout="constrained")
    for r in record["runs"]:
        colour, line = _STYLES.get(r["name"], (None, "-"))
        axes.plot(r["losses"], line, color=colour, label=r["name"], linewidth=2)
    settings, gpu = record["settings"], record["machine"].get("gpu", record["machine"]["device"])
    axes.set(xlabel="step", ylabel="loss per byte, nats")
    axes.set_title(f"Llama, {settings['parameters'] / 1e6:.1f}M parameters, {settings['dtype']}, {gpu}", fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plot.close(figure)
    return f"Loss curves: {path}"
