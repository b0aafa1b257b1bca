"""cross_entropy(logits, labels), tokens x vocabulary."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peers.operator import LIGER, Inputs, Operator, Peer, Shape, liger, ours, random, spellings

# Logits of a trained model are spread out: with this deviation the softmax's share of the gradient is worth checking.
LOGIT_STD = 3.0
TRUTH_ROWS = 1024


def random_labels(generator: torch.Generator, rows: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (rows,), device=generator.device, generator=generator)


def _inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, vocabulary = shape
    logits = random(generator, rows, vocabulary, std=LOGIT_STD).requires_grad_()
    labels = random_labels(generator, rows, vocabulary)
    return Inputs((logits, labels), (logits,), (), (torch.ones((), device=generator.device),))


def causal_lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="mean")


def _peers() -> Iterator[Peer]:
    yield from spellings(causal_lm_loss)
    if functions := liger():
        yield Peer(LIGER, functions.liger_cross_entropy, "overwrites the logits")
    yield ours("cross_entropy")


def true_rows(logits: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Summed loss of some rows and their logits' gradient, in float64, where the mean is over `rows` rows."""
    log_p = logits.double().log_softmax(-1)
    index = labels.unsqueeze(1)
    loss = -log_p.gather(1, index).sum()
    gradient = log_p.exp_()
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, -1.0))
    return loss, gradient.div_(rows)


def _truth(inputs: Inputs) -> tuple[Tensor, ...]:
    logits, labels = inputs.args
    logits, rows = logits.detach(), len(labels)
    loss, dlogits = torch.zeros((), dtype=torch.float64, device=logits.device), torch.empty_like(logits).float()
    for start in range(0, rows, TRUTH_ROWS):
        part = slice(start, start + TRUTH_ROWS)
        chunk_loss, dlogits[part] = true_rows(logits[part], labels[part], rows)
        loss += chunk_loss
    return (loss / rows).float(), dlogits


OPERATOR = Operator(
    name="cross_entropy",
    letters="tokens x vocabulary",
    shapes=((8192, 128256), (4096, 262144), (1024, 32000)),
    results=("loss", "dlogits"),
    inputs=_inputs,
    peers=_peers,
    truth=_truth,
)
