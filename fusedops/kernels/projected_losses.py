"""Losses of a projection on a GPU whose logits are stored nowhere: for evaluation, where nothing else is wanted.

T: rows (tokens)
H: hidden size
V: vocabulary

One product computes tiles of logits and keeps of each row what the loss needs; a second kernel puts these parts together.
The first is made for NVIDIA's TMA and takes its tiles from what was measured; elsewhere logits come in chunks.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_meta import cross_entropy as ce
from fusedops.kernels import projection
from fusedops.kernels.cross_entropy import map_logits, weights, with_options
from fusedops.kernels.launch import cdiv, contiguous, launch
from fusedops.kernels.projection import halves, place, product

ROWS = 8192  # whose parts are held at a time: 63 MiB at a vocabulary of 128 K, 157 with metrics and label smoothing
# Of the kernel that puts parts together.
BLOCK_ROWS = 32
BLOCK_PARTS = 64
WARPS = 4

LOG2_E = tl.constexpr(math.log2(math.e))
LOG_2 = tl.constexpr(math.log(2))


@triton.jit
def _keep(
    sums,
    tile_t,
    part,
    bias_ptr,
    labels_ptr,
    weight_ptr,
    parts_ptr,
    best_ptr,
    z_label_ptr,
    T,
    V,
    parts,
    WHOLE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
):
    """What the kernel below keeps of some columns of its tile."""
    ROWS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[1]
    first = part * COLUMNS
    rows = tile_t * ROWS + tl.arange(0, ROWS)
    columns = first + tl.arange(0, COLUMNS)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
    z = sums
    if SOFTCAP is not None or SCALE != 1.0:
        z, _ = map_logits(sums, SOFTCAP, SCALE)
    if not WHOLE:
        z = tl.where((columns < V)[None, :], z, -float("inf"))
    maximum = tl.max(z, 1)
    # One multiplication and addition for each element. What is subtracted is exact: it is what the maximum is kept as.
    base = tl.where(maximum == -float("inf"), 0.0, maximum * LOG2_E)  # -inf - -inf is NaN
    differences = z * LOG2_E - base[:, None]
    exponentials = tl.exp2(differences)
    inside = rows < T
    parts_ptr += part.to(tl.int64) * T + rows
    step = parts.to(tl.int64) * T
    tl.store(parts_ptr, tl.where(maximum == -float("inf"), maximum, base), mask=inside)
    tl.store(parts_ptr + step, tl.sum(exponentials, 1), mask=inside)
    if best_ptr is not None:
        moments = tl.where(z == -float("inf"), 0.0, exponentials * differences)
        tl.store(parts_ptr + 2 * step, tl.sum(moments, 1), mask=inside)
        # No column is the first of the largest in a row with a NaN.
        best = tl.min(tl.where(z == maximum[:, None], columns[None, :], V), 1)
        tl.store(best_ptr + part.to(tl.int64) * T + rows, best, mask=inside)
    if SMOOTHING != 0.0:
        weighted = tl.where((columns < V)[None, :], z, 0.0)
        if weight_ptr is not None:
            weighted *= tl.load(weight_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[None, :]
        tl.store(parts_ptr + 3 * step, tl.sum(weighted, 1), mask=inside)
    label = tl.load(labels_ptr + rows, mask=inside, other=-1)
    has_label = (label >= first) & (label < min(first + COLUMNS, V))
    place = tl.where(has_label, label - first, -1).to(tl.int32)  # 64 bits take two comparisons for each element
    z_label = tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == place[:, None], z, 0.0), 1)
    tl.store(z_label_ptr + rows, z_label, mask=has_label)


@triton.jit(do_not_specialize=["T"])
def projected_parts_kernel(
    hidden_desc,
    weight_desc,
    bias_ptr,
    labels_ptr,
    class_weight_ptr,
    parts_ptr,
    best_ptr,
    z_label_ptr,
    T,
    V,
    H,
    WHOLE: tl.constexpr,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Of each row of logits x = hidden @ weight.T + bias and each part of its columns, what the loss needs.

    z is x or SOFTCAP * tanh(SCALE * x / SOFTCAP), and is not rounded to the dtype of hidden. With y = z / log(2):
    parts (4, P, T) = m = max_j y_j, sum_j 2^(y_j - m), sum_j 2^(y_j - m) * (y_j - m), sum_j w_j * z_j; best (P, T) = the
    first j with y_j = m. The third and best are for metrics, the fourth for label smoothing: they are left out where
    best_ptr is None or SMOOTHING zero. z_label (T,) is written by the tile that has the label. P: two for each tile of V.
    Grid: programs, each takes every so manieth tile. Tile: BLOCK_T x BLOCK_V, a product along H.
    """
    tiles_t, tiles_v = tl.cdiv(T, BLOCK_T), tl.cdiv(V, BLOCK_V)
    for tile in tl.range(tl.program_id(0), tiles_t * tiles_v, tl.num_programs(0), flatten=True):
        tile_t, tile_v = place(tile, tiles_t, tiles_v, GROUP)
        sums = product(hidden_desc, weight_desc, tile_t, tile_v, H, BLOCK_T, BLOCK_V, BLOCK_H)
        # Half of the columns at a time: what is computed of all would exceed the registers.
        both = halves(sums)
        for half in tl.static_range(2):
            _keep(
                both[half],
                tile_t,
                2 * tile_v + half,
                bias_ptr,
                labels_ptr,
                class_weight_ptr,
                parts_ptr,
                best_ptr,
                z_label_ptr,
                T,
                V,
                2 * tiles_v,
                WHOLE,
                SMOOTHING,
                SOFTCAP,
                SCALE,
            )


@triton.jit(do_not_specialize=["P", "stats_stride", "metrics_stride", "ignore_index"])
def projected_losses_kernel(
    parts_ptr,
    best_ptr,
    z_label_ptr,
    labels_ptr,
    weight_ptr,
    weight_sum_ptr,
    losses_ptr,
    stats_ptr,
    stats_stride,
    metrics_ptr,
    metrics_stride,
    T,
    V,
    P,
    ignore_index,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Losses, statistics and metrics as those of cross_entropy_fwd_kernel, of the parts of each row.

    Grid: blocks of rows. Tile: BLOCK_P x BLOCK_T, walked along the parts with a running maximum.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = rows < T
    step = P.to(tl.int64) * T
    maximum = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    weighted_sum = tl.zeros((BLOCK_T,), tl.float32)
    moment = tl.zeros((BLOCK_T,), tl.float32)
    best = tl.zeros((BLOCK_T,), tl.int32) + V
    for start in range(0, P, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        mask = (part < P)[:, None] & inside[None, :]
        offsets = part.to(tl.int64)[:, None] * T + rows[None, :]
        maxima = tl.load(parts_ptr + offsets, mask=mask, other=-float("inf"))
        larger = tl.maximum(maximum, tl.max(maxima, 0))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        factors, factor = tl.exp2(maxima - base[None, :]), tl.exp2(maximum - base)
        totals = tl.load(parts_ptr + step + offsets, mask=mask, other=0.0)
        if best_ptr is not None:
            moments = tl.load(parts_ptr + 2 * step + offsets, mask=mask, other=0.0)
            shifts = tl.where(maxima == -float("inf"), 0.0, maxima - base[None, :])
            shift = tl.where(maximum == -float("inf"), 0.0, maximum - base)
            moment = (moment + shift * total) * factor + tl.sum((moments + shifts * totals) * factors, 0)
            columns = tl.load(best_ptr + offsets, mask=mask, other=V)
            found = tl.min(tl.where(maxima == larger[None, :], columns, V), 0)
            best = tl.where(larger > maximum, found, tl.minimum(best, found))
        total = total * factor + tl.sum(totals * factors, 0)
        maximum = larger
        if SMOOTHING != 0.0:
            weighted_sum += tl.sum(tl.load(parts_ptr + 3 * step + offsets, mask=mask, other=0.0), 0)
    label = tl.load(labels_ptr + rows, mask=inside, other=ignore_index)
    kept = label != ignore_index
    z_label = tl.load(z_label_ptr + rows, mask=inside, other=0.0)
    log2_sum = tl.log2(total)
    loss = LOG_2 * (log2_sum - (z_label * LOG2_E - maximum))
    maximum, log_sum = LOG_2 * maximum, LOG_2 * log2_sum
    if metrics_ptr is not None:
        metrics_ptr += rows
        tl.store(metrics_ptr, tl.where(kept, -loss, 0.0), mask=inside)
        tl.store(metrics_ptr + metrics_stride, tl.where(kept, log_sum - LOG_2 * moment / total, 0.0), mask=inside)
        tl.store(metrics_ptr + 2 * metrics_stride, (kept & (best == label)).to(tl.float32), mask=inside)
        tl.store(metrics_ptr + 3 * metrics_stride, tl.where(kept, maximum + log_sum, 0.0), mask=inside)
    loss = with_options(loss, label, maximum, log_sum, weighted_sum, weight_ptr, weight_sum_ptr, V, SMOOTHING, Z_LOSS)
    tl.store(losses_ptr + rows, tl.where(kept, loss, 0.0), mask=inside)
    tl.store(stats_ptr + rows, tl.where(kept, maximum, 0.0), mask=inside)
    tl.store(stats_ptr + stats_stride + rows, tl.where(kept, log_sum, 0.0), mask=inside)


def projected_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    options: ce.Options,
    losses: Tensor,
    stats: Tensor,
    metrics: Tensor | None,
) -> bool:
    """Fill in losses, statistics and metrics; False, and nothing is done, where that can't be fast."""
    tiles = projection.tiles(hidden, weight, (torch.float16, torch.bfloat16), interpreted=torch.float16)
    if not tiles:
        return False
    for start in range(0, len(hidden), ROWS):
        part = slice(start, start + ROWS)
        of_part = (losses[part], stats[:, part], None if metrics is None else metrics[:, part])
        _projected(tiles, hidden[part], weight, bias, labels[part], class_weight, options, *of_part)
    return True


def _projected(
    tiles: dict[str, int],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    options: ce.Options,
    losses: Tensor,
    stats: Tensor,
    metrics: Tensor | None,
) -> None:
    (rows, width), vocabulary = hidden.shape, len(weight)
    count = 2 * cdiv(vocabulary, tiles["BLOCK_V"])
    kinds = 4 if options.label_smoothing else 2 if metrics is None else 3
    parts = losses.new_empty((kinds, count, rows))
    best = None if metrics is None else labels.new_empty((count, rows), dtype=torch.int32)
    # What no tile writes is the logit of a label that is out of range, at which the reduction stops the device.
    z_label = losses.new_full((rows,), float("nan"))
    labels, (class_weight, weight_sum) = labels.contiguous(), weights(class_weight, options, losses)
    launch(
        projected_parts_kernel,
        projection.programs(hidden, weight, tiles),
        losses,
        *(*projection.operands(hidden, weight, tiles), contiguous(bias), labels, class_weight, parts, best, z_label),
        *(rows, vocabulary, width),
        WHOLE=vocabulary % tiles["BLOCK_V"] == 0,
        SMOOTHING=options.label_smoothing,
        SOFTCAP=options.softcap,
        SCALE=options.logit_scale,
        GROUP=projection.GROUP,
        **tiles,
    )
    launch(
        projected_losses_kernel,
        cdiv(rows, BLOCK_ROWS),
        losses,
        *(parts, best, z_label, labels, class_weight, weight_sum),
        *(losses, stats, stats.stride(0), metrics, 0 if metrics is None else metrics.stride(0)),
        *(rows, vocabulary, count, options.ignore_index),
        SMOOTHING=options.label_smoothing,
        Z_LOSS=options.z_loss,
        BLOCK_T=BLOCK_ROWS,
        BLOCK_P=BLOCK_PARTS,
        num_warps=WARPS,
    )
