"""What launchers share: the device to launch on, its number of processors, and tensors seen as rows."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

# The interpreter runs programs one after another: a few are enough to have rows shared out unevenly.
INTERPRETER_PROCESSORS = 3


def launch(kernel: Any, programs: int, on: Tensor, *args: Any, **options: Any) -> None:
    """Start programs of a kernel on the device of a tensor, which need not be the current one."""
    if programs:
        with _current(on.device):
            kernel[(programs,)](*args, **options)


def _current(device: torch.device) -> AbstractContextManager:
    """Triton launches on the current device. Switching costs microseconds, so it is done only where it is needed."""
    if device.type == "cpu":
        return nullcontext()
    module = torch.get_device_module(device)
    return nullcontext() if module.current_device() == device.index else module.device(device)


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run at the same time if each fills a processor (SM, compute unit, Xe core)."""
    if device.type == "cpu":
        return INTERPRETER_PROCESSORS
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["multiprocessor_count"]


def as_rows(t: Tensor) -> Tensor:
    """(..., N) as (M, N) with contiguous columns: a view where strides allow it, at any row stride."""
    columns = t.shape[-1]
    rows = t.reshape(t.shape[:-1].numel(), columns)
    return rows if rows.stride(1) == 1 or columns <= 1 else rows.contiguous()


def contiguous(t: Tensor | None) -> Tensor | None:
    """An optional tensor as kernels take it: without strides, or None, for which Triton leaves the code out."""
    return None if t is None else t.contiguous()
