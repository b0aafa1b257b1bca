"""Layer normalisation: y = (x - mean(x)) / sqrt(var(x) + eps) * w + b."""

from collections.abc import Iterator

import torch
from torch import Tensor

from csrc_meta import checks
from csrc_meta.registry import composite, no_flops, primitive
from csrc_meta.results import compute_dtype, new_gradient
from csrc_meta.rms_norm import check_rows
from csrc_meta.spec import Sample, Spec


def check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    check_rows(op, x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            checks.check_dtype(op, name, vector, checks.FLOATING, "Cast it to a floating-point dtype.")
            checks.check_same_device(op, name, vector, "x", x)
            checks.check_shape(op, name, vector, x.shape[-1:], "It has one element for each column of x.")


def _check_forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    check("layer_norm", x, weight, bias)


def _check_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: list[bool],
) -> None:
    op = "layer_norm_backward"
    check(op, x, weight, bias)
    checks.check_shape(op, "dy", dy, x.shape, "dy has the shape of x.")
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        checks.check_shape(op, name, statistic, x.shape[:-1], f"{name} is a result of the forward.")


def layer_norm_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean = torch.empty(x.shape[:-1], dtype=compute_dtype(x, weight), device=x.device)
    return y, mean, torch.empty_like(mean)


def layer_norm_ref(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(compute_dtype(x, weight))
    mean = wide.mean(-1)
    centred = wide - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype).contiguous(), mean.contiguous(), rstd.contiguous()


def layer_norm_backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = map(new_gradient, (x, weight, bias), (x, x, x), output_mask)
    return dx, dweight, dbias


def layer_norm_backward_ref(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = layer_norm_backward_fake(dy, x, weight, bias, mean, rstd, output_mask)
    wide, r = dy.to(rstd.dtype), rstd.unsqueeze(-1)
    normalised = (x.to(rstd.dtype) - mean.unsqueeze(-1)) * r
    if output_mask[0]:
        g = wide if weight is None else wide * weight.to(rstd.dtype)
        dx.copy_(r * (g - g.mean(-1, keepdim=True) - normalised * (g * normalised).mean(-1, keepdim=True)))
    rows = (x.shape[:-1].numel(), x.shape[-1])
    if output_mask[1] and weight is not None:
        dweight.copy_((wide * normalised).reshape(rows).sum(0))
    if output_mask[2] and bias is not None:
        dbias.copy_(wide.reshape(rows).sum(0))
    return dx, dweight, dbias


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, _dmean, _drstd):
    if dy is None:
        return (None,) * 4
    mask = list(ctx.needs_input_grad[:3])
    gradients = _backward_op(dy, *ctx.saved_tensors, mask)
    return *(g if wanted else None for g, wanted in zip(gradients, mask, strict=True)), None


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return _forward_op(x, weight, bias, eps)[0]


_forward_op = primitive(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    check=_check_forward,
    fake=layer_norm_fake,
    reference=layer_norm_ref,
    flops=no_flops,
    setup_context=_setup_context,
    backward=_backward,
)
_backward_op = primitive(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd,"
    " bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    check=_check_backward,
    fake=layer_norm_backward_fake,
    reference=layer_norm_backward_ref,
    flops=no_flops,
)
operator = composite("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", layer_norm)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def tensor(*shape: int) -> Tensor:
        # Off centre, so that a mean that is not subtracted shows.
        return torch.randn(shape, device=device, dtype=dtype) + 0.5

    def sample(label: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Sample:
        leaves = tuple(t.detach().requires_grad_() if t is not None else None for t in (x, weight, bias))
        return Sample(label, (*leaves, 1e-5))

    yield sample("weight and bias", tensor(2, 3, 64), tensor(64), tensor(64))
    yield sample("no bias", tensor(2, 3, 64), tensor(64), None)
    yield sample("no weight", tensor(5, 37), None, None)
    yield sample("bias alone", tensor(5, 37), None, tensor(37))
    yield sample("odd columns", tensor(3, 37), tensor(37), tensor(37))
    yield sample("one column", tensor(4, 1), tensor(1), tensor(1))
    yield sample("one row", tensor(130), tensor(130), tensor(130))
    yield sample("no rows", tensor(0, 16), tensor(16), tensor(16))
    yield sample("row stride", tensor(6, 80)[:, :64], tensor(64), tensor(64))
    yield sample("transposed", tensor(4, 3, 32).transpose(0, 1), tensor(32), tensor(32))
    yield sample("column stride", tensor(32, 5).t(), tensor(32), tensor(32))
    yield sample("expanded", tensor(1, 32).expand(4, 32), tensor(32), tensor(32))
    yield sample("misaligned", tensor(4 * 33 + 1)[1:].view(4, 33), tensor(34)[1:], tensor(34)[1:])
    if dtype in (torch.bfloat16, torch.float16):
        yield sample("float32 weight", tensor(4, 32), tensor(32).float(), tensor(32).float())


def _eager(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    narrow = x.dtype
    if any(t is not None and t.dtype != narrow for t in (weight, bias)):
        # torch wants one dtype; models cast up and down again where their parameters are wider.
        x, weight, bias = x.float(), None if weight is None else weight.float(), None if bias is None else bias.float()
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps).to(narrow)


def _bytes_moved(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> int:
    rows = x.numel() * x.element_size()
    vectors = sum(factor * t.numel() * t.element_size() for factor, t in ((3, weight), (2, bias)) if t is not None)
    return 5 * rows + vectors  # forward reads x and writes y; backward reads x and dy and writes dx


SPEC = Spec(
    name="layer_norm",
    samples=_samples,
    eager=_eager,
    bytes_moved=_bytes_moved,
    flops=lambda x, *args, **kwargs: 21 * x.numel(),
    source="arXiv 2410.10989, section 3.2, LayerNorm; torch.nn.LayerNorm",
)
