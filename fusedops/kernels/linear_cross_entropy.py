"""Linear cross entropy on a GPU: the chunk loop of csrc_meta with cuBLAS for its GEMMs and Triton for its rows."""

import triton
import triton.language as tl
from torch import Tensor

from csrc_meta import linear_cross_entropy as chunked
from csrc_meta.linear_cross_entropy import linear_cross_entropy_scale
from fusedops.kernels.cross_entropy import KERNELS
from fusedops.kernels.launch import cdiv, launch, processors

__all__ = [
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_cross_entropy_scale",
    "linear_cross_entropy_scale_",
]

BLOCK = 4096
WARPS = 8
PROGRAMS_PER_PROCESSOR = 8


def linear_cross_entropy_fwd(*args):
    return chunked.forward(KERNELS, *args)


def linear_cross_entropy_bwd(*args):
    return chunked.backward(KERNELS, *args)


@triton.jit(do_not_specialize=["BLOCKS"])
def scale_kernel(factor_ptr, g_ptr, N, BLOCKS, BLOCK: tl.constexpr):
    """g *= factor, N elements; nothing is read where the factor is one. Grid: programs, each takes every so manieth block."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        for block in range(tl.program_id(0), BLOCKS, tl.num_programs(0)):
            i = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            g = tl.load(g_ptr + i, mask=i < N, other=0.0)
            tl.store(g_ptr + i, (g.to(factor.dtype) * factor).to(g.dtype), mask=i < N)


def linear_cross_entropy_scale_(factor: Tensor, gradients: list[Tensor]) -> None:
    for g in gradients:
        blocks = cdiv(g.numel(), BLOCK)
        programs = min(blocks, PROGRAMS_PER_PROCESSOR * processors(g.device))
        launch(scale_kernel, programs, g, factor, g, g.numel(), blocks, BLOCK=BLOCK, num_warps=WARPS)
