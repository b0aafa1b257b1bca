"""Launches of each operator that the gate compiles: one file per operator, found by name, with ``cases(launchers)``."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

ROWS = 3  # not a multiple of 16: the number of rows must not help the compiler
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# A label and a call of the operator's launchers.
Cases = Iterator[tuple[str, Callable[[], Any]]]


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
