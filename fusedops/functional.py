"""The operators as functions, for models of one's own. Leading arguments are positional, the rest are keywords."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import csrc_meta.add_rms_norm
import csrc_meta.cross_entropy
import csrc_meta.geglu
import csrc_meta.layer_norm
import csrc_meta.linear_cross_entropy
import csrc_meta.rms_norm
import csrc_meta.rotary_embedding
import csrc_meta.swiglu

__all__ = [
    "LossMetrics",
    "add_rms_norm",
    "cross_entropy",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_with_metrics",
    "rms_norm",
    "rotary_embedding",
    "swiglu",
]


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, weight_offset: float = 0.0, cast: str = "llama"
) -> Tensor:
    """Root mean square normalisation over the last dimension: y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight).

    Args:
        x: (..., N) bf16|fp16|fp32|fp64, any strides; fastest where rows are contiguous.
        weight: (N,) floating point, or None for no scaling.
        eps: added to the mean of squares, inside the root.
        weight_offset: 0, or 1 for weights stored around zero (Gemma).
        cast: where the float32 intermediate is rounded. "llama": before it meets the weight, whose sum with the offset
            is taken in its own dtype. "gemma": after, everything else in float32; with ``weight_offset=0`` this is
            ``torch.nn.functional.rms_norm``. "float32": never, y is float32.

    Returns:
        y: (..., N), contiguous, never aliasing x. dtype: promotion of x's and weight's for "llama", x's for "gemma",
        float32 for "float32".

    Numerics:
        Accumulates in float32 (float64 for float64 inputs). The gradient of weight is summed in float32 in a fixed
        order: bitwise the same from run to run.

    Raises:
        UnsupportedDtypeError: x or weight is not floating point.
        UnsupportedInputError: shapes, devices or ``cast`` don't fit.
        DoubleBackwardError: a second derivative is asked for.

    Source:
        arXiv 2410.10989, equations 1-3; LlamaRMSNorm and GemmaRMSNorm of transformers.
    """
    return csrc_meta.rms_norm.operator(x, weight, eps, weight_offset=weight_offset, cast=cast)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    cast: str = "llama",
) -> tuple[Tensor, Tensor]:
    """A residual connection and the norm behind it: s = x + residual, y = s / sqrt(mean(s^2) + eps) * (weight_offset + weight).

    Args:
        x: (..., N) bf16|fp16|fp32|fp64, any strides; fastest where rows are contiguous.
        residual: the shape and dtype of x.
        weight: (N,) floating point, or None for no scaling.
        eps: added to the mean of squares, inside the root.
        weight_offset, cast: as for :func:`rms_norm`.

    Returns:
        y: (..., N), contiguous, of the dtype that :func:`rms_norm` would have.
        sum: (..., N), contiguous, x's dtype: the residual stream behind the connection. Neither aliases an input.

    Numerics:
        The sum is rounded to x's dtype before it is normalised, as in eager. The gradient that comes back through the
        sum is added to the norm's in float32 and rounded once; x and residual get the same tensor. Otherwise as
        :func:`rms_norm`.

    Raises:
        UnsupportedDtypeError: an input is not floating point, or residual's dtype is not x's.
        UnsupportedInputError: shapes, devices or ``cast`` don't fit.
        DoubleBackwardError: a second derivative is asked for.

    Source:
        arXiv 2410.10989, equations 1-3; the residual connections of LlamaDecoderLayer of transformers.
    """
    return csrc_meta.add_rms_norm.operator(x, residual, weight, eps, weight_offset=weight_offset, cast=cast)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Layer normalisation over the last dimension: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    Args:
        x: (..., N) bf16|fp16|fp32|fp64, any strides; fastest where rows are contiguous.
        weight: (N,) floating point, or None for no scaling.
        bias: (N,) floating point, or None for no shift; either may be given without the other.
        eps: added to the variance (over N, not N - 1), inside the root.

    Returns:
        y: (..., N), contiguous, x's dtype, never aliasing x.

    Numerics:
        Mean and variance are float32 (float64 for float64 inputs); the variance is of differences from the mean, so
        that a large mean costs no digits. y is rounded once. The gradients of weight and bias are summed in float32
        in a fixed order: bitwise the same from run to run.

    Raises:
        UnsupportedDtypeError: x, weight or bias is not floating point.
        UnsupportedInputError: shapes or devices don't fit.
        DoubleBackwardError: a second derivative is asked for.

    Source:
        arXiv 2410.10989, section 3.2; ``torch.nn.functional.layer_norm``, whose ``normalized_shape`` is N here.
    """
    return csrc_meta.layer_norm.operator(x, weight, bias, eps)


def rotary_embedding(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    memory_format: torch.memory_format | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embedding: each pair (x1, x2) of columns becomes (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2).

    Args:
        q: (B, Hq, T, D) bf16|fp16|fp32|fp64, any strides; fastest where columns are contiguous, as in transposed views
            of (B, T, Hq, D) and slices of a packed projection.
        k: (B, Hk, T, D), the dtype of q, or None.
        cos, sin: (1|B, T, R) floating point of any dtype, any strides; R is even and at most D. Columns from R on pass
            unchanged. Each column has its own factor: cos1 and cos2 are those of the columns of x1 and x2.
        interleaved: pairs are the columns (2 j, 2 j + 1) rather than (j, j + R / 2).
        sections: sizes that sum to R / 2, for tables of shape (len(sections), 1|B, T, R): pair j takes the table of the
            section that j falls into (mRoPE). Not with ``interleaved``.
        memory_format: ``torch.contiguous_format``, or None or ``torch.preserve_format`` for the strides of
            ``torch.empty_like(q)``.

    Returns:
        q: (B, Hq, T, D) and k: (B, Hk, T, D) of their dtype, or None for no k. Neither aliases an input.

    Numerics:
        Computed in float32 (float64 if an input is float64) whatever the dtype of the tables, and rounded once. The
        gradients of q and k are laid out in memory as q and k are. If cos or sin requires grad, plain PyTorch operators
        run instead, which differentiate tables too, and twice.

    Raises:
        UnsupportedDtypeError: an input is not floating point, or k's dtype is not q's, or sin's not cos's.
        UnsupportedInputError: shapes, devices, sections or ``memory_format`` don't fit.
        DoubleBackwardError: a second derivative is asked for.

    Source:
        RoFormer (arXiv 2104.09864), equation 34; arXiv 2410.10989, section 3.2. ``apply_rotary_pos_emb`` of
        transformers' Llama (halves) and Cohere (interleaved); Qwen2VLRotaryEmbedding (sections).
    """
    rotated_q, rotated_k = csrc_meta.rotary_embedding.operator(
        q, k, cos, sin, interleaved=interleaved, sections=sections, memory_format=memory_format
    )
    return rotated_q, None if k is None else rotated_k


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Gated linear unit with SiLU: y = silu(gate) * up, silu(x) = x / (1 + exp(-x)).

    Args:
        gate: (..., I) bf16|fp16|fp32|fp64, any strides; fastest where rows are contiguous.
        up: the shape and dtype of gate; or None, where gate is (..., 2 I) and holds both as halves of its rows.

    Returns:
        y: (..., I), contiguous, gate's dtype, never aliasing an input.

    Numerics:
        The activation is computed in float32 (float64 for float64 inputs) and rounded to gate's dtype before it meets
        up, as in eager. The backward pass computes it again from gate and up, in float32, and rounds each gradient
        once. In an eager backward pass the gradients take over the memory of gate and up where these are intermediate
        results that nobody can read again; otherwise gate and up stay as they are.

    Raises:
        UnsupportedDtypeError: gate is not floating point, or up's dtype is not gate's.
        UnsupportedInputError: shapes or devices don't fit.
        DoubleBackwardError: a second derivative is asked for.

    Source:
        arXiv 2002.05202, equation 5; arXiv 2410.10989, section 3.2. LlamaMLP and, with one tensor, Phi3MLP of
        transformers.
    """
    return csrc_meta.swiglu.operator(gate, up)


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """Gated linear unit with GELU: y = gelu(gate) * up, gelu(x) = x * (1 + erf(x / sqrt(2))) / 2.

    Args:
        gate: (..., I) bf16|fp16|fp32|fp64, any strides; fastest where rows are contiguous.
        up: the shape and dtype of gate; or None, where gate is (..., 2 I) and holds both as halves of its rows.
        approximate: "none", or "tanh" for gelu(x) = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2, as
            ``torch.nn.functional.gelu`` has it.

    Returns:
        y: (..., I), contiguous, gate's dtype, never aliasing an input.

    Numerics:
        As :func:`swiglu`.

    Raises:
        UnsupportedDtypeError: gate is not floating point, or up's dtype is not gate's.
        UnsupportedInputError: shapes, devices or ``approximate`` don't fit.
        DoubleBackwardError: a second derivative is asked for.

    Source:
        arXiv 2002.05202, equation 5; arXiv 2410.10989, section 3.2. GemmaMLP of transformers ("tanh").
    """
    return csrc_meta.geglu.operator(gate, up, approximate=approximate)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Cross entropy with integer labels: loss_i = log(sum_j exp(z_ij)) - z_i,label, z the logits or a map of them.

    With class weights w, label smoothing s and lse_i = log(sum_j exp(z_ij)), the loss of a row that is not ignored is

        z_ij = softcap * tanh(logit_scale * x_ij / softcap), or logit_scale * x_ij without softcap
        loss_i = (1 - s) * w_label * (lse_i - z_i,label) + s / V * sum_j w_j * (lse_i - z_ij) + z_loss * w_label * lse_i^2

    Args:
        logits: (T, V) bf16|fp16|fp32|fp64, any strides; fastest where rows are contiguous. Not modified while anybody
            can read them.
        labels: (T,) int64|int32 in [0, V) or equal to ignore_index.
        weight: (V,) floating point, the weight of each class, or None for ones. It gets no gradient.
        ignore_index: label of rows that count for nothing: loss 0, gradient 0, left out of the mean.
        reduction: "none", "sum", or "mean": the sum divided by the sum of w_label over the rows not ignored.
        label_smoothing: probability mass in [0, 1] spread evenly over the vocabulary.
        softcap: positive bound of the magnitude of z, or None for none.
        logit_scale: factor of the logits.
        z_loss: factor of lse^2, which keeps the logits' normaliser near 1; not negative.

    Returns:
        The loss, () or (T,) for "none", float32 (float64 for float64 logits) whatever the dtype of the logits. The
        gradient of the logits is a new tensor, or takes over their storage where nobody can read them again: in an
        eager backward pass without retain_graph and create_graph, for contiguous logits that another operator
        computed and to which no variable, view, other operator's saved tensor or saved-tensor hook refers.

    Numerics:
        Computed in float32 with the row maximum subtracted, so that logits of several hundred lose nothing. The
        upstream gradient is multiplied in before rounding to the logits' dtype. A mean over no row is NaN and its
        gradient zero, as in ``torch.nn.functional.cross_entropy``. Deterministic.

    Raises:
        UnsupportedDtypeError: logits or weight are not floating point, or labels not integers.
        UnsupportedInputError: shapes, devices, reduction or numbers don't fit, or weight requires grad.
        LabelOutOfRangeError: on a CPU, a label outside [0, V); on a GPU a device-side assertion, as in eager.
        DoubleBackwardError: a second derivative is asked for.

    Source:
        arXiv 2410.10989, equations 6 and 7; arXiv 2204.02311, section 5 (z-loss); Gemma2ForCausalLM (softcap) and
        CohereForCausalLM (logit_scale) of transformers.
    """
    return csrc_meta.cross_entropy.operator(
        logits,
        labels,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    divisor: Tensor | float | None = None,
    accum_dtype: torch.dtype | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Cross entropy of hidden @ weight.T + bias with integer labels, without the (T, V) logits.

    Args:
        hidden: (..., H) bf16|fp16|fp32|fp64, any strides.
        weight: (V, H), the dtype of hidden, as ``torch.nn.Linear`` stores it.
        labels: (...) int64|int32 in [0, V) or equal to ignore_index; the leading shape of hidden.
        bias: (V,), the dtype of hidden, or None.
        class_weight: (V,) floating point, or None; rows count by the weight of their label. Not differentiable.
        ignore_index: label of rows that count for nothing: loss 0, gradient 0, left out of the mean.
        reduction: "none", "mean" (over the rows not ignored, by their labels' weights) or "sum".
        label_smoothing: probability mass in [0, 1] spread evenly over the vocabulary.
        softcap, logit_scale, z_loss: as in :func:`cross_entropy`.
        divisor: what a "sum" is divided by, () or a number: the tokens of all batches whose gradients are accumulated.
        accum_dtype: of the sum over chunks that is the gradient of weight. float32, or None for it (float64 for float64
            inputs); bfloat16 for bfloat16 inputs takes less memory and is rounded after each chunk.
        chunk_bytes: that the logits of a chunk may take. As many as weight has, or None for them; more is faster, where
            the weight has few columns above all.

    Returns:
        The loss, () or the shape of labels for "none", float32 (float64 for float64 inputs).

    Numerics:
        Each chunk's logits are rounded to the dtype of hidden, as eager's are (on Hopper GPUs not where no gradient is
        wanted, and no logits are stored); from there to their gradient all is float32. The gradient of weight is one
        product, or summed over chunks in float32 and rounded once. "mean" and "sum" make gradients in the forward pass
        (three GEMMs in all), only those that are needed, for an upstream gradient of one; another is multiplied in
        afterwards, which rounds once more (in float16 before they are rounded). "none" computes the logits again in the
        backward pass (four). Under autocast the projection runs in the autocast dtype. Deterministic.

    Synchronisation:
        Ignored rows take no part in the products. To leave them out the host waits until the device knows the labels;
        the device does not wait for the host. Nobody waits, and nothing is left out, while a CUDA graph is captured and
        where a product is too short to be worth it.

    Raises:
        UnsupportedDtypeError: a dtype differs from hidden's, or labels are not integers.
        UnsupportedInputError: shapes, devices, reduction or another option don't fit.
        LabelOutOfRangeError: on a CPU, a label outside [0, V); on a GPU a device-side assertion, as in eager.
        DoubleBackwardError: a second derivative is asked for.

    Source:
        arXiv 2410.10989, section 3.2 (fused linear cross entropy); ForCausalLMLoss of transformers.
    """
    divisor = _as_tensor(divisor, hidden)
    return csrc_meta.linear_cross_entropy.operator(
        hidden,
        weight,
        labels,
        bias,
        class_weight=class_weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        logit_scale=logit_scale,
        z_loss=z_loss,
        divisor=divisor,
        accum_dtype=accum_dtype,
        chunk_bytes=chunk_bytes,
    )


def _as_tensor(number: Tensor | float | None, like: Tensor) -> Tensor | None:
    if number is None or isinstance(number, Tensor):
        return number
    return torch.full((), number, dtype=torch.float64, device=like.device)


class LossMetrics(NamedTuple):
    """What a loss says beside its value. Nothing of it is differentiable.

    Attributes:
        log_probs: log(p) of each label, 0 where it is ignored; the shape of labels.
        entropy: -sum_j p_j log(p_j) of each row, 0 where it is ignored; the shape of labels.
        accuracy: share of the rows not ignored whose label has the largest logit, and is the first that has; ().
        z_loss: the part of the loss that is z-loss, reduced and divided as the loss is.
    """

    log_probs: Tensor
    entropy: Tensor
    accuracy: Tensor
    z_loss: Tensor


def linear_cross_entropy_with_metrics(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, LossMetrics]:
    """:func:`linear_cross_entropy` and metrics of its logits, in the same pass over them.

    Args:
        hidden, weight, labels, bias, options: those of :func:`linear_cross_entropy`.

    Returns:
        The loss, with the gradients that it has without metrics, and the metrics in its dtype. They are of the logits
        that the loss is of, after softcap and scale. A mean over no row is NaN.
    """
    unknown = options.keys() - csrc_meta.linear_cross_entropy.DEFAULTS.keys()
    if unknown:
        raise TypeError(f"linear_cross_entropy_with_metrics: unknown options {sorted(unknown)}")
    options["divisor"] = _as_tensor(options.get("divisor"), hidden)
    loss, *metrics = csrc_meta.linear_cross_entropy.operator_with_metrics(hidden, weight, labels, bias, **options)
    return loss, LossMetrics(*metrics)
