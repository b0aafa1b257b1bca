"""Vocabularies of Llama 2 and 3, Gemma, and GPT-2, whose odd rows can't be aligned; each option, and all of them."""

from typing import Any

import torch

from csrc_meta.checks import REDUCTIONS
from csrc_meta.cross_entropy import Options
from csrc_meta.results import compute_dtype
from tests.aot.cases import DTYPES, ROWS, Cases, short

OPTIONS: dict[str, dict[str, Any]] = {
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 30.0},
    "scale": {"logit_scale": 0.0625},
    "z-loss": {"z_loss": 1e-4},
    "all": {"label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 0.0625, "z_loss": 1e-4},
}


def cases(launchers: Any) -> Cases:
    def case(
        vocabulary: int,
        dtype: torch.dtype,
        weight_dtype: torch.dtype | None = None,
        labels_dtype: torch.dtype = torch.int64,
        with_metrics: bool = False,
        **options: Any,
    ):
        logits = torch.empty(ROWS, vocabulary, dtype=dtype)
        labels = torch.zeros(ROWS, dtype=labels_dtype)
        weight = torch.ones(vocabulary, dtype=weight_dtype) if weight_dtype else None
        losses = torch.empty(ROWS, dtype=compute_dtype(logits))
        stats, given = losses.new_empty(2, ROWS), Options(**options)
        metrics = losses.new_empty(4, ROWS) if with_metrics else None
        launchers.row_losses(logits, labels, weight, given, losses, stats, metrics)
        for reduction in REDUCTIONS:
            launchers.reduce(losses, labels, weight, vocabulary, given, reduction)
        scalar = losses.new_empty(())
        for dloss, total in ((scalar, scalar), (losses, None)):
            launchers.row_gradients(dloss, total, logits, labels, weight, stats, given, logits)

    for vocabulary in (32000, 50257, 128256, 256000):
        for dtype in DTYPES:
            yield f"{vocabulary} {short(dtype)}", lambda v=vocabulary, d=dtype: case(v, d)
    for label, options in OPTIONS.items():
        yield f"128256 bf16 {label}", lambda o=options: case(128256, torch.bfloat16, **o)
    for dtype in DTYPES:
        label = f"128256 {short(dtype)} weights"
        yield label, lambda d=dtype: case(128256, d, torch.float32)
        yield f"{label}, all options", lambda d=dtype: case(128256, d, torch.float32, **OPTIONS["all"])
        yield f"128256 {short(dtype)} metrics", lambda d=dtype: case(128256, d, with_metrics=True)
    yield "50257 bf16 metrics", lambda: case(50257, torch.bfloat16, with_metrics=True, **OPTIONS["all"])
    yield "128256 bf16 int32 labels", lambda: case(128256, torch.bfloat16, labels_dtype=torch.int32)
