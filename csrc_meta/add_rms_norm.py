"""A residual connection and the RMSNorm behind it: s = x + r, y = s / sqrt(mean(s^2) + eps) * (offset + w)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from csrc_meta import checks, rms_norm
from csrc_meta.registry import composite, no_flops, primitive
from csrc_meta.spec import Sample, Spec


def check(op: str, x: Tensor, residual: Tensor, weight: Tensor | None, cast: str) -> None:
    rms_norm.check(op, x, weight, cast)
    checks.check_same_dtype(op, "residual", residual, "x", x)
    checks.check_same_device(op, "residual", residual, "x", x)
    checks.check_shape(op, "residual", residual, x.shape, "It has the shape of x: expand it, if it is broadcast.")


def _check_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str
) -> None:
    check("add_rms_norm", x, residual, weight, cast)


def _check_backward(
    dy: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    cast: str,
    output_mask: list[bool],
) -> None:
    op = "add_rms_norm_backward"
    rms_norm.check_backward(op, dy, total, weight, rstd, cast)
    if dsum is not None:
        checks.check_shape(op, "dsum", dsum, total.shape, "dsum has the shape of the sum.")


def add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor]:
    y, rstd = rms_norm.rms_norm_fake(x, weight, eps, weight_offset, cast)
    return y, torch.empty_like(x, memory_format=torch.contiguous_format), rstd


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor]:
    total = (x + residual).contiguous()
    y, rstd = rms_norm.rms_norm_ref(total, weight, eps, weight_offset, cast)
    return y, total, rstd


def add_rms_norm_backward_fake(
    dy: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    cast: str,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    return rms_norm.rms_norm_backward_fake(dy, total, weight, rstd, weight_offset, cast, output_mask)


def add_rms_norm_backward_ref(
    dy: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    cast: str,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    results = add_rms_norm_backward_fake(dy, dsum, total, weight, rstd, weight_offset, cast, output_mask)
    dx, dweight = rms_norm.gradients_ref(dy, total, weight, rstd, weight_offset, cast, output_mask)
    if dx is not None:
        results[0].copy_(dx if dsum is None else dx + dsum.to(rstd.dtype))  # both parts are rounded once, together
    if dweight is not None:
        results[1].copy_(dweight)
    return results


def _setup_context(ctx, inputs, output) -> None:
    _, _, weight, _, ctx.weight_offset, ctx.cast = inputs
    _, total, rstd = output
    ctx.save_for_backward(total, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, dsum, _drstd):
    dx, dweight = dsum, None
    mask = [ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    if dy is not None:
        dx, dweight = _backward_op(dy, dsum, *ctx.saved_tensors, ctx.weight_offset, ctx.cast, mask)
    x_and_residual = (dx if wanted else None for wanted in ctx.needs_input_grad[:2])
    return *x_and_residual, dweight if mask[1] else None, None, None, None


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, cast: str = "llama"
) -> tuple[Tensor, Tensor]:
    y, total, _ = _forward_op(x, residual, weight, eps, weight_offset, cast)
    return y, total


_forward_op = primitive(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset, str cast)"
    " -> (Tensor, Tensor, Tensor)",
    check=_check_forward,
    fake=add_rms_norm_fake,
    reference=add_rms_norm_ref,
    flops=no_flops,
    setup_context=_setup_context,
    backward=_backward,
)
_backward_op = primitive(
    "add_rms_norm_backward(Tensor dy, Tensor? dsum, Tensor sum, Tensor? weight, Tensor rstd, float weight_offset,"
    " str cast, bool[2] output_mask) -> (Tensor, Tensor)",
    check=_check_backward,
    fake=add_rms_norm_backward_fake,
    reference=add_rms_norm_backward_ref,
    flops=no_flops,
)
operator = composite(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, *, float weight_offset=0.0,"
    " str cast='llama') -> (Tensor, Tensor)",
    add_rms_norm,
)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    """Those of rms_norm, each with a residual of its own layout or of another."""
    for sample in rms_norm.SPEC.samples(device, dtype):
        x, *rest = sample.args
        residual = torch.randn_like(x).requires_grad_()
        yield Sample(sample.label, (x, residual, *rest), sample.kwargs)
    x, residual = torch.randn(4, 3, 32, device=device, dtype=dtype).transpose(0, 1), torch.randn(3, 4, 32).to(x)
    weight = torch.randn(32, device=device, dtype=dtype).requires_grad_()
    yield Sample("two layouts", (x.requires_grad_(), residual.requires_grad_(), weight, 1e-5))


def _eager(x: Tensor, residual: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
    total = residual + x
    return rms_norm.eager(total, *args, **kwargs), total


def _bytes_moved(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **kwargs) -> int:
    rows = x.numel() * x.element_size()
    weights = 0 if weight is None else 3 * weight.numel() * weight.element_size()
    return 8 * rows + weights  # forward reads x, r and writes y, s; backward reads dy, ds, s and writes one dx


SPEC = Spec(
    name="add_rms_norm",
    samples=_samples,
    eager=_eager,
    bytes_moved=_bytes_moved,
    flops=lambda x, *args, **kwargs: 17 * x.numel(),
    source="arXiv 2410.10989, equations 1-3; residual connections of transformers LlamaDecoderLayer",
)
