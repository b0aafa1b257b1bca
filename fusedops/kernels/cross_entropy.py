"""Cross entropy of rows of logits on a GPU: loss = log(sum_j exp(x_j - m)) - (x_label - m), m = max_j x_j.

T: rows (tokens)
V: columns (vocabulary)
"""

import triton
import triton.language as tl
from torch import Tensor

from csrc_meta import checks
from csrc_meta.cross_entropy import compute_dtype, reduce
from fusedops.kernels.launch import as_rows, launch

BLOCK_V = 4096
BLOCK_T = 1024
WARPS = 8


@triton.jit(do_not_specialize=["T", "ignore_index"])
def assert_labels_kernel(labels_ptr, T, V, ignore_index, BLOCK_T: tl.constexpr):
    """Stops the device at a label outside the vocabulary. Grid: blocks of rows."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    label = tl.load(labels_ptr + rows, mask=rows < T, other=ignore_index)
    known = (label == ignore_index) | ((label >= 0) & (label < V))
    tl.device_assert(known, "fusedops: labels: got a label outside [0, vocabulary) that is not ignore_index")


@triton.jit(do_not_specialize=["T", "ignore_index"])
def cross_entropy_fwd_kernel(
    logits_ptr,
    logits_stride_t,
    labels_ptr,
    losses_ptr,
    stats_ptr,
    T,
    V,
    ignore_index,
    SMOOTHING: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """loss = (1 - s) * (log_sum - (x_label - m)) + s * (log_sum - (mean(x) - m)); stats (2, T) = m, log_sum.

    Grid: T. Tile: BLOCK_V, walked once along the row with a running maximum. Ignored rows are not read.
    """
    WIDE: tl.constexpr = losses_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    zero = tl.zeros((), WIDE)
    if label == ignore_index:
        tl.store(losses_ptr + row, zero)
        tl.store(stats_ptr + row, zero)
        tl.store(stats_ptr + T + row, zero)
    else:
        logits_ptr += row * logits_stride_t
        maximum = zero - float("inf")
        total = zero
        plain_sum = zero
        for start in range(0, V, BLOCK_V):
            columns = start + tl.arange(0, BLOCK_V)
            x = tl.load(logits_ptr + columns, mask=columns < V, other=-float("inf")).to(WIDE)
            larger = tl.maximum(maximum, tl.max(x, 0))
            # -inf - -inf is NaN: until the first finite logit there is nothing to subtract.
            base = tl.where(larger == -float("inf"), 0.0, larger)
            total = total * tl.exp(maximum - base) + tl.sum(tl.exp(x - base), 0)
            maximum = larger
            if SMOOTHING != 0.0:
                plain_sum += tl.sum(tl.where(columns < V, x, 0.0), 0)
        log_sum = tl.log(total)
        known = (label >= 0) & (label < V)
        x_label = tl.load(logits_ptr + label, mask=known, other=float("nan")).to(WIDE)
        loss = log_sum - (x_label - maximum)
        if SMOOTHING != 0.0:
            mean = plain_sum / tl.cast(V, WIDE)
            loss = (1.0 - SMOOTHING) * loss + SMOOTHING * (log_sum - (mean - maximum))
        tl.store(losses_ptr + row, loss)
        tl.store(stats_ptr + row, maximum)
        tl.store(stats_ptr + T + row, log_sum)


@triton.jit(do_not_specialize=["stats_stride", "ignore_index"])
def cross_entropy_bwd_kernel(
    dloss_ptr,
    dloss_stride_t,
    logits_ptr,
    logits_stride_t,
    labels_ptr,
    stats_ptr,
    stats_stride,
    out_ptr,
    out_stride_t,
    V,
    ignore_index,
    SMOOTHING: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dx_j = dloss * (exp(x_j - m - log_sum) - (1 - s) * [j = label] - s / V); zero in ignored rows, whatever they hold.

    Grid: T times blocks of columns. Tile: BLOCK_V. Every element is read before it is written: out may be the logits.
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
        x = tl.load(logits_ptr + row * logits_stride_t + columns, mask=columns < V, other=0.0).to(WIDE)
        maximum = tl.load(stats_ptr + row)
        log_sum = tl.load(stats_ptr + stats_stride + row)
        dloss = tl.load(dloss_ptr + row * dloss_stride_t).to(WIDE)
        dx = tl.exp(x - maximum - log_sum)
        if SMOOTHING != 0.0:
            dx -= tl.full((), SMOOTHING, WIDE) / tl.cast(V, WIDE)
        dx = dloss * tl.where(columns == label, dx - (1.0 - SMOOTHING), dx)
        tl.store(out_ptrs, dx.to(out_ptr.dtype.element_ty), mask=columns < V)


def check_labels(op: str, labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise on a CPU, assert on a device: reading labels back would make the host wait for the device."""
    if labels.device.type == "cpu":
        checks.check_label_values(op, labels, vocabulary, ignore_index)
    else:
        assert_labels(labels, vocabulary, ignore_index)


def assert_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    rows = labels.numel()
    # Triton leaves device_assert out of kernels that aren't compiled for debugging, and adds overflow checks to those
    # that are.
    options = {"debug": True, "sanitize_overflow": False}
    blocks = triton.cdiv(rows, BLOCK_T)
    launch(
        assert_labels_kernel, blocks, labels, labels.contiguous(), rows, vocabulary, ignore_index, BLOCK_T, **options
    )


def row_losses(logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Loss and statistics of each row, as csrc_meta.cross_entropy.row_losses_ref; ignored rows have zero statistics."""
    rows, vocabulary = logits.shape
    losses = logits.new_empty((rows,), dtype=compute_dtype(logits))
    stats = losses.new_empty((2, rows))
    logits = as_rows(logits)
    tensors = (logits, logits.stride(0), labels.contiguous(), losses, stats)
    constants = {"SMOOTHING": label_smoothing, "BLOCK_V": BLOCK_V, "num_warps": WARPS}
    launch(cross_entropy_fwd_kernel, rows, logits, *tensors, rows, vocabulary, ignore_index, **constants)
    return losses, stats


def row_gradients(
    dloss: Tensor, logits: Tensor, labels: Tensor, stats: Tensor, ignore_index: int, label_smoothing: float, out: Tensor
) -> Tensor:
    """Gradient of each row, as csrc_meta.cross_entropy.row_gradients_ref; ``out`` has contiguous columns."""
    rows, vocabulary = logits.shape
    logits = as_rows(logits)
    stats = stats if stats.stride(1) == 1 else stats.contiguous()
    dloss_stride = dloss.stride(0) if dloss.dim() else 0
    tensors = (dloss, dloss_stride, logits, logits.stride(0), labels.contiguous(), stats, stats.stride(0))
    constants = {"SMOOTHING": label_smoothing, "BLOCK_V": BLOCK_V, "num_warps": WARPS}
    programs = rows * triton.cdiv(vocabulary, BLOCK_V)
    launch(
        cross_entropy_bwd_kernel, programs, logits, *tensors, out, out.stride(0), vocabulary, ignore_index, **constants
    )
    return out


def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    check_labels("cross_entropy", labels, logits.shape[1], ignore_index)
    losses, stats = row_losses(logits, labels, ignore_index, label_smoothing)
    count = (labels != ignore_index).sum().to(losses.dtype)
    return reduce(losses, count, reduction), stats, count


def cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    count: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    upstream = dloss / count if reduction == "mean" else dloss
    out = logits.new_empty(logits.shape)
    return row_gradients(upstream, logits, labels, stats, ignore_index, label_smoothing, out)


def cross_entropy_bwd_(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    count: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> None:
    upstream = dloss / count if reduction == "mean" else dloss
    row_gradients(upstream, logits, labels, stats, ignore_index, label_smoothing, logits)
