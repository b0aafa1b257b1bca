"""Defining operators in the ``fusedops`` namespace.

An operator users call is *composite*: plain Python that reads ``requires_grad`` and calls the primitive operators
below it. A *primitive* operator is opaque to the compiler: it has a fake kernel, a CPU reference, kernels for other
devices registered by :mod:`fusedops.kernels`, and an autograd formula (or one that raises, for backward operators).

A primitive may also be a *mutating variant*: ``<name>_`` takes the arguments of ``<name>`` but its ``output_mask``, and
writes what that returns, all of it, into those of its arguments that its schema marks ``(a!)``. Formulas call it on dead
tensors (:mod:`csrc_meta.donation`). It has no autograd formula: differentiating it raises.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from csrc_meta import flops as flop_formulas
from csrc_meta.errors import DoubleBackwardError, NoKernelError, message

NAMESPACE = "fusedops"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu")


class Primitive:
    """A primitive operator as other operators and autograd formulas call it.

    In plain eager execution, which nobody traces or watches, a call goes straight to the kernel: the dispatcher would
    enter Python two or three times for it, which takes longer than small kernels run. Everywhere else it goes through
    the dispatcher. The result is the same.
    """

    def __init__(self, overload: torch._ops.OpOverload, check: Callable[..., None]) -> None:
        self.overload, self.check = overload, check
        self.kernels: dict[str, Callable[..., Any]] = {}  # by type of device
        self.function: type[torch.autograd.Function] | None = None
        self.written = [i for i, a in enumerate(overload._schema.arguments) if a.alias_info is not None]

    def __call__(self, *args: Any) -> Any:
        tensors = [a for a in args if a is not None and isinstance(a, Tensor)]
        kernel = self.kernels.get(tensors[0].device.type)
        if kernel is None or not _is_plain_eager(tensors):
            return self.overload(*args)
        if not torch.is_grad_enabled():
            result = kernel(*args)
            if self.written:
                self.count_writes(args)
            return result
        if self.function is None:
            return self.overload(*args)
        return self.function.apply(*args)

    def count_writes(self, args: Sequence[Any]) -> None:
        """Let autograd nodes that saved what a mutating variant wrote to notice it: its kernels leave no trace."""
        torch.autograd.graph.increment_version([args[i] for i in self.written if args[i] is not None])

    def differentiate(self, setup_context: Callable[..., None], backward: Callable[..., Any]) -> None:
        """Attach the autograd formula, as torch.library.register_autograd does for calls through the dispatcher."""

        def forward(ctx: Any, *args: Any) -> Any:
            result = self.kernels[next(a for a in args if isinstance(a, Tensor)).device.type](*args)
            setup_context(ctx, args, result)
            return result

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.function = type(f"{self.overload._opname}_eager", (torch.autograd.Function,), methods)


def _is_plain_eager(tensors: Sequence[Tensor]) -> bool:
    """No subclass, fake, batched, functional or lazily negated tensor, and nobody who would see the dispatched call."""
    # Modes first: under one, what _plain_keys makes and remembers would be no ordinary tensor.
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    ):
        return False
    plain = _plain_keys(tensors[0].device.type)
    return all(torch._C._dispatch_keys(t).raw_repr() in plain for t in tensors)


@functools.cache
def _plain_keys(device: str) -> frozenset[int]:
    """Dispatch keys of ordinary tensors of a device."""
    with torch.inference_mode(False):
        plain = torch.empty(0, device=device)
    with torch.inference_mode():
        inference = torch.empty(0, device=device)
    return frozenset(torch._C._dispatch_keys(t).raw_repr() for t in (plain, inference))


class _Registry:
    """The library handle and what was defined with it; it outlives reloads, since torch refuses a second definition."""

    def __init__(self) -> None:
        self.library = torch.library.Library(NAMESPACE, "DEF")
        self.primitives: dict[str, Primitive] = {}


_KEY = "_fusedops_registry"
_registry: _Registry = torch.library.__dict__.setdefault(_KEY, None) or _Registry()
setattr(torch.library, _KEY, _registry)


def _is_defined(name: str) -> bool:
    return hasattr(torch.ops.fusedops, name)


def _overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.fusedops, name).default


def primitive(
    signature: str,
    *,
    check: Callable[..., None],
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    flops: Callable[..., int],
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Primitive:
    """Define an opaque operator.

    Args:
        signature: torch schema, ``name(args) -> returns``.
        check: raises a typed error on inputs that no kernel accepts; runs before every kernel, the fake one included.
        fake: result shapes, dtypes and strides, exactly those of the kernels.
        reference: the CPU kernel.
        flops: floating-point operations by shapes, in ``FlopCounterMode``'s convention (contractions alone count).
        setup_context, backward: the autograd formula. Without one the operator raises when differentiated.

    Returns:
        The operator as Python calls it, with positional arguments alone.
    """
    name = signature.split("(", 1)[0]
    if _is_defined(name):
        return _registry.primitives[name]
    library = _registry.library
    library.define(signature, tags=_TAGS)
    defined = _registry.primitives[name] = Primitive(_overload(name), check)
    defined.kernels["cpu"] = _checked(check, reference)
    if setup_context is not None and backward is not None:
        defined.differentiate(setup_context, backward)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _checked(check, fake), lib=library)
    library.impl(name, _checked(check, reference), "CPU")
    library.impl(name, _checked(check, _no_kernel(name)), "CompositeExplicitAutograd")
    if defined.written:
        library.impl(name, _mutating(defined), "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", backward or _raise_second_derivative(name), setup_context=setup_context, lib=library
        )
    flop_formulas.register(name, flops)
    return defined


def no_flops(*args: Any, **kwargs: Any) -> int:
    """FlopCounterMode counts contractions alone, and totals must not change when a model is rewritten."""
    return 0


def composite(
    signature: str, implementation: Callable[..., Any], *, autocast: Callable[..., Any] | None = None
) -> None:
    """Define an operator users call, as plain Python over primitive ones.

    Args:
        signature: torch schema, ``name(args) -> returns``.
        implementation: the composition. Tracing before dispatch keeps the operator as one node.
        autocast: ``(dtype, *args, **kwargs) -> (args, kwargs)``, the casts made where autocast is on; none by default.
    """
    name = signature.split("(", 1)[0]
    if _is_defined(name):
        return
    library = _registry.library
    library.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeImplicitAutograd")
    if autocast is not None:
        for device in _AUTOCAST_DEVICES:
            _register_autocast(name, device, autocast)


def register_kernel(name: str, dispatch_key: str, kernel: Callable[..., Any], library: torch.library.Library) -> None:
    """Register how a primitive operator runs on a device, behind the operator's own input check."""
    # Replacing the CPU reference (kernels under Triton's interpreter) is meant: torch warns about it otherwise.
    defined = _registry.primitives[name]
    checked = defined.kernels[dispatch_key.lower()] = _checked(defined.check, kernel)
    library.impl(name, checked, dispatch_key, allow_override=True)


def primitives() -> tuple[str, ...]:
    """Names of all opaque operators."""
    return tuple(_registry.primitives)


def _checked(check: Callable[..., None], kernel: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        check(*args)
        return kernel(*args)

    return checked


def _no_kernel(name: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        devices = sorted({str(a.device) for a in args if isinstance(a, torch.Tensor)})
        raise NoKernelError(
            message(
                name,
                "device",
                ", ".join(devices),
                "a CPU, or a GPU with Triton installed",
                "Import fusedops (csrc_meta alone has no GPU kernels), install triton, or move the inputs to the CPU.",
            )
        )

    return kernel


def second_derivative_error(name: str) -> DoubleBackwardError:
    return DoubleBackwardError(
        message(
            name.removesuffix("_").removesuffix("_backward"),
            "gradient",
            "a second derivative",
            "first derivatives only",
            "Run this part in plain PyTorch: options={'disable': [...]} leaves it unrewritten.",
        )
    )


def _raise_second_derivative(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise second_derivative_error(name)

    return backward


def _mutating(primitive: Primitive) -> Callable[..., Any]:
    """Autograd of a mutating variant: there is none."""

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            raise second_derivative_error(primitive.overload._opname)
        with torch._C._AutoDispatchBelowAutograd():
            result = primitive.overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        primitive.count_writes(args)
        return result

    return kernel


def _register_autocast(name: str, device: str, cast: Callable[..., Any]) -> None:
    key = getattr(torch._C.DispatchKey, "Autocast" + torch._C._dispatch_key_for_device(device))
    op = _overload(name)

    def kernel(_keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast(torch.get_autocast_dtype(device), *args, **kwargs)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return op(*args, **kwargs)

    _registry.library.impl(name, kernel, key.name, with_keyset=True)
