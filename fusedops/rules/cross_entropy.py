"""Cross entropy on logits that exist: cast to float32 first, as ForCausalLMLoss does, or not."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_meta.checks import REDUCTIONS
from fusedops.compiler.match import Match
from fusedops.compiler.rule import Rule

# Numbers that a loss is given; the values are markers and occur nowhere else in the pattern.
NUMBERS = {"ignore_index": -123457, "label_smoothing": 0.0123457}
HALVES = (torch.bfloat16, torch.float16)  # in float32 there is no cast to leave out


def on_logits(
    logits: Tensor, labels: Tensor, weight: Tensor | None = None, *, upcast: bool, reduction: str, **numbers
) -> Tensor:
    return F.cross_entropy(logits.float() if upcast else logits, labels, weight, reduction=reduction, **numbers)


def fused(logits: Tensor, labels: Tensor, weight: Tensor | None = None, *, upcast: bool, **options) -> Tensor:
    loss = torch.ops.fusedops.cross_entropy(logits, labels, weight, **options)
    return loss if upcast else loss.to(logits.dtype)


def _examples(weighted: bool, upcast: bool) -> Iterator[dict[str, Tensor]]:
    for dtype in (torch.float32, *HALVES) if upcast else HALVES:
        example = {"logits": torch.empty(6, 8, dtype=dtype), "labels": torch.zeros(6, dtype=torch.int64)}
        yield example | ({"weight": torch.empty(8)} if weighted else {})


def labels_are_indices(match: Match) -> str | None:
    labels = match.value("labels")
    if labels.dtype != torch.int64:
        return f"labels are {labels.dtype}: probabilities of classes, or what eager refuses"
    return None if labels.dim() == 1 else f"labels have shape {tuple(labels.shape)}: classes are not the last dimension"


def _takes_indices(match: Match) -> str | None:
    if "weight" in match.bindings and match.value("weight").dtype != torch.float32:
        return f"the classes' weights are {match.value('weight').dtype}, which eager refuses"
    return labels_are_indices(match)


RULES = [
    Rule(
        name=f"cross_entropy.{reduction}" + ("_weighted" if weighted else "") + ("" if upcast else "_not_upcast"),
        op="cross_entropy",
        pattern=partial(on_logits, upcast=upcast, reduction=reduction),
        replacement=partial(fused, upcast=upcast, reduction=reduction),
        examples=partial(_examples, weighted, upcast),
        numbers=NUMBERS,
        anchor=torch.ops.aten.cross_entropy_loss.default,
        guard=_takes_indices,
    )
    for weighted, upcast in ((False, True), (False, False), (True, True))
    for reduction in REDUCTIONS
]
