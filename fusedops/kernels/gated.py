"""The kernels of swiglu and geglu on a GPU: y = act(gate) * up, act(x) = x * P(x).

M: rows, all leading dimensions together; one where all tensors are contiguous
N: columns of a row; all elements where all tensors are contiguous

gate and up are two tensors or the halves of one, which differ in strides alone. Nothing is reduced: small
programs, of which many share a processor, keep memory busiest, whatever the shape.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from csrc_meta import gated
from fusedops.kernels.launch import as_rows, cdiv, launch, power_of_2

TILE = 512
WARPS = 2

SQRT_HALF = tl.constexpr(math.sqrt(0.5))
DENSITY_AT_ZERO = tl.constexpr(1 / math.sqrt(2 * math.pi))  # of the normal distribution
# gelu's tanh form, 0.5 * x * (1 + tanh(z)) = x * sigmoid(2 * z), z = sqrt(2 / pi) * (x + 0.044715 * x^3)
TANH_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _share(x, ACTIVATION: tl.constexpr):
    """P(x) and its derivative, where the activation is x * P(x)."""
    if ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        slope = DENSITY_AT_ZERO * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_tanh":
        square = x * x
        # As a sigmoid it neither overflows nor cancels where tanh is near -1.
        share = tl.sigmoid((x + square * x * TANH_CUBIC) * TANH_SLOPE)
        slope = share * (1.0 - share) * ((square * (3 * TANH_CUBIC) + 1.0) * TANH_SLOPE)
    else:
        tl.static_assert(ACTIVATION == "silu")
        share = tl.sigmoid(x)
        slope = share * (1.0 - share)
    return share, slope


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a program's tile and which of its elements exist."""
    blocks = tl.cdiv(N, BLOCK_N).to(tl.int32)
    program = tl.program_id(0)
    rows = (program // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = (program % blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return rows, columns, (rows < M) & (columns < N)


@triton.jit(do_not_specialize=["M"])
def gated_fwd_kernel(
    gate_ptr,
    gate_stride_m,
    up_ptr,
    up_stride_m,
    y_ptr,
    y_stride_m,
    M,
    N,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = act(gate) * up, act(gate) rounded to its dtype. Grid: tiles of rows times blocks of columns."""
    rows, columns, mask = _tile(M, N, BLOCK_M, BLOCK_N)
    gate = tl.load(gate_ptr + rows * gate_stride_m + columns, mask=mask, other=0.0)
    up = tl.load(up_ptr + rows * up_stride_m + columns, mask=mask, other=0.0)
    WIDE: tl.constexpr = tl.float64 if gate.dtype == tl.float64 else tl.float32
    x = gate.to(WIDE)
    share, _ = _share(x, ACTIVATION)
    y = (x * share).to(gate.dtype).to(WIDE) * up.to(WIDE)
    tl.store(y_ptr + rows * y_stride_m + columns, y.to(gate.dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def gated_bwd_kernel(
    dy_ptr,
    dy_stride_m,
    gate_ptr,
    gate_stride_m,
    up_ptr,
    up_stride_m,
    dgate_ptr,
    dgate_stride_m,
    dup_ptr,
    dup_stride_m,
    M,
    N,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dgate = dy * up * act'(gate), act'(x) = P(x) + x * P'(x); dup = dy * act(gate), rounded as in the forward pass.

    Grid: tiles of rows times blocks of columns. Every element is read before it is written, by the same program:
    dgate and dup may be gate and up.
    """
    rows, columns, mask = _tile(M, N, BLOCK_M, BLOCK_N)
    gate = tl.load(gate_ptr + rows * gate_stride_m + columns, mask=mask, other=0.0)
    dy = tl.load(dy_ptr + rows * dy_stride_m + columns, mask=mask, other=0.0)
    WIDE: tl.constexpr = tl.float64 if gate.dtype == tl.float64 else tl.float32
    x = gate.to(WIDE)
    dy = dy.to(WIDE)
    share, slope = _share(x, ACTIVATION)
    if dgate_ptr is not None:
        up = tl.load(up_ptr + rows * up_stride_m + columns, mask=mask, other=0.0).to(WIDE)
        dgate = dy * up * (share + x * slope)
        tl.store(dgate_ptr + rows * dgate_stride_m + columns, dgate.to(gate.dtype), mask=mask)
    if dup_ptr is not None:
        dup = dy * (x * share).to(gate.dtype).to(WIDE)
        tl.store(dup_ptr + rows * dup_stride_m + columns, dup.to(gate.dtype), mask=mask)


def _launch(kernel, tensors: tuple[Tensor | None, ...], activation: str) -> None:
    """Tensors of one shape, None where a gradient isn't needed: as one long row if they are contiguous, else as rows."""
    given = [t for t in tensors if t is not None]
    first = given[0]
    if all(t.is_contiguous() for t in given):
        m, n, block_n = 1, first.numel(), TILE
        arguments = [a for t in tensors for a in (t, n)]
    else:
        m, n = first.shape[:-1].numel(), first.shape[-1]
        block_n = min(power_of_2(n), TILE)
        arguments = [a for t in tensors for a in as_rows(t)]
    block_m = TILE // block_n
    programs = cdiv(m, block_m) * cdiv(n, block_n)
    constants = {"ACTIVATION": activation, "BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": WARPS}
    launch(kernel, programs, first, *arguments, m, n, **constants)


def gated_fwd(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    y = gated.forward_fake(gate, up, activation)
    _launch(gated_fwd_kernel, (*gated.halves(gate, up), y), activation)
    return y


def gated_bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, output_mask: list[bool]
) -> tuple[Tensor, Tensor]:
    dgate, dup = gated.backward_fake(dy, gate, up, activation, output_mask)
    targets = gated.gradient_halves(dgate, dup, up is None, output_mask)
    if any(t is not None for t in targets):
        _launch(gated_bwd_kernel, (dy, *gated.halves(gate, up), *targets), activation)
    return dgate, dup


def gated_bwd_(dy: Tensor, gate: Tensor, up: Tensor | None, activation: str) -> None:
    tensors = gated.halves(gate, up)
    _launch(gated_bwd_kernel, (dy, *tensors, *tensors), activation)
