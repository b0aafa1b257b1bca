"""What launchers launch: they run on CPU tensors of real widths while Triton's launch is replaced by a recorder."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from csrc_meta import SPECS
from fusedops.kernels import tuned


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of ``kernel[grid](*args, **options)`` and the case that made it."""

    case: str
    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recorded_launches() -> Iterator[list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]]]:
    """Launches inside are recorded instead of made. Outputs keep whatever memory held."""
    calls: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: calls.append((self, args, options))
    try:
        yield calls
    finally:
        JITFunction.run = run


def all_launches(architecture: str, ops: Iterable[str] | None = None) -> list[Launch]:
    """Launches on an architecture of every operator that has cases; one that launches others' kernels has none."""
    launches = []
    for op in ops or SPECS:
        if importlib.util.find_spec(f"tests.aot.cases.{op}") is None:
            continue
        cases = importlib.import_module(f"tests.aot.cases.{op}").cases
        for label, call in cases(importlib.import_module(f"fusedops.kernels.{op}")):
            with mock.patch.object(tuned, "architecture", return_value=architecture), recorded_launches() as calls:
                call()
            launches += [Launch(f"{op} {label}", kernel, args, options) for kernel, args, options in calls]
    return launches
