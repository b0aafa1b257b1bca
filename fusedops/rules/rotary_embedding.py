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
Turn = Callable[..., Tensor]


def rotate_half(x: Tensor, half: int) -> Tensor:
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def whole(turn: Turn, x: Tensor, cos: Tensor, sin: Tensor, **cut: int) -> Tensor:
    return x * cos + turn(x, **cut) * sin


def leading(turn: Turn, x: Tensor, cos: Tensor, sin: Tensor, rotary: int, **cut: int) -> Tensor:
    """The leading columns of each head are rotated, the others (there may be none) pass."""
    return torch.cat([whole(turn, x[..., :rotary], cos, sin, **cut), x[..., rotary:]], dim=-1)


def rounded_once(turn: Turn, x: Tensor, cos: Tensor, sin: Tensor, **cut: int) -> Tensor:
    """float32 tables promote the products; the sum is cast to the dtype of x, as in OLMo."""
    return whole(turn, x, cos, sin, **cut).to(x.dtype)


def in_float32(turn: Turn, x: Tensor, cos: Tensor, sin: Tensor, **cut: int) -> Tensor:
    """Cast before everything else, as in Cohere."""
    return whole(turn, x.float(), cos, sin, **cut).to(x.dtype)


def in_float32_late(turn: Turn, x: Tensor, cos: Tensor, sin: Tensor, **cut: int) -> Tensor:
    """Cast before the products, as in Ernie 4.5."""
    return (x.float() * cos + turn(x, **cut).float() * sin).to(x.dtype)


def fused(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, interleaved: bool, **sizes: int
) -> tuple[Tensor, Tensor | None]:
    heads = _heads_dim(q, cos)
    assert heads is not None  # or the guard has declined
    # A concatenation with the columns that pass is contiguous; a sum has its strides in the order of x's.
    memory_format = torch.contiguous_format if "rotary" in sizes and heads == 1 else None

    def heads_first(x: Tensor) -> Tensor:
        return x if heads == 1 else x.transpose(1, 2)

    q_rotated, k_rotated = torch.ops.fusedops.rotary_embedding(
        heads_first(q),
        None if k is None else heads_first(k),
        cos.squeeze(heads),
        sin.squeeze(heads),
        interleaved=interleaved,
        memory_format=memory_format,
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


def _tables_fit(match: Match) -> str | None:
    cos, sin = match.value("cos"), match.value("sin")
    rotated = {name: match.value(name) for name in ("q", "k") if name in match.bindings}
    columns = cos.shape[-1]
    half = match.bindings.get("half", columns // 2)
    if not statically_known_true(2 * half == columns):
        return f"columns are cut at {half}, and tables have {columns}: not halves"
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
    name: str,
    spelling: Callable[..., Tensor],
    turn: Turn,
    tables: Mapping[torch.dtype, torch.dtype],
    heads: Sequence[int] = (ROTARY,),
    **sizes: int,
) -> list[Rule]:
    """One rule for queries and keys together, and one for a tensor that has no partner."""
    interleaved = turn is rotate_every_two
    numbers = sizes if interleaved else {"half": HALF, **sizes}

    def pair(q: Tensor, k: Tensor, **rest) -> tuple[Tensor, Tensor]:
        return spelling(turn, q, **rest), spelling(turn, k, **rest)

    def single(q: Tensor, **rest) -> Tensor:
        return spelling(turn, q, **rest)

    def fused_single(q: Tensor, **rest) -> Tensor:
        return fused(q, None, interleaved=interleaved, **rest)[0]

    def rule(name: str, pattern, replacement, names: Sequence[str]) -> Rule:
        return Rule(
            name=f"rotary_embedding.{name}",
            op="rotary_embedding",
            pattern=pattern,
            replacement=replacement,
            examples=partial(_examples, names, heads, tables),
            numbers=numbers,
            results=len(names),
            anchor=torch.ops.aten.neg.default,
            guard=_tables_fit,
        )

    return [
        rule(name, pair, partial(fused, interleaved=interleaved), ("q", "k")),
        rule(f"{name}_single", single, fused_single, ("q",)),
    ]


_ALIKE = {dtype: dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
# In float32 the casts vanish, and what is left is a spelling above.
_HALF = {dtype: dtype for dtype in (torch.bfloat16, torch.float16)}
_WIDER = dict.fromkeys(_HALF, torch.float32)

RULES = [
    *_rules("half", whole, rotate_half, _ALIKE),
    *_rules("partial", leading, rotate_half, _ALIKE, (ROTARY, ROTARY + 2), rotary=ROTARY),
    *_rules("half_rounded_once", rounded_once, rotate_half, _WIDER),
    *_rules("interleaved", whole, rotate_every_two, _ALIKE),
    *_rules("interleaved_partial", leading, rotate_every_two, _ALIKE, (ROTARY + 2,), rotary=ROTARY),
    *_rules("interleaved_in_float32", in_float32, rotate_every_two, _HALF),
    *_rules("interleaved_in_float32_late", in_float32_late, rotate_every_two, _HALF),
]
