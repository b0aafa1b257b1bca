"""A residual addition followed by RMSNorm. The sum stays readable: it is the residual of the next block."""

from collections.abc import Callable, Iterator

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


def fused_llama(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.fusedops.add_rms_norm(x, residual, weight, eps)


def fused_gemma(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.fusedops.add_rms_norm(x, residual, weight, eps, weight_offset=1.0, cast="gemma")


def fused_rounded_last(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.ops.fusedops.add_rms_norm(x, residual, weight, eps, cast="gemma")


def _examples() -> Iterator[dict[str, Tensor]]:
    for example in rms_norm.examples():
        yield {"x": example["x"], "residual": torch.empty_like(example["x"]), "weight": example["weight"]}


def _adds_like_to_like(match: Match) -> str | None:
    return guards.same_kind(match, "x", "residual") or rms_norm.scales_columns(match)


def _rule(name: str, pattern, replacement) -> Rule:
    return Rule(
        name=f"add_rms_norm.{name}",
        op="add_rms_norm",
        pattern=_after_addition(pattern),
        replacement=replacement,
        examples=_examples,
        numbers=rms_norm.NUMBERS,
        results=2,
        anchor=torch.ops.aten.rsqrt.default,
        guard=_adds_like_to_like,
    )


RULES = [
    _rule("llama", rms_norm.llama, fused_llama),
    _rule("gemma", rms_norm.gemma, fused_gemma),
    _rule("rounded_last", rms_norm.rounded_last, fused_rounded_last),
]
