"""Logits on demand: a tensor that is ``linear(hidden, weight, bias)``, or a function of it, and computes itself when read.

A model that computes its loss from hidden states still returns ``.logits``. They keep their meaning: shape, dtype,
device and autograd graph are there from the start, the values come with the first read and are those of the moment
when the model ran.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from csrc_meta.errors import StaleLogitsError, UnsupportedInputError, message


def logits_on_demand(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    then: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``linear(hidden, weight, bias)``, or ``then`` of it, not computed yet.

    Args:
        hidden: (..., H) floating point.
        weight: (V, H).
        bias: (V,) or None.
        dtype: of the logits; operands of another dtype are cast to it first, as autocast does.
        then: a differentiable function of the linear's result, elementwise and of the same dtype: a scale, a softcap.

    Returns:
        logits: (..., V) of that dtype, contiguous; differentiable as the linear would be.

    Raises:
        StaleLogitsError: on the first read, if hidden, weight or bias were written to since the call.
    """
    return _Deferred.apply(hidden, weight, bias, dtype, then)


class _Deferred(torch.autograd.Function):
    """The lazy tensor is a function's output, so it has a grad_fn before it has values."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, dtype, then):
        ctx.save_for_backward(hidden, weight, None if then is None else bias)
        ctx.dtype, ctx.bias_dtype, ctx.then = dtype, None if bias is None else bias.dtype, then
        return DeferredLogits(_Projection(hidden, weight, bias, dtype, then))

    @staticmethod
    def backward(ctx, dlogits):
        hidden, weight, bias = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dhidden = dweight = dbias = None
        with torch.autocast(hidden.device.type, enabled=False):
            if ctx.then is not None:
                with torch.enable_grad():
                    linear = _linear((hidden, weight, bias), ctx.dtype).detach().requires_grad_()
                    (dlogits,) = torch.autograd.grad(ctx.then(linear), linear, dlogits)
            rows = dlogits.reshape(-1, dlogits.shape[-1])
            if wants_hidden:
                dhidden = (dlogits @ weight.to(ctx.dtype)).to(hidden.dtype)
            if wants_weight:
                dweight = (rows.t() @ hidden.reshape(-1, hidden.shape[-1]).to(ctx.dtype)).to(weight.dtype)
            if wants_bias:
                dbias = rows.sum(0).to(ctx.bias_dtype)
        return dhidden, dweight, dbias, None, None


def _linear(operands: Iterable[Tensor | None], dtype: torch.dtype) -> Tensor:
    return torch.nn.functional.linear(*(None if t is None else t.to(dtype) for t in operands))


class _Projection:
    """What the logits are computed from, and the values once they are."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        then: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.operands = {"hidden": hidden.detach(), "weight": weight.detach()}
        if bias is not None:
            self.operands["bias"] = bias.detach()
        self.shape = (*hidden.shape[:-1], weight.shape[0])
        self.dtype, self.device, self.then = dtype, hidden.device, then
        self.versions = {name: _version(t) for name, t in self.operands.items()}
        # Optimizers that write to p.data leave the version as it is, so the operands' bits are summed as well: one
        # read of the weight, without a host synchronisation.
        self.fingerprints = {name: _fingerprint(t) for name, t in self.operands.items()}
        self.values: Tensor | None = None

    def read(self) -> Tensor:
        if self.values is None:
            # Whoever reads first may do so in inference mode; others may differentiate what comes of the values.
            with torch.inference_mode(False), torch.no_grad():
                self.refuse_changed_operands()
                with torch.autocast(self.device.type, enabled=False):
                    linear = _linear(self.operands.values(), self.dtype)
                    self.values = linear if self.then is None else self.then(linear)
            self.operands = {}
        return self.values

    def refuse_changed_operands(self) -> None:
        for name, tensor in self.operands.items():
            # FSDP frees the storage of a gathered weight without another sign of it.
            freed = tensor.untyped_storage().nbytes() < _needed_bytes(tensor)
            if freed or _version(tensor) != self.versions[name]:
                _raise_stale(name)
        for name, tensor in self.operands.items():
            if not torch.equal(_fingerprint(tensor), self.fingerprints[name]):
                _raise_stale(name)


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _needed_bytes(t: Tensor) -> int:
    if t.numel() == 0:
        return 0
    last = int(t.storage_offset()) + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def _fingerprint(t: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers, modulo 2^64, each row weighted by an odd number of its own."""
    bits = t.detach().reshape(-1, t.shape[-1])
    wide = 8 // bits.element_size()
    if bits.stride(1) == 1 and all(n % wide == 0 for n in (bits.shape[1], bits.stride(0), bits.storage_offset())):
        bits = bits.view(torch.int64)  # as it lies in memory: nothing to convert
    else:
        bits = bits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()])
    rows = bits.sum(1, dtype=torch.int64)
    return (rows * torch.arange(1, 2 * len(rows), 2, device=rows.device)).sum()


def _raise_stale(name: str) -> None:
    raise StaleLogitsError(
        message(
            "logits",
            name,
            "a tensor that was written to or freed after the model ran",
            "it unchanged until the logits are first read",
            "Read the logits before optimizer.step() (logits.detach().clone() keeps them), or compile with"
            " options={'disable': ['linear_cross_entropy']}.",
        )
    )


# Beside those that torch tags, operations that give a tensor another shape or storage in place.
_RESHAPING = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set_data"}


def _refuse_reshaping(name: str) -> None:
    raise UnsupportedInputError(
        message(
            "logits",
            name,
            "an operation that changes a tensor's shape in place",
            "one that returns a tensor",
            "Copy them first: logits.clone().",
        )
    )


class DeferredLogits(torch.Tensor):
    """The tensor subclass behind :func:`logits_on_demand`: any operation reads the values, ``detach`` does not."""

    _projection: _Projection
    # Dispatch below autograd sees every consumer, custom autograd.Functions included; overriding the function
    # protocol as well would hide the graph from them.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, projection: _Projection) -> "DeferredLogits":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, projection.shape, dtype=projection.dtype, device=projection.device
        )
        tensor._projection = projection
        return tensor

    def __init__(self, projection: _Projection) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            # A second tensor of the same values: what is written to one is read from the other.
            return DeferredLogits(args[0]._projection)
        if torch.Tag.inplace_view in func.tags or func._schema.name in _RESHAPING:
            _refuse_reshaping(func._schema.name)
        args_, kwargs_ = tree_map_only(DeferredLogits, lambda t: t._projection.read(), (args, kwargs or {}))
        result = func(*args_, **kwargs_)
        if func._schema.is_mutable:
            # An in-place operation wrote to the values and returns them: the caller holds the wrapper.
            return tree_map_only(torch.Tensor, lambda t: args[0] if t is args_[0] else t, result)
        return result

    def _plain(self) -> Tensor:
        return self._projection.read().detach().requires_grad_(self.requires_grad)

    def __repr__(self, *, tensor_contents=None) -> str:
        return repr(self._plain())

    def __reduce_ex__(self, protocol):
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # refuses, as for any tensor with a history
        return copy.deepcopy(self._plain(), memo)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse_reshaping("data")

    # Whoever asks for memory (foreign Triton kernels, NumPy, DLPack) gets the values' memory.
    def data_ptr(self) -> int:
        return self._projection.read().data_ptr()

    def untyped_storage(self):
        return self._projection.read().untyped_storage()

    def numpy(self, *, force: bool = False):
        return self._plain().numpy(force=force)

    def tolist(self) -> list[Any]:
        return self._plain().tolist()

    def __array__(self, *args, **kwargs):
        return self._plain().__array__(*args, **kwargs)

    def __dlpack__(self, **kwargs):
        return self._plain().__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self._projection.read().__dlpack_device__()

    @property
    def __cuda_array_interface__(self):
        return self._plain().__cuda_array_interface__
