"""Rotary position embedding on a GPU: y1 = x1 * cos1 - x2 * sin1, y2 = x2 * cos2 + x1 * sin2 of each pair of columns.

B: batch
H: heads; q and k have their own numbers
T: tokens of a sequence
D: columns of a head
R: columns that are rotated, the first of D; a pair is (j, j + R / 2), or (2 j, 2 j + 1) where interleaved
S: sections of the pairs, each with tables of its own

q and k share one launch, and each program turns a tile of one of them. H, D, R and the sections are compile-time
constants (a model has one or two of each), B and T are not.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_meta.rotary_embedding import backward_fake, forward_fake
from fusedops.kernels.launch import cdiv, launch, power_of_2

ELEMENTS = 1024  # of a tile
HEADS = 8  # at least, in a tile of a tensor that has them: a row of the tables is read once for all of them
WARPS = 4


@triton.jit
def _load_pairs(
    ptrs, exists, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr, WIDE: tl.constexpr
):
    """The first and the second column of each pair."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        both = tl.load(ptrs + columns, mask=exists & (columns < R), other=0.0).to(WIDE)
        first, second = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK_PAIRS, 2)))
    else:
        j = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        mask = exists & (j < R // 2)
        first = tl.load(ptrs + j, mask=mask, other=0.0).to(WIDE)
        second = tl.load(ptrs + R // 2 + j, mask=mask, other=0.0).to(WIDE)
    return first, second


@triton.jit
def _store_pairs(ptrs, first, second, exists, R: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    dtype: tl.constexpr = ptrs.dtype.element_ty
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK_PAIRS)[None, None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK_PAIRS))
        tl.store(ptrs + columns, both.to(dtype), mask=exists & (columns < R))
    else:
        j = tl.arange(0, BLOCK_PAIRS)[None, None, :]
        mask = exists & (j < R // 2)
        tl.store(ptrs + j, first.to(dtype), mask=mask)
        tl.store(ptrs + R // 2 + j, second.to(dtype), mask=mask)


@triton.jit
def _rotate(
    x_ptr,
    x_stride_b,
    x_stride_h,
    x_stride_t,
    y_ptr,
    y_stride_b,
    y_stride_h,
    y_stride_t,
    cos_ptr,
    sin_ptr,
    table_stride_s,
    table_stride_b,
    table_stride_t,
    program,
    T,
    TOKENS,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SECTION_ENDS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """A tile of x, which may hold tokens of two sequences."""
    head_blocks: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    token = (program // head_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None, None]
    head = ((program % head_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[None, :, None]).to(tl.int64)
    exists = (token < TOKENS) & (head < H)
    b = (token // T).to(tl.int64)
    t = (token % T).to(tl.int64)
    x_ptrs = x_ptr + b * x_stride_b + head * x_stride_h + t * x_stride_t
    y_ptrs = y_ptr + b * y_stride_b + head * y_stride_h + t * y_stride_t

    x_type: tl.constexpr = x_ptr.dtype.element_ty
    table_type: tl.constexpr = cos_ptr.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if x_type == tl.float64 or table_type == tl.float64 else tl.float32
    x1, x2 = _load_pairs(x_ptrs, exists, R, INTERLEAVED, BLOCK_PAIRS, WIDE)
    if D > R:
        tail = R + tl.arange(0, BLOCK_TAIL)[None, None, :]
        mask = exists & (tail < D)
        tl.store(y_ptrs + tail, tl.load(x_ptrs + tail, mask=mask), mask=mask)
    table = b * table_stride_b + t * table_stride_t
    for i in tl.static_range(len(SECTION_ENDS)):
        table += tl.where(tl.arange(0, BLOCK_PAIRS)[None, None, :] >= SECTION_ENDS[i], table_stride_s, 0)
    cos1, cos2 = _load_pairs(cos_ptr + table, token < TOKENS, R, INTERLEAVED, BLOCK_PAIRS, WIDE)
    sin1, sin2 = _load_pairs(sin_ptr + table, token < TOKENS, R, INTERLEAVED, BLOCK_PAIRS, WIDE)
    if BACKWARD:  # the transposed rotation
        sin1, sin2 = -sin2, -sin1
    y1 = x1 * cos1 - x2 * sin1
    y2 = x2 * cos2 + x1 * sin2
    _store_pairs(y_ptrs, y1, y2, exists, R, INTERLEAVED, BLOCK_PAIRS)


@triton.jit(do_not_specialize=["T", "TOKENS"])
def rotary_embedding_kernel(
    q_ptr,
    q_stride_b,
    q_stride_h,
    q_stride_t,
    q_out_ptr,
    q_out_stride_b,
    q_out_stride_h,
    q_out_stride_t,
    k_ptr,
    k_stride_b,
    k_stride_h,
    k_stride_t,
    k_out_ptr,
    k_out_stride_b,
    k_out_stride_h,
    k_out_stride_t,
    cos_ptr,
    sin_ptr,
    table_stride_s,
    table_stride_b,
    table_stride_t,
    T,
    TOKENS,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    SECTION_ENDS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    Q_BLOCK_T: tl.constexpr,
    Q_BLOCK_H: tl.constexpr,
    K_BLOCK_T: tl.constexpr,
    K_BLOCK_H: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """Rotates q and k, in the backward pass the other way. TOKENS = B * T; the first section ends at SECTION_ENDS[0].

    Grid: tiles of q, then those of k. Tile: (BLOCK_T, BLOCK_H, D), tokens of all sequences in a row.
    """
    program = tl.program_id(0)
    q_programs = tl.cdiv(TOKENS, Q_BLOCK_T) * tl.cdiv(Q_HEADS, Q_BLOCK_H)
    if program < q_programs:
        _rotate(
            *(q_ptr, q_stride_b, q_stride_h, q_stride_t, q_out_ptr, q_out_stride_b, q_out_stride_h, q_out_stride_t),
            *(cos_ptr, sin_ptr, table_stride_s, table_stride_b, table_stride_t, program, T, TOKENS),
            *(Q_HEADS, D, R, SECTION_ENDS, INTERLEAVED, BACKWARD, Q_BLOCK_T, Q_BLOCK_H, BLOCK_PAIRS, BLOCK_TAIL),
        )
    elif k_ptr is not None:
        _rotate(
            *(k_ptr, k_stride_b, k_stride_h, k_stride_t, k_out_ptr, k_out_stride_b, k_out_stride_h, k_out_stride_t),
            *(cos_ptr, sin_ptr, table_stride_s, table_stride_b, table_stride_t, program - q_programs, T, TOKENS),
            *(K_HEADS, D, R, SECTION_ENDS, INTERLEAVED, BACKWARD, K_BLOCK_T, K_BLOCK_H, BLOCK_PAIRS, BLOCK_TAIL),
        )


def _block(heads: int, columns: int) -> tuple[int, int]:
    """Tokens and heads of a tile. A number of heads that is no power of two is split into blocks that waste little."""
    rows = max(ELEMENTS // power_of_2(columns), 1)
    block_h = min(max(heads & -heads, min(power_of_2(heads), HEADS)), rows)
    return rows // block_h, block_h


@functools.cache
def _constants(
    q_heads: int,
    k_heads: int,
    columns: int,
    rotated: int,
    sections: tuple[int, ...],
    interleaved: bool,
    backward: bool,
) -> dict[str, Any]:
    q_block_t, q_block_h = _block(q_heads, columns)
    k_block_t, k_block_h = _block(max(k_heads, 1), columns)
    return {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "D": columns,
        "R": rotated,
        "SECTION_ENDS": tuple(itertools.accumulate(sections[:-1])),
        "INTERLEAVED": interleaved,
        "BACKWARD": backward,
        "Q_BLOCK_T": q_block_t,
        "Q_BLOCK_H": q_block_h,
        "K_BLOCK_T": k_block_t,
        "K_BLOCK_H": k_block_h,
        "BLOCK_PAIRS": power_of_2(rotated // 2),
        "BLOCK_TAIL": power_of_2(columns - rotated),
        "num_warps": WARPS,
    }


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Tables with contiguous columns, and the strides that both have over sections, batch and tokens."""
    if cos.stride(-1) != 1 or cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    section, batch, token = (0, *cos.stride())[-4:-1]
    return cos, sin, (section, 0 if cos.shape[-3] == 1 else batch, token)


def _rotate_into(
    outputs: Sequence[Tensor],
    inputs: tuple[Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    backward: bool,
) -> None:
    """Outputs have contiguous columns; those of inputs that are None or empty are left alone."""
    given = [
        (_with_contiguous_columns(x), y) for x, y in zip(inputs, outputs, strict=True) if x is not None and x.numel()
    ]
    if not given:
        return
    q, q_out = given[0]
    k, k_out = given[1] if len(given) == 2 else (None, None)
    batch, q_heads, length, columns = q.shape
    k_heads = 0 if k is None else k.shape[1]
    cos, sin, table_strides = _tables(cos, sin)
    constants = _constants(q_heads, k_heads, columns, cos.shape[-1], tuple(sections or ()), interleaved, backward)
    tokens = batch * length
    programs = cdiv(tokens, constants["Q_BLOCK_T"]) * cdiv(q_heads, constants["Q_BLOCK_H"])
    programs += cdiv(tokens, constants["K_BLOCK_T"]) * cdiv(k_heads, constants["K_BLOCK_H"])
    tensors = [a for t in (q, q_out, k, k_out) for a in (t, *((0, 0, 0) if t is None else t.stride()[:3]))]
    launch(rotary_embedding_kernel, programs, q, *tensors, cos, sin, *table_strides, length, tokens, **constants)


def _with_contiguous_columns(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def rotary_embedding_fwd(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    memory_format: torch.memory_format | None,
) -> tuple[Tensor, Tensor]:
    outputs = forward_fake(q, k, cos, sin, interleaved, sections, memory_format)
    targets = [y if y.stride(-1) == 1 else y.new_empty(y.shape) for y in outputs]
    _rotate_into(targets, (q, k), cos, sin, interleaved, sections, backward=False)
    for y, target in zip(outputs, targets, strict=True):
        if target is not y:
            y.copy_(target)
    return outputs


def rotary_embedding_bwd(
    dq: Tensor | None,
    dk: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    q_order: list[int],
    k_order: list[int],
) -> tuple[Tensor, Tensor]:
    gradients = backward_fake(dq, dk, cos, sin, interleaved, sections, q_order, k_order)
    _rotate_into(gradients, (dq, dk), cos, sin, interleaved, sections, backward=True)
    return gradients
