"""add_rms_norm(x, residual, weight, eps) -> (y, sum), rows x columns: both results have an upstream gradient."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.peers.operator import LIGER, Inputs, Operator, Peer, Shape, liger, ours, random, spellings, wide
from bench.peers.rms_norm import EPS, llama_rms_norm, true_rms_norm


def _inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, columns = shape
    x, residual = (random(generator, rows, columns).requires_grad_() for _ in range(2))
    weight = random(generator, columns).requires_grad_()
    upstreams = (random(generator, rows, columns), random(generator, rows, columns))
    return Inputs((x, residual, weight, EPS), (x, residual), (weight,), upstreams)


def _llama(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return llama_rms_norm(total, weight, eps), total


def _peers() -> Iterator[Peer]:
    yield from spellings(_llama)
    if functions := liger():
        # in_place=False: otherwise the upstream gradient would be gone after the first step.
        yield Peer(LIGER, lambda *args: functions.liger_fused_add_rms_norm(*args, in_place=False))
    yield ours("add_rms_norm")


def _truth(inputs: Inputs) -> tuple[Tensor, ...]:
    x, residual, weight, eps = wide(inputs.args)
    dy, dsum = (u.double() for u in inputs.upstreams)
    total = x + residual
    y, dx, dweight = true_rms_norm(total, weight, eps, dy)
    dx = (dx + dsum).float()
    return y.float(), total.float(), dx, dx, dweight.float()


OPERATOR = Operator(
    name="add_rms_norm",
    letters="rows x columns",
    shapes=((8192, 4096), (16384, 4096), (8192, 8192), (4096, 16384), (2048, 4096)),
    results=("y", "sum", "dx", "dresidual", "dweight"),
    inputs=_inputs,
    peers=_peers,
    truth=_truth,
)
