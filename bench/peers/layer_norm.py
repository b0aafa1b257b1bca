"""layer_norm(x, weight, bias, eps), rows x columns. HuggingFace's spelling is torch's own operator."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peers.operator import LIGER, Inputs, Operator, Peer, Shape, liger, ours, random, spellings, wide

EPS = 1e-5


def _inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, columns = shape
    x, weight, bias = (random(generator, *s).requires_grad_() for s in (shape, (columns,), (columns,)))
    return Inputs((x, weight, bias, EPS), (x,), (weight, bias), (random(generator, rows, columns),))


def _peers() -> Iterator[Peer]:
    yield from spellings(lambda x, weight, bias, eps: F.layer_norm(x, weight.shape, weight, bias, eps))
    if functions := liger():
        yield Peer(LIGER, functions.liger_layer_norm)
    yield ours("layer_norm")


def _truth(inputs: Inputs) -> tuple[Tensor, ...]:
    x, weight, bias, eps = wide(inputs.args)
    dy = inputs.upstreams[0].double()
    centred = x - x.mean(-1, keepdim=True)
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalised, g = centred * rstd, dy * weight
    dx = rstd * (g - g.mean(-1, keepdim=True) - normalised * (g * normalised).mean(-1, keepdim=True))
    results = (normalised * weight + bias, dx, (dy * normalised).sum(0), dy.sum(0))
    return tuple(t.float() for t in results)


OPERATOR = Operator(
    name="layer_norm",
    letters="rows x columns",
    shapes=((8192, 4096), (4096, 16384), (2048, 4096)),
    results=("y", "dx", "dweight", "dbias"),
    inputs=_inputs,
    peers=_peers,
    truth=_truth,
)
