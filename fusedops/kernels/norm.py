"""The kernels of rms_norm, add_rms_norm and layer_norm: y = (x - mean) * rstd * (offset + w) + b.

M: rows, all leading dimensions together
N: columns, the normalised dimension
P: programs of the backward pass, each summing its own part of dw and db

What an operator lacks (the mean, a residual, w, b) is passed as None, and Triton leaves its code out. Rows that fit into
registers are read once. Wider ones are walked in blocks of columns, each time after the first out of the cache. N is a
compile-time constant (a model has two or three), M is not.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.kernels import tuned
from fusedops.kernels.launch import as_rows, cdiv, contiguous, launch, power_of_2, processors

# Widest rows held in registers without spilling: columns forward, bytes of x backward, which holds x, dy, dw and db.
FORWARD_COLUMNS = 16384
BACKWARD_BYTES = 32768
TILE = 4096  # elements of a tile of several short rows
SHORT_ROW = 256  # columns up to which the backward pass is faster with more warps to a tile
WIDE_FORWARD = {"BLOCK_M": 1, "BLOCK_N": 8192, "num_warps": 16}
# The more rows share a block, the less often the sums of dw and db are read and written.
WIDE_BACKWARD = {"BLOCK_M": 4, "BLOCK_N": 2048, "num_warps": 8}
WARPS_PER_PROCESSOR = 16  # of the backward pass: more write more parts of dw, fewer wait for memory
# Tiles of the second stage: parts of dw by columns.
PARTS = {"BLOCK_P": 32, "BLOCK_N": 32, "num_warps": 4}


@triton.jit
def _rows(tile, BLOCK_M: tl.constexpr):
    return tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]


@triton.jit
def _mask(rows, columns, M, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of a tile exist. What is known to exist costs no comparison."""
    if N % BLOCK_N == 0 and N > 0:
        exists = tl.full((1, BLOCK_N), True, tl.int1)
    else:
        exists = columns < N
    if BLOCK_M > 1:
        exists = exists & (rows < M)
    return exists


@triton.jit
def _vector(ptr, columns, N: tl.constexpr, BLOCK_N: tl.constexpr):
    if N % BLOCK_N == 0 and N > 0:
        return tl.load(ptr + columns)
    return tl.load(ptr + columns, mask=columns < N, other=0.0)


@triton.jit
def _scale(w_ptr, columns, N: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr, CAST: tl.constexpr, like):
    """offset + w, rounded to the weight's own dtype in Llama's order."""
    w = _vector(w_ptr, columns, N, BLOCK_N)
    scale = w.to(like.dtype)
    if OFFSET != 0.0:
        scale += tl.full((), OFFSET, like.dtype)
        if CAST == "llama":
            scale = scale.to(w.dtype).to(like.dtype)
    return scale


@triton.jit
def _round(normalised, dtype: tl.constexpr, CAST: tl.constexpr):
    """The normalised value as the weight meets it: rounded to x's dtype in Llama's order."""
    if CAST == "llama":
        normalised = normalised.to(dtype).to(normalised.dtype)
    return normalised


@triton.jit
def _divide(total, size):
    """total / size, rounded correctly: a row of equal elements has exactly that mean, and no difference from it."""
    if total.dtype == tl.float32:
        return tl.math.div_rn(total, tl.zeros_like(total) + size)
    return total / size


@triton.jit
def _affine(
    normalised, w_ptr, b_ptr, columns, N: tl.constexpr, BLOCK_N: tl.constexpr, OFFSET: tl.constexpr, CAST: tl.constexpr
):
    if w_ptr is not None:
        normalised *= _scale(w_ptr, columns, N, BLOCK_N, OFFSET, CAST, normalised)
    if b_ptr is not None:
        normalised += _vector(b_ptr, columns, N, BLOCK_N).to(normalised.dtype)
    return normalised


@triton.jit
def _summed(x_ptr, x_stride_m, r_ptr, r_stride_m, s_ptr, rows, columns, mask, N: tl.constexpr):
    """x, or x + residual rounded to its dtype and stored."""
    x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0)
    if r_ptr is not None:
        r = tl.load(r_ptr + rows * r_stride_m + columns, mask=mask, other=0.0)
        if x.dtype == tl.float64:
            x += r
        else:
            x = (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)
        tl.store(s_ptr + rows * N + columns, x, mask=mask)
    return x


@triton.jit(do_not_specialize=["M"])
def norm_fwd_kernel(
    x_ptr,
    x_stride_m,
    r_ptr,
    r_stride_m,
    s_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """s = x + r; y = (s - mean) * rstd * (offset + w) + b. Grid: tiles of rows. Tile: BLOCK_M whole rows."""
    WIDE: tl.constexpr = rstd_ptr.dtype.element_ty
    rows = _rows(tl.program_id(0), BLOCK_M)
    columns = tl.arange(0, BLOCK_N)[None, :]
    mask = _mask(rows, columns, M, N, BLOCK_M, BLOCK_N)
    x = _summed(x_ptr, x_stride_m, r_ptr, r_stride_m, s_ptr, rows, columns, mask, N)
    wide = x.to(WIDE)
    if mean_ptr is not None:
        mean = _divide(tl.sum(wide, 1, keep_dims=True), N)
        tl.store(mean_ptr + rows, mean, mask=rows < M)
        wide = tl.where(columns < N, wide - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / N + tl.full((), EPS, WIDE))
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    y = _affine(_round(wide * rstd, x.dtype, CAST), w_ptr, b_ptr, columns, N, BLOCK_N, OFFSET, CAST)
    tl.store(y_ptr + rows * N + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def norm_fwd_wide_kernel(
    x_ptr,
    x_stride_m,
    r_ptr,
    r_stride_m,
    s_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    M,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The equations of norm_fwd_kernel for rows that don't fit into registers.

    Grid: tiles of rows. Tile: (BLOCK_M, BLOCK_N), walked twice along the row. Means and squared deviations of blocks are
    combined as Chan, Golub and LeVeque do, since differences of large sums would lose what a small variance is.
    """
    WIDE: tl.constexpr = rstd_ptr.dtype.element_ty
    rows = _rows(tl.program_id(0), BLOCK_M)
    mean = tl.zeros((BLOCK_M, 1), WIDE)
    squares = tl.zeros((BLOCK_M, 1), WIDE)
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)[None, :]
        mask = _mask(rows, columns, M, N, BLOCK_M, BLOCK_N)
        wide = _summed(x_ptr, x_stride_m, r_ptr, r_stride_m, s_ptr, rows, columns, mask, N).to(WIDE)
        if mean_ptr is not None:
            size = tl.minimum(N - start, BLOCK_N).to(WIDE)
            share = size / (start + size)
            block_mean = _divide(tl.sum(wide, 1, keep_dims=True), size)
            shift = block_mean - mean
            wide = tl.where(columns < N, wide - block_mean, 0.0)
            squares += shift * shift * (start * share)
            mean += shift * share
        squares += tl.sum(wide * wide, 1, keep_dims=True)
    rstd = tl.rsqrt(squares / N + tl.full((), EPS, WIDE))
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=rows < M)
    source_ptr = x_ptr
    source_stride_m = x_stride_m
    if r_ptr is not None:
        # Each thread reads back what it wrote itself.
        source_ptr = s_ptr
        source_stride_m = N
    for start in range(0, N, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)[None, :]
        mask = _mask(rows, columns, M, N, BLOCK_M, BLOCK_N)
        x = tl.load(source_ptr + rows * source_stride_m + columns, mask=mask, other=0.0)
        normalised = _round((x.to(WIDE) - mean) * rstd, x.dtype, CAST)
        y = _affine(normalised, w_ptr, b_ptr, columns, N, BLOCK_N, OFFSET, CAST)
        tl.store(y_ptr + rows * N + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _normalised(x, mean_ptr, rstd, rows, M, columns, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """(x - mean) * rstd; zero where a row ends, as x itself is."""
    wide = x.to(rstd.dtype)
    if mean_ptr is not None:
        wide -= tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        if N % BLOCK_N != 0:
            wide = tl.where(columns < N, wide, 0.0)
    return wide * rstd


@triton.jit
def _scaled(
    dy,
    w_ptr,
    columns,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    WIDE: tl.constexpr,
):
    """g = dy * (offset + w). w comes from the cache for every tile: held, it would take the registers of wide rows."""
    g = dy.to(WIDE)
    if w_ptr is not None:
        g *= _scale(w_ptr, columns, N, BLOCK_N, OFFSET, CAST, g)
    return g


@triton.jit
def _sums(a, b):
    """The sums over columns of two tiles, in one reduction: each has all warps wait for each other."""
    a, b = tl.split(tl.sum(tl.join(a, b), 1))
    return a[:, None], b[:, None]


@triton.jit
def _anew(x):
    """x itself, of which the compiler can't know that it has converted it before: the third program id is always zero."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True) ^ tl.program_id(2).to(tl.int16)
    elif x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True) ^ tl.program_id(2)
    else:
        bits = x.to(tl.int64, bitcast=True) ^ tl.program_id(2).to(tl.int64)
    return bits.to(x.dtype, bitcast=True)


@triton.jit(do_not_specialize=["M"])
def norm_bwd_kernel(
    dy_ptr,
    dy_stride_m,
    ds_ptr,
    ds_stride_m,
    x_ptr,
    x_stride_m,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    part_stride_p,
    M,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    RECONVERT: tl.constexpr,
):
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + ds, xhat = (x - mean) * rstd, g = dy * (offset + w).

    mean(g) is subtracted where x's own mean was. dw = sum of dy * xhat over the rows, db = sum of dy.
    Grid: P, each program takes every P-th tile of rows and writes its own row of dw and db, which share the rows of one
    tensor. Tile: BLOCK_M whole rows.
    """
    WIDE: tl.constexpr = rstd_ptr.dtype.element_ty
    program = tl.program_id(0)
    if dw_ptr is not None and db_ptr is not None:
        db_ptr += N
    columns = tl.arange(0, BLOCK_N)[None, :]
    if dw_ptr is not None:
        dw = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
    if db_ptr is not None:
        db = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
    # STAGES tiles are on their way from memory while one is computed.
    for tile in tl.range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = _rows(tile, BLOCK_M)
        mask = _mask(rows, columns, M, N, BLOCK_M, BLOCK_N)
        x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + rows * dy_stride_m + columns, mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        if dx_ptr is not None:
            xhat = _normalised(x, mean_ptr, rstd, rows, M, columns, N, BLOCK_N)
            g = _scaled(dy, w_ptr, columns, N, BLOCK_N, OFFSET, CAST, WIDE)
            if mean_ptr is not None:
                product, gradient = _sums(g * xhat, g)
                gradient /= N
            else:
                product = tl.sum(g * xhat, 1, keep_dims=True)
            product /= N
            if RECONVERT:
                # Held in float32 until both sums are known, they would take the registers that dw and db need.
                x = _anew(x)
                dy = _anew(dy)
        xhat = _normalised(x, mean_ptr, rstd, rows, M, columns, N, BLOCK_N)
        if dw_ptr is not None:
            dw += dy.to(WIDE) * _round(xhat, x.dtype, CAST)
        if db_ptr is not None:
            db += dy.to(WIDE)
        if dx_ptr is not None:
            dx = _scaled(dy, w_ptr, columns, N, BLOCK_N, OFFSET, CAST, WIDE) - xhat * product
            if mean_ptr is not None:
                dx -= gradient
            dx *= rstd
            if ds_ptr is not None:
                dx += tl.load(ds_ptr + rows * ds_stride_m + columns, mask=mask, other=0.0).to(WIDE)
            tl.store(dx_ptr + rows * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    part = program.to(tl.int64) * part_stride_p + tl.arange(0, BLOCK_N)
    if dw_ptr is not None:
        tl.store(dw_ptr + part, tl.sum(dw, 0), mask=tl.arange(0, BLOCK_N) < N)
    if db_ptr is not None:
        tl.store(db_ptr + part, tl.sum(db, 0), mask=tl.arange(0, BLOCK_N) < N)


@triton.jit
def _add_part(part_ptr, columns, part, N: tl.constexpr):
    """Add a tile's sum over its rows to a program's own part in memory."""
    mask = columns < N
    tl.store(part_ptr + columns, tl.load(part_ptr + columns, mask=mask, other=0.0) + tl.sum(part, 0), mask=mask)


@triton.jit(do_not_specialize=["M"])
def norm_bwd_wide_kernel(
    dy_ptr,
    dy_stride_m,
    ds_ptr,
    ds_stride_m,
    x_ptr,
    x_stride_m,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    part_stride_p,
    M,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The equations of norm_bwd_kernel for rows that don't fit into registers.

    Grid: P. Tile: (BLOCK_M, BLOCK_N), walked twice along the row. dw and db (P, N) start at zero and are summed in
    memory, each row by its own program.
    """
    WIDE: tl.constexpr = rstd_ptr.dtype.element_ty
    program = tl.program_id(0)
    part = program.to(tl.int64) * part_stride_p
    if dw_ptr is not None and db_ptr is not None:
        db_ptr += N
    for tile in range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        rows = _rows(tile, BLOCK_M)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        products = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
        gradients = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
        if dx_ptr is not None:
            for start in range(0, N, BLOCK_N):
                columns = start + tl.arange(0, BLOCK_N)[None, :]
                mask = _mask(rows, columns, M, N, BLOCK_M, BLOCK_N)
                dy = tl.load(dy_ptr + rows * dy_stride_m + columns, mask=mask, other=0.0)
                g = _scaled(dy, w_ptr, columns, N, BLOCK_N, OFFSET, CAST, WIDE)
                x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0)
                products += g * _normalised(x, mean_ptr, rstd, rows, M, columns, N, BLOCK_N)
                if mean_ptr is not None:
                    gradients += g
        product = tl.sum(products, 1, keep_dims=True) / N
        gradient = tl.sum(gradients, 1, keep_dims=True) / N
        for start in range(0, N, BLOCK_N):
            columns = start + tl.arange(0, BLOCK_N)[None, :]
            mask = _mask(rows, columns, M, N, BLOCK_M, BLOCK_N)
            dy = tl.load(dy_ptr + rows * dy_stride_m + columns, mask=mask, other=0.0).to(WIDE)
            x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0)
            xhat = _normalised(x, mean_ptr, rstd, rows, M, columns, N, BLOCK_N)
            if dw_ptr is not None:
                _add_part(dw_ptr + part, start + tl.arange(0, BLOCK_N), dy * _round(xhat, x.dtype, CAST), N)
            if db_ptr is not None:
                _add_part(db_ptr + part, start + tl.arange(0, BLOCK_N), dy, N)
            if dx_ptr is not None:
                g = _scaled(dy, w_ptr, columns, N, BLOCK_N, OFFSET, CAST, WIDE)
                dx = rstd * (g - gradient - xhat * product)
                if ds_ptr is not None:
                    dx += tl.load(ds_ptr + rows * ds_stride_m + columns, mask=mask, other=0.0).to(WIDE)
                tl.store(dx_ptr + rows * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["P"])
def norm_parts_kernel(
    parts_ptr, parts_stride_p, dw_ptr, db_ptr, P, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    """dw and db: sums over P of parts (P, dw and db one after the other), always in the same order.

    Grid: blocks of columns, first those of dw. Tile: (BLOCK_P, BLOCK_N), walked down the parts.
    """
    WIDE: tl.constexpr = parts_ptr.dtype.element_ty
    blocks = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0)
    is_dw = False
    if dw_ptr is not None:
        is_dw = block < blocks
        parts_ptr += (block // blocks) * N
    columns = (block % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), WIDE)
    for start in range(0, P, BLOCK_P):
        parts = start + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
        mask = (parts < P) & (columns < N)[None, :]
        total += tl.load(parts_ptr + parts * parts_stride_p + columns[None, :], mask=mask, other=0.0)
    result = tl.sum(total, 0)
    if dw_ptr is not None:
        tl.store(dw_ptr + columns, result.to(dw_ptr.dtype.element_ty), mask=is_dw & (columns < N))
    if db_ptr is not None:
        tl.store(db_ptr + columns, result.to(db_ptr.dtype.element_ty), mask=(not is_dw) & (columns < N))


def forward(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    total: Tensor | None,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
    weight_offset: float,
    cast: str,
) -> None:
    """Launch the forward kernel that fits the rows; results are written into total, y, mean and rstd."""
    m, n = rstd.numel(), x.shape[-1]
    kernel, sizes = _forward_sizes(tuned.architecture(x.device), op, n, x.element_size())
    tensors = (*as_rows(x), *as_rows(residual), total, contiguous(weight), contiguous(bias), y, mean, rstd)
    programs = cdiv(m, sizes["BLOCK_M"])
    launch(kernel, programs, x, *tensors, m, N=n, EPS=eps, OFFSET=weight_offset, CAST=cast, **sizes)


def backward(
    op: str,
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    weight_offset: float,
    cast: str,
) -> None:
    """Launch the backward kernel that fits the rows, then the sums of its parts; None is not wanted."""
    wanted = (dweight is not None) + (dbias is not None)
    if dx is None and not wanted:
        return
    m, n = rstd.numel(), x.shape[-1]
    arch = tuned.architecture(x.device)
    kernel, sizes, per_processor = _backward_sizes(arch, op, n, x.element_size(), dx is not None)
    programs = min(cdiv(m, sizes["BLOCK_M"]), per_processor * processors(x.device))
    parts = None
    if wanted:
        new = torch.empty if kernel is norm_bwd_kernel else torch.zeros
        parts = new((programs, wanted * n), dtype=rstd.dtype, device=x.device)
    inputs = (*as_rows(dy), *as_rows(dsum), *as_rows(x), contiguous(weight), mean, rstd)
    results = (dx, None if dweight is None else parts, None if dbias is None else parts, wanted * n)
    launch(kernel, programs, x, *inputs, *results, m, N=n, OFFSET=weight_offset, CAST=cast, **sizes)
    if parts is not None:
        blocks = wanted * cdiv(n, PARTS["BLOCK_N"])
        launch(norm_parts_kernel, blocks, x, parts, wanted * n, dweight, dbias, programs, N=n, **PARTS)


def _whole_rows(columns: int, elements_per_warp: int) -> dict[str, int]:
    block_n = power_of_2(columns)
    block_m = max(TILE // block_n, 1)
    warps = min(max(block_m * block_n // elements_per_warp, 4), 16)
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}


@functools.cache
def _forward_sizes(arch: str, op: str, columns: int, element_size: int) -> tuple[Any, dict[str, int]]:
    if columns > FORWARD_COLUMNS:
        return norm_fwd_wide_kernel, WIDE_FORWARD
    sizes = _whole_rows(columns, 512)
    return norm_fwd_kernel, sizes | tuned.find(arch, f"{op}_fwd", element_size, sizes["BLOCK_N"])


@functools.cache
def _backward_sizes(
    arch: str, op: str, columns: int, element_size: int, wants_dx: bool
) -> tuple[Any, dict[str, int], int]:
    """Kernel, its sizes, and how many of its programs share a processor."""
    if columns * element_size > BACKWARD_BYTES:
        return norm_bwd_wide_kernel, WIDE_BACKWARD, max(WARPS_PER_PROCESSOR // WIDE_BACKWARD["num_warps"], 1)
    # Wide elements, and dw alone (on sm_100), spill where a warp holds more.
    spills = element_size > 2 or not wants_dx
    sizes = _whole_rows(columns, 512 if columns <= SHORT_ROW or spills else 1024) | {"STAGES": 1}
    # Two sums beside rows that take half of the registers.
    sizes["RECONVERT"] = op == "layer_norm" and sizes["BLOCK_N"] * element_size > BACKWARD_BYTES // 2
    if wants_dx:
        sizes |= tuned.find(arch, f"{op}_bwd", element_size, sizes["BLOCK_N"])
    per_processor = sizes.pop("programs", None) or max(WARPS_PER_PROCESSOR // sizes["num_warps"], 1)
    if op == "layer_norm":
        # g - mean(g) is exactly zero in eager where it should be: no product may stay unrounded there.
        sizes["enable_fp_fusion"] = False
    return norm_bwd_kernel, sizes, per_processor
