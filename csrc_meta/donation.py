"""Donation: a gradient takes over the storage of the tensor it belongs to, where nobody can read that tensor again.

An autograd formula saves with :func:`save` and reads with :func:`unpack`, which tells it the dead tensors among what
was saved. The formula then calls the mutating variant of its backward operator (``<op>_backward_``) on them and returns
``dead.detach()`` as their gradient.

That nobody can read a tensor is seen from what refers to it. A reader needs the Python object, the TensorImpl (another
autograd node, a container in C++) or the storage (a view, ``detach()``, an ``UntypedStorage``), and each of these counts
its references. How many of them a saved tensor has that nobody else knows depends on the version of torch: it is learned
from one whose history is known, on first use. What no count shows is a read that is still running: a tensor that is read
on another CUDA stream has to be held until that stream has read it, ``record_stream`` protects freed memory alone.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# How many refer to each object by which a tensor's memory can be reached: tensor, TensorImpl, storage, StorageImpl.
References = tuple[int, int, int, int]


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """``ctx.save_for_backward(*tensors)`` for a formula that reads them with :func:`unpack`."""
    ctx.save_for_backward(*tensors)
    ctx.has_hooks = _has_hooks()


def unpack(ctx: Any, upstream: Tensor, candidates: int = 1) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """``ctx.saved_tensors``, and for each of the first ``candidates`` whether its gradient may be written over it.

    True only in an eager backward pass without create_graph and retain_graph, for a plain and contiguous intermediate
    result to which nothing refers but this node; never where hooks packed it, or in what is traced, captured, batched
    or watched by a dispatch mode.

    Args:
        ctx: context of the formula; :func:`save` was called on it.
        upstream: the gradient that the formula was given.
        candidates: how many of the saved tensors, from the first on, their gradients may replace. They are not None.
    """
    tensors = ctx.saved_tensors
    if not is_last_use(ctx, upstream):
        return tensors, (False,) * candidates
    expected = _references_of_dead()
    return tensors, tuple(
        _may_be_overwritten(tensors[i]) and _references(tensors, i) == expected for i in range(candidates)
    )


def is_last_use(ctx: Any, upstream: Tensor) -> bool:
    """Whether this is an eager backward pass after which nobody sees again what :func:`save` saved, but by its name.

    What an operator made for its formula alone may then be written over, without asking who else refers to it.
    """
    return not torch.compiler.is_compiling() and not ctx.has_hooks and _is_plain_eager(upstream)


def is_capturing(t: Tensor) -> bool:
    """A CUDA graph is being captured on the stream."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def _has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _is_plain_eager(upstream: Tensor) -> bool:
    """Nothing runs this backward pass again, records it, or turns it into another."""
    return not (
        torch.is_grad_enabled()
        or torch._C._autograd._get_current_graph_task_keep_graph()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        # torch.autograd.grad(is_grads_batched=True) runs the formula once for each gradient of the batch.
        or torch._C._functorch.is_legacy_batchedtensor(upstream)
        or type(upstream) is not Tensor
        or _has_hooks()
    )


def _may_be_overwritten(t: Tensor) -> bool:
    return (
        type(t) is Tensor
        and not torch._is_functional_tensor(t)
        and not t.is_leaf  # a leaf is the caller's
        and t.is_contiguous()  # the layout that kernels write
        and not weakref.getweakrefcount(t)
        # A captured backward pass may be replayed without the forward pass that makes the tensor anew.
        and not is_capturing(t)
    )


def _references(tensors: tuple[Tensor, ...], i: int) -> References:
    """References to one of the tensors, which no variable may hold: a debugger's copy of it would count."""
    return (
        sys.getrefcount(tensors[i]),
        tensors[i]._use_count(),  # type: ignore[attr-defined]
        sys.getrefcount(tensors[i].untyped_storage()),
        torch._C._storage_Use_Count(tensors[i].untyped_storage()._cdata),
    )


class _Identity(torch.autograd.Function):
    """Saves its input as a registered autograd formula does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        save(ctx, x)
        return x.clone()


@functools.cache
def _references_of_dead() -> References | None:
    """References to a saved tensor that nobody else can read; None where they don't tell it from one that is read."""
    holders: tuple[Callable[[Tensor], Any], ...] = (
        lambda t: t,
        lambda t: t.detach(),
        lambda t: t.view(-1),
        lambda t: t * t,
        lambda t: t.untyped_storage(),
    )
    counts_are_exact = getattr(sys, "_is_gil_enabled", lambda: True)()
    with torch.inference_mode(False), torch.enable_grad(), torch._C.DisableTorchFunction():
        dead, again = _trial(), _trial()
        if counts_are_exact and dead is not None and dead == again and all(_trial(h) != dead for h in holders):
            return dead
    return None


def _trial(holder: Callable[[Tensor], Any] = lambda t: None) -> References | None:
    """References to a saved tensor of which ``holder``'s result is held; None if someone unknown held it as well."""
    output, held = _saved(holder)
    found = _references(output.grad_fn.saved_tensors, 0)
    (tensor,) = map(weakref.ref, output.grad_fn.saved_tensors)
    (storage,) = map(weakref.ref, map(Tensor.untyped_storage, output.grad_fn.saved_tensors))
    del output, held
    return found if tensor() is None and storage() is None else None


def _saved(holder: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
    intermediate = torch.ones(1, device="cpu", requires_grad=True).clone()
    return _Identity.apply(intermediate), holder(intermediate)
