"""Layer norm on a GPU: y = (x - mean) * rstd * w + b. Launches the kernels of norm.py."""

from torch import Tensor

from csrc_meta.layer_norm import layer_norm_backward_fake, layer_norm_fake
from fusedops.kernels import norm


def layer_norm_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = layer_norm_fake(x, weight, bias, eps)
    norm.forward("layer_norm", x, None, weight, bias, None, y, mean, rstd, eps, 0.0, "once")
    return y, mean, rstd


def layer_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    results = layer_norm_backward_fake(dy, x, weight, bias, mean, rstd, output_mask)
    inputs = zip(results, (x, weight, bias), output_mask, strict=True)
    dx, dweight, dbias = (result if wanted and t is not None else None for result, t, wanted in inputs)
    statistics = mean.contiguous(), rstd.contiguous()
    norm.backward("layer_norm", dy, None, x, weight, *statistics, dx, dweight, dbias, 0.0, "once")
    return results
