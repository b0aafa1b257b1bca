"""From hidden states to the loss: lm_head followed by ForCausalLMLoss, whose logits the caller may still receive."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_meta.checks import REDUCTIONS
from fusedops.compiler.match import Match
from fusedops.compiler.rule import Rule
from fusedops.rules.cross_entropy import HALVES, NUMBERS, labels_are_indices

LOSS = torch.ops.aten.cross_entropy_loss.default


def _plain(logits: Tensor) -> Tensor:
    return logits


def _scaled(logits: Tensor, *, logit_scale: float) -> Tensor:
    return logits * logit_scale


def _divided(logits: Tensor, *, divisor: float) -> Tensor:
    return logits / divisor


def _softcapped(logits: Tensor, *, softcap: float) -> Tensor:
    return torch.tanh(logits / softcap) * softcap


def _scaled_and_softcapped(logits: Tensor, *, logit_scale: float, softcap: float) -> Tensor:
    return _softcapped(_scaled(logits, logit_scale=logit_scale), softcap=softcap)


# What models do to logits before the loss, and before they return them; numbers as in NUMBERS.
MAPS: dict[Callable[..., Tensor], dict[str, float]] = {
    _plain: {},
    _scaled: {"logit_scale": 0.0234567},
    _divided: {"divisor": 234.567},
    _softcapped: {"softcap": 345.678},
    _scaled_and_softcapped: {"logit_scale": 0.0234567, "softcap": 345.678},
}


def causal_lm(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    num_items: Tensor | None = None,
    *,
    map_logits: Callable[..., Tensor],
    upcast: bool,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    **numbers: float,
) -> tuple[Tensor, Tensor]:
    logits = map_logits(F.linear(hidden, weight, bias), **numbers)
    flat = (logits.float() if upcast else logits).view(-1, weight.shape[0])
    loss = F.cross_entropy(
        flat, labels, reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    return loss if num_items is None else loss / num_items, logits


def fused(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    num_items: Tensor | None = None,
    *,
    upcast: bool,
    divisor: float | None = None,
    **options,
) -> Tensor:
    if divisor is not None:
        options["logit_scale"] = 1.0 / divisor
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss = torch.ops.fusedops.linear_cross_entropy(flat, weight, labels, bias, divisor=num_items, **options)
    return loss if upcast else loss.to(hidden.dtype)


def _examples(with_bias: bool, upcast: bool, per_item: bool) -> Iterator[dict[str, Tensor]]:
    for dtype in (torch.float32, *HALVES) if upcast else HALVES:
        example = {
            "hidden": torch.empty(2, 3, 4, dtype=dtype),
            "weight": torch.empty(8, 4, dtype=dtype),
            "labels": torch.zeros(6, dtype=torch.int64),
        }
        example |= {"bias": torch.empty(8, dtype=dtype)} if with_bias else {}
        yield example | ({"num_items": torch.tensor(6)} if per_item else {})


def _rows_stay_rows(match: Match) -> str | None:
    reason = labels_are_indices(match)
    if reason:
        return reason
    (loss,) = (n for n in match.interior if n.target is LOSS)
    flat, weight = loss.args[0].meta["val"], match.value("weight")
    if flat.dim() != 2 or flat.shape[1] != weight.shape[0]:
        return f"the logits are viewed as {tuple(flat.shape)}: not one row for each position"
    if "num_items" in match.bindings and match.value("num_items").is_floating_point():
        # A graph that is traced before autograd doesn't say which of its values require grad.
        return f"the count it is divided by is {match.value('num_items').dtype}, which may need a gradient"
    return None


def _rule(
    map_logits: Callable[..., Tensor], upcast: bool, with_bias: bool, reduction: str, per_item: bool = False
) -> Rule:
    spelling = ["causal_lm" + ("" if map_logits is _plain else map_logits.__name__)]
    spelling += [reduction] + ["per_item"] * per_item + ["bias"] * with_bias + ["not_upcast"] * (not upcast)
    return Rule(
        name="linear_cross_entropy." + "_".join(spelling),
        op="linear_cross_entropy",
        pattern=partial(causal_lm, map_logits=map_logits, upcast=upcast, reduction=reduction),
        replacement=partial(fused, upcast=upcast, reduction=reduction),
        examples=partial(_examples, with_bias, upcast, per_item),
        numbers=NUMBERS | MAPS[map_logits],
        anchor=LOSS,
        guard=_rows_stay_rows,
    )


RULES = [
    _rule(map_logits, upcast, with_bias, reduction, per_item)
    for map_logits in MAPS
    for upcast in (True, False)
    for with_bias in (False, True)
    for reduction, per_item in (*((r, False) for r in REDUCTIONS), ("sum", True))
    # No model maps its logits and has a bias, or leaves them in their dtype.
    if map_logits is _plain or (upcast and not with_bias)
]
