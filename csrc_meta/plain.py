"""Plain eager execution: nobody traces, transforms, casts or watches what is called, and tensors are ordinary ones.

There operators may skip torch's dispatcher, which enters Python two or three times for each of them. All of these leave
their traces in the dispatcher's own state, a pair of key sets for a thread and one for each tensor, which are compared
with those of a thread in which nothing ever happened.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

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
    return frozenset(_in_new_thread(_thread_keys))


@functools.cache
def _plain_tensor_keys(device: torch.device) -> frozenset[int]:
    return frozenset(_in_new_thread(lambda: torch._C._dispatch_keys(torch.empty(0, device=device)).raw_repr()))


def _in_new_thread(function: Callable[[], T]) -> list[T]:
    """Results of a function in a new thread, which shares no state with this one, without and with inference mode."""
    results = []

    def run() -> None:
        results.append(function())
        with torch.inference_mode():
            results.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results
