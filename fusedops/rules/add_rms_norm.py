"""A residual addition followed by RMSNorm. The sum stays readable: it is the residual of the next block."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from fusedops.compiler.match import Match
from fusedops.compiler.rule import Rule
from fusedops.rules import guards, rms_norm


def _after_addition(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def pattern(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual + x
        return norm(total, weight, eps), total

    return pattern


def _fused(x: Tensor, residual: Tensor, weight: Tensor, eps: float, **options) -> tuple[Tensor, Tensor]:
    return torch.ops.fusedops.add_rms_norm(x, residual, weight, eps, **options)


def _examples() -> Iterator[dict[str, Tensor]]:
    for example in rms_norm.examples():
        yield {"x": example["x"], "residual": torch.empty_like(example["x"]), "weight": example["weight"]}


def _adds_like_to_like(match: Match) -> str | None:
    return guards.same_kind(match, "x", "residual") or rms_norm.scales_columns(match)


RULES = [
    Rule(
        name=f"add_rms_norm.{name}",
        op="add_rms_norm",
        pattern=_after_addition(spelling),
        replacement=partial(_fused, **options),
        examples=_examples,
        numbers=rms_norm.NUMBERS,
        results=2,
        anchor=torch.ops.aten.rsqrt.default,
        guard=_adds_like_to_like,
    )
    for name, (spelling, options) in rms_norm.SPELLINGS.items()
]
