"""RMSNorm on a GPU: y = x * rstd * (offset + w), rstd = 1 / sqrt(mean(x^2) + eps).

M: rows, all leading dimensions together
N: columns, the normalised dimension
P: programs of the backward pass, each summing its own part of dweight

Rows that fit into registers are read once. Wider ones are walked twice in blocks of columns, the second time out of the
cache. N is a compile-time constant (a model has two or three), M is not.
"""

import triton
import triton.language as tl
from torch import Tensor

from csrc_meta.rms_norm import rms_norm_backward_fake, rms_norm_fake
from fusedops.kernels.launch import as_rows, contiguous, launch, processors

# Widest rows held in registers without spilling: columns forward, bytes of x backward, which holds x, dy and dweight.
FORWARD_COLUMNS = 16384
BACKWARD_BYTES = 32768
TILE = 4096  # elements of a tile of several short rows
SHORT_ROW = 256  # columns up to which the backward pass is faster with more warps to a tile
# BLOCK_M, BLOCK_N, warps. The more rows share a block, the less often the sum of dweight is read and written.
WIDE_FORWARD = (1, 8192, 16)
WIDE_BACKWARD = (4, 2048, 8)
WARPS_PER_PROCESSOR = 16  # of the backward pass: more write more parts of dweight, fewer wait for memory


@triton.jit
def _tile(rows, start, M, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Column offsets of a block and which of the tile's elements exist."""
    columns = start + tl.arange(0, BLOCK_N)[None, :]
    return columns, (rows < M) & (columns < N)


@triton.jit
def _rows(tile, BLOCK_M: tl.constexpr):
    return tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]


@triton.jit
def _scale(w_ptr, columns, N: tl.constexpr, OFFSET: tl.constexpr, CAST: tl.constexpr, WIDE: tl.constexpr):
    """offset + w, rounded to the weight's own dtype in Llama's order."""
    w = tl.load(w_ptr + columns, mask=columns < N, other=0.0)
    scale = w.to(WIDE) + OFFSET
    if CAST == "llama":
        scale = scale.to(w.dtype).to(WIDE)
    return scale


@triton.jit
def _normalise(x, rstd, CAST: tl.constexpr):
    """x * rstd as the weight meets it: rounded to x's dtype in Llama's order."""
    normalised = x.to(rstd.dtype) * rstd
    if CAST == "llama":
        normalised = normalised.to(x.dtype).to(rstd.dtype)
    return normalised


@triton.jit
def _rstd(squares, N: tl.constexpr, EPS: tl.constexpr):
    return tl.rsqrt(tl.sum(squares, 1, keep_dims=True) / N + EPS)


@triton.jit(do_not_specialize=["M"])
def rms_norm_fwd_kernel(
    x_ptr,
    x_stride_m,
    w_ptr,
    y_ptr,
    rstd_ptr,
    M,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = x * rstd * (offset + w). Grid: tiles of rows. Tile: BLOCK_M whole rows."""
    WIDE: tl.constexpr = rstd_ptr.dtype.element_ty
    rows = _rows(tl.program_id(0), BLOCK_M)
    columns, mask = _tile(rows, 0, M, N, BLOCK_N)
    x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0)
    wide = x.to(WIDE)
    rstd = _rstd(wide * wide, N, EPS)
    y = _normalise(x, rstd, CAST)
    if w_ptr is not None:
        y *= _scale(w_ptr, columns, N, OFFSET, CAST, WIDE)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    tl.store(y_ptr + rows * N + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def rms_norm_fwd_wide_kernel(
    x_ptr,
    x_stride_m,
    w_ptr,
    y_ptr,
    rstd_ptr,
    M,
    N: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = x * rstd * (offset + w). Grid: tiles of rows. Tile: (BLOCK_M, BLOCK_N), walked twice along the row."""
    WIDE: tl.constexpr = rstd_ptr.dtype.element_ty
    rows = _rows(tl.program_id(0), BLOCK_M)
    squares = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
    for start in range(0, N, BLOCK_N):
        columns, mask = _tile(rows, start, M, N, BLOCK_N)
        x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0).to(WIDE)
        squares += x * x
    rstd = _rstd(squares, N, EPS)
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)
    for start in range(0, N, BLOCK_N):
        columns, mask = _tile(rows, start, M, N, BLOCK_N)
        y = _normalise(tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0), rstd, CAST)
        if w_ptr is not None:
            y *= _scale(w_ptr, columns, N, OFFSET, CAST, WIDE)
        tl.store(y_ptr + rows * N + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def rms_norm_bwd_kernel(
    dy_ptr,
    dy_stride_m,
    x_ptr,
    x_stride_m,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    M,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx = rstd * (g - xhat * mean(g * xhat)), xhat = x * rstd, g = dy * (offset + w); dw = sum over rows of dy * xhat.

    Grid: P, each program takes every P-th tile of rows and writes its own row of dw (P, N). Tile: BLOCK_M whole rows.
    """
    WIDE: tl.constexpr = rstd_ptr.dtype.element_ty
    program = tl.program_id(0)
    if dw_ptr is not None:
        dw = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
    for tile in range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        rows = _rows(tile, BLOCK_M)
        columns, mask = _tile(rows, 0, M, N, BLOCK_N)
        x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0)
        dy = tl.load(dy_ptr + rows * dy_stride_m + columns, mask=mask, other=0.0).to(WIDE)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        if dw_ptr is not None:
            dw += dy * _normalise(x, rstd, CAST)
        if dx_ptr is not None:
            g = dy
            if w_ptr is not None:
                # From the cache for every tile: held, it would take the registers that wide rows need.
                g *= _scale(w_ptr, columns, N, OFFSET, CAST, WIDE)
            xhat = x.to(WIDE) * rstd
            dx = rstd * (g - xhat * (tl.sum(g * xhat, 1, keep_dims=True) / N))
            tl.store(dx_ptr + rows * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if dw_ptr is not None:
        columns = tl.arange(0, BLOCK_N)
        tl.store(dw_ptr + program.to(tl.int64) * N + columns, tl.sum(dw, 0), mask=columns < N)


@triton.jit(do_not_specialize=["M"])
def rms_norm_bwd_wide_kernel(
    dy_ptr,
    dy_stride_m,
    x_ptr,
    x_stride_m,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    M,
    N: tl.constexpr,
    OFFSET: tl.constexpr,
    CAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The equations of rms_norm_bwd_kernel for rows that don't fit into registers.

    Grid: P. Tile: (BLOCK_M, BLOCK_N), walked twice along the row. dw (P, N) starts at zero and is summed in memory, each
    row by its own program.
    """
    WIDE: tl.constexpr = rstd_ptr.dtype.element_ty
    program = tl.program_id(0)
    for tile in range(program, tl.cdiv(M, BLOCK_M), tl.num_programs(0)):
        rows = _rows(tile, BLOCK_M)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        if dx_ptr is not None:
            products = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
            for start in range(0, N, BLOCK_N):
                columns, mask = _tile(rows, start, M, N, BLOCK_N)
                g = tl.load(dy_ptr + rows * dy_stride_m + columns, mask=mask, other=0.0).to(WIDE)
                if w_ptr is not None:
                    g *= _scale(w_ptr, columns, N, OFFSET, CAST, WIDE)
                x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0).to(WIDE)
                products += g * (x * rstd)
            mean = tl.sum(products, 1, keep_dims=True) / N
        for start in range(0, N, BLOCK_N):
            columns, mask = _tile(rows, start, M, N, BLOCK_N)
            dy = tl.load(dy_ptr + rows * dy_stride_m + columns, mask=mask, other=0.0).to(WIDE)
            x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0)
            if dw_ptr is not None:
                part = start + tl.arange(0, BLOCK_N)
                dw_block = dw_ptr + program.to(tl.int64) * N + part
                dw = tl.load(dw_block, mask=part < N, other=0.0) + tl.sum(dy * _normalise(x, rstd, CAST), 0)
                tl.store(dw_block, dw, mask=part < N)
            if dx_ptr is not None:
                g = dy
                if w_ptr is not None:
                    g *= _scale(w_ptr, columns, N, OFFSET, CAST, WIDE)
                dx = rstd * (g - x.to(WIDE) * rstd * mean)
                tl.store(dx_ptr + rows * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def _whole_rows(columns: int, elements_per_warp: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and the number of warps for tiles of whole rows."""
    block_n = triton.next_power_of_2(max(columns, 1))
    block_m = max(TILE // block_n, 1)
    return block_m, block_n, min(max(block_m * block_n // elements_per_warp, 4), 16)


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str
) -> tuple[Tensor, Tensor]:
    y, rstd = rms_norm_fake(x, weight, eps, weight_offset, cast)
    x = as_rows(x)
    m, n = x.shape
    if n <= FORWARD_COLUMNS:
        kernel, (block_m, block_n, warps) = rms_norm_fwd_kernel, _whole_rows(n, 512)
    else:
        kernel, (block_m, block_n, warps) = rms_norm_fwd_wide_kernel, WIDE_FORWARD
    sizes = {"M": m, "N": n, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}
    constants = {"EPS": eps, "OFFSET": weight_offset, "CAST": cast}
    launch(kernel, triton.cdiv(m, block_m), x, x, x.stride(0), contiguous(weight), y, rstd, **sizes, **constants)
    return y, rstd


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, cast: str, output_mask: list[bool]
) -> tuple[Tensor, Tensor]:
    dx, dweight = rms_norm_backward_fake(dy, x, weight, rstd, weight_offset, cast, output_mask)
    wants_dx, wants_dweight = output_mask[0], output_mask[1] and weight is not None
    if not (wants_dx or wants_dweight):
        return dx, dweight
    dy, x = as_rows(dy), as_rows(x)
    m, n = x.shape
    if n * x.element_size() <= BACKWARD_BYTES:
        kernel, new = rms_norm_bwd_kernel, x.new_empty
        # Wide elements, and dweight alone (on sm_100), spill where a warp holds more.
        spills = x.element_size() > 2 or not wants_dx
        block_m, block_n, warps = _whole_rows(n, 512 if n <= SHORT_ROW or spills else 1024)
    else:
        kernel, new = rms_norm_bwd_wide_kernel, x.new_zeros
        block_m, block_n, warps = WIDE_BACKWARD
    programs = min(triton.cdiv(m, block_m), max(WARPS_PER_PROCESSOR // warps, 1) * processors(x.device))
    parts = new((programs, n), dtype=rstd.dtype) if wants_dweight else None
    sizes = {"M": m, "N": n, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps}
    constants = {"OFFSET": weight_offset, "CAST": cast}
    tensors = (contiguous(weight), contiguous(rstd), dx if wants_dx else None, parts)
    launch(kernel, programs, x, dy, dy.stride(0), x, x.stride(0), *tensors, **sizes, **constants)
    return dx, dweight if parts is None else parts.sum(0).to(dweight.dtype)
