"""Cross entropy of a linear projection, without its logits: cross_entropy(hidden @ weight.T + bias, labels).

For ``mean`` and ``sum`` the chunks of :mod:`csrc_meta.chunks` make the gradients in the forward pass, as if the upstream
gradient were one, which it is as a rule: three GEMMs in all, as eager, and nothing is left for the backward pass but to
see that it was right. For ``none`` every row has an upstream gradient of its own, and the backward pass computes the
logits again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from csrc_meta import checks, chunks, donation
from csrc_meta import cross_entropy as ce
from csrc_meta.registry import composite, no_flops, primitive, second_derivative_error
from csrc_meta.results import compute_dtype
from csrc_meta.spec import Sample, Spec


def check(
    op: str,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    accum_dtype: torch.dtype | None,
    chunk_bytes: int | None,
    options: ce.Options,
) -> None:
    checks.check_dtype(op, "hidden", hidden, checks.FLOATING, "Cast it to a floating-point dtype.")
    checks.check_same_dtype(op, "weight", weight, "hidden", hidden)
    checks.check_same_device(op, "weight", weight, "hidden", hidden)
    ce.check_options(op, reduction, options)
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise checks.UnsupportedInputError(
            checks.message(
                op,
                "weight",
                checks.describe(weight),
                f"shape (V, H) with the last dimension of hidden, {checks.describe(hidden)}",
                "Pass the projection as torch.nn.Linear stores it.",
            )
        )
    ce.check_labels(op, labels, "hidden", hidden, hidden.shape[:-1])
    if bias is not None:
        checks.check_same_dtype(op, "bias", bias, "hidden", hidden)
        checks.check_same_device(op, "bias", bias, "hidden", hidden)
        checks.check_shape(op, "bias", bias, weight.shape[:1], "One element for each row of weight.")
    if class_weight is not None:
        ce.check_class_weights(op, "class_weight", class_weight, "hidden", hidden, weight.shape[0])
    # In float16 what is summed has no loss scale yet, and would underflow.
    allowed = (None, compute_dtype(hidden)) + (torch.bfloat16,) * (hidden.dtype == torch.bfloat16)
    checks.check_choice(op, "accum_dtype", accum_dtype, allowed)
    if chunk_bytes is not None and chunk_bytes <= 0:
        wants = "a positive number of bytes, or None"
        raise checks.UnsupportedInputError(
            checks.message(op, "chunk_bytes", chunk_bytes, wants, "Leave it out for as many as weight has.")
        )


def _check_divisor(op: str, divisor: Tensor | None, hidden: Tensor, reduction: str) -> None:
    if divisor is None:
        return
    checks.check_same_device(op, "divisor", divisor, "hidden", hidden)
    checks.check_shape(op, "divisor", divisor, (), "All rows are divided by one number.")
    if reduction != "sum" or divisor.dtype.is_complex:
        got = f"{checks.describe(divisor)}, reduction={reduction!r}"
        wants = "a real number, for reduction='sum'"
        raise checks.UnsupportedInputError(checks.message(op, "divisor", got, wants, "Divide the loss instead."))


def _check_forward(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    output_mask: list[bool],
    wants_metrics: bool,
    reduction: str,
    accum_dtype: torch.dtype | None,
    chunk_bytes: int | None,
    *options: Any,
) -> None:
    given = (reduction, accum_dtype, chunk_bytes, ce.Options(*options))
    check("linear_cross_entropy", hidden, weight, labels, bias, class_weight, *given)
    _check_divisor("linear_cross_entropy", divisor, hidden, reduction)


def _check_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    stats: Tensor,
    output_mask: list[bool],
    accum_dtype: torch.dtype | None,
    chunk_bytes: int | None,
    *options: Any,
) -> None:
    op = "linear_cross_entropy_backward"
    check(op, hidden, weight, labels, bias, class_weight, "none", accum_dtype, chunk_bytes, ce.Options(*options))
    checks.check_shape(op, "dloss", dloss, labels.shape, "dloss has the shape of the losses.")


def _check_scale(factor: Tensor, gradients: list[Tensor], dtype: torch.dtype | None = None) -> None:
    checks.check_shape("linear_cross_entropy_scale", "factor", factor, (), "mean and sum have one upstream gradient.")


def linear_cross_entropy_ref(*args):
    return chunks.forward(chunks.REFERENCE, *args)


def linear_cross_entropy_backward_ref(*args):
    return chunks.backward(chunks.REFERENCE, *args)


def linear_cross_entropy_scale(factor: Tensor, gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Gradients times a factor, rounded once. Serves every device: torch alone is at its limit."""
    return [torch.mul(g, factor.reshape(1), out=torch.empty_like(g, dtype=dtype)) for g in gradients]


def linear_cross_entropy_scale_ref_(factor: Tensor, gradients: list[Tensor]) -> None:
    for g in gradients:
        g.mul_(factor)


def linear_cross_entropy_fake(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    output_mask: list[bool],
    wants_metrics: bool,
    reduction: str,
    accum_dtype: torch.dtype | None,
    chunk_bytes: int | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = compute_dtype(hidden)
    kept = hidden.dtype if chunks.divides_early(hidden.dtype) else wide
    wanted = output_mask if reduction != "none" else [False] * 3
    return (
        hidden.new_empty(labels.shape if reduction == "none" else (), dtype=wide),
        hidden.new_empty((2, labels.numel()) if reduction == "none" else (0,), dtype=wide),
        hidden.new_empty((4, labels.numel()) if wants_metrics else (0,), dtype=wide),
        hidden.new_empty((), dtype=wide),
        hidden.new_empty(hidden.shape if wanted[0] else (0,)),
        hidden.new_empty(weight.shape if wanted[1] else (0,), dtype=kept),
        hidden.new_empty(weight.shape[:1] if wanted[2] else (0,), dtype=kept),
    )


def linear_cross_entropy_backward_fake(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    stats: Tensor,
    output_mask: list[bool],
    accum_dtype: torch.dtype | None,
    chunk_bytes: int | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if output_mask[0] else (0,)),
        weight.new_empty(weight.shape if output_mask[1] else (0,)),
        weight.new_empty(weight.shape[:1] if output_mask[2] else (0,)),
    )


def _scale_fake(factor: Tensor, gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(g, dtype=dtype) for g in gradients]


def _setup_context(ctx, inputs, output) -> None:
    hidden, weight, labels, bias, class_weight, divisor, _, _, ctx.reduction, *ctx.options = inputs
    ce.refuse_trained("linear_cross_entropy", "class_weight", ctx.needs_input_grad[4])
    ce.refuse_trained("linear_cross_entropy", "divisor", ctx.needs_input_grad[5])
    _, stats, _, total, *gradients = output
    if ctx.reduction == "none":
        ctx.save_for_backward(hidden, weight, labels, bias, class_weight, stats)
    else:
        donation.save(ctx, total, *gradients)
        ctx.captured = donation.is_capturing(hidden)
    ctx.dtype, ctx.is_divided = hidden.dtype, divisor is not None
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, *_):
    mask = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    of_options = (None,) * (3 + len(ctx.options))  # output_mask, wants_metrics and reduction among them
    if dloss is None:
        return (None,) * 6 + of_options
    if ctx.reduction == "none":
        gradients = _backward_op(dloss, *ctx.saved_tensors, mask, *ctx.options)
    else:
        # These gradients were made in the forward pass: nothing links them to hidden and weight, and a second
        # derivative would be silently zero. Only create_graph=True runs a backward pass with gradients enabled.
        if torch.is_grad_enabled():
            raise second_derivative_error("linear_cross_entropy")
        total, *gradients = ctx.saved_tensors
        factor = dloss.to(total.dtype)
        if not chunks.divides_early(ctx.dtype):
            if ctx.reduction == "mean":
                # Without a row that counts eager's gradient is zero, and not 0 * inf.
                factor = torch.where(total == 0, 0.0, factor / total)
            elif ctx.is_divided:
                factor = factor / total
        # The forward pass made them for this backward pass alone. A captured one may be replayed without that.
        replayed = donation.is_capturing(dloss) and not ctx.captured
        if gradients[1].dtype == ctx.dtype and donation.is_last_use(ctx, dloss) and not replayed:
            _scale_op_(factor, gradients)
            gradients = [g.detach() for g in gradients]
        elif torch.compiler.is_compiling() or type(dloss) is not Tensor:  # torch 2.11 traces this without saying so
            # Inductor multiplies in one pass and, of the dtype that they have, in place: nobody else reads them.
            gradients = [(g * factor.reshape(1)).to(ctx.dtype) for g in gradients]
        else:
            gradients = _scale_op(factor, gradients, ctx.dtype)
    dhidden, dweight, dbias = (g if wanted else None for g, wanted in zip(gradients, mask, strict=True))
    return dhidden, dweight, None, dbias, None, None, *of_options


def _forward(hidden, weight, labels, bias, wants_metrics, options) -> tuple[Tensor, ...]:
    """The outputs of the forward operator for the keyword arguments that the operators below share."""
    reduction, tensors = options["reduction"], (options["class_weight"], options["divisor"])
    # Gradients are made in the forward pass, and only those that a backward pass may ask for.
    recording = torch.is_grad_enabled()
    mask = [recording and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    of_chunks = (options["accum_dtype"], options["chunk_bytes"])
    others = (mask, wants_metrics, reduction, *of_chunks, *(options[n] for n in ce.Options._fields))
    return _forward_op(hidden, weight, labels, bias, *tensors, *others)


DEFAULTS = {"class_weight": None, "divisor": None, "reduction": "mean", "accum_dtype": None, "chunk_bytes": None}
DEFAULTS |= ce.Options._field_defaults


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    return _forward(hidden, weight, labels, bias, False, DEFAULTS | options)[0]


def linear_cross_entropy_with_metrics(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The loss, then log(p_label) and entropy of each row, the share of rows whose label is the argmax, the z-loss."""
    given = DEFAULTS | options
    loss, _, metrics, *_ = _forward(hidden, weight, labels, bias, True, given)
    log_probs, entropy, correct, lse = (row.view(labels.shape) for row in metrics.detach().unbind())
    kept = labels != given["ignore_index"]
    accuracy = correct.sum() / kept.sum()
    flat = labels.reshape(-1)
    of_label = ce.label_weights(flat, given["class_weight"], given["ignore_index"], lse.dtype).view(labels.shape)
    penalty = given["z_loss"] * of_label * lse.square()
    if given["reduction"] != "none":
        divisor = of_label.sum() if given["reduction"] == "mean" else given["divisor"]
        penalty = penalty.sum() if divisor is None else penalty.sum() / divisor
    return loss, log_probs, entropy, accuracy, penalty.to(lse.dtype)


def _autocast(dtype: torch.dtype, hidden, weight, labels, bias=None, **kwargs):
    """As torch.nn.functional.linear: the projection runs in the autocast dtype, the loss is float32."""

    def cast(t: Tensor | None) -> Tensor | None:
        eligible = t is not None and t.is_floating_point() and t.dtype != torch.float64
        return t.to(dtype) if eligible else t

    return (cast(hidden), cast(weight), labels, cast(bias)), kwargs


def _gemm_flops(hidden: torch.Size, weight: torch.Size) -> int:
    return 2 * hidden.numel() * weight[0]


def _forward_flops(
    hidden, weight, labels, bias, class_weight, divisor, mask, wants_metrics, reduction, *options, **kwargs
) -> int:
    gemms = 1 + (mask[0] + mask[1] if reduction != "none" else 0)
    return gemms * _gemm_flops(hidden, weight)


def _backward_flops(dloss, hidden, weight, labels, bias, class_weight, stats, mask, *options, **kwargs) -> int:
    return (1 + mask[0] + mask[1]) * _gemm_flops(hidden, weight)


_forward_op = primitive(
    "linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor labels, Tensor? bias, Tensor? class_weight,"
    " Tensor? divisor, bool[3] output_mask, bool wants_metrics, str reduction, ScalarType? accum_dtype, int? chunk_bytes,"
    f" {ce.OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_forward,
    fake=linear_cross_entropy_fake,
    reference=linear_cross_entropy_ref,
    flops=_forward_flops,
    setup_context=_setup_context,
    backward=_backward,
)
_backward_op = primitive(
    "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor labels, Tensor? bias,"
    f" Tensor? class_weight, Tensor stats, bool[3] output_mask, ScalarType? accum_dtype, int? chunk_bytes, {ce.OPTIONS_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
    check=_check_backward,
    fake=linear_cross_entropy_backward_fake,
    reference=linear_cross_entropy_backward_ref,
    flops=_backward_flops,
)
_scale_op = primitive(
    "linear_cross_entropy_scale(Tensor factor, Tensor[] gradients, ScalarType dtype) -> Tensor[]",
    check=_check_scale,
    fake=_scale_fake,
    reference=linear_cross_entropy_scale,
    flops=no_flops,
)
_scale_op_ = primitive(
    "linear_cross_entropy_scale_(Tensor factor, Tensor(a!)[] gradients) -> ()",
    check=_check_scale,
    fake=lambda *args: None,
    reference=linear_cross_entropy_scale_ref_,
    flops=no_flops,
)
_ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor labels, Tensor? bias=None, *, Tensor? class_weight=None,"
    " int ignore_index=-100, str reduction='mean', float label_smoothing=0.0, float? softcap=None,"
    " float logit_scale=1.0, float z_loss=0.0, Tensor? divisor=None, ScalarType? accum_dtype=None,"
    " int? chunk_bytes=None"
)
operator = composite(f"linear_cross_entropy({_ARGUMENTS}) -> Tensor", linear_cross_entropy, autocast=_autocast)
operator_with_metrics = composite(
    f"linear_cross_entropy_with_metrics({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    linear_cross_entropy_with_metrics,
    autocast=_autocast,
)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) / 3

    def sample(
        label: str,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        ignored: int = 0,
        weighted: bool = False,
        divisor: float | None = None,
        **kwargs,
    ) -> Sample:
        leaves = [t.detach().requires_grad_() if t is not None else None for t in (hidden, weight, bias)]
        rows = hidden.shape[:-1]
        labels = ce.sample_labels(rows.numel(), weight.shape[0], device, ignored).view(rows)
        if weighted:
            kwargs["class_weight"] = (torch.rand(weight.shape[0], device=device) + 0.5).to(dtype)
        if divisor is not None:
            kwargs["divisor"] = torch.tensor(divisor, device=device)
        return Sample(label, (*leaves[:2], labels, leaves[2]), kwargs)

    yield sample("mean", tensor(2, 6, 32), tensor(64, 32), ignored=3)
    yield sample("sum", tensor(12, 32), tensor(64, 32), ignored=1, reduction="sum")
    yield sample("none", tensor(2, 6, 32), tensor(64, 32), ignored=3, reduction="none")
    yield sample("bias and label smoothing", tensor(9, 16), tensor(37, 16), tensor(37), label_smoothing=0.1)
    yield sample("bias, none", tensor(9, 16), tensor(37, 16), tensor(37), reduction="none", label_smoothing=0.1)
    yield sample("class weights", tensor(9, 16), tensor(37, 16), ignored=2, weighted=True)
    yield sample("softcap", 3 * tensor(9, 16), tensor(37, 16), ignored=2, softcap=1.5)
    yield sample("logit scale and z-loss", tensor(9, 16), tensor(37, 16), logit_scale=0.7, z_loss=0.01)
    together: dict[str, Any] = {"label_smoothing": 0.2, "softcap": 3.0, "logit_scale": -1.5, "z_loss": 0.05}
    yield sample("all options", tensor(9, 16), tensor(37, 16), tensor(37), ignored=2, weighted=True, **together)
    yield sample("all options, none", tensor(9, 16), tensor(37, 16), weighted=True, reduction="none", **together)
    yield sample("sum by a count", tensor(12, 32), tensor(64, 32), ignored=5, reduction="sum", divisor=17)
    yield sample("all ignored", tensor(4, 16), tensor(32, 16), ignored=4, reduction="sum")
    yield sample("no rows", tensor(0, 16), tensor(32, 16), reduction="sum")
    yield sample("odd sizes", tensor(3, 5, 7), tensor(11, 7))
    yield sample("row stride", tensor(6, 40)[:, :32], tensor(48, 32))
    yield sample("transposed", tensor(4, 3, 32).transpose(0, 1), tensor(32, 48).t())
    yield sample("expanded", tensor(1, 32).expand(4, 32), tensor(48, 32))
    yield sample("misaligned", tensor(4 * 33 + 1)[1:].view(4, 33), tensor(48, 33))


def _eager(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    divisor: Tensor | None = None,
    accum_dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
    **kwargs,
) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    loss = ce.eager(logits.view(-1, logits.shape[-1]), labels.reshape(-1), class_weight, **kwargs)
    if divisor is not None:
        loss = loss / divisor
    return loss.view(labels.shape) if kwargs.get("reduction") == "none" else loss


SPEC = Spec(
    name="linear_cross_entropy",
    samples=_samples,
    eager=_eager,
    bytes_moved=lambda hidden, weight, *args, **kwargs: 3 * (hidden.numel() + weight.numel()) * hidden.element_size(),
    flops=lambda hidden, weight, *args, **kwargs: 3 * _gemm_flops(hidden.shape, weight.shape),
    source="arXiv 2410.10989, section 3.2, fused linear cross entropy; transformers lm_head followed by ForCausalLMLoss",
)
