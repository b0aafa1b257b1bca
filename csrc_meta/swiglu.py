"""SwiGLU: y = silu(gate) * up, silu(x) = x / (1 + exp(-x))."""

import torch.nn.functional as F
from torch import Tensor

from csrc_meta import gated
from csrc_meta.registry import composite
from csrc_meta.spec import Spec

_forward_op = gated.define("swiglu")


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return _forward_op(gate, up, "silu")


operator = composite("swiglu(Tensor gate, Tensor? up=None) -> Tensor", swiglu)


def _eager(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = gated.halves(gate, up)
    return F.silu(gate) * up


SPEC = Spec(
    name="swiglu",
    samples=gated.samples,
    eager=_eager,
    bytes_moved=gated.bytes_moved,
    # sigmoid 4 and two products; backward: sigmoid 4, silu's derivative 4, products with dy and up 3.
    flops=lambda gate, up=None: gated.elements(gate, up) * (6 + 11),
    source="arXiv 2002.05202, equation 5; arXiv 2410.10989, section 3.2; transformers LlamaMLP, Phi3MLP (packed)",
)
