"""LayerNorm, which PyTorch has an operator for: over the last dimension, with or without weight and bias."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedops.compiler.match import Match
from fusedops.compiler.rule import Rule

COLUMNS = 1237  # a marker: normalised_shape is read from the model
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def spelling(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, columns: int, eps: float
) -> Tensor:
    return F.layer_norm(x, (columns,), weight, bias, eps)


def fused(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, columns: int, eps: float) -> Tensor:
    return torch.ops.fusedops.layer_norm(x, weight, bias, eps)


def _examples(parameters: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    for dtype in DTYPES:
        yield {
            "x": torch.empty(2, COLUMNS, dtype=dtype),
            **{name: torch.empty(COLUMNS, dtype=dtype) for name in parameters},
        }


def _has_one_dtype(match: Match) -> str | None:
    """On a CPU eager also takes a float32 weight with half-precision x, and rounds elsewhere."""
    dtypes = {name: match.value(name).dtype for name in ("x", "weight", "bias") if name in match.bindings}
    return None if len(set(dtypes.values())) == 1 else f"its dtypes differ: {dtypes}"


RULES = [
    Rule(
        name=f"layer_norm.{name}",
        op="layer_norm",
        pattern=spelling,
        replacement=fused,
        examples=partial(_examples, parameters),
        numbers={"columns": COLUMNS, "eps": 1.234567e-6},
        anchor=torch.ops.aten.layer_norm.default,
        guard=_has_one_dtype,
    )
    for name, parameters in (("affine", ("weight", "bias")), ("weight", ("weight",)), ("plain", ()))
]
