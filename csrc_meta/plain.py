"""Plain eager execution: nobody traces, transforms, casts or watches what is called, and tensors are ordinary ones.

There operators may skip torch's dispatcher, which enters Python two or three times for each of them. All of these leave
their traces in the dispatcher's own state, a pair of key sets for a thread and one for each tensor, which are compared
with those of a thread in which nothing ever happened.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def thread_is_plain() -> bool:
    """No dispatch mode, functorch transform, tracer or autocast is on in this thread."""
    return _thread_keys() in _plain_thread_keys()


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """No tensor is fake, batched, functional, lazily negated or of a subclass that sees what is called."""
    plain = _plain_tensor_keys(tensors[0].device)
    keys = [torch._C._dispatch_keys(t).raw_repr() for t in tensors]
    return plain.issuperset(keys)


def _thread_keys() -> tuple[int, int]:
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return included.raw_repr(), excluded.raw_repr()


@functools.cache
def _plain_thread_keys() -> frozenset[tuple[int, int]]:
    def observe(seen: list[tuple[int, int]]) -> None:
        seen.append(_thread_keys())
        # Some versions of torch exclude a key more while a backward pass runs.
        y = _Observer.apply(torch.zeros((), device="cpu", requires_grad=True), seen)
        torch.autograd.backward(y)
        with torch.inference_mode():
            seen.append(_thread_keys())

    return _in_new_thread(observe)


@functools.cache
def _plain_tensor_keys(device: torch.device) -> frozenset[int]:
    def observe(seen: list[int]) -> None:
        seen.append(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
        with torch.inference_mode():
            seen.append(torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr())

    return _in_new_thread(observe)


class _Observer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[tuple[int, int]]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.seen.append(_thread_keys())
        return dy, None


def _in_new_thread(observe: Callable[[list[T]], None]) -> frozenset[T]:
    """What a function appends to a list in a thread that shares no state with this one."""
    seen: list[T] = []
    thread = threading.Thread(target=observe, args=(seen,))
    thread.start()
    thread.join()
    return frozenset(seen)
