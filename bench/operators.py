"""Operators on a GPU beside their peers: forward plus backward in bfloat16, all in one process and run.

Usage: python -m bench.operators [--output DIR] [--only rms_norm ...]

A result is checked against a float64 truth before it is timed, and a wrong one gets no time. Device time is by replay
of a CUDA graph over input sets that together exceed the L2 cache; host time is apart. Shares are of the copy rate, or
for linear_cross_entropy of the three bare GEMMs, as measured in the same run.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import machine
from bench.peers import OPERATORS, Function, Inputs, Operator, Shape
from bench.timing import CudaTimer, WallTimer
from csrc_meta import SPECS

SEED = 0
# A result is red where its error exceeds both: a multiple of eager's own error, and what sums in bfloat16 may lose.
ERROR_FACTOR = 4.0
LEAST_BOUND = 3e-2
ERROR_ROWS = 1024
MOST_SETS = 8

Timer = CudaTimer | WallTimer


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console()
    if not torch.cuda.is_available():
        console.print("bench.operators measures a GPU: it needs an NVIDIA or AMD one, with Triton, and found none.")
        return 2
    chosen = [op for op in OPERATORS if not options.only or op.name in options.only]
    options.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda", torch.cuda.current_device())

    def save(record: dict[str, Any]) -> None:
        (options.output / "operators.json").write_text(json.dumps(record, indent=1) + "\n")

    record = measure(chosen, device, CudaTimer(), machine.l2_bytes(device), 2**30, save, console)
    console.print(table(record))
    console.print(f"As data: {options.output / 'operators.json'}")
    return 0 if all(p["failure"] is None for c in record["cases"] for p in c["peers"] if p["name"] == "fusedops") else 1


def measure(
    operators: Sequence[Operator],
    device: torch.device,
    timer: Timer,
    l2_bytes: int,
    copy_bytes: int,
    save: Callable[[dict[str, Any]], None],
    console: Console,
) -> dict[str, Any]:
    """Measure every operator at every shape; `save` sees the record after each, so that a stopped run keeps some."""
    began = time.perf_counter()
    record: dict[str, Any] = {"machine": machine.describe(device), "copy_gb_per_s": 0.0, "cases": []}
    record["copy_gb_per_s"] = _copy_rate(device, timer, copy_bytes)
    for op in operators:
        for shape in op.shapes:
            torch._dynamo.reset()
            record["cases"].append(_case(op, shape, device, timer, l2_bytes, record["copy_gb_per_s"], console))
            record["seconds"] = time.perf_counter() - began
            save(record)
    return record


def _copy_rate(device: torch.device, timer: Timer, size: int) -> float:
    """Bytes read plus written a second between two buffers, by a kernel: a copy in a graph may take another engine."""
    a = torch.randn(size // 4, device=device, generator=_generator(device))
    b = torch.empty_like(a)
    timing = timer.device(lambda i: torch.neg(a, out=b), 1)
    return 2 * size / timing.median / 1e6


def _case(
    op: Operator, shape: Shape, device: torch.device, timer: Timer, l2_bytes: int, copy_rate: float, console: Console
) -> dict[str, Any]:
    case: dict[str, Any] = {"op": op.name, "shape": list(shape), "letters": op.letters, "floor": None, "peers": []}
    try:
        case["bytes_moved"] = SPECS[op.name].bytes_moved(*op.inputs(shape, _generator(device)).args)
        truth = op.truth(op.inputs(shape, _generator(device)))
        if op.floor is not None:
            step = op.floor(op.inputs(shape, _generator(device)))
            case["floor"] = asdict(timer.device(lambda i: step(), 1))
            del step
    except Exception as error:
        case["failure"] = _told(error)
        return case
    eager_errors: dict[str, float] = {}
    for name, function in op.peers():
        timer.release()
        console.print(f"{op.name} {'x'.join(map(str, shape))}: {name}", highlight=False)
        peer: dict[str, Any] = {"name": name, "failure": None, "errors": {}}
        case["peers"].append(peer)
        try:
            _peer(peer, op, shape, function, truth, eager_errors, device, timer, l2_bytes)
        except Exception as error:
            peer["failure"] = _told(error)
        if "device" in peer:
            peer["share_of_copy"] = case["bytes_moved"] / peer["device"]["median"] / 1e6 / copy_rate
            if case["floor"]:
                peer["share_of_floor"] = case["floor"]["median"] / peer["device"]["median"]
    return case


def _peer(
    peer: dict[str, Any],
    op: Operator,
    shape: Shape,
    function: Function,
    truth: tuple[Tensor, ...],
    eager_errors: dict[str, float],
    device: torch.device,
    timer: Timer,
    l2_bytes: int,
) -> None:
    # Fresh inputs for everyone: some peers write into theirs.
    generator = _generator(device)
    sets: list[Inputs] = [op.inputs(shape, generator)]
    results = sets[0].forward_backward(function)
    peer["errors"] = {n: relative_error(r, t) for n, r, t in zip(op.results, results, truth, strict=True)}
    del results
    for name, error in peer["errors"].items():
        bound = max(ERROR_FACTOR * eager_errors.setdefault(name, error), LEAST_BOUND)
        if not error <= bound:
            peer["failure"] = f"wrong: {name} is off by {error:.1e}, allowed {bound:.1e}"
            return
    while len(sets) < min(math.ceil(4 * l2_bytes / max(sets[0].bytes(), 1)), MOST_SETS):
        sets.append(op.inputs(shape, generator))

    def step(i: int) -> object:
        return sets[i].forward_backward(function)

    peer["peak_mib"] = timer.peak_mib(step)
    peer["host_ms"] = timer.host_ms(step)
    peer["device"] = asdict(timer.device(step, len(sets)))
    peer["sets"] = len(sets)


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Norm of the difference by norm of the truth, NaN where the result has one; by rows, to spare memory."""
    if result.shape != truth.shape:
        return math.nan
    if result.dim() == 0:
        result, truth = result.reshape(1), truth.reshape(1)
    off = torch.zeros((), dtype=torch.float64, device=truth.device)
    size = torch.zeros_like(off)
    for start in range(0, len(truth), ERROR_ROWS):
        t = truth[start : start + ERROR_ROWS].double()
        off += (result[start : start + ERROR_ROWS].double() - t).square().sum()
        size += t.square().sum()
    return math.sqrt(off.item() / size.item()) if size.item() else math.sqrt(off.item())


def table(record: dict[str, Any]) -> Table:
    where = record["machine"].get("gpu", record["machine"]["device"])
    title = f"Forward plus backward, bfloat16, {where}; copy {record['copy_gb_per_s']:.0f} GB/s"
    names = ("operator", "implementation", "ms", "20-80 %", "share", "peak MiB", "host ms", "error", "note")
    result = Table(*names, title=title, title_justify="left")
    for case in record["cases"]:
        label = f"{case['op']} {'x'.join(map(str, case['shape']))}"
        if case.get("failure"):
            result.add_row(label, "", "-", "-", "-", "-", "-", "-", case["failure"])
        if case["floor"]:
            result.add_row(label, "three bare GEMMs", *_times(case["floor"]), "floor", "", "", "", "")
        for peer in case["peers"]:
            result.add_row(label, peer["name"], *_cells(peer))
        result.add_section()
    return result


def _times(timing: dict[str, Any]) -> tuple[str, str]:
    return f"{timing['median']:.3f}", f"{timing['q20']:.3f}-{timing['q80']:.3f}"


def _cells(peer: dict[str, Any]) -> list[str]:
    worst = max(peer["errors"].values(), default=math.nan)
    error = "-" if math.isnan(worst) else f"{worst:.1e}"
    if "device" not in peer:
        return ["-", "-", "-", "-", "-", error, peer["failure"] or ""]
    share = f"{peer['share_of_copy']:.0%} copy"
    if "share_of_floor" in peer:
        share = f"{peer['share_of_floor']:.0%} floor"
    method = peer["device"]["method"]
    note = peer["failure"] or ("" if method == "CUDA graph" else method)
    return [*_times(peer["device"]), share, f"{peer['peak_mib']:.0f}", f"{peer['host_ms']:.2f}", error, note]


def _generator(device: torch.device) -> torch.Generator:
    # One of our own: a failed graph capture can leave torch's default generator unusable.
    return torch.Generator(device).manual_seed(SEED)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.operators", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("operator-results"), help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=[op.name for op in OPERATORS], help="these operators alone")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
