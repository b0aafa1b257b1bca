"""RMSNorm as HuggingFace models spell it."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusedops.compiler.match import Match
from fusedops.compiler.rule import Rule

NUMBERS = {"eps": 1.234567e-6}


def llama(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    normalised = wide * torch.rsqrt(variance + eps)
    return weight * normalised.to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normalised * (1.0 + weight.float())).type_as(x)


def rounded_last(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normalised).to(x.dtype)


# Spellings by name, and the options of the operator that computes the same.
SPELLINGS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "llama": (llama, {}),
    "gemma": (gemma, {"weight_offset": 1.0, "cast": "gemma"}),
    "rounded_last": (rounded_last, {"cast": "gemma"}),
}


def _fused(x: Tensor, weight: Tensor, eps: float, **options) -> Tensor:
    """Eager's result lies in memory as x does, the operator's row by row.

    They differ where heads are normalised after ``transpose(1, 2)``: the operator gets x as it was before.
    """
    if x.dim() == 4 and statically_known_true(x.stride(1) < x.stride(2)):
        return torch.ops.fusedops.rms_norm(x.transpose(1, 2), weight, eps, **options).transpose(1, 2)
    return torch.ops.fusedops.rms_norm(x, weight, eps, **options)


def examples() -> Iterator[dict[str, Tensor]]:
    for x in (torch.float32, torch.bfloat16, torch.float16):
        # float32 weights under half-precision activations: autocast, or master weights.
        for weight in {x, torch.float32}:
            yield {"x": torch.empty(2, 3, 4, dtype=x), "weight": torch.empty(4, dtype=weight)}


def scales_columns(match: Match) -> str | None:
    x, weight = match.value("x"), match.value("weight")
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        return f"the weight {tuple(weight.shape)} does not have one element for each column of x {tuple(x.shape)}"
    if not (x.is_floating_point() and weight.is_floating_point()):
        return f"x is {x.dtype} and the weight {weight.dtype}: not both floating point"
    return None


RULES = [
    Rule(
        name=f"rms_norm.{name}",
        op="rms_norm",
        pattern=spelling,
        replacement=partial(_fused, **options),
        examples=examples,
        numbers=NUMBERS,
        anchor=torch.ops.aten.rsqrt.default,
        guard=scales_columns,
    )
    for name, (spelling, options) in SPELLINGS.items()
]
