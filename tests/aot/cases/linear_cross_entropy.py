"""Its own kernels: scaled gradients, losses without logits, gradients without a pass over them. The rest is cuBLAS'."""

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
    yield "gradients", _gradients(launchers, ce.Options())
    options = ce.Options(softcap=30.0, logit_scale=0.5, z_loss=1e-4)
    yield "gradients, all options", _gradients(launchers, options, weighted=True)


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


def _gradients(launchers: Any, options: ce.Options, weighted: bool = False) -> Callable[[], object]:
    vocabulary, rows = 1000 if weighted else 1024, slice(0, 512)
    hidden, weight, logits = (
        torch.empty(s, dtype=torch.bfloat16) for s in ((512, 4096), (vocabulary, 4096), (512, 1024))
    )
    labels, total, results = torch.empty(512, dtype=torch.int64), torch.empty(()), torch.empty(3, 512)
    class_weight = torch.empty(vocabulary) if weighted else None
    upstream = torch.empty(512 if weighted else ()), None if weighted else total
    of_all = (hidden, weight, None, labels, class_weight, options, results[0], results[1:], None, *upstream)

    def launches() -> None:
        made = launchers.factored(*of_all)
        if made is None:  # on an architecture whose tiles were not measured
            return
        made.fill(rows, hidden, [(slice(0, vocabulary), logits[:, :vocabulary])])
        made.scale(rows, hidden, torch.empty_like(hidden))
        made.finish(rows, torch.empty(512, 4096), torch.empty_like(hidden))
        made.add_rounded(torch.empty(weight.shape), logits[:, :vocabulary], hidden, torch.empty_like(weight))
        for index in (None, labels):
            made.add_labels(hidden, index, [(slice(0, vocabulary), torch.empty(weight.shape))])

    return launches
