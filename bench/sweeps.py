"""How time and peak memory grow: vocabulary, hidden size and sequence length of arXiv 2410.10989, figures 2 and 3.

Usage: python -m bench.sweeps [--output DIR] [--only rms_norm ...] [--seconds S]

Measured as bench.operators measures, in shorter repetitions. The ends of every panel come first, so that a stopped run
spans them; torch.compile, which takes seconds for each size, is measured at the ends alone.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from bench import recording, sweep_figures
from bench.peers import OPERATORS
from bench.peers.operator import COMPILE, KINDS, Shape
from bench.recording import Task
from bench.timing import CudaTimer

VOCABULARIES = (40960, 81920, 122880, 163840)
SIZES = (4096, 8192, 12288, 16384)
# What a panel does not vary: 8192 tokens, and Llama 3's widths.
TOKENS = 8192
INTERMEDIATE = 14336
HEAD_SIZE = 128
GROUP = 4  # query heads for each key head


@dataclass(frozen=True)
class Panel:
    """One operator along one axis; `fixed` tells the reader what does not change."""

    op: str
    axis: str
    fixed: str
    points: tuple[int, ...]
    shape: Callable[[int], Shape]

    def key(self) -> dict[str, str]:
        return {"op": self.op, "axis": self.axis, "fixed": self.fixed}


def _rotary(batch: int, tokens: int, hidden: int) -> Shape:
    heads = hidden // HEAD_SIZE
    return batch, tokens, heads, heads // GROUP, HEAD_SIZE


PANELS = (
    Panel("cross_entropy", "vocabulary", f"{TOKENS} tokens", VOCABULARIES, lambda n: (TOKENS, n)),
    Panel("rms_norm", "hidden size", f"{TOKENS} tokens", SIZES, lambda n: (TOKENS, n)),
    Panel("layer_norm", "hidden size", f"{TOKENS} tokens", SIZES, lambda n: (TOKENS, n)),
    Panel("rotary_embedding", "hidden size", "4 x 2048 tokens", SIZES, lambda n: _rotary(4, 2048, n)),
    Panel("swiglu", "intermediate size", f"{TOKENS} tokens", SIZES, lambda n: (TOKENS, n)),
    Panel("geglu", "intermediate size", f"{TOKENS} tokens", SIZES, lambda n: (TOKENS, n)),
    Panel("rotary_embedding", "sequence length", "32 + 8 heads of 128", SIZES, lambda n: _rotary(1, n, 4096)),
    Panel("swiglu", "sequence length", f"intermediate size {INTERMEDIATE}", SIZES, lambda n: (n, INTERMEDIATE)),
    Panel("geglu", "sequence length", f"intermediate size {INTERMEDIATE}", SIZES, lambda n: (n, INTERMEDIATE)),
)


def tasks(panels: Sequence[Panel], only: Collection[str] | None) -> Iterator[Task]:
    """The points to measure, ends of the panels first."""
    operators = {op.name: op for op in OPERATORS}
    chosen = [panel for panel in panels if not only or panel.op in only]
    ends = [(panel, x) for panel in chosen for x in {panel.points[0]: 0, panel.points[-1]: 0}]
    inner = [(panel, x) for panel in chosen for x in panel.points[1:-1]]
    for panel, x in ends + inner:
        kinds = KINDS if (panel, x) in ends else [kind for kind in KINDS if kind != COMPILE]
        yield Task(operators[panel.op], panel.shape(x), kinds, {"panel": panel.key(), "x": x})


def main(arguments: Sequence[str] | None = None) -> int:
    options = recording.options("bench.sweeps", __doc__, arguments)
    console = Console()
    setting = recording.gpu_setting(console, "bench.sweeps", CudaTimer(repetitions=10, least_ms=5.0, warm_up_s=0.1))
    if setting is None:
        return 2
    path = options.output / "sweeps.json"
    save = recording.saving(path)
    record = recording.measure(list(tasks(PANELS, options.only)), setting, save, options.seconds)
    console.print(f"{len(record['cases'])} points measured, {len(record['not_run'])} not run; as data: {path}")
    for line in sweep_figures.draw(record, options.output):
        console.print(line)
    return 0 if recording.ours_is_right(record) else 1


if __name__ == "__main__":
    sys.exit(main())
