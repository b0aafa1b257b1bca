"""What swiglu and geglu share: y = act(gate) * up, with gate and up as two tensors or as the halves of one."""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_meta import checks, donation
from csrc_meta.registry import Primitive, no_flops, primitive
from csrc_meta.results import compute_dtype, new_gradient
from csrc_meta.spec import Sample

# The activations and their derivatives, by the names that primitives know them by.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward,
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}


def _check_forward(op: str, gate: Tensor, up: Tensor | None, activation: str) -> None:
    checks.check_dtype(op, "gate", gate, checks.FLOATING, "Cast it to a floating-point dtype.")
    if gate.dim() == 0:
        raise checks.UnsupportedInputError(
            checks.message(op, "gate", checks.describe(gate), "at least one dimension", "Add one: gate[None].")
        )
    if up is not None:
        checks.check_same_dtype(op, "up", up, "gate", gate)
        checks.check_same_device(op, "up", up, "gate", gate)
        checks.check_shape(op, "up", up, gate.shape, "gate and up have one shape.")
    elif gate.shape[-1] % 2:
        remedy = "Pass up too; gate alone holds both as halves."
        raise checks.UnsupportedInputError(
            checks.message(op, "gate", checks.describe(gate), "an even last dimension where up is None", remedy)
        )


def _check_backward(
    op: str, dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, output_mask: list[bool]
) -> None:
    _check_forward(f"{op}_backward", gate, up, activation)
    checks.check_shape(f"{op}_backward", "dy", dy, _output_shape(gate, up), "dy has the shape of y.")


def _check_mutating(op: str, dy: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> None:
    _check_backward(op, dy, gate, up, activation, [True, True])
    for name, t in (("gate", gate), ("up", up)):
        if t is not None and not t.is_contiguous():
            got = f"{checks.describe(t)} with strides {t.stride()}"
            raise checks.UnsupportedInputError(
                checks.message(f"{op}_backward_", name, got, "a contiguous tensor", f"Take {op}_backward instead.")
            )


def _output_shape(gate: Tensor, up: Tensor | None) -> torch.Size:
    return gate.shape if up is not None else gate.shape[:-1] + (gate.shape[-1] // 2,)


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up, as views where one tensor holds both."""
    if up is not None:
        return gate, up
    columns = gate.shape[-1] // 2
    return gate.narrow(-1, 0, columns), gate.narrow(-1, columns, columns)


def forward_fake(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is not None:
        return torch.empty_like(gate, memory_format=torch.contiguous_format)
    return gate.new_empty(_output_shape(gate, up))


def forward_ref(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    y = forward_fake(gate, up, activation)
    gate, up = halves(gate, up)
    return y.copy_(_activated(gate, activation) * up)


def _activated(gate: Tensor, activation: str) -> Tensor:
    """act(gate), rounded to its dtype before it meets up, as eager rounds it."""
    return ACTIVATIONS[activation](gate.to(compute_dtype(gate))).to(gate.dtype)


def backward_fake(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, output_mask: list[bool]
) -> tuple[Tensor, Tensor]:
    return new_gradient(gate, gate, output_mask[0]), new_gradient(up, gate, output_mask[1])


def gradient_halves(
    dgate: Tensor, dup: Tensor, packed: bool, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Where the gradients of gate and up are written in the results of :func:`backward_fake`; None where not needed."""
    if packed:
        return halves(dgate, None) if output_mask[0] else (None, None)
    return dgate if output_mask[0] else None, dup if output_mask[1] else None


def backward_ref(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, output_mask: list[bool]
) -> tuple[Tensor, Tensor]:
    dgate, dup = backward_fake(dy, gate, up, activation, output_mask)
    _write_gradients(dy, *halves(gate, up), *gradient_halves(dgate, dup, up is None, output_mask), activation)
    return dgate, dup


def backward_mutating_ref(dy: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> None:
    _write_gradients(dy, *halves(gate, up), *halves(gate, up), activation)


def _write_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor | None, dup: Tensor | None, activation: str
) -> None:
    """The activation is computed again; everything is read before anything is written."""
    wide = compute_dtype(gate)
    dy, activated = dy.to(wide), _activated(gate, activation)
    if dgate is not None:
        dgate.copy_(DERIVATIVES[activation](dy * up.to(wide), gate.to(wide)))
    if dup is not None:
        dup.copy_(dy * activated.to(wide))


def _setup_context(ctx, inputs, output) -> None:
    gate, up, ctx.activation = inputs
    ctx.inputs = 1 if up is None else 2
    donation.save(ctx, gate, up)


def _backward(backward_op: Primitive, backward_op_: Primitive, ctx, dy):
    (gate, up), dead = donation.unpack(ctx, dy, ctx.inputs)
    mask = list(ctx.needs_input_grad[:2])
    if all(dead) and all(mask[: ctx.inputs]):
        backward_op_(dy, gate, up, ctx.activation)
        return gate.detach(), None if up is None else up.detach(), None
    dgate, dup = backward_op(dy, gate, up, ctx.activation, mask)
    return dgate if mask[0] else None, dup if mask[1] else None, None


def define(op: str) -> Primitive:
    """Define the primitives of an operator: ``<op>_forward``, which is returned, ``<op>_backward``, and
    ``<op>_backward_``, which writes the gradients of gate and up over them."""
    backward_op = primitive(
        f"{op}_backward(Tensor dy, Tensor gate, Tensor? up, str activation, bool[2] output_mask) -> (Tensor, Tensor)",
        check=functools.partial(_check_backward, op),
        fake=backward_fake,
        reference=backward_ref,
        flops=no_flops,
    )
    backward_op_ = primitive(
        f"{op}_backward_(Tensor dy, Tensor(a!) gate, Tensor(b!)? up, str activation) -> ()",
        check=functools.partial(_check_mutating, op),
        fake=lambda *args: None,
        reference=backward_mutating_ref,
        flops=no_flops,
    )
    return primitive(
        f"{op}_forward(Tensor gate, Tensor? up, str activation) -> Tensor",
        check=functools.partial(_check_forward, op),
        fake=forward_fake,
        reference=forward_ref,
        flops=no_flops,
        setup_context=_setup_context,
        backward=functools.partial(_backward, backward_op, backward_op_),
    )


def samples(device: torch.device, dtype: torch.dtype, **kwargs) -> Iterator[Sample]:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def sample(label: str, gate: Tensor, up: Tensor | None = None) -> Sample:
        leaves = tuple(t.detach().requires_grad_() if t is not None else None for t in (gate, up))
        return Sample(label, leaves, kwargs)

    yield sample("separate", tensor(2, 3, 64), tensor(2, 3, 64))
    yield sample("packed", tensor(2, 3, 128))
    yield sample("odd columns", tensor(5, 37), tensor(5, 37))
    yield sample("packed odd columns", tensor(5, 74))
    yield sample("one column", tensor(7, 2))
    yield sample("one dimension", tensor(130), tensor(130))
    yield sample("no rows", tensor(0, 16), tensor(0, 16))
    yield sample("row stride", tensor(6, 80)[:, :64], tensor(6, 96)[:, 32:])
    yield sample("packed row stride", tensor(6, 80)[:, :64])
    yield sample("transposed", tensor(4, 3, 32).transpose(0, 1), tensor(3, 4, 32))
    yield sample("column stride", tensor(32, 5).t(), tensor(5, 32))
    yield sample("expanded", tensor(1, 32).expand(4, 32), tensor(4, 32))
    yield sample("misaligned", tensor(4 * 33 + 1)[1:].view(4, 33), tensor(4, 33))


def elements(gate: Tensor, up: Tensor | None) -> int:
    return gate.numel() if up is not None else gate.numel() // 2


def bytes_moved(gate: Tensor, up: Tensor | None = None, **kwargs) -> int:
    """Forward reads gate and up and writes y; backward reads dy, gate and up and writes dgate and dup."""
    return 8 * elements(gate, up) * gate.element_size()
