"""Linear cross entropy on a GPU: the chunk loop of csrc_meta with cuBLAS for its GEMMs and Triton for its rows.

Where products by Triton are as fast, :mod:`fusedops.kernels.projected_losses` computes losses without chunks, and
:mod:`fusedops.kernels.projected_gradients` gradients without a pass over logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from csrc_meta import chunks
from csrc_meta.donation import is_capturing
from csrc_meta.linear_cross_entropy import linear_cross_entropy_scale
from fusedops.kernels import cross_entropy
from fusedops.kernels.launch import cdiv, launch, processors
from fusedops.kernels.projected_gradients import factored
from fusedops.kernels.projected_losses import projected_losses

__all__ = [
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_cross_entropy_scale",
    "linear_cross_entropy_scale_",
]

# Multiplications of one product, a third of a millisecond or more on every GPU there is.
WORTH_WAITING = 2**37
BLOCK = 4096
WARPS = 8
PROGRAMS_PER_PROCESSOR = 8


def kept_rows(labels: Tensor, ignore_index: int, work: int) -> Tensor | None:
    """As csrc_meta.chunks.kept_ref. The host waits for the labels, which the device does not notice: it sorts meanwhile.

    Nobody waits, and all rows are kept, where a CUDA graph is captured or products are so short that the device would
    run out of work before the host has caught up.
    """
    if labels.device.type == "cpu":
        return chunks.kept_ref(labels, ignore_index, work)
    if not labels.is_cuda or is_capturing(labels) or work < WORTH_WAITING:
        return None
    kept = labels != ignore_index
    count = torch.empty((), dtype=torch.int64, pin_memory=True).copy_(kept.sum(), non_blocking=True)
    known = torch.cuda.Event()
    known.record()
    first = kept.to(torch.uint8).argsort(descending=True, stable=True)
    known.synchronize()
    rows = int(count)
    return None if rows == len(labels) else first[:rows]


KERNELS = chunks.Kernels(cross_entropy.KERNELS, kept_rows, projected_losses, factored)


def linear_cross_entropy_fwd(*args):
    return chunks.forward(KERNELS, *args)


def linear_cross_entropy_bwd(*args):
    return chunks.backward(KERNELS, *args)


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
