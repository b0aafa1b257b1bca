"""Rotary position embedding as HuggingFace models spell it: x * cos + rotate_half(x) * sin, for queries and keys.

A pattern begins where the tables are broadcast over the heads already: (1|B, 1, T, R) beside (B, H, T, D), or
(1|B, T, 1, R) beside (B, T, H, D). How a model comes by them (``unsqueeze``, sections of mRoPE) is its own affair.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusedops.compiler.match import Match
from fusedops.compiler.rule import Rule
from fusedops.rules.guards import same_shape

# Markers: where a head is cut is read from the model.
HALF, ROTARY = 1237, 2 * 1237


def whole(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def leading(x: Tensor, cos: Tensor, sin: Tensor, half: int, rotary: int) -> Tensor:
    """The leading columns of each head are rotated, the others (there may be none) pass."""
    return torch.cat([whole(x[..., :rotary], cos, sin, half), x[..., rotary:]], dim=-1)


def rounded_once(x: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """float32 tables promote the products; the sum is cast to the dtype of x, as in OLMo."""
    return whole(x, cos, sin, half).to(x.dtype)


def fused(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **sizes: int) -> tuple[Tensor, Tensor | None]:
    heads = _heads_dim(q, cos)
    # A concatenation with the columns that pass is contiguous; a sum has its strides in the order of x's.
    memory_format = torch.contiguous_format if "rotary" in sizes and heads == 1 else None

    def heads_first(x: Tensor | None) -> Tensor | None:
        return x if x is None or heads == 1 else x.transpose(1, 2)

    q_rotated, k_rotated = torch.ops.fusedops.rotary_embedding(
        heads_first(q), heads_first(k), cos.squeeze(heads), sin.squeeze(heads), memory_format=memory_format
    )
    return heads_first(q_rotated), None if k is None else heads_first(k_rotated)


def _heads_dim(x: Tensor, table: Tensor) -> int | None:
    """The dimension of x that a table is broadcast over, if it is one of (batch,) positions and columns."""
    columns = table.shape[-1]
    for batch in (1, x.shape[0]):
        if same_shape(table.shape, (batch, 1, x.shape[2], columns)):
            return 1
        if same_shape(table.shape, (batch, x.shape[1], 1, columns)):
            return 2
    return None


def _rotates_halves(match: Match) -> str | None:
    cos, sin = match.value("cos"), match.value("sin")
    rotated = {name: match.value(name) for name in ("q", "k") if name in match.bindings}
    half, columns = match.value("half"), cos.shape[-1]
    if not statically_known_true(2 * half == columns):
        return f"{columns} columns are cut at {half}: not halves"
    if match.bindings.get("rotary", columns) != columns:
        return f"{match.value('rotary')} columns are rotated by tables of {columns}"
    if not same_shape(cos.shape, sin.shape):
        return f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} differ in shape"
    if any(x.dim() != 4 or _heads_dim(x, cos) is None for x in rotated.values()):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in rotated.items())
        return f"cos {tuple(cos.shape)} has not one row for each position of {shapes}"
    return None


def _examples(
    names: Sequence[str], heads: Sequence[int], tables: Mapping[torch.dtype, torch.dtype]
) -> Iterator[dict[str, Tensor]]:
    for head, (dtype, table) in product(heads, tables.items()):
        yield {
            **{name: torch.empty(1, 2, 3, head, dtype=dtype) for name in names},
            **{name: torch.empty(1, 1, 3, ROTARY, dtype=table) for name in ("cos", "sin")},
        }


def _rules(
    name: str, spelling: Callable[..., Tensor], heads: Sequence[int], tables: Mapping[torch.dtype, torch.dtype], **sizes
) -> list[Rule]:
    """One rule for queries and keys together, and one for a tensor that has no partner."""

    def rule(name: str, pattern, replacement, names: Sequence[str]) -> Rule:
        return Rule(
            name=f"rotary_embedding.{name}",
            op="rotary_embedding",
            pattern=pattern,
            replacement=replacement,
            examples=partial(_examples, names, heads, tables),
            numbers={"half": HALF, **sizes},
            results=len(names),
            anchor=torch.ops.aten.neg.default,
            guard=_rotates_halves,
        )

    def pair(q: Tensor, k: Tensor, **rest) -> tuple[Tensor, Tensor]:
        return spelling(q, **rest), spelling(k, **rest)

    def single(q: Tensor, **rest) -> Tensor:
        return spelling(q, **rest)

    def fused_single(q: Tensor, **rest) -> Tensor:
        return fused(q, None, **rest)[0]

    return [rule(name, pair, fused, ("q", "k")), rule(f"{name}_single", single, fused_single, ("q",))]


_ALIKE = {dtype: dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_WIDER = dict.fromkeys((torch.bfloat16, torch.float16), torch.float32)

RULES = [
    *_rules("half", whole, [ROTARY], _ALIKE),
    *_rules("half_rounded_once", rounded_once, [ROTARY], _WIDER),
    *_rules("partial", leading, [ROTARY, ROTARY + 2], _ALIKE, rotary=ROTARY),
]
