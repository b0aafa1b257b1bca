"""Root mean square normalisation: y = x / sqrt(mean(x^2) + eps) * (offset + w)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from csrc_meta import checks
from csrc_meta.registry import composite, no_flops, primitive
from csrc_meta.results import compute_dtype, new_gradient
from csrc_meta.spec import Sample, Spec

CASTS = ("llama", "gemma", "float32")


def output_dtype(x: Tensor, weight: Tensor | None, cast: str) -> torch.dtype:
    if cast == "float32":
        return compute_dtype(x, weight)
    if cast == "llama" and weight is not None:
        return torch.promote_types(x.dtype, weight.dtype)
    return x.dtype


def check_rows(op: str, x: Tensor) -> None:
    checks.check_dtype(op, "x", x, checks.FLOATING, "Cast it to a floating-point dtype.")
    if x.dim() == 0:
        raise checks.UnsupportedInputError(
            checks.message(
                op, "x", checks.describe(x), "at least one dimension", "Normalise over the last dimension: x[None]."
            )
        )


def check(op: str, x: Tensor, weight: Tensor | None, cast: str) -> None:
    check_rows(op, x)
    checks.check_choice(op, "cast", cast, CASTS)
    if weight is not None:
        checks.check_dtype(op, "weight", weight, checks.FLOATING, "Cast it to a floating-point dtype.")
        checks.check_same_device(op, "weight", weight, "x", x)
        checks.check_shape(op, "weight", weight, x.shape[-1:], "The weight has one element for each column of x.")


def check_backward(op: str, dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, cast: str) -> None:
    check(op, x, weight, cast)
    checks.check_shape(op, "dy", dy, x.shape, "dy has the shape of x.")
    checks.check_shape(op, "rstd", rstd, x.shape[:-1], "rstd is a result of the forward.")


def _check_forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str) -> None:
    check("rms_norm", x, weight, cast)


def _check_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, cast: str, output_mask: list[bool]
) -> None:
    check_backward("rms_norm_backward", dy, x, weight, rstd, cast)


def rms_norm_fake(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str
) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x, dtype=output_dtype(x, weight, cast), memory_format=torch.contiguous_format)
    return y, torch.empty(x.shape[:-1], dtype=compute_dtype(x, weight), device=x.device)


def rms_norm_ref(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str
) -> tuple[Tensor, Tensor]:
    wide = x.to(compute_dtype(x, weight))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    normalised = wide * rstd.unsqueeze(-1)
    if cast == "llama":
        normalised = normalised.to(x.dtype)
    y = normalised if weight is None else normalised * _scale(weight, weight_offset, cast, wide.dtype)
    return y.to(output_dtype(x, weight, cast)).contiguous(), rstd.contiguous()


def _scale(weight: Tensor, weight_offset: float, cast: str, wide: torch.dtype) -> Tensor:
    """offset + w, in the weight's own dtype where Llama's order is asked for."""
    return weight + weight_offset if cast == "llama" else weight.to(wide) + weight_offset


def rms_norm_backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, cast: str, output_mask: list[bool]
) -> tuple[Tensor, Tensor]:
    return new_gradient(x, x, output_mask[0]), new_gradient(weight, x, output_mask[1])


def gradients_ref(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, cast: str, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and weight in rstd's dtype, not rounded yet; None where not wanted."""
    dx = dweight = None
    dy, wide, r = dy.to(rstd.dtype), x.to(rstd.dtype), rstd.unsqueeze(-1)
    normalised = wide * r
    if output_mask[0]:
        g = dy if weight is None else dy * _scale(weight, weight_offset, cast, rstd.dtype).to(rstd.dtype)
        dx = r * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    if output_mask[1] and weight is not None:
        seen = normalised.to(x.dtype).to(rstd.dtype) if cast == "llama" else normalised
        dweight = (dy * seen).reshape(x.shape[:-1].numel(), x.shape[-1]).sum(0)
    return dx, dweight


def rms_norm_backward_ref(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, cast: str, output_mask: list[bool]
) -> tuple[Tensor, Tensor]:
    results = rms_norm_backward_fake(dy, x, weight, rstd, weight_offset, cast, output_mask)
    gradients = gradients_ref(dy, x, weight, rstd, weight_offset, cast, output_mask)
    for result, gradient in zip(results, gradients, strict=True):
        if gradient is not None:
            result.copy_(gradient)
    return results


def _setup_context(ctx, inputs, output) -> None:
    x, weight, _, ctx.weight_offset, ctx.cast = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, _drstd):
    if dy is None:
        return (None,) * 5
    mask = list(ctx.needs_input_grad[:2])
    dx, dweight = _backward_op(dy, *ctx.saved_tensors, ctx.weight_offset, ctx.cast, mask)
    return dx if mask[0] else None, dweight if mask[1] else None, None, None, None


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, cast: str = "llama"
) -> Tensor:
    return _forward_op(x, weight, eps, weight_offset, cast)[0]


_forward_op = primitive(
    "rms_norm_forward(Tensor x, Tensor? weight, float eps, float weight_offset, str cast) -> (Tensor, Tensor)",
    check=_check_forward,
    fake=rms_norm_fake,
    reference=rms_norm_ref,
    flops=no_flops,
    setup_context=_setup_context,
    backward=_backward,
)
_backward_op = primitive(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, str cast,"
    " bool[2] output_mask) -> (Tensor, Tensor)",
    check=_check_backward,
    fake=rms_norm_backward_fake,
    reference=rms_norm_backward_ref,
    flops=no_flops,
)
operator = composite(
    "rms_norm(Tensor x, Tensor? weight, float eps, *, float weight_offset=0.0, str cast='llama') -> Tensor",
    rms_norm,
)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def sample(label: str, x: Tensor, weight: Tensor | None, **kwargs) -> Sample:
        leaves = tuple(t.detach().requires_grad_() if t is not None else None for t in (x, weight))
        return Sample(label, (*leaves, 1e-5), kwargs)

    yield sample("llama", tensor(2, 3, 64), tensor(64))
    yield sample("gemma", tensor(2, 3, 64), tensor(64), weight_offset=1.0, cast="gemma")
    yield sample("float32 result", tensor(5, 48), tensor(48), cast="float32")
    yield sample("no weight", tensor(5, 37), None)
    yield sample("odd columns", tensor(3, 37), tensor(37))
    yield sample("one column", tensor(4, 1), tensor(1))
    yield sample("one row", tensor(130), tensor(130))
    yield sample("no rows", tensor(0, 16), tensor(16))
    yield sample("row stride", tensor(6, 80)[:, :64], tensor(64))
    yield sample("transposed", tensor(4, 3, 32).transpose(0, 1), tensor(32))
    yield sample("column stride", tensor(32, 5).t(), tensor(32))
    yield sample("expanded", tensor(1, 32).expand(4, 32), tensor(32))
    yield sample("misaligned", tensor(4 * 33 + 1)[1:].view(4, 33), tensor(34)[1:])
    if dtype in (torch.bfloat16, torch.float16):
        yield sample("float32 weight", tensor(4, 32), tensor(32).float())


def eager(x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, cast: str = "llama") -> Tensor:
    wide = x.to(compute_dtype(x, weight))
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "llama":
        y = y.to(x.dtype)
        return y if weight is None else (weight + weight_offset) * y
    y = y if weight is None else y * (weight_offset + weight.to(wide.dtype))
    return y.to(x.dtype) if cast == "gemma" else y


def _bytes_moved(x: Tensor, weight: Tensor | None, eps: float, **kwargs) -> int:
    rows = x.numel() * x.element_size()
    weights = 0 if weight is None else 3 * weight.numel() * weight.element_size()
    return 5 * rows + weights  # forward reads x and writes y; backward reads x and dy and writes dx


SPEC = Spec(
    name="rms_norm",
    samples=_samples,
    eager=eager,
    bytes_moved=_bytes_moved,
    flops=lambda x, *args, **kwargs: 4 * x.numel() + 11 * x.numel(),
    source="arXiv 2410.10989, equations 1-3; transformers LlamaRMSNorm, GemmaRMSNorm",
)
