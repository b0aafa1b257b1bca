"""RMSNorm on a GPU: y = x * rstd * (offset + w), rstd = 1 / sqrt(mean(x^2) + eps). Launches the kernels of norm.py."""

from torch import Tensor

from csrc_meta.rms_norm import rms_norm_backward_fake, rms_norm_fake
from fusedops.kernels import norm


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, cast: str
) -> tuple[Tensor, Tensor]:
    y, rstd = rms_norm_fake(x, weight, eps, weight_offset, cast)
    norm.forward("rms_norm", x, None, weight, None, None, y, None, rstd, eps, weight_offset, cast)
    return y, rstd


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float, cast: str, output_mask: list[bool]
) -> tuple[Tensor, Tensor]:
    dx, dweight = rms_norm_backward_fake(dy, x, weight, rstd, weight_offset, cast, output_mask)
    wanted = dx if output_mask[0] else None, dweight if output_mask[1] and weight is not None else None
    norm.backward("rms_norm", dy, None, x, weight, None, rstd.contiguous(), *wanted, None, weight_offset, cast)
    return dx, dweight
