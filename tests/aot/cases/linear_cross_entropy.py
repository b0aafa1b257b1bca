"""Its own kernels, which scale finished gradients and evaluate without logits: the rest is cross_entropy's, and cuBLAS'."""

from collections.abc import Callable
from typing import Any

import torch

from csrc_meta import cross_entropy as ce
from tests.aot.cases import DTYPES, Cases, short


def cases(launchers: Any) -> Cases:
    for dtype in DTYPES:
        gradient = torch.empty(64, 4096, dtype=dtype)
        factor = torch.empty((), dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        yield f"scale {short(dtype)}", lambda f=factor, g=gradient: launchers.linear_cross_entropy_scale_(f, [g])
    for dtype in (torch.bfloat16, torch.float16):
        yield f"losses {short(dtype)}", _losses(launchers, dtype, ce.Options())
    all_options = ce.Options(label_smoothing=0.1, softcap=30.0, logit_scale=0.5, z_loss=1e-4)
    yield "losses, all options", _losses(launchers, torch.bfloat16, all_options, weighted=True, metrics=True)


def _losses(
    launchers: Any,
    dtype: torch.dtype,
    options: ce.Options,
    weighted: bool = False,
    metrics: bool = False,
) -> Callable[[], object]:
    vocabulary = 1000 if weighted else 1024  # with and without a tile that has fewer columns
    hidden, weight = torch.empty(512, 4096, dtype=dtype), torch.empty(vocabulary, 4096, dtype=dtype)
    labels, results = torch.empty(512, dtype=torch.int64), torch.empty(7, 512)
    bias, class_weight = (torch.empty(vocabulary, dtype=d) if weighted else None for d in (dtype, torch.float32))
    of_rows = (results[0], results[1:3], results[3:] if metrics else None)
    return lambda: launchers.projected_losses(hidden, weight, bias, labels, class_weight, options, *of_rows)
