"""What products by Triton share: tiles of logits = hidden @ weight.T that are read by NVIDIA's TMA.

Their loops walk over tiles, and each program takes every so manieth: with the loop of the product inside flattened into it,
the first operands of a tile are read while the last one's results are worked on. Where no tiles were measured to be as fast
as cuBLAS' there are none.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fusedops.kernels import tuned
from fusedops.kernels.launch import cdiv, processors

# By architecture. "" is the interpreter: several tiles in small tensors.
TILES: dict[str, dict[str, int]] = {
    "sm_90": {"BLOCK_T": 128, "BLOCK_V": 256, "BLOCK_H": 64, "num_warps": 8, "num_stages": 3},
    "": {"BLOCK_T": 16, "BLOCK_V": 32, "BLOCK_H": 16, "num_warps": 4, "num_stages": 1},
}
GROUP = 16  # tiles of rows that take turns at a tile of weight while it is in the L2 cache
ALIGNMENT = 16  # bytes: what TMA reads and writes rows by


@triton.jit
def place(tile, tiles_t, tiles_v, GROUP: tl.constexpr):
    """Which rows and which columns a tile has."""
    first = tile // (GROUP * tiles_v) * GROUP
    group = min(tiles_t - first, GROUP)
    return first + tile % (GROUP * tiles_v) % group, tile % (GROUP * tiles_v) // group


@triton.jit
def product(
    hidden_desc, weight_desc, tile_t, tile_v, H, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr
):
    """A tile of hidden @ weight.T in float32."""
    sums = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for h in range(0, H, BLOCK_H):
        hidden = hidden_desc.load([tile_t * BLOCK_T, h])
        weight = weight_desc.load([tile_v * BLOCK_V, h])
        sums = tl.dot(hidden, weight.T, sums)
    return sums


@triton.jit
def halves(t):
    """The left and the right columns of a matrix."""
    rows: tl.constexpr = t.shape[0]
    columns: tl.constexpr = t.shape[1]
    return tl.split(tl.permute(tl.reshape(t, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def quarters(t):
    left, right = halves(t)
    return halves(left) + halves(right)


def tiles(hidden: Tensor, weight: Tensor, dtypes: tuple[torch.dtype, ...], interpreted: torch.dtype) -> dict[str, int]:
    """The tiles of a product of these dtypes (of another one in the interpreter), or none.

    The interpreter would multiply the bits of bfloat16 as integers.
    """
    architecture = tuned.architecture(hidden.device)
    known = hidden.dtype in dtypes if architecture else hidden.dtype == interpreted
    return TILES.get(architecture, {}) if known and has_rows_for_tma(hidden) and has_rows_for_tma(weight) else {}


def has_rows_for_tma(t: Tensor) -> bool:
    row = t.stride(0) * t.itemsize
    return t.numel() > 0 and t.stride(1) == 1 and row % ALIGNMENT == 0 and t.data_ptr() % ALIGNMENT == 0


def descriptor(t: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def operands(hidden: Tensor, weight: Tensor, tiles: dict[str, int]) -> tuple[TensorDescriptor, TensorDescriptor]:
    block_h = tiles["BLOCK_H"]
    return descriptor(hidden, [tiles["BLOCK_T"], block_h]), descriptor(weight, [tiles["BLOCK_V"], block_h])


def programs(hidden: Tensor, weight: Tensor, tiles: dict[str, int]) -> int:
    count = cdiv(len(hidden), tiles["BLOCK_T"]) * cdiv(len(weight), tiles["BLOCK_V"])
    return min(count, processors(hidden.device))
