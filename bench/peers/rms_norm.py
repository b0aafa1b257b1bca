"""rms_norm(x, weight, eps), rows x columns."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peers.operator import LIGER, TORCH, Inputs, Operator, Peer, Shape, liger, ours, random, spellings, wide

EPS = 1e-6


def _inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, columns = shape
    x, weight = random(generator, rows, columns).requires_grad_(), random(generator, columns).requires_grad_()
    return Inputs((x, weight, EPS), (x,), (weight,), (random(generator, rows, columns),))


def llama_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def _peers() -> Iterator[Peer]:
    yield from spellings(llama_rms_norm)
    yield Peer(TORCH, lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps), "F.rms_norm")
    if functions := liger():
        # in_place=False: otherwise the upstream gradient would be gone after the first step.
        yield Peer(LIGER, lambda x, weight, eps: functions.liger_rms_norm(x, weight, eps, in_place=False))
    yield ours("rms_norm")


def true_rms_norm(x: Tensor, weight: Tensor, eps: float, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dweight in float64."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalised, g = x * rstd, dy * weight
    dx = rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    return normalised * weight, dx, (dy * normalised).sum(0)


def _truth(inputs: Inputs) -> tuple[Tensor, ...]:
    x, weight, eps = wide(inputs.args)
    return tuple(t.float() for t in true_rms_norm(x, weight, eps, inputs.upstreams[0].double()))


OPERATOR = Operator(
    name="rms_norm",
    letters="rows x columns",
    shapes=((8192, 4096), (16384, 4096), (8192, 8192), (4096, 16384), (65536, 128), (2048, 4096), (512, 2048)),
    results=("y", "dx", "dweight"),
    inputs=_inputs,
    peers=_peers,
    truth=_truth,
)
