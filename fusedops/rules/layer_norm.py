"""LayerNorm over the last dimension: PyTorch's operator with or without weight and bias, or spelt out in float32."""

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


def fused(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float, columns: int | None = None
) -> Tensor:
    return torch.ops.fusedops.layer_norm(x, weight, bias, eps)


def spelt_out(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    normalised = (wide - mean) * torch.rsqrt(variance + eps)
    return (weight.to(torch.float32) * normalised).to(x.dtype)


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


SPELT_OUT = Rule(
    name="layer_norm.spelt_out",
    op="layer_norm",
    pattern=spelt_out,
    replacement=fused,
    # In float64 it computes in float32 all the same.
    examples=lambda: (e for e in _examples(("weight",)) if e["x"].dtype != torch.float64),
    numbers={"eps": 1.234567e-6},
    anchor=torch.ops.aten.rsqrt.default,
    guard=_has_one_dtype,
)
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
] + [SPELT_OUT]
