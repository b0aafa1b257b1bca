"""What linear_cross_entropy computes on every device: losses and gradients of a projection, chunk by chunk of its rows.

A chunk's logits live in one buffer, become their own gradient in place, and are multiplied into the gradients of hidden
and weight before the next chunk overwrites them. Rows that are ignored take no part in any of it.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from csrc_meta import cross_entropy as ce
from csrc_meta.results import compute_dtype

# Each chunk reads and writes the whole sum of the weight's gradient: 8 V H bytes in float32 beside 6 rows V H
# floating-point operations. At 4 TB/s and 700 TFLOP/s that is up to 230 / rows of the GEMMs' time, whatever V and H are.
FEWEST_CHUNK_ROWS = 2048
# Below this a chunk's logits are too small to be worth splitting.
SMALL_CHUNK_BYTES = 64 * 2**20
WHOLE = 512  # rows: of a multiple of them GEMMs are fast, whatever their tiles
TILE = 256  # columns, at most, of a GEMM's tile
FINISHED = 2**23  # elements of the gradient of hidden that are held in float32: fewer keep no GPU busy
ALIGNED = 8  # elements, no more than 16 bytes unless they are wide: what rows of logits begin at a multiple of
SCRATCH = 2**24  # elements that are rounded beside their place, so that the rest can be rounded in it


def chunk_rows(
    rows: int, hidden: int, vocabulary: int, element_size: int, saved: int = 0, budget: int | None = None
) -> int:
    """Rows whose logits are held at a time.

    Without a budget the buffer is no larger than the weight, which the user has room for: its gradient is as large again.
    Of the rows that make it so GEMMs get a power of two; fewer than 2048 would cost more time than they save memory. All
    rows are one chunk where that takes no more memory. Otherwise the chunks are alike.

    Args:
        rows: rows of hidden that are not ignored.
        hidden: H.
        vocabulary: V.
        element_size: bytes of an element of hidden and weight.
        saved: bytes for each element of the weight that one chunk saves and several chunks need for their sum.
        budget: bytes that the logits of a chunk may take, however large the weight is.
    """
    row_bytes = max(vocabulary * element_size, 1)
    if budget is None:
        most = max(1 << max(hidden.bit_length() - 1, 0), FEWEST_CHUNK_ROWS, SMALL_CHUNK_BYTES // row_bytes)
    else:
        most = max(budget // row_bytes, 1)
        most -= most % WHOLE if most > WHOLE else 0
    if rows <= most + hidden * saved // element_size:
        return max(rows, 1)
    chunks = -(-rows // most)
    return min(_round_up(-(-rows // chunks), WHOLE), most)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


Matrices = list[tuple[slice, Tensor]]  # one matrix: columns, and what it has there


class Factored(Protocol):
    """Gradients of logits that were never read: a matrix times a factor for each row, less a term for each row's label.

    What multiplies the matrix takes the factors: rows of hidden before, rows of a product after. It also fills in losses and
    statistics.
    """

    def fill(self, part: slice, hidden: Tensor, matrices: "Matrices") -> None:
        """Write the matrix for a part of the rows, whose factors are known from then on."""

    def scale(self, part: slice, hidden: Tensor, out: Tensor) -> None:
        """``out = factors * hidden``: matrix.T @ out is the gradient of weight without labels' terms."""

    def add_rounded(self, total: Tensor, matrix: Tensor, states: Tensor, out: Tensor) -> None:
        """``out = total + matrix.T @ states``, rounded once; out may be where a part of total was that isn't given."""

    def finish(self, part: slice, product: Tensor, out: Tensor) -> None:
        """``out``: the gradient of hidden, of product = matrix @ weight."""

    def add_labels(self, hidden: Tensor, index: Tensor | None, pieces: list[tuple[slice, Tensor]]) -> None:
        """Add labels' terms to pieces of the gradient of weight. ``index``: the rows of hidden that are not ignored."""


class Kernels(NamedTuple):
    """What differs between devices.

    Attributes:
        rows: how rows of logits become losses and gradients.
        kept: ``(labels, ignore_index, work) -> indices``, in order, of the rows that are not ignored; None for all of
            them, which is always right. ``work``: multiplications that each product takes if none is left out.
        losses: ``(hidden, weight, bias, labels, class_weight, options, losses, stats, metrics) -> done``: the three last
            without a buffer of logits, metrics where they are not None; False, and nothing done, where that can't be.
        factored: ``(hidden, weight, bias, labels, class_weight, options, losses, stats, metrics, upstream, divisor)``:
            gradients without a pass over the logits, ``upstream`` for each row or one for all; None where that can't be.
    """

    rows: ce.RowKernels
    kept: Callable[[Tensor, int, int], Tensor | None]
    losses: Callable[..., bool]
    factored: Callable[..., Factored | None]


def kept_ref(labels: Tensor, ignore_index: int, work: int) -> Tensor | None:
    kept = labels != ignore_index
    return None if kept.all() else kept.nonzero().squeeze(1)


REFERENCE = Kernels(ce.REFERENCE, kept_ref, lambda *args: False, lambda *args: None)


class _Rows:
    """The rows of a call that are not ignored."""

    def __init__(self, kernels: Kernels, hidden: Tensor, weight: Tensor, labels: Tensor, options: ce.Options) -> None:
        self.hidden, self.all_labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        kernels.rows.check_values("linear_cross_entropy", self.all_labels, weight.shape[0], options.ignore_index)
        self.index = kernels.kept(self.all_labels, options.ignore_index, self.hidden.numel() * weight.shape[0])
        self.labels = self.only(self.all_labels)

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, t: Tensor, part: slice = slice(None), dim: int = 0) -> Tensor:
        """What a tensor with an element for each row of the call has for these rows, or for a part of them."""
        if self.index is None:
            return t if part == slice(None) else t[part]
        return t.index_select(dim, self.index[part])

    def spread(self, t: Tensor) -> Tensor:
        """The opposite: a result with an element for each row of the call, zero where it is ignored."""
        if self.index is None:
            return t
        return t.new_zeros((*t.shape[:-1], len(self.all_labels))).index_copy_(-1, self.index, t)


class _Gradients:
    """Gradients of hidden, weight and bias, added up chunk by chunk; unwanted ones are empty.

    That of the weight adds up in ``sums`` (float32 as a rule, since sums in bfloat16 are rounded after each chunk). It is
    a plain product in the dtype of the results where there is but one chunk.
    """

    def __init__(
        self,
        rows: _Rows,
        weight: Tensor,
        output_mask: list[bool],
        sums: torch.dtype,
        results: torch.dtype,
        budget: int | None,
    ) -> None:
        self.wants_hidden, self.wants_weight, self.wants_bias = output_mask
        self.rows, self.dtype = rows, results
        narrowing = sums.itemsize // results.itemsize
        saved = (sums.itemsize - results.itemsize) * self.wants_weight
        # Without a gradient of the weight chunks cost nothing, and have less reason to be large.
        width = weight.shape[1] if self.wants_weight else 0
        self.step = chunk_rows(len(rows), width, weight.shape[0], weight.element_size(), saved, budget)
        is_sum = len(rows) > self.step
        new = rows.hidden.new_empty if rows.index is None else rows.hidden.new_zeros
        self.hidden = new(rows.hidden.shape if self.wants_hidden else (0,))
        # The first chunk overwrites it: without one it has to be zero.
        new = weight.new_empty if len(rows) else weight.new_zeros
        shape = weight.shape if self.wants_weight else torch.Size((0, 0))
        pieces = _pieces(shape[0], narrowing) if is_sum else [slice(0, shape[0])]
        dtype = sums if is_sum else results
        # As large as the first: what they hold before a sum is written into them is as large (see parts).
        self.storage = [new((pieces[0].stop, shape[1]), dtype=dtype) for _ in pieces]
        self.sums = [(p, whole[: p.stop - p.start]) for p, whole in zip(pieces, self.storage, strict=True)]
        self.weight: Tensor | None = None  # the result, once it is rounded
        self.bias = weight.new_zeros(weight.shape[:1] if self.wants_bias else (0,), dtype=compute_dtype(weight))

    @property
    def take_factors(self) -> bool:
        """Labels' terms nearly cancel what the other rows add to a frequent label's gradient: only wide sums take both."""
        return not self.wants_weight or all(total.dtype == self.bias.dtype for _, total in self.sums)

    def add(self, part: slice, dlogits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        if self.wants_hidden:
            index = self.rows.index
            if index is None:
                torch.mm(dlogits, weight, out=self.hidden[part])
            else:
                self.hidden.index_copy_(0, index[part], torch.mm(dlogits, weight))
        if self.wants_weight:
            for piece, total in self.sums:
                _add_product(total, dlogits[:, piece].t(), hidden, overwrite=part.start == 0)
        if self.wants_bias:
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)

    def parts(self, weight: Tensor) -> Iterator[tuple[slice, Matrices]]:
        """Each chunk's rows, and where its matrix is to be.

        That is a buffer. But while there is no sum yet, its memory is free for a larger chunk, which leaves fewer to be
        added up: a piece's columns are held where the next piece of the sum will be, and the buffer has the last one's.
        """
        count, width = len(self.rows), _round_up(weight.shape[0], ALIGNED)
        buffer = weight.new_empty(min(self.step, count) * width)
        places = [whole.view(-1).view(weight.dtype) for whole in self.storage[1:]] + [buffer]
        widths = [_round_up(p.stop - p.start, ALIGNED) for p, _ in self.sums]
        most = min(place.numel() // max(width, 1) for place, width in zip(places, widths, strict=True))
        most -= most % WHOLE if most > WHOLE else 0
        done = 0
        if len(places) > 1 and most > self.step:
            done = count - max(-(-(count - most) // self.step), 0) * self.step
            sizes = zip(self.sums, places, widths, strict=True)
            yield slice(0, done), [(p, _matrix(place, done, w, p.stop - p.start)) for (p, _), place, w in sizes]
        for start in range(done, count, self.step):
            part = slice(start, min(start + self.step, count))
            columns = slice(0, weight.shape[0])
            yield part, [(columns, _matrix(buffer, part.stop - start, width, columns.stop))]

    def add_factored(self, part: slice, factored: Factored, matrices: Matrices, hidden: Tensor, weight: Tensor) -> None:
        in_place = self.wants_hidden and self.rows.index is None
        place = self.hidden[part] if in_place else hidden.new_empty(hidden.shape)
        sums_overwrite = len(matrices) > 1
        if sums_overwrite:
            self._add_to_hidden(part, factored, matrices, place, weight)
            if in_place:  # the rows behind these are not made yet
                behind = self.hidden[part.stop : part.stop + len(hidden)]
                place = behind if len(behind) == len(hidden) else hidden.new_empty(hidden.shape)
        self._add_to_weight(part, factored, matrices, hidden, place)
        if not sums_overwrite:
            self._add_to_hidden(part, factored, matrices, place, weight)

    def _add_to_weight(
        self, part: slice, factored: Factored, matrices: Matrices, hidden: Tensor, states: Tensor
    ) -> None:
        if not self.wants_weight:
            return
        factored.scale(part, hidden, states)
        is_last = part.stop == len(self.rows)
        rounds = is_last and part.start > 0 and self.sums[0][1].dtype != self.dtype
        if not rounds:
            for piece, total in self.sums:
                _add_product(total, _columns(matrices, piece).t(), states, overwrite=part.start == 0)
        if is_last:
            factored.add_labels(self.rows.hidden, self.rows.index, self.sums)
        if rounds:
            self.weight = _one_after_another(
                [total for _, total in self.sums],
                self.dtype,
                lambda total, out, rows: factored.add_rounded(total, _columns(matrices, rows), states, out),
            )

    def _add_to_hidden(
        self, part: slice, factored: Factored, matrices: Matrices, place: Tensor, weight: Tensor
    ) -> None:
        if not self.wants_hidden:
            return
        step = max(FINISHED // place.shape[1] // WHOLE, 1) * WHOLE
        for start in range(0, len(place), step):
            block = slice(start, start + step)
            product = place.new_empty(place[block].shape, dtype=self.bias.dtype)
            for columns, matrix in matrices:
                _add_product(product, matrix[block], weight[columns], overwrite=columns.start == 0)
            factored.finish(slice(part.start + start, part.start + start + len(product)), product, place[block])
        if self.rows.index is not None:
            self.hidden.index_copy_(0, self.rows.index[part], place)

    def results(self, shape: torch.Size) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients, that of hidden in the shape of hidden. Called once: the sums are rounded in their place."""
        if self.weight is None and self.wants_weight:
            self.weight = _one_after_another([total for _, total in self.sums], self.dtype)
        elif self.weight is None:
            self.weight = self.bias.new_empty(0, dtype=self.dtype)
        return self.hidden.view(shape) if self.wants_hidden else self.hidden, self.weight, self.bias.to(self.dtype)


def _matrix(place: Tensor, rows: int, width: int, columns: int) -> Tensor:
    """A matrix at the beginning of a place, whose rows begin at multiples of width."""
    return place[: rows * width].view(rows, width)[:, :columns]


def _columns(matrices: Matrices, wanted: slice) -> Tensor:
    return next(
        matrix[:, wanted.start - columns.start : wanted.stop - columns.start]
        for columns, matrix in matrices
        if columns.start <= wanted.start and wanted.stop <= columns.stop
    )


def _pieces(size: int, count: int) -> list[slice]:
    """Up to ``count`` pieces of rows, the first no smaller than the others together where there are two."""
    first = min(_round_up(-(-size // count), TILE), size)
    return [slice(start, min(start + first, size)) for start in range(0, size, max(first, 1))] or [slice(0, 0)]


def _round(source: Tensor, target: Tensor, rows: slice) -> None:
    target.copy_(source)


def _one_after_another(
    pieces: list[Tensor], dtype: torch.dtype, write: Callable[[Tensor, Tensor, slice], object] = _round
) -> Tensor:
    """Rows of several tensors as one tensor of a narrower dtype, in the storage of the first: nothing new is allocated.

    An element is written where a wider one was that has been read. That holds for a stretch of rows as long as all before
    it; the beginning goes by way of a copy. ``write(source, target, rows)`` narrows a stretch.
    """
    first = pieces[0]
    if len(pieces) == 1 and first.dtype == dtype:
        return first
    rows, width = sum(len(p) for p in pieces), first.shape[1]
    result = first.new_empty(0, dtype=dtype).set_(first.untyped_storage(), 0, (rows, width), (width, 1))  # type: ignore
    done = min(_round_up(max(SCRATCH // max(width, 1), 1), ALIGNED), len(first))
    beginning = first.new_empty((done, width), dtype=dtype)
    write(first[:done], beginning, slice(0, done))
    result[:done].copy_(beginning)
    while done < len(first):
        stretch = slice(done, min(2 * done, len(first)))
        write(first[stretch], result[stretch], stretch)
        done = stretch.stop
    for piece in pieces[1:]:
        stretch = slice(done, done + len(piece))
        write(piece, result[stretch], stretch)
        done = stretch.stop
    return result


def _add_product(total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """total += a @ b with products summed in total's dtype, whatever the dtype of a and b; or total = a @ b."""
    beta = 0 if overwrite else 1
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta)


def divides_early(dtype: torch.dtype) -> bool:
    """Whether gradients are divided by the total in the forward pass; in float16 they would underflow.

    float16 loss scaling arrives with the upstream gradient, and is multiplied in before anything is rounded.
    """
    return dtype != torch.float16


def _chunks(rows: _Rows, weight: Tensor, bias: Tensor | None, step: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Each chunk's rows, their hidden states and their logits, whose buffer is the same for all chunks."""
    vocabulary = weight.shape[0]
    buffer = weight.new_empty((min(step, len(rows)), _round_up(vocabulary, ALIGNED)))
    for start in range(0, len(rows), step):
        part = slice(start, min(start + step, len(rows)))
        hidden, out = rows.only(rows.hidden, part), buffer[: part.stop - start, :vocabulary]
        if bias is None:
            yield part, hidden, torch.mm(hidden, weight.t(), out=out)
        else:
            yield part, hidden, torch.addmm(bias, hidden, weight.t(), out=out)


def _add_factored(factored: Factored, rows: _Rows, gradients: _Gradients, weight: Tensor) -> None:
    for part, matrices in gradients.parts(weight):
        states = rows.only(rows.hidden, part)
        factored.fill(part, states, matrices)
        gradients.add_factored(part, factored, matrices, states, weight)


def forward(
    kernels: Kernels,
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
    wide, given = compute_dtype(hidden), ce.Options(*options)
    rows = _Rows(kernels, hidden, weight, labels, given)
    losses = hidden.new_empty(len(rows), dtype=wide)
    stats = hidden.new_empty((2, len(rows)), dtype=wide)
    metrics = hidden.new_empty((4, len(rows)), dtype=wide) if wants_metrics else None
    makes_gradients = reduction != "none" and any(output_mask)
    early = divides_early(hidden.dtype)
    wanted = output_mask if makes_gradients else [False] * 3
    kept = hidden.dtype if early else wide
    gradients = _Gradients(rows, weight, wanted, accum_dtype or wide, kept, chunk_bytes)
    if divisor is not None:
        divisor = divisor.to(wide)
    elif reduction == "mean" and makes_gradients and early:
        # Again below, where a label out of range stops the device: what is launched after that fails for no reason given.
        divisor = ce.label_weights(rows.labels, class_weight, given.ignore_index, wide).sum()
    one = hidden.new_ones((), dtype=wide)
    of_all = (weight, bias, rows.labels, class_weight, given, losses, stats, metrics)
    takes_factors = makes_gradients and gradients.take_factors
    factored = kernels.factored(rows.hidden, *of_all, one, divisor) if takes_factors else None
    if factored is not None:
        _add_factored(factored, rows, gradients, weight)
    # Gradients of logits as they are stored have statistics of the same.
    elif any(output_mask) or not kernels.losses(rows.only(rows.hidden), *of_all):
        for part, states, logits in _chunks(rows, weight, bias, gradients.step):
            of_part = (logits, rows.labels[part], class_weight)
            kernels.rows.losses(
                *of_part, given, losses[part], stats[:, part], None if metrics is None else metrics[:, part]
            )
            if makes_gradients:
                kernels.rows.gradients(one, divisor if early else None, *of_part, stats[:, part], given, logits)
                gradients.add(part, logits, states, weight)
            del of_part, logits  # or their buffer would stay while the gradients are rounded
    loss, total = kernels.rows.reduce(losses, rows.labels, class_weight, weight.shape[0], given, reduction)
    if reduction == "none":
        loss, stats = rows.spread(loss).view(labels.shape), rows.spread(stats)
    else:
        stats = stats.new_empty(0)
    if reduction == "sum" and divisor is not None:
        loss, total = loss / divisor, total.copy_(divisor)
    of_rows = stats.new_empty(0) if metrics is None else rows.spread(metrics)
    return loss, stats, of_rows, total, *gradients.results(hidden.shape)


def backward(
    kernels: Kernels,
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
    given = ce.Options(*options)
    rows = _Rows(kernels, hidden, weight, labels, given)
    upstream, stats = rows.only(dloss.reshape(-1)), rows.only(stats, dim=1)
    gradients = _Gradients(rows, weight, output_mask, accum_dtype or stats.dtype, weight.dtype, chunk_bytes)
    of_all = (weight, bias, rows.labels, class_weight, given, torch.empty_like(upstream), torch.empty_like(stats), None)
    factored = kernels.factored(rows.hidden, *of_all, upstream, None) if gradients.take_factors else None
    if factored is not None:
        _add_factored(factored, rows, gradients, weight)
        return gradients.results(hidden.shape)
    for part, states, logits in _chunks(rows, weight, bias, gradients.step):
        of_part = (logits, rows.labels[part], class_weight, stats[:, part])
        kernels.rows.gradients(upstream[part], None, *of_part, given, logits)
        gradients.add(part, logits, states, weight)
        del of_part, logits
    return gradients.results(hidden.shape)
