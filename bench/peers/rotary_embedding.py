"""rotary_embedding(q, k, cos, sin): q and k are (B, H, T, D) views of (B, T, H, D) memory, as a projection makes them.

So are the upstream gradients, as attention makes them; the tables are (1, T, D).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.peers.operator import LIGER, Inputs, Operator, Peer, Shape, liger, ours, random, spellings, wide

BASE = 10000.0


def _inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    batch, tokens, q_heads, k_heads, size = shape

    def heads(number: int) -> Tensor:
        return random(generator, batch, tokens, number, size).transpose(1, 2)

    q, k = heads(q_heads).requires_grad_(), heads(k_heads).requires_grad_()
    return Inputs((q, k, *_tables(tokens, size, generator.device)), (q, k), (), (heads(q_heads), heads(k_heads)))


def _tables(tokens: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    frequencies = BASE ** (-torch.arange(0, size, 2, device=device, dtype=torch.float32) / size)
    angles = torch.arange(tokens, device=device, dtype=torch.float32).unsqueeze(1) * frequencies
    angles = torch.cat((angles, angles), -1).unsqueeze(0)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _llama(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate_half(x: Tensor) -> Tensor:
        low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-high, low), dim=-1)

    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def _peers() -> Iterator[Peer]:
    yield from spellings(_llama)
    if functions := liger():
        yield Peer(LIGER, functions.liger_rope, "overwrites q, k and their gradients")
    yield ours("rotary_embedding")


def _truth(inputs: Inputs) -> tuple[Tensor, ...]:
    q, k, cos, sin = wide(inputs.args)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def forward(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return (x * cos + torch.cat((-high, low), -1) * sin).float()

    def backward(dy: Tensor) -> Tensor:
        low, high = (dy * sin).chunk(2, -1)
        return (dy * cos + torch.cat((high, -low), -1)).float()

    return forward(q), forward(k), *(backward(u.double()) for u in inputs.upstreams)


OPERATOR = Operator(
    name="rotary_embedding",
    letters="batch x tokens x query heads x key heads x head size",
    shapes=((8, 2048, 32, 8, 128), (1, 2048, 32, 8, 128)),
    results=("q", "k", "dq", "dk"),
    inputs=_inputs,
    peers=_peers,
    truth=_truth,
)
