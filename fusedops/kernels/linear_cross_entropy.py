"""Linear cross entropy on a GPU: the chunk loop of csrc_meta with cuBLAS for its GEMMs and Triton for its rows."""

from csrc_meta import linear_cross_entropy as chunked
from csrc_meta.linear_cross_entropy import linear_cross_entropy_scale
from fusedops.kernels.cross_entropy import KERNELS

__all__ = ["linear_cross_entropy_bwd", "linear_cross_entropy_fwd", "linear_cross_entropy_scale"]


def linear_cross_entropy_fwd(*args):
    return chunked.forward(KERNELS, *args)


def linear_cross_entropy_bwd(*args):
    return chunked.backward(KERNELS, *args)
