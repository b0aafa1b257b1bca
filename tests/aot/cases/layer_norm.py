"""Hidden sizes from GPT-2's to 16384, one that is no power of two, and a width walked in blocks."""

from typing import Any

import torch

from tests.aot.cases import DTYPES, ROWS, Cases, short


def cases(launchers: Any) -> Cases:
    def case(columns: int, dtype: torch.dtype, mask: list[bool], weighted: bool = True):
        x, dy = (torch.empty(ROWS, columns, dtype=dtype) for _ in range(2))
        weight, bias = (torch.empty(columns, dtype=dtype) if weighted else None for _ in range(2))
        launchers.layer_norm_fwd(x, weight, bias, 1e-5)
        launchers.layer_norm_bwd(dy, x, weight, bias, torch.empty(ROWS), torch.empty(ROWS), mask)

    for columns in (768, 2048, 4096, 5120, 8192, 16384, 65536):
        for dtype in DTYPES:
            yield f"{columns} {short(dtype)}", lambda c=columns, d=dtype: case(c, d, [True, True, True])
    for mask in ([True, False, False], [False, True, True], [True, True, False]):
        yield f"4096 bf16 mask {mask}", lambda m=mask: case(4096, torch.bfloat16, m)
    yield "4096 bf16 no weight", lambda: case(4096, torch.bfloat16, [True, False, False], weighted=False)
