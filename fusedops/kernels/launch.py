"""What launchers share: launching on the tensor's device, its number of processors, tensors seen as rows."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# The interpreter runs programs one after another: a few are enough to have rows shared out unevenly.
INTERPRETER_PROCESSORS = 3

DEVICE = 1  # its index, among what a compiled kernel is kept under

# What Triton compiled for a kernel, its constants and the kind of its arguments, and the constants in its order.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, programs: int, on: Tensor, *args: Any, **options: Any) -> None:
    """Start programs of a kernel on the device of a tensor, which need not be the current one.

    Triton binds, specialises and looks up all arguments at each launch, which costs more time than small kernels run.
    Its compiled kernel is therefore kept, under all that its specialisation depends on, and launched directly.
    """
    if not programs:
        return
    device = on.device
    if device.type == "cpu":  # the interpreter, or a recorder in place of the launch
        kernel[(programs,)](*args, **options)
        return
    # All that Triton may compile into a kernel of an argument that is no constant. A loop, and no helpers: launching
    # takes the host longer than small kernels run. The kernel gets addresses, which Triton would ask the tensors for.
    kinds = [kernel.fn, device.index, *options.values()]
    values: list[Any] = []
    for a in args:
        if type(a) is int:
            kinds.append(a == 1 or (a & 15 == 0, a >> 31))
        elif a is None:
            kinds.append(None)
        elif type(a) is TensorDescriptor:
            kinds.append((a.base.dtype, *a.block_shape))
        else:
            dtype, a = a.dtype, a.data_ptr()
            kinds.append((dtype, a & 15))
        values.append(a)
    key = tuple(kinds)
    module = torch.cuda if device.type == "cuda" else torch.get_device_module(device)
    # Triton launches on the current device. Switching costs microseconds, so it is done only where it is needed.
    if module.current_device() != device.index:
        with module.device(device):
            _launch(key, kernel, programs, args, values, options)
    else:
        _launch(key, kernel, programs, args, values, options)


def _launch(
    key: tuple[Any, ...], kernel: Any, programs: int, args: Sequence[Any], values: list[Any], options: dict[str, Any]
) -> None:
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[(programs,)](*args, **options)
        _compiled[key] = compiled, tuple(options[name] for name in kernel.arg_names[len(args) :])
    else:
        compiled, constants = found
        # Triton would ask for the current device once more to find the stream.
        stream = triton.runtime.driver.active.get_current_stream(key[DEVICE])
        compiled[programs, 1, 1](*values, *constants, stream=stream)


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run at the same time if each fills a processor (SM, compute unit, Xe core)."""
    if device.type == "cpu":
        return INTERPRETER_PROCESSORS
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["multiprocessor_count"]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is no smaller than n."""
    return 1 << max(n - 1, 0).bit_length()


def as_rows(t: Tensor | None) -> tuple[Tensor | None, int]:
    """(..., N) as (M, N) with contiguous columns: where its rows begin, by a stride, without a copy if strides allow it.

    Contiguous tensors are not made views of, which would take the host as long as a launch. None stays None.
    """
    if t is None:
        return None, 0
    if t.is_contiguous():
        return t, t.shape[-1]
    columns = t.shape[-1]
    rows = t if t.dim() == 2 else t.reshape(t.shape[:-1].numel(), columns)
    if rows.stride(1) != 1 and columns > 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


def contiguous(t: Tensor | None) -> Tensor | None:
    """An optional tensor as kernels take it: without strides, or None, for which Triton leaves the code out."""
    return None if t is None else t.contiguous()
