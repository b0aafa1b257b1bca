"""The record of bench.frontier as a table of what the operator takes and a figure of what it could have taken."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.figures import NO_FIGURE, finish, pyplot
from bench.sweep_figures import caption
from csrc_meta.chunks import chunk_rows

ELEMENT_SIZE = 2  # of bfloat16 hidden states and weights
COLOURS = {"float32": "#000000", "bfloat16": "#0072B2"}
PAPER = "#D55E00"
FIGURE = "frontier.png"


def paper_rows(shape: Sequence[int]) -> int:
    """Rows of a chunk by arXiv 2410.10989, section 3.2: as many chunks as the vocabulary has hidden sizes."""
    rows, hidden, vocabulary = shape
    inputs = -(-vocabulary // hidden)
    return min(1 << max(-(-rows // inputs) - 1, 0).bit_length(), rows)


def taken_rows(shape: Sequence[int], sums: str) -> int:
    """Rows of a chunk as the operator takes them by itself."""
    rows, hidden, vocabulary = shape
    saved = 4 - ELEMENT_SIZE if sums.endswith("float32") else 0
    return chunk_rows(rows, hidden, vocabulary, ELEMENT_SIZE, saved)


def _with(case: dict[str, Any], sums: str, rows: int) -> dict[str, Any]:
    """The point of a chunk; where one chunk has all rows there are no sums, whose dtype would matter."""
    return next(
        p for p in case["points"] if p["rows"] == rows and (p["accum_dtype"] == sums or rows == case["shape"][0])
    )


def table(record: dict[str, Any]) -> Table:
    """The chunks that the operator takes by itself."""
    names = (
        "tokens x hidden x vocabulary",
        "sums in",
        "rows",
        "ms",
        "of floor",
        "peak GiB",
        "error",
        "all rows in one chunk",
        "60 % ignored",
        "eval",
    )
    result = Table(*names, title="linear_cross_entropy with the chunks it takes", title_justify="left")
    for case in record["cases"]:
        label = "x".join(map(str, case["shape"]))
        for sums in COLOURS:
            point = _with(case, sums, taken_rows(case["shape"], sums))
            cells = [label, sums, str(point["rows"]), f"{point['median']:.2f}"]
            cells += [f"{point['median'] / case['floor_ms']:.3f}", f"{point['peak_mib'] / 1024:.2f}"]
            cells.append(f"{point['error_ratio']:.2f}")
            if sums == "float32":
                whole = _with(case, sums, case["shape"][0])
                one = f"{whole['median'] / case['floor_ms']:.3f} of floor, {whole['peak_mib'] / 1024:.2f} GiB"
                cells.append(one)
                cells.append(f"{case['ignored_ms'] / case['uncaptured_ms']:.2f} of the time")
                cells.append(
                    f"{case['eval_ms'] / case['product_ms']:.3f} of a product, {case['eval_peak_mib']:.0f} MiB"
                )
            result.add_row(*cells, *[""] * (len(names) - len(cells)))
    for shape in record["not_run"]:
        result.add_row("x".join(map(str, shape)), "not run", *[""] * (len(names) - 2))
    return result


def draw(record: dict[str, Any], folder: Path) -> Iterator[str]:
    """Write the figure; answers with a line for the reader."""
    plot = pyplot()
    if plot is None:
        yield NO_FIGURE
        return
    if not record["cases"]:
        return
    cases = record["cases"]
    size = (3.6 * len(cases), 7.5)
    figure, grid = plot.subplots(2, len(cases), figsize=size, layout="constrained", squeeze=False)
    lines: dict[str, Any] = {}
    for (above, below), case in zip(grid.T, cases, strict=True):
        for axes, y in ((above, lambda p, c=case: p["median"] / c["floor_ms"]), (below, lambda p: p["error_ratio"])):
            lines |= _curves(axes, case, y)
            axes.set_xlabel("peak memory beyond the inputs, GiB")
            axes.grid(visible=True, alpha=0.25)
        above.set_title("x".join(map(str, case["shape"])), fontsize=10)
    grid[0, 0].set_ylabel("time, of three bare products")
    grid[1, 0].set_ylabel("error of the weight's gradient,\nof one product's")
    finish(
        figure, f"Chunks of linear_cross_entropy, labelled with their rows\n{caption(record)}", lines, folder / FIGURE
    )
    yield f"Figure: {folder / FIGURE}"


def _curves(axes: Any, case: dict[str, Any], y: Any) -> dict[str, Any]:
    lines: dict[str, Any] = {}
    for sums, colour in COLOURS.items():
        points = [p for p in case["points"] if p["accum_dtype"] == sums]
        xs, ys = [p["peak_mib"] / 1024 for p in points], [y(p) for p in points]
        (lines[f"sums in {sums}"],) = axes.plot(xs, ys, color=colour, marker=".")
        for point, at in zip(points, zip(xs, ys, strict=True), strict=True):
            axes.annotate(str(point["rows"]), at, fontsize=6, xytext=(2, 2), textcoords="offset points")
        paper = _with(case, sums, paper_rows(case["shape"]))
        mark = axes.plot(paper["peak_mib"] / 1024, y(paper), color=PAPER, marker="v", linestyle="none")
        (lines["rows by the paper's formula"],) = mark
        taken = _with(case, sums, taken_rows(case["shape"], sums))
        mark = axes.plot(
            taken["peak_mib"] / 1024,
            y(taken),
            color=colour,
            marker="o",
            markerfacecolor="none",
            markersize=10,
            ls="none",
        )
        (lines[f"taken, sums in {sums}"],) = mark
    return lines
