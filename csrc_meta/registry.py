"""Defining operators in the ``fusedops`` namespace.

An operator users call is *composite*: plain Python that reads ``requires_grad`` and calls the primitive operators
below it. A *primitive* operator is opaque to the compiler: it has a fake kernel, a CPU reference, kernels for other
devices registered by :mod:`fusedops.kernels`, and an autograd formula (or one that raises, for backward operators).

A primitive may also be a *mutating variant*: ``<name>_`` takes the arguments of ``<name>`` but its ``output_mask`` or
``dtype``, and writes what that returns, all of it, into those of its arguments that its schema marks ``(a!)``. Formulas
call it on dead tensors (:mod:`csrc_meta.donation`). It has no autograd formula: differentiating it raises.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from csrc_meta import flops as flop_formulas
from csrc_meta import plain
from csrc_meta.errors import DoubleBackwardError, NoKernelError, message

NAMESPACE = "fusedops"
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu")


class Primitive:
    """A primitive operator as other operators and autograd formulas call it, with positional arguments alone.

    In plain eager execution a call goes straight to the kernel. Everywhere else, and with arguments of other types than
    the schema's, it goes through the dispatcher. The result is the same.
    """

    def __init__(
        self,
        overload: torch._ops.OpOverload,
        check: Callable[..., None],
        formula: tuple[Callable[..., Any], ...] | None,
    ) -> None:
        self.overload, self.check, self.formula = overload, check, formula
        arguments = overload._schema.arguments
        self.types = [_types(a.type) for a in arguments]
        self.written = [i for i, a in enumerate(arguments) if a.alias_info is not None]
        self.kernels: dict[str, Callable[..., Any]] = {}  # by type of device
        self.differentiable: dict[str, Callable[..., Any]] = {}

    def add_kernel(self, device: str, kernel: Callable[..., Any]) -> None:
        self.kernels[device] = kernel
        if self.formula is not None:
            self.differentiable[device] = _differentiable(self.overload._opname, kernel, *self.formula)

    def __call__(self, *args: Any) -> Any:
        tensors = []
        for argument, types in zip(args, self.types, strict=True):
            kind = type(argument)
            if kind not in types:
                return self.overload(*args)
            if kind in _TENSORS:
                tensors.append(argument)
            elif kind is list:
                tensors += [t for t in argument if isinstance(t, Tensor)]
        kernel = self.kernels.get(tensors[0].device.type)
        if kernel is None or not (plain.thread_is_plain() and plain.are_plain(tensors)):
            return self.overload(*args)
        if self.formula is not None:
            # Formulas call the others, with what the forward pass has checked and gradients that autograd has.
            self.check(*args)
        if torch.is_grad_enabled():
            differentiable = self.differentiable.get(tensors[0].device.type, self.overload)
            return differentiable(*args)
        result = kernel(*args)
        if self.written:
            self.count_writes(args)
        return result

    def count_writes(self, args: Sequence[Any]) -> None:
        """Let autograd nodes that saved what a mutating variant wrote to notice it: its kernels leave no trace."""
        written = [t for i in self.written for t in (args[i] if type(args[i]) is list else (args[i],))]
        torch.autograd.graph.increment_version([t for t in written if t is not None])


_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_TYPES = {
    "Tensor": _TENSORS,
    "float": frozenset((float, int)),
    "int": frozenset((int, torch.memory_format)),  # a schema's enumerations are ints
    "bool": frozenset((bool,)),
    "str": frozenset((str,)),
}


def _types(declared: Any) -> frozenset[type]:
    """The types of Python that an argument has as a rule; lists may hold anything."""
    if isinstance(declared, torch.OptionalType):
        return _types(declared.getElementType()) | {type(None)}
    return _TYPES.get(str(declared), frozenset((list,)))


def _differentiable(
    name: str, kernel: Callable[..., Any], setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The kernel with its autograd formula, as torch.library.register_autograd makes it for calls that are dispatched."""

    def forward(ctx: Any, *args: Any) -> Any:
        result = kernel(*args)
        setup_context(ctx, args, result)
        return result

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(f"{name}_eager", (torch.autograd.Function,), methods)
    # Function's own apply takes care of functorch's transforms first, of which there are none in plain execution.
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


class Composite:
    """An operator users call, as functions of this package call it: without the dispatcher in plain eager execution."""

    def __init__(self, op: torch._ops.OpOverloadPacket, implementation: Callable[..., Any]) -> None:
        self.op, self.implementation = op, implementation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or torch.autograd.profiler._is_profiler_enabled
            or has_torch_function((*args, *kwargs.values()))
            or not plain.thread_is_plain()
        ):
            return self.op(*args, **kwargs)
        return self.implementation(*args, **kwargs)


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
    formula = None if setup_context is None or backward is None else (setup_context, backward)
    defined = _registry.primitives[name] = Primitive(_overload(name), check, formula)
    defined.add_kernel("cpu", reference)
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
) -> Composite:
    """Define an operator users call, as plain Python over primitive ones.

    Args:
        signature: torch schema, ``name(args) -> returns``.
        implementation: the composition. Tracing before dispatch keeps the operator as one node.
        autocast: ``(dtype, *args, **kwargs) -> (args, kwargs)``, the casts made where autocast is on; none by default.

    Returns:
        The operator as the functions of this package call it.
    """
    name = signature.split("(", 1)[0]
    if _is_defined(name):
        return Composite(getattr(torch.ops.fusedops, name), implementation)
    library = _registry.library
    library.define(signature, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CompositeImplicitAutograd")
    if autocast is not None:
        for device in _AUTOCAST_DEVICES:
            _register_autocast(name, device, autocast)
    return Composite(getattr(torch.ops.fusedops, name), implementation)


def register_kernel(name: str, dispatch_key: str, kernel: Callable[..., Any], library: torch.library.Library) -> None:
    """Register how a primitive operator runs on a device, behind the operator's own input check."""
    # Replacing the CPU reference (kernels under Triton's interpreter) is meant: torch warns about it otherwise.
    defined = _registry.primitives[name]
    defined.add_kernel(dispatch_key.lower(), kernel)
    library.impl(name, _checked(defined.check, kernel), dispatch_key, allow_override=True)


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
