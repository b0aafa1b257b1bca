"""Hidden sizes up to 16384 and a width walked in blocks; the sum's gradient is there or not."""

from typing import Any

import torch

from tests.aot.cases import DTYPES, ROWS, Cases, short


def cases(launchers: Any) -> Cases:
    def case(columns: int, dtype: torch.dtype, with_dsum: bool = True):
        x, residual, dy, dsum = (torch.empty(ROWS, columns, dtype=dtype) for _ in range(4))
        weight = torch.empty(columns, dtype=dtype)
        launchers.add_rms_norm_fwd(x, residual, weight, 1e-6, 0.0, "llama")
        dsum = dsum if with_dsum else None
        launchers.add_rms_norm_bwd(dy, dsum, x, weight, torch.empty(ROWS), 0.0, "llama", [True, True])

    for columns in (2048, 4096, 8192, 16384, 65536):
        for dtype in DTYPES:
            yield f"{columns} {short(dtype)}", lambda c=columns, d=dtype: case(c, d)
    yield "4096 bf16 without dsum", lambda: case(4096, torch.bfloat16, with_dsum=False)
