"""dtypes and memory of what operators return."""

import torch
from torch import Tensor


def compute_dtype(*inputs: Tensor | None) -> torch.dtype:
    """float64 if an input is float64; everything else is computed, and statistics are kept, in float32."""
    for t in inputs:
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def new_gradient(t: Tensor | None, x: Tensor, wanted: bool) -> Tensor:
    """Memory for a gradient: contiguous, and empty where it is not wanted."""
    if t is None or not wanted:
        return x.new_empty(0)
    return torch.empty_like(t, memory_format=torch.contiguous_format)
