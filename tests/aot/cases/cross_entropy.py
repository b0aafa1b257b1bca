"""Vocabularies of Llama 2 and 3, Gemma, and GPT-2, whose odd rows can't be aligned."""

from typing import Any

import torch

from csrc_meta.cross_entropy import compute_dtype
from tests.aot.cases import DTYPES, ROWS, Cases, short


def cases(launchers: Any) -> Cases:

    def case(vocabulary: int, dtype: torch.dtype, smoothing: float = 0.0, labels_dtype: torch.dtype = torch.int64):
        logits = torch.empty(ROWS, vocabulary, dtype=dtype)
        labels = torch.zeros(ROWS, dtype=labels_dtype)
        launchers.assert_labels(labels, vocabulary, -100)
        _, stats = launchers.row_losses(logits, labels, -100, smoothing)
        wide = compute_dtype(logits)
        for dloss in (torch.empty((), dtype=wide), torch.empty(ROWS, dtype=wide)):
            launchers.row_gradients(dloss, logits, labels, stats, -100, smoothing, logits)

    for vocabulary in (32000, 50257, 128256, 256000):
        for dtype in DTYPES:
            yield f"{vocabulary} {short(dtype)}", lambda v=vocabulary, d=dtype: case(v, d)
    yield "128256 bf16 smoothing", lambda: case(128256, torch.bfloat16, smoothing=0.1)
    yield "128256 bf16 int32 labels", lambda: case(128256, torch.bfloat16, labels_dtype=torch.int32)
