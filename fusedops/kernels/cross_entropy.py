"""Cross entropy of rows of logits on a GPU: loss = log(sum_j exp(z_j - m)) - (z_label - m), m = max_j z_j.

T: rows (tokens)
V: columns (vocabulary)

z is the logits x, or SOFTCAP * tanh(SCALE * x / SOFTCAP). Options that are not used leave no code behind.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_meta import checks
from csrc_meta import cross_entropy as ce
from fusedops.kernels.launch import as_rows, cdiv, contiguous, launch

BLOCK_V = 4096
WARPS = 8
# Of the one program that reduces all rows: two steps for a batch of 8192.
BLOCK_T = 4096
REDUCE_WARPS = 16


@triton.jit
def _tanh(u):
    """tanh(u) and its derivative, of exp(-2 |u|), which can't overflow."""
    magnitude = tl.abs(u)
    e = tl.exp(-2.0 * magnitude)
    tanh = (1.0 - e) / (1.0 + e)
    if u.dtype == tl.float32:
        # 1 - e loses digits near zero. The series' next term is 9e-9 of the sum where it ends.
        s = u * u
        series = 1.0 + s * (-1.0 / 3.0 + s * (2.0 / 15.0 + s * (-17.0 / 315.0 + s * (62.0 / 2835.0))))
        tanh = tl.where(magnitude < 0.25, magnitude * series, tanh)
    return tl.where(u < 0.0, -tanh, tanh), 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def map_logits(x, SOFTCAP: tl.constexpr, SCALE: tl.constexpr):
    """z and dz / dx."""
    # A plain number would be rounded to float32 before it meets a float64.
    scale = tl.full((), SCALE, x.dtype)
    if SOFTCAP is None:
        z, slope = x * scale, scale
    else:
        tanh, derivative = _tanh(x * tl.full((), SCALE / SOFTCAP, x.dtype))
        z, slope = tanh * tl.full((), SOFTCAP, x.dtype), derivative * scale
    return z, slope


@triton.jit
def _of_label(logits_ptr, label, V, SOFTCAP: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr):
    """z_label of a row; NaN for a label out of range, at which the reduction of all rows stops the device."""
    z = tl.load(logits_ptr + label, mask=(label >= 0) & (label < V), other=float("nan")).to(WIDE)
    if SOFTCAP is not None or SCALE != 1.0:
        z, _ = map_logits(z, SOFTCAP, SCALE)
    return z


@triton.jit
def with_options(
    loss,
    label,
    maximum,
    log_sum,
    weighted_sum,
    weight_ptr,
    weight_sum_ptr,
    V,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    """The losses of rows, one or several, with class weights, label smoothing and z-loss.

    loss = lse - z_label; weighted_sum = sum_j w_j * z_j, used for label smoothing alone.
    """
    WIDE: tl.constexpr = loss.dtype
    if weight_ptr is not None:
        of_label = tl.load(weight_ptr + label, mask=(label >= 0) & (label < V), other=0.0).to(WIDE)
        loss *= of_label
    if SMOOTHING != 0.0:
        mean = weighted_sum / tl.cast(V, WIDE)
        if weight_ptr is None:
            of_all = log_sum - (mean - maximum)
        else:
            mean_weight = tl.load(weight_sum_ptr) / tl.cast(V, WIDE)
            of_all = mean_weight * log_sum - (mean - mean_weight * maximum)
        smoothing = tl.full((), SMOOTHING, WIDE)
        loss = (1.0 - smoothing) * loss + smoothing * of_all
    if Z_LOSS != 0.0:
        penalty = tl.full((), Z_LOSS, WIDE) * (maximum + log_sum) * (maximum + log_sum)
        if weight_ptr is not None:
            penalty *= of_label
        loss += penalty
    return loss


@triton.jit(do_not_specialize=["stats_stride", "metrics_stride", "ignore_index"])
def cross_entropy_fwd_kernel(
    logits_ptr,
    logits_stride_t,
    labels_ptr,
    weight_ptr,
    weight_sum_ptr,
    losses_ptr,
    stats_ptr,
    stats_stride,
    metrics_ptr,
    metrics_stride,
    V,
    ignore_index,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """loss = (1 - s) * w_label * (lse - z_label) + s / V * sum_j w_j * (lse - z_j) + Z_LOSS * w_label * lse^2.

    stats (2, T) = m, log_sum; lse = m + log_sum is never formed where a difference with it is wanted. metrics (4, T) =
    log(p_label), log_sum - sum_j p_j * (z_j - m), whether label is the first of the largest, lse. Grid: T. Tile: BLOCK_V,
    walked once along the row with a running maximum. Ignored rows are not read.
    """
    WIDE: tl.constexpr = losses_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    zero = tl.zeros((), WIDE)
    if label == ignore_index:
        tl.store(losses_ptr + row, zero)
        tl.store(stats_ptr + row, zero)
        tl.store(stats_ptr + stats_stride + row, zero)
        if metrics_ptr is not None:
            tl.store(metrics_ptr + tl.arange(0, 4) * metrics_stride + row, tl.zeros((4,), WIDE))
    else:
        logits_ptr += row * logits_stride_t
        maximum = zero - float("inf")
        total = zero
        weighted_sum = zero  # of w_j * z_j
        moment = zero  # of exp(z_j - m) * (z_j - m)
        ahead = tl.zeros((), tl.int32)  # of label: larger, or equal and before it
        if metrics_ptr is not None:
            z_label = _of_label(logits_ptr, label, V, SOFTCAP, SCALE, WIDE)
        for start in range(0, V, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            z = tl.load(logits_ptr + columns, mask=columns < V, other=-float("inf")).to(WIDE)
            if SOFTCAP is not None or SCALE != 1.0:
                z, _ = map_logits(z, SOFTCAP, SCALE)
                z = tl.where(columns < V, z, -float("inf"))
            larger = tl.maximum(maximum, tl.max(z, 0))
            # -inf - -inf is NaN: until the first finite logit there is nothing to subtract.
            base = tl.where(larger == -float("inf"), 0.0, larger)
            if metrics_ptr is not None:
                shift = tl.where(maximum == -float("inf"), 0.0, maximum - base)
                difference = tl.where(z == -float("inf"), 0.0, z - base)
                moment = (moment + shift * total) * tl.exp(maximum - base)
                moment += tl.sum(tl.exp(z - base) * difference, 0)
                ahead += tl.sum(((z > z_label) | ((z == z_label) & (columns < label))).to(tl.int32), 0)
            total = total * tl.exp(maximum - base) + tl.sum(tl.exp(z - base), 0)
            maximum = larger
            if SMOOTHING != 0.0:
                part = z
                if weight_ptr is not None:
                    part *= tl.load(weight_ptr + columns, mask=columns < V, other=0.0).to(WIDE)
                weighted_sum += tl.sum(tl.where(columns < V, part, 0.0), 0)
        log_sum = tl.log(total)
        if metrics_ptr is None:
            z_label = _of_label(logits_ptr, label, V, SOFTCAP, SCALE, WIDE)
        loss = log_sum - (z_label - maximum)
        if metrics_ptr is not None:
            tl.store(metrics_ptr + row, -loss)
            tl.store(metrics_ptr + metrics_stride + row, log_sum - moment / total)
            tl.store(metrics_ptr + 2 * metrics_stride + row, (ahead == 0).to(WIDE))
            tl.store(metrics_ptr + 3 * metrics_stride + row, maximum + log_sum)
        loss = with_options(
            loss, label, maximum, log_sum, weighted_sum, weight_ptr, weight_sum_ptr, V, SMOOTHING, Z_LOSS
        )
        tl.store(losses_ptr + row, loss)
        tl.store(stats_ptr + row, maximum)
        tl.store(stats_ptr + stats_stride + row, log_sum)


@triton.jit(do_not_specialize=["T", "ignore_index"])
def cross_entropy_reduce_kernel(
    losses_ptr,
    labels_ptr,
    weight_ptr,
    loss_ptr,
    total_ptr,
    T,
    V,
    ignore_index,
    MEAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """total = sum over rows not ignored of w_label, loss = sum(losses), divided by total for a mean.

    Grid: 1, so that sums have one order. Tile: BLOCK_T rows. It also stops the device at a label out of range.
    """
    WIDE: tl.constexpr = total_ptr.dtype.element_ty
    losses = tl.zeros((BLOCK_T,), WIDE)
    weights = tl.zeros((BLOCK_T,), WIDE)
    for start in range(0, T, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T).to(tl.int64)
        label = tl.load(labels_ptr + rows, mask=rows < T, other=ignore_index)
        kept = label != ignore_index
        known = (label >= 0) & (label < V)
        tl.device_assert(
            known | (label == ignore_index),
            "fusedops: labels: got a label outside [0, vocabulary) that is not ignore_index",
        )
        if weight_ptr is None:
            weights += kept.to(WIDE)
        else:
            weights += tl.load(weight_ptr + label, mask=kept & known, other=0.0).to(WIDE)
        if loss_ptr is not None:
            losses += tl.load(losses_ptr + rows, mask=rows < T, other=0.0)
    total = tl.sum(weights, 0)
    tl.store(total_ptr, total)
    if loss_ptr is not None:
        loss = tl.sum(losses, 0)
        if MEAN:
            loss /= total
        tl.store(loss_ptr, loss)


@triton.jit(do_not_specialize=["stats_stride", "ignore_index"])
def cross_entropy_bwd_kernel(
    dloss_ptr,
    dloss_stride_t,
    total_ptr,
    logits_ptr,
    logits_stride_t,
    labels_ptr,
    weight_ptr,
    weight_sum_ptr,
    stats_ptr,
    stats_stride,
    out_ptr,
    out_stride_t,
    V,
    ignore_index,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dx_j = dloss / total * dz_j / dx_j * (p_j * mass - (1 - s) * w_label * [j = label] - s / V * w_j), p = exp(z - lse).

    mass = (1 - s) * w_label + s * mean(w) + 2 * Z_LOSS * w_label * lse, which is 1 without weights and Z_LOSS. Zero in
    ignored rows, whatever they hold. Grid: T times blocks of columns. Tile: BLOCK_V. Every element is read before it is
    written: out may be the logits.
    """
    WIDE: tl.constexpr = stats_ptr.dtype.element_ty
    blocks = tl.cdiv(V, BLOCK_V)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    out_ptrs = out_ptr + row * out_stride_t + columns
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(out_ptrs, tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty), mask=columns < V)
    else:
        z = tl.load(logits_ptr + row * logits_stride_t + columns, mask=columns < V, other=0.0).to(WIDE)
        if SOFTCAP is not None or SCALE != 1.0:
            z, slope = map_logits(z, SOFTCAP, SCALE)
        maximum = tl.load(stats_ptr + row)
        log_sum = tl.load(stats_ptr + stats_stride + row)
        dloss = tl.load(dloss_ptr + row * dloss_stride_t).to(WIDE)
        if total_ptr is not None:
            dloss /= tl.load(total_ptr)
        of_label = tl.full((), 1.0, WIDE)
        if weight_ptr is not None:
            of_label = tl.load(weight_ptr + label, mask=(label >= 0) & (label < V), other=0.0).to(WIDE)
        smoothing_part = tl.full((), SMOOTHING, WIDE) / tl.cast(V, WIDE)
        dx = tl.exp(z - maximum - log_sum)
        if weight_ptr is not None or Z_LOSS != 0.0:
            mass = of_label + tl.full((), 2.0 * Z_LOSS, WIDE) * of_label * (maximum + log_sum)
            if weight_ptr is not None and SMOOTHING != 0.0:
                mass += smoothing_part * tl.load(weight_sum_ptr) - tl.full((), SMOOTHING, WIDE) * of_label
            dx *= mass
        if SMOOTHING != 0.0:
            if weight_ptr is None:
                dx -= smoothing_part
            else:
                dx -= smoothing_part * tl.load(weight_ptr + columns, mask=columns < V, other=0.0).to(WIDE)
        dx = tl.where(columns == label, dx - tl.full((), 1.0 - SMOOTHING, WIDE) * of_label, dx)
        if SOFTCAP is not None or SCALE != 1.0:
            dx *= slope
        tl.store(out_ptrs, (dloss * dx).to(out_ptr.dtype.element_ty), mask=columns < V)


def check_values(op: str, labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """On a device the reduction asserts instead: reading labels back would make the host wait for it."""
    if labels.device.type == "cpu":
        checks.check_label_values(op, labels, vocabulary, ignore_index)


def _constants(options: ce.Options) -> dict[str, object]:
    return {
        "SMOOTHING": options.label_smoothing,
        "SOFTCAP": options.softcap,
        "SCALE": options.logit_scale,
        "Z_LOSS": options.z_loss,
        "BLOCK_V": BLOCK_V,
        "num_warps": WARPS,
    }


def weights(weight: Tensor | None, options: ce.Options, stats: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The class weights, and their sum where it is needed."""
    if weight is None or not options.label_smoothing:
        return contiguous(weight), None
    return weight.contiguous(), weight.sum(dtype=stats.dtype)


def row_losses(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    options: ce.Options,
    losses: Tensor,
    stats: Tensor,
    metrics: Tensor | None = None,
) -> None:
    """As csrc_meta.cross_entropy.row_losses_ref, but that ignored rows have zero statistics."""
    rows, vocabulary = logits.shape
    tensors = (*as_rows(logits), labels.contiguous(), *weights(weight, options, stats))
    results = (losses, stats, stats.stride(0), metrics, 0 if metrics is None else metrics.stride(0))
    sizes = (vocabulary, options.ignore_index)
    launch(cross_entropy_fwd_kernel, rows, logits, *tensors, *results, *sizes, **_constants(options))


def reduce(
    losses: Tensor, labels: Tensor, weight: Tensor | None, vocabulary: int, options: ce.Options, reduction: str
) -> tuple[Tensor, Tensor]:
    """As csrc_meta.cross_entropy.reduce_ref; stops the device at a label out of range."""
    total = torch.empty((), dtype=losses.dtype, device=losses.device)
    loss = None if reduction == "none" else torch.empty_like(total)
    tensors = (losses, labels.contiguous(), contiguous(weight), loss, total)
    sizes = (labels.numel(), vocabulary, options.ignore_index)
    # Triton leaves device_assert out of kernels that aren't compiled for debugging, and adds overflow checks to those
    # that are.
    constants = {"MEAN": reduction == "mean", "BLOCK_T": BLOCK_T, "num_warps": REDUCE_WARPS}
    launch(cross_entropy_reduce_kernel, 1, losses, *tensors, *sizes, **constants, debug=True, sanitize_overflow=False)
    return losses if loss is None else loss, total


def row_gradients(
    dloss: Tensor,
    total: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    options: ce.Options,
    out: Tensor,
) -> None:
    """As csrc_meta.cross_entropy.row_gradients_ref; ``out`` has contiguous columns."""
    rows, vocabulary = logits.shape
    stats = stats if stats.stride(1) == 1 else stats.contiguous()
    upstream = (dloss, dloss.stride(0) if dloss.dim() else 0, total)
    tensors = (*as_rows(logits), labels.contiguous(), *weights(weight, options, stats))
    results = (stats, stats.stride(0), out, out.stride(0))
    sizes = (vocabulary, options.ignore_index)
    programs = rows * cdiv(vocabulary, BLOCK_V)
    launch(cross_entropy_bwd_kernel, programs, logits, *upstream, *tensors, *results, *sizes, **_constants(options))


KERNELS = ce.RowKernels(check_values, row_losses, reduce, row_gradients)

cross_entropy_fwd = partial(ce.forward, KERNELS)
cross_entropy_bwd = partial(ce.backward, KERNELS)
cross_entropy_bwd_ = partial(ce.backward_mutating, KERNELS)
