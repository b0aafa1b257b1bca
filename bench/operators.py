"""Operators on a GPU beside their peers: forward plus backward in bfloat16, all in one process and run.

Usage: python -m bench.operators [--output DIR] [--only rms_norm ...] [--seconds S]

A result is checked against a float64 truth before it is timed, and a wrong one gets no time. Device time is by replay
of a CUDA graph over input sets that together exceed the L2 cache; host time is apart, and so is peak memory. Shares
are of the copy rate, or for linear_cross_entropy of the three bare GEMMs, as measured in the same run.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from bench import operator_tables, recording
from bench.peers import OPERATORS
from bench.recording import Task
from bench.timing import CudaTimer


def main(arguments: Sequence[str] | None = None) -> int:
    options = recording.options("bench.operators", __doc__, arguments)
    console = Console()
    setting = recording.gpu_setting(console, "bench.operators", CudaTimer())
    if setting is None:
        return 2
    tasks = [Task(op, shape) for op in OPERATORS if not options.only or op.name in options.only for shape in op.shapes]
    path = options.output / "operators.json"
    record = recording.measure(tasks, setting, recording.saving(path), options.seconds)
    console.print(operator_tables.measurements(record))
    for table in operator_tables.summaries(record):
        console.print(table)
    console.print(f"As data: {path}")
    return 0 if recording.ours_is_right(record) else 1


if __name__ == "__main__":
    sys.exit(main())
