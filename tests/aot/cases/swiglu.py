"""Two tensors (one long row) and packed ones (rows) as in Llama and Phi-3, in place, and one gradient alone."""

from typing import Any

import torch

from tests.aot.cases import DTYPES, ROWS, Cases, short

COLUMNS = 8192


def cases(launchers: Any) -> Cases:
    return gated_cases(launchers.swiglu_fwd, launchers.swiglu_bwd, launchers.swiglu_bwd_, "silu")


def gated_cases(forward: Any, backward: Any, backward_: Any, activation: str) -> Cases:

    def case(dtype: torch.dtype, packed: bool, mask: list[bool]):
        gate = torch.empty(ROWS, 2 * COLUMNS if packed else COLUMNS, dtype=dtype)
        up = None if packed else torch.empty_like(gate)
        y = forward(gate, up, activation)
        backward(y, gate, up, activation, mask)
        backward_(y, gate, up, activation)

    for dtype in DTYPES:
        for packed in (False, True):
            label = f"{activation} {short(dtype)}{' packed' * packed}"
            yield label, lambda d=dtype, p=packed: case(d, p, [True, not p])
    for mask in ([True, False], [False, True]):
        yield f"{activation} bf16 mask {mask}", lambda m=mask: case(torch.bfloat16, False, m)
