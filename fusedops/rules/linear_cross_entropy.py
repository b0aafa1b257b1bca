"""From hidden states to the loss: lm_head followed by ForCausalLMLoss, whose logits the caller may still receive."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_meta.checks import REDUCTIONS
from fusedops.compiler.match import Match
from fusedops.compiler.rule import Rule
from fusedops.rules.cross_entropy import NUMBERS, labels_are_indices


def causal_lm(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, *, reduction: str, **numbers
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight, bias)
    flat = logits.float().view(-1, weight.shape[0])
    return F.cross_entropy(flat, labels, reduction=reduction, **numbers), logits


def fused(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options) -> Tensor:
    flat = hidden.reshape(-1, hidden.shape[-1])
    return torch.ops.fusedops.linear_cross_entropy(flat, weight, labels, bias, **options)


def _examples(with_bias: bool) -> Iterator[dict[str, Tensor]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        example = {
            "hidden": torch.empty(2, 3, 4, dtype=dtype),
            "weight": torch.empty(8, 4, dtype=dtype),
            "labels": torch.zeros(6, dtype=torch.int64),
        }
        yield example | ({"bias": torch.empty(8, dtype=dtype)} if with_bias else {})


def _rows_stay_rows(match: Match) -> str | None:
    reason = labels_are_indices(match)
    if reason:
        return reason
    flat, weight = match.root.args[0].meta["val"], match.value("weight")
    if flat.dim() != 2 or flat.shape[1] != weight.shape[0]:
        return f"the logits are viewed as {tuple(flat.shape)}: not one row for each position"
    return None


RULES = [
    Rule(
        name=f"linear_cross_entropy.causal_lm_{reduction}" + ("_bias" if with_bias else ""),
        op="linear_cross_entropy",
        pattern=partial(causal_lm, reduction=reduction),
        replacement=partial(fused, reduction=reduction),
        examples=partial(_examples, with_bias),
        numbers=NUMBERS,
        anchor=torch.ops.aten.cross_entropy_loss.default,
        guard=_rows_stay_rows,
    )
    for with_bias in (False, True)
    for reduction in REDUCTIONS
]
