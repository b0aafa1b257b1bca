"""Chunks of linear_cross_entropy on a CPU, with factored gradients spelled out: which memory holds what, and when."""

import pytest
import torch

from csrc_meta import chunks
from csrc_meta import cross_entropy as ce

STEP = 32


class Spelled:
    """As csrc_meta.chunks.Factored, of softmax alone."""

    def __init__(self, weight, labels, losses, upstream, divisor):
        self.weight, self.labels, self.losses = weight, labels, losses
        self.upstream = upstream / divisor if divisor is not None else upstream
        self.factors, self.of_label = torch.empty(2, len(losses))
        self.rows = []

    def fill(self, part, hidden, matrices):
        self.rows.append((len(hidden), len(matrices)))
        rows, labels = torch.arange(len(hidden)), self.labels[part]
        logits = hidden.float() @ self.weight.float().t()
        exponentials, lse = logits.exp(), logits.logsumexp(-1)
        self.losses[part] = lse - logits[rows, labels]
        self.factors[part] = self.upstream / lse.exp()
        self.of_label[part] = self.upstream * (1 - (-self.losses[part]).exp())
        exponentials[rows, labels] = 0
        for _, matrix in matrices:
            matrix.fill_(float("nan"))  # all of them are there at once
        for columns, matrix in matrices:
            assert not matrix.isfinite().any()
            matrix.copy_(exponentials[:, columns])

    def scale(self, part, hidden, out):
        out.copy_(self.factors[part, None] * hidden)

    def finish(self, part, product, out):
        label = self.weight[self.labels[part]]
        out.copy_(self.factors[part, None] * product - self.of_label[part, None] * label)

    def add_labels(self, hidden, index, pieces):
        kept = hidden if index is None else hidden[index]
        terms = torch.zeros(self.weight.shape).index_add_(0, self.labels, self.of_label[:, None] * kept)
        for piece, total in pieces:
            total -= terms[piece]

    def add_rounded(self, total, matrix, states, out):
        out.copy_(total + matrix.t().float() @ states.float())


@pytest.mark.parametrize("ignored", [False, True], ids=["all rows", "some ignored"])
@pytest.mark.parametrize("mask", [[True, True, False], [False, True, False], [True, False, False]], ids=str)
@pytest.mark.parametrize(
    ("shape", "first"),
    [((160, 32, 1024), 64), ((150, 32, 1031), 54), ((60, 32, 1024), 60), ((160, 8, 1024), 32), ((160, 32, 500), 64)],
    ids=str,
)
def test_a_chunk_in_the_memory_of_sums_to_come(monkeypatch, shape, first, mask, ignored):
    """The first chunk is larger where sums are wider than it: rows as told, unless one of its own would hold no more."""
    rows, hidden, vocabulary = shape
    torch.manual_seed(0)
    states, weight = (torch.randn(s).to(torch.bfloat16) for s in ((rows, hidden), (vocabulary, hidden)))
    weight /= hidden**0.5
    labels = torch.randint(0, vocabulary, (rows,))
    extra = 40 if ignored else 0  # rows that are ignored and in the way of those that aren't
    if ignored:
        places = torch.randperm(rows + extra)[:rows].sort().values
        states = torch.full((rows + extra, hidden), 7.0, dtype=torch.bfloat16).index_copy_(0, places, states)
        labels = torch.full((rows + extra,), -100).index_copy_(0, places, labels)
    made = []

    def factored(hidden, weight, bias, labels, class_weight, options, losses, stats, metrics, upstream, divisor):
        made.append(Spelled(weight, labels, losses, upstream, divisor))
        return made[0]

    monkeypatch.setattr(chunks, "chunk_rows", lambda *args: STEP)
    kernels = chunks.REFERENCE._replace(factored=factored)
    loss, _, _, _, dhidden, dweight, _ = chunks.forward(
        kernels, states, weight, labels, None, None, None, mask, False, "mean", None, None, *ce.Options()
    )
    args = [t.double().requires_grad_() for t in (states, weight)]
    truth = torch.nn.functional.cross_entropy(args[0] @ args[1].t(), labels)
    truth.backward()
    torch.testing.assert_close(loss.double(), truth.detach(), rtol=1e-5, atol=1e-5)
    for got, wanted, wants in zip((dhidden, dweight), (a.grad for a in args), mask, strict=False):
        if wants:
            assert (got.double() - wanted).norm() <= 4e-3 * wanted.norm()
        else:
            assert not got.numel()
    expected = first if mask[1] else STEP
    assert made[0].rows[0][0] == expected
    assert all(one == (STEP, 1) for one in made[0].rows[1:-1])
    assert (made[0].rows[0][1] == 2) == (mask[1] and expected != STEP)


def test_memory_is_that_of_the_sums_and_a_buffer(monkeypatch):
    """What the first chunk is held in is no larger than what the others need in any case."""
    monkeypatch.setattr(chunks, "chunk_rows", lambda *args: STEP)
    states, weight = torch.zeros(160, 32, dtype=torch.bfloat16), torch.zeros(1024, 32, dtype=torch.bfloat16)
    rows = chunks._Rows(chunks.REFERENCE, states, weight, torch.zeros(160, dtype=torch.int64), ce.Options())
    gradients = chunks._Gradients(rows, weight, [True, True, False], torch.float32, torch.bfloat16, None)
    sums = {total.untyped_storage().data_ptr(): total.untyped_storage().nbytes() for _, total in gradients.sums}
    assert sum(sums.values()) == 4 * weight.numel()
    places = {}
    for _, matrices in gradients.parts(weight):
        for _, matrix in matrices:
            places[matrix.untyped_storage().data_ptr()] = matrix.untyped_storage().nbytes()
    (buffer,) = (nbytes for place, nbytes in places.items() if place not in sums)
    assert buffer == STEP * 1024 * 2
    assert gradients.sums[0][1].untyped_storage().data_ptr() not in places
