"""Write docs/demo.md and docs/benchmarks.md from the JSON of recorded runs, so that no number in them is typed.

Usage: copy what runs left (demo.json, losses.png, operators.json, host.json, frontier.json, frontier.png,
accumulation.json, accumulation.png, medusa.json, medusa.png, sweeps.json, sweeps_time.png, sweeps_memory.png) into
docs/results/, then python -m bench.publish.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import accumulation, demo_tables, frontier_figure, host, medusa, operator_tables, sweep_figures

DOCS = Path(__file__).parent.parent / "docs"
NOT_RUN = "No run on a GPU has been recorded yet.\n"

DEMO = """# The demo on a GPU

`nox -s demo` on the machine below: the same Llama, from the same seed, on the same batches of text. What was replaced
in that run is listed below; rules that came after it are not in its numbers.

"""
BENCHMARKS = """# Operators beside their peers

`nox -s bench` (or `python -m bench.operators` and its neighbours, named below) on the machines below. All implementations
of a run ran in one process, on random inputs, after their results were checked against float64; a wrong result gets no
time.

All runs below were recorded before several chunks of `linear_cross_entropy` did without passes over their logits, and before
its first chunk became larger: neither is in these numbers.

- **Time** is device time of forward plus backward, by replay of a CUDA graph unless a note says otherwise: the median,
  and the 20 % and 80 % quantiles, over inputs that together exceed the L2 cache and are held from step to step.
- **Share** is the rate at which the bytes that must move were moved, as a share of the copy rate measured in the same
  run. "Two kernels that move the bytes" do that and nothing else, one for forward and one for backward: the share in
  reach at that size. `linear_cross_entropy` is beside three bare matrix products instead.
- **Peak memory** is beyond the inputs, results included, and as in a model: the activations that the operator is given
  are themselves results of an operation before it, and nobody else holds them. So who puts a gradient where a dead
  activation was is credited with it, whether it asks if anyone still reads that activation or, as a note in brackets
  says of some, overwrites it in any case.
- **Host time** is until a step is enqueued, several in a row, while the device still works on those before. That of
  `linear_cross_entropy` is the device's: it waits for its labels once a step, and in this row of steps for the one before.

"""
HOST = """
## Host time

`python -m bench.host`: forward plus backward of small tensors in eager mode, where the device waits for the host. "By hand"
is an autograd function in Python that makes the same tensors, launches the same compiled kernels and does nothing else:
no operator written in Python gets below it.

"""
FRONTIER = """
## Chunks of linear_cross_entropy

`python -m bench.frontier`: time, peak memory and the error of the weight's gradient by rows of a chunk, with sums over chunks
in float32 and in bfloat16, beside three bare matrix products. Error is that of the whole gradient against float64, of one
product's. Circles are the chunks that the operator takes by itself; so are the rows of the table. With sums in float32 the
first chunk may have twice as many. All rows in one chunk need no sum over chunks, whatever the memory, but two passes over
the logits, which several chunks with sums in float32 do without. Without gradients ("eval") no logits are stored, and the
time is beside that of one product.

"""
ACCUMULATION = """
`python -m bench.accumulation`: the same error in every step of a training, by number of chunks, from the hidden states and
the weight of that step. One chunk has no sum: it is the one product. In float32 the first two may be added up as one. The
model learns a random Markov chain with the chunks that the operator takes by itself.

"""
MEDUSA = """
## Medusa

`python -m bench.medusa`: the [example](../examples/medusa/README.md), several heads on one hidden state. Stage 1 trains the
heads alone, stage 2 the model too. Peak memory is beyond the weights, and the gradients of the heads are in it. torch.compile
and fusedops' compiled backbone were measured with the largest batch alone.

"""
SWEEPS = """Device time and peak memory of forward plus backward along vocabulary, hidden size and sequence length, as in
figures 2 and 3 of arXiv 2410.10989; measured as above, in shorter repetitions, `torch.compile` at the ends alone.
"""
FIGURES = """![Device time](results/sweeps_time.png)

![Peak memory](results/sweeps_memory.png)
"""


def main() -> int:
    for page, text in pages(DOCS / "results").items():
        (DOCS / page).write_text(text)
        print(f"docs/{page}")
    return 0


def pages(results: Path) -> dict[str, str]:
    """The text of each page."""
    return {
        "demo.md": DEMO + _from(results / "demo.json", demo_page),
        "benchmarks.md": BENCHMARKS
        + _from(results / "operators.json", operators_part)
        + HOST
        + _from(results / "host.json", host_part)
        + FRONTIER
        + _from(results / "frontier.json", frontier_part)
        + _from(results / "accumulation.json", accumulation_part, "")
        + MEDUSA
        + _from(results / "medusa.json", medusa_part)
        + "\n## Sweeps\n\n"
        + SWEEPS
        + "\n"
        + _from(results / "sweeps.json", sweeps_part),
    }


def _from(path: Path, page: Callable[[dict[str, Any]], str], otherwise: str = NOT_RUN) -> str:
    return page(json.loads(path.read_text())) if path.exists() else otherwise


def demo_page(record: dict[str, Any]) -> str:
    settings = record["settings"]
    model = (
        f"A Llama of {settings['parameters'] / 1e6:.1f}M parameters ({settings['layers']} layers, hidden size "
        f"{settings['hidden']}, vocabulary {settings['vocabulary']}), {settings['dtype']}, AdamW, {settings['steps']} "
        f"steps of {settings['batch']} x {settings['sequence']} tokens. The text is {settings['text']}; a token is a "
        "byte, so that 256 rows of the vocabulary occur and the rest gives the loss its real cost."
    )
    parts = [model, machine(record)]
    tables = (demo_tables.cost, demo_tables.losses, demo_tables.sites, demo_tables.declined)
    parts += [markdown(table) for table in (make(record) for make in tables) if table.row_count]
    parts += demo_tables.summary(record) + demo_tables.failures(record)
    parts.append("![Loss curves](results/losses.png)")
    return "\n\n".join(parts) + "\n"


def operators_part(record: dict[str, Any]) -> str:
    tables = [*operator_tables.summaries(record), operator_tables.measurements(record)]
    return "\n\n".join([machine(record), *map(markdown, tables)]) + "\n"


def host_part(record: dict[str, Any]) -> str:
    return "\n\n".join([machine(record), markdown(host.table(record), "###")]) + "\n"


def frontier_part(record: dict[str, Any]) -> str:
    figure = f"![Time, memory and error by rows of a chunk](results/{frontier_figure.FIGURE})"
    return "\n\n".join([machine(record), figure, markdown(frontier_figure.table(record), "###")]) + "\n"


def accumulation_part(record: dict[str, Any]) -> str:
    settings, losses = record["settings"], [step["loss"] for step in record["steps"]]
    model = (
        f"A Llama of {settings['layers']} layers, hidden size {settings['hidden']}, vocabulary {settings['vocabulary']}, "
        f"{settings['dtype']}, AdamW, {len(losses)} steps of {settings['batch']} x {settings['sequence']} tokens; the "
        f"loss goes from {losses[0]:.2f} to {losses[-1]:.2f}."
    )
    figure = f"![Error in every step by number of chunks](results/{accumulation.FIGURE})"
    parts = [model, machine(record), figure, markdown(accumulation.table(record), "###")]
    return ACCUMULATION + "\n\n".join(parts) + "\n"


def medusa_part(record: dict[str, Any]) -> str:
    figure = f"![Time and peak memory by batch](results/{medusa.FIGURE})"
    return "\n\n".join([machine(record), figure, markdown(medusa.table(record), "###")]) + "\n"


def sweeps_part(record: dict[str, Any]) -> str:
    return "\n\n".join([machine(record), FIGURES.strip(), markdown(sweep_figures.table(record), "###")]) + "\n"


def machine(record: dict[str, Any]) -> str:
    return "Machine: " + "; ".join(f"{name} {value}" for name, value in record["machine"].items()) + "."


def markdown(table: Table, heading: str = "##") -> str:
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    lines = [[str(c.header) for c in table.columns]]
    lines.append(["---:" if c.justify == "right" else "---" for c in table.columns])
    lines += [list(row) for row in zip(*columns, strict=True)]
    escaped = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"{heading} {table.title}\n\n" + "\n".join(escaped)


if __name__ == "__main__":
    sys.exit(main())
