"""Measure launch configurations of the norms on this device; with --write, enter the best into the launchers' table.

Usage: python -m bench.tune [--only rms_norm_bwd ...] [--columns 4096 ...] [--dtypes bfloat16 ...] [--write]

Every candidate is compiled first, in parallel, then timed on rows that together exceed the L2 cache. The table is
fusedops/kernels/tuned.json, by architecture; what was measured goes to tune.json.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import machine
from bench.timing import CudaTimer
from fusedops.kernels import add_rms_norm, launch, layer_norm, norm, rms_norm, tuned

TABLE = Path(tuned.__file__).with_name("tuned.json")
ELEMENTS = 2**25  # of each tensor: 64 MiB in bfloat16
COLUMNS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LEAST_ROWS = 4096
LAUNCHES = 16
TIMER = CudaTimer(repetitions=5, least_ms=0.0, warm_up_s=0.0)
# A candidate replaces what there is only where it is faster by more than timings of the same thing differ.
LEAST_GAIN = 0.01
# Registers that are spilled may cost more beside other work than alone: such a candidate has to be much faster.
SPILLING = 1.1
EPS = 1e-6

Settings = dict[str, int]  # True and False are 1 and 0 to a kernel


class Case(NamedTuple):
    kernel: str
    columns: int
    dtype: torch.dtype


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console()
    if not torch.cuda.is_available():
        console.print("bench.tune measures a GPU: it needs an NVIDIA or AMD one, with Triton, and found none.")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    dtypes = [getattr(torch, name) for name in options.dtypes]
    cases = [Case(*case) for case in itertools.product(options.only or KERNELS, options.columns, dtypes)]
    jobs = [(case, settings) for case in cases for settings in candidates(case)]
    console.print(f"compiling {len(jobs)} candidates")
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        spilled = list(pool.map(registers_spilled, jobs, chunksize=8))
    result = Table("kernel", "dtype", "columns", "ms", "before", "best settings")
    record: dict[str, Any] = {"machine": machine.describe(device), "cases": []}
    for case in cases:
        step = KERNELS[case.kernel](case, max(ELEMENTS // case.columns, LEAST_ROWS), device)
        present = tuned.find(tuned.architecture(device), case.kernel, case.dtype.itemsize, case.columns)
        before = milliseconds(case, present, step)
        mine = [
            (settings, spills)
            for (c, settings), spills in zip(jobs, spilled, strict=True)
            if c == case and spills is not None
        ]
        timings = [(milliseconds(case, settings, step), settings, spills) for settings, spills in mine]
        timings.sort(key=lambda timing: timing[0] * (SPILLING if timing[2] else 1.0))
        del step
        best, settings, _ = timings[0]
        name = str(case.dtype).removeprefix("torch.")
        fastest = [{"ms": ms, "spills": spills, **s} for ms, s, spills in timings[:8]]
        record["cases"].append({"kernel": case.kernel, "columns": case.columns, "dtype": name, "fastest": fastest})
        result.add_row(case.kernel, name, str(case.columns), f"{best:.4f}", f"{before:.4f}", str(settings))
        if options.write and best < (1 - LEAST_GAIN) * before:
            enter(TABLE, tuned.architecture(device), case, settings)
    console.print(result)
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def candidates(case: Case) -> Iterator[Settings]:
    """Tiles of 4 to 64 elements a thread; backward also how many tiles are on their way and programs to a processor."""
    tiles = {max(elements // case.columns, 1) for elements in (2048, 4096, 8192, 16384)}
    for rows, warps in itertools.product(sorted(tiles), (4, 8, 16, 32)):
        if not 4 <= rows * case.columns // (32 * warps) <= 64 or (warps == 32 and case.columns < 16384):
            continue
        sizes = {"BLOCK_M": rows, "num_warps": warps}
        if case.kernel.endswith("_fwd"):
            yield sizes
            continue
        for stages, programs in itertools.product((1, 2, 3, 4), (1, 2, 3, 4)):
            # Stages are buffers in shared memory, of which no device has more.
            staged = (stages - 1) * rows * case.columns * case.dtype.itemsize * 2
            if programs * warps <= 32 and programs * staged <= 200_000:
                for reconvert in (False, True):
                    if not reconvert or case.columns >= 8192:
                        yield sizes | {"STAGES": stages, "programs": programs, "RECONVERT": reconvert}


@contextmanager
def using(case: Case, settings: Settings) -> Iterator[None]:
    """The launcher of a case finds these settings."""

    def find(arch: str, kernel: str, *where: Any) -> Settings:
        return settings if kernel == case.kernel else {}

    def forget() -> None:
        norm._forward_sizes.cache_clear()
        norm._backward_sizes.cache_clear()

    forget()
    with mock.patch.object(tuned, "find", find):
        yield
    forget()


def registers_spilled(job: tuple[Case, Settings]) -> int | None:
    """Compile a candidate, for the width itself and for one that is no power of two; None if the device refuses it."""
    case, settings = job
    device = torch.device("cuda", torch.cuda.current_device())
    launch._compiled.clear()
    try:
        with using(case, settings):
            for columns in (case.columns, case.columns * 5 // 8):
                KERNELS[case.kernel](case._replace(columns=columns), 3, device)()
        torch.cuda.synchronize()
    except Exception:
        return None
    return max(compiled.n_spills for compiled, _ in launch._compiled.values())


def milliseconds(case: Case, settings: Settings, step: Callable[[], object]) -> float:
    """Device time of one launch with what belongs to it, in a graph of several."""
    with using(case, settings):
        return TIMER.device(lambda i: step(), LAUNCHES).median


def enter(path: Path, architecture: str, case: Case, settings: Settings) -> None:
    table = json.loads(path.read_text())
    entries = table.setdefault(architecture, {}).setdefault(case.kernel, {}).setdefault(str(case.dtype.itemsize), {})
    entries[str(case.columns)] = settings
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def _tensors(case: Case, rows: int, device: torch.device, count: int) -> list[Tensor]:
    return [torch.randn(rows, case.columns, device=device, dtype=case.dtype) for _ in range(count)]


def _weight(case: Case, device: torch.device) -> Tensor:
    return torch.randn(case.columns, device=device, dtype=case.dtype)


def _statistics(rows: int, device: torch.device) -> Tensor:
    return torch.rand(rows, device=device) + 0.5


def _rms_norm_fwd(case: Case, rows: int, device: torch.device) -> Callable[[], object]:
    (x,), w = _tensors(case, rows, device, 1), _weight(case, device)
    return lambda: rms_norm.rms_norm_fwd(x, w, EPS, 0.0, "llama")


def _rms_norm_bwd(case: Case, rows: int, device: torch.device) -> Callable[[], object]:
    (dy, x), w, rstd = _tensors(case, rows, device, 2), _weight(case, device), _statistics(rows, device)
    return lambda: rms_norm.rms_norm_bwd(dy, x, w, rstd, 0.0, "llama", [True, True])


def _add_rms_norm_fwd(case: Case, rows: int, device: torch.device) -> Callable[[], object]:
    (x, residual), w = _tensors(case, rows, device, 2), _weight(case, device)
    return lambda: add_rms_norm.add_rms_norm_fwd(x, residual, w, EPS, 0.0, "llama")


def _add_rms_norm_bwd(case: Case, rows: int, device: torch.device) -> Callable[[], object]:
    (dy, dsum, total), w = _tensors(case, rows, device, 3), _weight(case, device)
    rstd = _statistics(rows, device)
    return lambda: add_rms_norm.add_rms_norm_bwd(dy, dsum, total, w, rstd, 0.0, "llama", [True, True])


def _layer_norm_fwd(case: Case, rows: int, device: torch.device) -> Callable[[], object]:
    (x,), w, b = _tensors(case, rows, device, 1), _weight(case, device), _weight(case, device)
    return lambda: layer_norm.layer_norm_fwd(x, w, b, EPS)


def _layer_norm_bwd(case: Case, rows: int, device: torch.device) -> Callable[[], object]:
    (dy, x), w, b = _tensors(case, rows, device, 2), _weight(case, device), _weight(case, device)
    mean, rstd = _statistics(rows, device), _statistics(rows, device)
    return lambda: layer_norm.layer_norm_bwd(dy, x, w, b, mean, rstd, [True, True, True])


KERNELS: dict[str, Callable[[Case, int, torch.device], Callable[[], object]]] = {
    "rms_norm_fwd": _rms_norm_fwd,
    "rms_norm_bwd": _rms_norm_bwd,
    "add_rms_norm_fwd": _add_rms_norm_fwd,
    "add_rms_norm_bwd": _add_rms_norm_bwd,
    "layer_norm_fwd": _layer_norm_fwd,
    "layer_norm_bwd": _layer_norm_bwd,
}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.tune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(KERNELS), help="these kernels alone")
    parser.add_argument("--columns", nargs="+", type=int, default=COLUMNS, help="powers of two; default: %(default)s")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=8, help="compile in so many; default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("tune.json"), help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="enter the best into the table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
