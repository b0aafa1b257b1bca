"""Write docs/demo.md and docs/benchmarks.md from the JSON of recorded runs, so that no number in them is typed.

Usage: copy a run's demo.json, losses.png or operators.json into docs/results/, then python -m bench.publish
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import demo_tables, operators

DOCS = Path(__file__).parent.parent / "docs"
NOT_RUN = "No run on a GPU has been recorded yet.\n"

DEMO = """# The demo on a GPU

`nox -s demo` on the machine below: the same Llama, from the same seed, on the same batches of text.

"""
BENCHMARKS = """# Operators beside their peers

`python -m bench.operators` on the machine below. Every implementation ran in the same process, on random inputs, after
its results were checked against float64. Time is device time of forward plus backward, by replay of a CUDA graph unless
a note says otherwise; "copy" is the share of the copy rate at which the bytes that must move were moved, "floor" the
share of three bare matrix products. Peak memory is beyond the inputs. Host time is until the step is enqueued.

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
        "benchmarks.md": BENCHMARKS + _from(results / "operators.json", benchmarks_page),
    }


def _from(path: Path, page: Callable[[dict[str, Any]], str]) -> str:
    return page(json.loads(path.read_text())) if path.exists() else NOT_RUN


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


def benchmarks_page(record: dict[str, Any]) -> str:
    return "\n\n".join([machine(record), markdown(operators.table(record))]) + "\n"


def machine(record: dict[str, Any]) -> str:
    return "Machine: " + "; ".join(f"{name} {value}" for name, value in record["machine"].items()) + "."


def markdown(table: Table) -> str:
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    lines = [[str(c.header) for c in table.columns]]
    lines.append(["---:" if c.justify == "right" else "---" for c in table.columns])
    lines += [list(row) for row in zip(*columns, strict=True)]
    escaped = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"## {table.title}\n\n" + "\n".join(escaped)


if __name__ == "__main__":
    sys.exit(main())
