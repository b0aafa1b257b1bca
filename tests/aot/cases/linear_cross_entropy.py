"""Its own kernel, which scales finished gradients: the rest is cross_entropy's, and cuBLAS'."""

from typing import Any

import torch

from tests.aot.cases import DTYPES, Cases, short


def cases(launchers: Any) -> Cases:
    for dtype in DTYPES:
        gradient = torch.empty(64, 4096, dtype=dtype)
        factor = torch.empty((), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        yield f"scale {short(dtype)}", lambda f=factor, g=gradient: launchers.linear_cross_entropy_scale_(f, [g])
