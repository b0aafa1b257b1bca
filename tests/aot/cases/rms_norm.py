"""q and k norms (128), hidden sizes up to 16384, a width walked in blocks, one that is no power of two."""

from typing import Any

import torch

from tests.aot.cases import DTYPES, ROWS, Cases, short


def cases(launchers: Any) -> Cases:

    def case(columns: int, dtype: torch.dtype, cast: str, offset: float, mask: list[bool], weighted: bool = True):
        x = torch.empty(ROWS, columns, dtype=dtype)
        weight = torch.empty(columns, dtype=dtype) if weighted else None
        rstd = torch.empty(ROWS)
        dy = torch.empty(ROWS, columns, dtype=torch.float32 if cast == "float32" else dtype)
        launchers.rms_norm_fwd(x, weight, 1e-6, offset, cast)
        launchers.rms_norm_bwd(dy, x, weight, rstd, offset, cast, mask)

    for columns in (128, 2048, 4096, 5120, 8192, 16384, 65536):
        for dtype in DTYPES:
            yield f"{columns} {short(dtype)}", lambda c=columns, d=dtype: case(c, d, "llama", 0.0, [True, True])
    for columns in (4096, 16384):
        for cast, offset in (("gemma", 1.0), ("float32", 0.0)):
            label = f"{columns} bf16 {cast}"
            yield label, lambda c=columns, k=cast, o=offset: case(c, torch.bfloat16, k, o, [True, True])
        for mask in ([True, False], [False, True]):
            label = f"{columns} bf16 mask {mask}"
            yield label, lambda c=columns, m=mask: case(c, torch.bfloat16, "llama", 0.0, m)
        label = f"{columns} bf16 no weight"
        yield label, lambda c=columns: case(c, torch.bfloat16, "llama", 0.0, [True, False], weighted=False)
