"""swiglu(gate, up), the same on one packed tensor, and geglu(gate, up) with tanh; rows x intermediate size."""

from collections.abc import Iterator
from math import pi, sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peers.operator import LIGER, Inputs, Operator, Peer, Shape, liger, ours, random, spellings, wide

LETTERS = "rows x intermediate size"


def _inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    gate, up = (random(generator, *shape).requires_grad_() for _ in range(2))
    return Inputs((gate, up), (gate, up), (), (random(generator, *shape),))


def _swiglu_peers() -> Iterator[Peer]:
    yield from spellings(lambda gate, up: F.silu(gate) * up)
    if functions := liger():
        yield Peer(LIGER, functions.liger_swiglu, "overwrites gate and up")
    yield ours("swiglu")


def _geglu_peers() -> Iterator[Peer]:
    yield from spellings(lambda gate, up: F.gelu(gate, approximate="tanh") * up)
    if functions := liger():
        yield Peer(LIGER, functions.liger_geglu, "overwrites gate and up")
    yield ours("geglu", approximate="tanh")


def _swiglu_truth(inputs: Inputs) -> tuple[Tensor, ...]:
    gate, up = wide(inputs.args)
    return _gated(up, inputs.upstreams[0].double(), *_silu(gate))


def _geglu_truth(inputs: Inputs) -> tuple[Tensor, ...]:
    gate, up = wide(inputs.args)
    slope = sqrt(2 / pi)
    t = torch.tanh(slope * (gate + 0.044715 * gate**3))
    derivative = 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * slope * (1 + 3 * 0.044715 * gate**2)
    return _gated(up, inputs.upstreams[0].double(), 0.5 * gate * (1 + t), derivative)


def _silu(gate: Tensor) -> tuple[Tensor, Tensor]:
    s = gate.sigmoid()
    return gate * s, s * (1 + gate * (1 - s))


def _gated(up: Tensor, dy: Tensor, activated: Tensor, derivative: Tensor) -> tuple[Tensor, ...]:
    """y, dgate and dup, where y = activated * up."""
    return (activated * up).float(), (dy * up * derivative).float(), (dy * activated).float()


def _packed_inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, size = shape
    packed = random(generator, rows, 2 * size).requires_grad_()
    return Inputs((packed,), (packed,), (), (random(generator, *shape),))


def _phi3(packed: Tensor) -> Tensor:
    gate, up = packed.chunk(2, dim=-1)
    return up * F.silu(gate)


def _packed_peers() -> Iterator[Peer]:
    yield from spellings(_phi3)
    if functions := liger():
        yield Peer(LIGER, lambda packed: functions.liger_swiglu(*packed.chunk(2, -1)), "on halves")
        if fused := _liger_fused_gate_up():
            yield Peer(LIGER, lambda packed: fused.apply(packed, True), "overwrites its input")
    yield ours("swiglu")


def _liger_fused_gate_up() -> Any:
    """Liger's function on one packed tensor, which some of its versions have."""
    from liger_kernel.ops import swiglu

    return getattr(swiglu, "LigerFusedGateUpSiLUMulFunction", None)


def _packed_truth(inputs: Inputs) -> tuple[Tensor, ...]:
    (packed,) = wide(inputs.args)
    gate, up = packed.chunk(2, -1)
    y, dgate, dup = _gated(up, inputs.upstreams[0].double(), *_silu(gate))
    return y, torch.cat((dgate, dup), -1)


SWIGLU = Operator(
    name="swiglu",
    letters=LETTERS,
    shapes=((8192, 14336), (2048, 4096)),
    results=("y", "dgate", "dup"),
    inputs=_inputs,
    peers=_swiglu_peers,
    truth=_swiglu_truth,
)
PACKED_SWIGLU = Operator(
    name="packed_swiglu",
    op="swiglu",
    letters=LETTERS,
    shapes=((8192, 14336),),
    results=("y", "dpacked"),
    inputs=_packed_inputs,
    peers=_packed_peers,
    truth=_packed_truth,
)
GEGLU = Operator(
    name="geglu",
    letters=LETTERS,
    shapes=((8192, 14336), (2048, 4096)),
    results=("y", "dgate", "dup"),
    inputs=_inputs,
    peers=_geglu_peers,
    truth=_geglu_truth,
)
