"""Losses of a projection and the gradients of its logits on a GPU, without a pass over the logits.

T: rows (tokens), of a chunk
H: hidden size
V: vocabulary

The gradient of a row's logits is, but for the column of its label, exp(z - lse) times a number. lse is known when the row is
complete; exp(z - r) for any reference r differs from it by a factor of the row, and that factor may as well multiply what
the row is multiplied with. So the product that makes the logits stores exp(z - r) in their place and sums it; factors
multiply the rows of hidden before the product that gives the gradient of weight, and the rows of the product that gives the
gradient of hidden after it. The column of the label is left out of the matrix. Its share, most of the gradient while the
model is wrong, is added in the precision of the sums.

r is the logit of the label plus SHIFT: then no exponential overflows unless the loss of a row exceeds 97. The product is
repeated, for all rows of the chunk, with their largest logits as references where that happens; the device decides.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_meta import cross_entropy as ce
from csrc_meta.chunks import Matrices
from fusedops.kernels import projection
from fusedops.kernels.cross_entropy import map_logits, with_options
from fusedops.kernels.launch import cdiv, contiguous, launch, power_of_2, processors
from fusedops.kernels.projection import place, product, quarters

LOG2_E = tl.constexpr(math.log2(math.e))
LOG_2 = tl.constexpr(math.log(2))
# Binary logarithms. Of a label's exponential: what is 2^-66 of it, or less, is lost.
SHIFT = tl.constexpr(60.0)
# Of the largest exponential: those of 2^18 columns, and their products with a weight below 2^28, sum up in float32.
LIMIT = tl.constexpr(80.0)
# Of the kernels that put together the parts of rows, and that work on rows of a hidden size.
BLOCK_ROWS = 16
BLOCK_PARTS = 128
BLOCK_H = 1024
BLOCK_SAME = 4  # rows of one label that are added at a time
WARPS = 4


@triton.jit(do_not_specialize=["ignore_index"])
def label_logits_kernel(
    hidden_ptr,
    hidden_stride,
    weight_ptr,
    weight_stride,
    labels_ptr,
    references_ptr,
    x_label_ptr,
    V,
    H,
    ignore_index,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """x_label = hidden . weight[label]; references = z_label / log(2) + SHIFT, infinite in ignored rows.

    NaN for a label out of range, at which the reduction of all rows stops the device. Grid: T.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    known = (label >= 0) & (label < V)
    hidden_ptr += row * hidden_stride
    weight_ptr += tl.where(known, label, 0) * weight_stride
    products = tl.zeros((BLOCK_H,), tl.float32)
    for start in range(0, H, BLOCK_H):
        columns = start + tl.arange(0, BLOCK_H)
        inside = known & (columns < H)
        hidden = tl.load(hidden_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        products += hidden * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(known, tl.sum(products, 0), float("nan"))
    z, _ = map_logits(x, SOFTCAP, SCALE)
    tl.store(x_label_ptr + row, x)
    tl.store(references_ptr + row, tl.where(label == ignore_index, float("inf"), z * LOG2_E + SHIFT))


@triton.jit
def _exponentials(
    sums,
    tile_t,
    part,
    out_desc,
    labels_ptr,
    references_ptr,
    parts_ptr,
    first_column,
    first_part,
    T,
    V,
    P,
    WHOLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
):
    """What the kernel below makes of some columns of its tile."""
    ROWS: tl.constexpr = sums.shape[0]
    COLUMNS: tl.constexpr = sums.shape[1]
    first = part * COLUMNS
    rows = tile_t * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows < T
    references = tl.load(references_ptr + rows, mask=inside, other=0.0)
    if SOFTCAP is None:
        y = sums * (SCALE * LOG2_E) - references[:, None]
    else:
        z, slopes = map_logits(sums, SOFTCAP, SCALE)
        y = z * LOG2_E - references[:, None]
    if not WHOLE:
        y = tl.where((first + columns < V)[None, :], y, -float("inf"))
    label = tl.load(labels_ptr + rows, mask=inside, other=-1) - first_column
    has_label = (label >= first) & (label < first + COLUMNS)
    label = tl.where(has_label, label - first, -1).to(tl.int32)  # 64 bits take two comparisons for each element
    exponentials = tl.where(columns[None, :] == label[:, None], 0.0, tl.exp2(y))
    parts_ptr += (first_part + part).to(tl.int64) * T + rows
    tl.store(parts_ptr, tl.sum(exponentials, 1), mask=inside)
    tl.store(parts_ptr + P.to(tl.int64) * T, tl.max(y, 1), mask=inside)
    if SOFTCAP is not None:
        exponentials *= slopes
    out_desc.store([tile_t * ROWS, first], exponentials.to(out_desc.dtype))


@triton.jit(do_not_specialize=["first_column", "first_part", "T", "P"])
def exponentials_kernel(
    hidden_desc,
    weight_desc,
    out_desc,
    labels_ptr,
    references_ptr,
    parts_ptr,
    needed_ptr,
    first_column,
    first_part,
    T,
    V,
    H,
    P,
    WHOLE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out = 2^y, with y = z / log(2) - references, and 0 in the column of the label, for logits x = hidden @ weight.T.

    weight and out have V columns of the logits, from first_column on; V may not be all of them.

    z is x or SOFTCAP * tanh(SCALE * x / SOFTCAP), and is not rounded. With SOFTCAP out is multiplied by dz / dx as well.
    parts (2, P, T) = sum_j 2^(y_j) and max_j y_j of the columns of each part, without the label's in the sum; each tile has
    PARTS, 1 or 4, from first_part on. Nothing is done where needed_ptr is given and points at zero. Grid: programs, each takes every so manieth
    tile. Tile: BLOCK_T x BLOCK_V, a product along H.
    """
    tiles_t, tiles_v = tl.cdiv(T, BLOCK_T), tl.cdiv(V, BLOCK_V)
    tiles = tiles_t * tiles_v
    if needed_ptr is not None:
        tiles *= tl.load(needed_ptr)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_t, tile_v = place(tile, tiles_t, tiles_v, GROUP)
        sums = product(hidden_desc, weight_desc, tile_t, tile_v, H, BLOCK_T, BLOCK_V, BLOCK_H)
        if PARTS == 1:
            parts = (sums,)
        else:
            parts = quarters(sums)
        for i in tl.static_range(PARTS):
            _exponentials(
                parts[i],
                tile_t,
                PARTS * tile_v + i,
                out_desc,
                labels_ptr,
                references_ptr,
                parts_ptr,
                first_column,
                first_part,
                T,
                V,
                P,
                WHOLE,
                SOFTCAP,
                SCALE,
            )


@triton.jit(do_not_specialize=["stats_stride", "P", "upstream_stride", "ignore_index"])
def exponential_rows_kernel(
    parts_ptr,
    references_ptr,
    x_label_ptr,
    labels_ptr,
    weight_ptr,
    upstream_ptr,
    upstream_stride,
    total_ptr,
    losses_ptr,
    stats_ptr,
    stats_stride,
    factors_ptr,
    of_label_ptr,
    needed_ptr,
    T,
    V,
    P,
    ignore_index,
    AGAIN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALE: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Losses and statistics as those of cross_entropy_fwd_kernel, and what multiplies rows and labels in gradients.

    With S the sum of a row's exponentials, e that of its label, u = upstream / total and
    mass = w_label * (1 + 2 * Z_LOSS * lse), as in cross_entropy_bwd_kernel: factors = u * mass / (S + e), and
    of_label = u * dz / dx * (w_label - mass * e / (S + e)). It asks for exponentials anew, by needed and by references that are
    the largest logits, where they may have overflowed; AGAIN, it does nothing unless they were. Grid: blocks of rows.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    if AGAIN:
        P *= tl.load(needed_ptr)
    inside = rows < T
    sums = tl.zeros((BLOCK_T,), tl.float32)
    largest = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    for start in range(0, P, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        mask = (part < P)[:, None] & inside[None, :]
        offsets = part.to(tl.int64)[:, None] * T + rows[None, :]
        sums += tl.sum(tl.load(parts_ptr + offsets, mask=mask, other=0.0), 0)
        maxima = tl.load(parts_ptr + P.to(tl.int64) * T + offsets, mask=mask, other=-float("inf"))
        largest = tl.maximum(largest, tl.max(maxima, 0))
    if AGAIN:
        inside = inside & (P > 0)
    label = tl.load(labels_ptr + rows, mask=inside, other=ignore_index)
    kept = label != ignore_index
    reference = tl.load(references_ptr + rows, mask=inside, other=0.0)
    x_label = tl.load(x_label_ptr + rows, mask=inside, other=0.0)
    z_label, slope = map_logits(x_label, SOFTCAP, SCALE)
    if not AGAIN:
        overflows = kept & (largest > LIMIT) & inside
        tl.store(references_ptr + rows, reference + largest, mask=overflows)
        if tl.max(overflows.to(tl.int32), 0) > 0:
            tl.store(needed_ptr, 1)
    of_label = tl.full((BLOCK_T,), 1.0, tl.float32)
    if weight_ptr is not None:
        of_label = tl.load(weight_ptr + label, mask=kept & (label >= 0) & (label < V), other=0.0).to(tl.float32)
    gap = reference - z_label * LOG2_E  # SHIFT, unless the reference is the largest logit
    e = tl.exp2(-gap)
    total = sums + e
    # Where the label has nearly all, what the others have is told from one before it is lost in a logarithm of the sum.
    near = (sums < 1.0) & (gap < 2.0 * SHIFT)
    log_sum = tl.where(near, tl.log2(1.0 + sums * tl.exp2(tl.where(near, gap, 0.0))), gap + tl.log2(total)) * LOG_2
    loss = with_options(log_sum, label, z_label, log_sum, 0.0, weight_ptr, None, V, 0.0, Z_LOSS)
    penalty = tl.zeros((BLOCK_T,), tl.float32)
    if Z_LOSS != 0.0:
        penalty = of_label * (2.0 * Z_LOSS) * (z_label + log_sum)
    upstream = tl.load(upstream_ptr + rows * upstream_stride, mask=inside, other=0.0).to(tl.float32)
    if total_ptr is not None:
        upstream /= tl.load(total_ptr)
    factor = upstream * (of_label + penalty) / total
    if SOFTCAP is None:
        factor *= slope
    of_label = upstream * slope * (of_label * (sums / total) - penalty * (e / total))
    tl.store(losses_ptr + rows, tl.where(kept, loss, 0.0), mask=inside)
    tl.store(stats_ptr + rows, tl.where(kept, z_label, 0.0), mask=inside)
    tl.store(stats_ptr + stats_stride + rows, tl.where(kept, log_sum, 0.0), mask=inside)
    tl.store(factors_ptr + rows, tl.where(kept, factor, 0.0), mask=inside)
    tl.store(of_label_ptr + rows, tl.where(kept, of_label, 0.0), mask=inside)


@triton.jit(do_not_specialize=["ignore_index"])
def scaled_rows_kernel(
    x_ptr,
    x_stride,
    factors_ptr,
    weight_ptr,
    weight_stride,
    of_label_ptr,
    labels_ptr,
    out_ptr,
    out_stride,
    V,
    H,
    ignore_index,
    BLOCK_H: tl.constexpr,
):
    """out = factors * x - of_label * weight[label], the second term where weight_ptr is given; 0 in ignored rows.

    Grid: T times blocks of H. Tile: BLOCK_H. Every element is read before it is written: out may be x.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    label = tl.load(labels_ptr + row)
    inside = (columns < H) & (label != ignore_index)
    out = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32) * tl.load(factors_ptr + row)
    if weight_ptr is not None:
        weight = tl.load(
            weight_ptr + label * weight_stride + columns, mask=inside & (label >= 0) & (label < V), other=0.0
        )
        out -= tl.load(of_label_ptr + row) * weight.to(tl.float32)
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit(do_not_specialize=["T", "first", "ignore_index"])
def label_rows_kernel(
    labels_ptr,
    order_ptr,
    places_ptr,
    of_label_ptr,
    hidden_ptr,
    hidden_stride,
    out_ptr,
    T,
    first,
    V,
    H,
    ignore_index,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[label - first] -= sum of of_label * hidden over the rows with that label, for labels in first, ..., first + V - 1.

    labels are in order; order says which row has each of them, places where hidden has that row (None: in its place). Grid:
    T times blocks of H; of all programs for a label the first works. Sums have one order.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    start = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * BLOCK_H + tl.arange(0, BLOCK_H)
    label = tl.load(labels_ptr + start)
    before = tl.load(labels_ptr + start - 1, mask=start > 0, other=-1)
    is_first = (start == 0) | (before != label)
    if is_first & (label != ignore_index) & (label >= first) & (label < first + V):
        sums = tl.zeros((BLOCK_H,), tl.float32)
        more = label >= 0
        while more:
            i = start + tl.arange(0, BLOCK_T)
            same = tl.load(labels_ptr + i, mask=i < T, other=-1) == label
            same = same & (i < T)
            row = tl.load(order_ptr + i, mask=same, other=0)
            of_label = tl.load(of_label_ptr + row, mask=same, other=0.0)
            if places_ptr is not None:
                row = tl.load(places_ptr + row, mask=same, other=0)
            mask = same[:, None] & (columns < H)[None, :]
            x = tl.load(hidden_ptr + row[:, None] * hidden_stride + columns[None, :], mask=mask, other=0.0)
            sums += tl.sum(of_label[:, None] * x.to(tl.float32), 0)
            start += BLOCK_T
            more = tl.min(same.to(tl.int32), 0) > 0
        out_ptrs = out_ptr + (label - first) * H + columns
        out = tl.load(out_ptrs, mask=columns < H, other=0.0).to(tl.float32)
        tl.store(out_ptrs, (out - sums).to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit(do_not_specialize=["V"])
def rounded_sum_kernel(
    matrix_desc,
    states_desc,
    out_desc,
    total_ptr,
    V,
    H,
    T,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """out = total + matrix.T @ states, rounded once. total (V, H) is contiguous.

    Grid: programs, each takes every so manieth tile. Tile: BLOCK_V x BLOCK_H; a product along T.
    """
    tiles_v, tiles_h = tl.cdiv(V, BLOCK_V), tl.cdiv(H, BLOCK_H)
    for tile in tl.range(tl.program_id(0), tiles_v * tiles_h, tl.num_programs(0), flatten=True):
        tile_v, tile_h = place(tile, tiles_v, tiles_h, GROUP)
        sums = tl.zeros((BLOCK_V, BLOCK_H), tl.float32)
        for t in range(0, T, BLOCK_T):
            matrix = matrix_desc.load([t, tile_v * BLOCK_V])
            states = states_desc.load([t, tile_h * BLOCK_H])
            sums = tl.dot(matrix.T, states, sums)
        rows = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        parts = quarters(sums)
        for i in tl.static_range(4):
            first = tile_h * BLOCK_H + i * (BLOCK_H // 4)
            columns = first + tl.arange(0, BLOCK_H // 4)
            mask = (rows < V)[:, None] & (columns < H)[None, :]
            total = tl.load(total_ptr + rows.to(tl.int64)[:, None] * H + columns[None, :], mask=mask, other=0.0)
            out_desc.store([tile_v * BLOCK_V, first], (total + parts[i]).to(out_desc.dtype))


class Exponentials:
    """As csrc_meta.chunks.Factored."""

    def __init__(
        self,
        weight: Tensor,
        labels: Tensor,
        class_weight: Tensor | None,
        options: ce.Options,
        losses: Tensor,
        stats: Tensor,
        upstream: Tensor,
        divisor: Tensor | None,
    ) -> None:
        self.weight, self.labels, self.class_weight = weight, labels.contiguous(), contiguous(class_weight)
        self.options, self.losses, self.stats, self.upstream, self.divisor = options, losses, stats, upstream, divisor
        self.factors, self.of_label = losses.new_empty((2, len(losses))).unbind()

    def fill(self, part: slice, hidden: Tensor, matrices: Matrices) -> None:
        weight, options = self.weight, self.options
        (rows, width), vocabulary = hidden.shape, len(weight)
        tiles = tiles_for(hidden, weight)
        # What tanh takes for all columns of a tile would exceed the registers.
        parts_of_tile = 1 if options.softcap is None else 4
        count = parts_of_tile * sum(cdiv(matrix.shape[1], tiles["BLOCK_V"]) for _, matrix in matrices)
        parts = self.losses.new_empty((2, count, rows))
        references, x_label = self.losses.new_empty((2, rows)).unbind()
        needed = self.labels.new_zeros((), dtype=torch.int32)
        labels, losses, stats = self.labels[part], self.losses[part], self.stats[:, part]
        upstream = self.upstream[part] if self.upstream.dim() else self.upstream
        constants = {"SOFTCAP": options.softcap, "SCALE": options.logit_scale}
        launch(
            label_logits_kernel,
            rows,
            losses,
            *(hidden, hidden.stride(0), weight, weight.stride(0), labels, references, x_label),
            *(vocabulary, width, options.ignore_index),
            **constants,
            BLOCK_H=min(BLOCK_H, power_of_2(width)),
            num_warps=WARPS,
        )
        block = [tiles["BLOCK_T"], tiles["BLOCK_V"] // parts_of_tile]
        for again in (False, True):
            first_part = 0
            for columns, matrix in matrices:
                of_columns = weight[columns]
                launch(
                    exponentials_kernel,
                    projection.programs(hidden, of_columns, tiles),
                    losses,
                    *(*projection.operands(hidden, of_columns, tiles), projection.descriptor(matrix, block)),
                    *(labels, references, parts, needed if again else None, columns.start, first_part),
                    *(rows, len(of_columns), width, count),
                    WHOLE=len(of_columns) % tiles["BLOCK_V"] == 0,
                    **constants,
                    PARTS=parts_of_tile,
                    GROUP=projection.GROUP,
                    **tiles,
                )
                first_part += parts_of_tile * cdiv(len(of_columns), tiles["BLOCK_V"])
            launch(
                exponential_rows_kernel,
                cdiv(rows, BLOCK_ROWS),
                losses,
                *(parts, references, x_label, labels, self.class_weight),
                *(upstream, upstream.stride(0) if upstream.dim() else 0, self.divisor),
                *(losses, stats, stats.stride(0), self.factors[part], self.of_label[part], needed),
                *(rows, vocabulary, count, options.ignore_index),
                AGAIN=again,
                **constants,
                Z_LOSS=options.z_loss,
                BLOCK_T=BLOCK_ROWS,
                BLOCK_P=BLOCK_PARTS,
                num_warps=WARPS,
            )

    def scale(self, part: slice, hidden: Tensor, out: Tensor) -> None:
        self._rows(part, hidden, None, out)

    def finish(self, part: slice, product: Tensor, out: Tensor) -> None:
        self._rows(part, product, self.weight, out)

    def _rows(self, part: slice, x: Tensor, weight: Tensor | None, out: Tensor) -> None:
        rows, width = x.shape
        launch(
            scaled_rows_kernel,
            rows * cdiv(width, BLOCK_H),
            x,
            *(x, x.stride(0), self.factors[part], weight, 0 if weight is None else weight.stride(0)),
            *(self.of_label[part], self.labels[part], out, out.stride(0)),
            *(len(self.weight), width, self.options.ignore_index),
            BLOCK_H=BLOCK_H,
            num_warps=WARPS,
        )

    def add_labels(self, hidden: Tensor, index: Tensor | None, pieces: list[tuple[slice, Tensor]]) -> None:
        labels, order = self.labels.sort(stable=True)
        for piece, total in pieces:
            rows, width = len(labels), total.shape[1]
            launch(
                label_rows_kernel,
                rows * cdiv(width, BLOCK_H),
                total,
                *(labels, order, index, self.of_label, hidden, hidden.stride(0), total),
                *(rows, piece.start, len(total), width, self.options.ignore_index),
                BLOCK_T=BLOCK_SAME,
                BLOCK_H=BLOCK_H,
                num_warps=WARPS,
            )

    def add_rounded(self, total: Tensor, matrix: Tensor, states: Tensor, out: Tensor) -> None:
        (rows, width), vocabulary = states.shape, len(total)
        tiles = tiles_for(states, self.weight)
        block_v, block_h, block_t = (tiles[n] for n in ("BLOCK_T", "BLOCK_V", "BLOCK_H"))
        launch(
            rounded_sum_kernel,
            min(cdiv(vocabulary, block_v) * cdiv(width, block_h), processors(total.device)),
            total,
            projection.descriptor(matrix, [block_t, block_v]),
            projection.descriptor(states, [block_t, block_h]),
            projection.descriptor(out, [block_v, block_h // 4]),
            *(total, vocabulary, width, rows),
            GROUP=projection.GROUP,
            BLOCK_V=block_v,
            BLOCK_H=block_h,
            BLOCK_T=block_t,
            num_warps=tiles["num_warps"],
            num_stages=tiles["num_stages"],
        )


def tiles_for(hidden: Tensor, weight: Tensor) -> dict[str, int]:
    """Not for float16, which could not hold what exponentials may be, nor where TMA could not write a gradient of weight."""
    if hidden.shape[1] * hidden.itemsize % projection.ALIGNMENT:
        return {}
    return projection.tiles(hidden, weight, (torch.bfloat16,), interpreted=torch.float32)


def factored(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    class_weight: Tensor | None,
    options: ce.Options,
    losses: Tensor,
    stats: Tensor,
    metrics: Tensor | None,
    upstream: Tensor,
    divisor: Tensor | None,
) -> Exponentials | None:
    """None with a bias or label smoothing, whose shares of gradients have no factor of the row, and with metrics."""
    if bias is not None or options.label_smoothing or metrics is not None or not tiles_for(hidden, weight):
        return None
    return Exponentials(weight, labels, class_weight, options, losses, stats, upstream, divisor)
