"""GEGLU: y = gelu(gate) * up, gelu(x) = x * P(X <= x) for a standard normal X, exactly or by tanh."""

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_meta import checks, gated
from csrc_meta.registry import composite
from csrc_meta.spec import Sample, Spec

ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}
_forward_op = gated.define("geglu")


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    checks.check_choice("geglu", "approximate", approximate, tuple(ACTIVATIONS))
    return _forward_op(gate, up, ACTIVATIONS[approximate])


operator = composite("geglu(Tensor gate, Tensor? up=None, *, str approximate='none') -> Tensor", geglu)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    yield from gated.samples(device, dtype)
    # Layouts have nothing to do with the formula: some of them are enough for the other.
    for sample in itertools.islice(gated.samples(device, dtype, approximate="tanh"), 3):
        yield Sample(f"{sample.label} tanh", sample.args, sample.kwargs)


def _eager(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    gate, up = gated.halves(gate, up)
    return F.gelu(gate, approximate=approximate) * up


SPEC = Spec(
    name="geglu",
    samples=_samples,
    eager=_eager,
    bytes_moved=gated.bytes_moved,
    # By tanh: its argument 5, tanh 5, three products; backward: the same 10, the derivative 9, products with dy and up 3.
    flops=lambda gate, up=None, **kwargs: gated.elements(gate, up) * (13 + 22),
    source="arXiv 2002.05202, equation 5; arXiv 2410.10989, section 3.2; transformers GemmaMLP, Gemma2MLP (tanh)",
)
