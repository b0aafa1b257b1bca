"""Measuring case after case into one JSON file: what bench.operators and bench.sweeps share."""

import argparse
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from bench import case, machine
from bench.peers import OPERATORS
from bench.peers.operator import KINDS, OURS, Operator, Shape
from bench.timing import CudaTimer

COPY_BYTES = 2**30
T = TypeVar("T")
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Task:
    """A case to measure; `told` is what else its record says."""

    op: Operator
    shape: Shape
    kinds: Collection[str] = KINDS
    told: dict[str, Any] = field(default_factory=dict)


def measure(
    tasks: Iterable[Task], setting: case.Setting, save: Save, seconds: float | None = None, **told: Any
) -> dict[str, Any]:
    """Measure every task; `save` sees the record after each, so that a stopped run keeps what it has.

    After so many seconds no further case is begun; the record names those that were left.
    """
    began = time.perf_counter()
    record: dict[str, Any] = {"machine": machine.describe(setting.device), **told, "seconds": 0.0}
    record |= {"copy_gb_per_s": case.copy_rate(setting), "host_floor": asdict(case.host_floor(setting))}
    record |= {"cases": [], "not_run": []}
    for task, begins in in_time(tasks, seconds):
        if not begins:
            record["not_run"].append({"op": task.op.name, "shape": list(task.shape), **task.told})
            continue
        measured = case.measure(task.op, task.shape, setting, record["copy_gb_per_s"], task.kinds)
        record["cases"].append(task.told | measured)
        record["seconds"] = time.perf_counter() - began
        save(record)
    save(record)
    return record


def in_time(tasks: Iterable[T], seconds: float | None) -> Iterator[tuple[T, bool]]:
    """Each task, and whether it may be begun: not after so many seconds."""
    began = time.perf_counter()
    for task in tasks:
        yield task, seconds is None or time.perf_counter() - began < seconds


def ours_is_right(record: dict[str, Any]) -> bool:
    """Whether no result of fusedops was wrong and none of its calls failed."""
    ours = [p for c in record["cases"] for p in c["peers"] if p["kind"] == OURS]
    return all(p["failure"] is None for p in ours) and not any("failure" in c for c in record["cases"])


def saving(path: Path) -> Save:
    path.parent.mkdir(parents=True, exist_ok=True)
    return lambda record: _replace(path, json.dumps(record, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    # A run that is stopped while it writes keeps the file as it was.
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)


def gpu_setting(console: Console, program: str, timer: CudaTimer) -> case.Setting | None:
    """The current GPU, or None and a line that says what is needed."""
    if not torch.cuda.is_available():
        console.print(f"{program} measures a GPU: it needs an NVIDIA or AMD one, with Triton, and found none.")
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return case.Setting(device, timer, machine.l2_bytes(device), COPY_BYTES, console)


def options(program: str, about: str | None, arguments: Iterable[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=program, description=(about or "").partition("\n")[0])
    names = [op.name for op in OPERATORS]
    parser.add_argument("--output", type=Path, default=Path("bench-results"), help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=names, metavar="OPERATOR", help=f"of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, help="begin no further case after so many")
    return parser.parse_args(None if arguments is None else list(arguments))
