"""linear_cross_entropy(hidden, weight, labels), tokens x hidden x vocabulary, beside three bare matrix products."""

import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peers.cross_entropy import LOGIT_STD, TRUTH_ROWS, causal_lm_loss, random_labels, true_rows
from bench.peers.operator import LIGER, TORCH, Inputs, Operator, Peer, Shape, liger, ours, random, spellings


def _inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, hidden_size, vocabulary = shape
    hidden = random(generator, rows, hidden_size).requires_grad_()
    weight = random(generator, vocabulary, hidden_size, std=LOGIT_STD / math.sqrt(hidden_size)).requires_grad_()
    labels = random_labels(generator, rows, vocabulary)
    return Inputs((hidden, weight, labels), (hidden,), (weight,), (torch.ones((), device=generator.device),))


def _peers() -> Iterator[Peer]:
    yield from spellings(lambda hidden, weight, labels: causal_lm_loss(F.linear(hidden, weight), labels))
    if fused := getattr(F, "linear_cross_entropy", None):
        yield Peer(TORCH, fused, "F.linear_cross_entropy")
    if functions := liger():
        function = functions.liger_fused_linear_cross_entropy
        yield Peer(LIGER, function)
        yield Peer(LIGER, functools.partial(function, accum_dtype=torch.float32), "float32 dW")
    yield ours("linear_cross_entropy")


def _truth(inputs: Inputs) -> tuple[Tensor, ...]:
    hidden, weight, labels = (a.detach() for a in inputs.args)
    rows, wide = len(labels), weight.double()
    loss, dweight = torch.zeros((), dtype=torch.float64, device=weight.device), torch.zeros_like(wide)
    dhidden = torch.empty_like(hidden).float()
    for start in range(0, rows, TRUTH_ROWS):
        part = slice(start, start + TRUTH_ROWS)
        chunk = hidden[part].double()
        chunk_loss, dlogits = true_rows(chunk @ wide.t(), labels[part], rows)
        loss += chunk_loss
        dhidden[part] = dlogits @ wide
        dweight.addmm_(dlogits.t(), chunk)
    return (loss / rows).float(), dhidden, dweight.float()


def _three_gemms(inputs: Inputs) -> Callable[[], None]:
    """The projection and its two gradients on whole matrices, results in the dtype of the inputs."""
    hidden, weight, _ = (a.detach() for a in inputs.args)
    logits = hidden.new_empty((hidden.shape[0], weight.shape[0]))
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def step() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.t(), hidden, out=dweight)

    return step


OPERATOR = Operator(
    name="linear_cross_entropy",
    letters="tokens x hidden x vocabulary",
    shapes=((8192, 4096, 128256), (8192, 2048, 128256), (512, 4096, 128256)),
    results=("loss", "dhidden", "dweight"),
    inputs=_inputs,
    peers=_peers,
    truth=_truth,
    floor=("three bare GEMMs", _three_gemms),
)
