"""A residual connection and RMSNorm on a GPU: s = x + r, y = s * rstd * (offset + w). Launches the kernels of norm.py."""

from torch import Tensor

from csrc_meta.add_rms_norm import add_rms_norm_backward_fake, add_rms_norm_fake
from fusedops.kernels import norm


def add_rms_norm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str
) -> tuple[Tensor, Tensor, Tensor]:
    y, total, rstd = add_rms_norm_fake(x, residual, weight, eps, weight_offset, cast)
    norm.forward("add_rms_norm", x, residual, weight, None, total, y, None, rstd, eps, weight_offset, cast)
    return y, total, rstd


def add_rms_norm_bwd(
    dy: Tensor,
    dsum: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    cast: str,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    dx, dweight = add_rms_norm_backward_fake(dy, dsum, total, weight, rstd, weight_offset, cast, output_mask)
    wanted = dx if output_mask[0] else None, dweight if output_mask[1] and weight is not None else None
    norm.backward("add_rms_norm", dy, dsum, total, weight, None, rstd.contiguous(), *wanted, None, weight_offset, cast)
    return dx, dweight
