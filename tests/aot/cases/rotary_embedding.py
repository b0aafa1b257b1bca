"""Heads as in Llama 3, Phi-3, Qwen2-VL, Phi-2 and GLM-4 (partial), GPT-J (interleaved) and DeepSeek (one head of k)."""

from typing import Any

import torch

from tests.aot.cases import DTYPES, ROWS, Cases, short


def cases(launchers: Any) -> Cases:

    def case(
        dtype: torch.dtype,
        q_heads: int,
        k_heads: int,
        columns: int,
        rotated: int,
        interleaved: bool = False,
        sections: list[int] | None = None,
        tables: torch.dtype | None = None,
    ):
        def heads(count: int) -> torch.Tensor:
            return torch.empty(2, ROWS, count, columns, dtype=dtype).transpose(1, 2)

        q, k = heads(q_heads), heads(k_heads) if k_heads else None
        shape = (2, ROWS, rotated) if sections is None else (len(sections), 2, ROWS, rotated)
        cos, sin = (torch.empty(shape, dtype=tables or dtype) for _ in range(2))
        launchers.rotary_embedding_fwd(q, k, cos, sin, interleaved, sections, None)
        launchers.rotary_embedding_bwd(q, k, cos, sin, interleaved, sections, [0, 2, 1, 3], [0, 2, 1, 3])

    for dtype in DTYPES:
        yield f"llama {short(dtype)}", lambda d=dtype: case(d, 32, 8, 128, 128)
        yield f"phi-3 {short(dtype)}", lambda d=dtype: case(d, 32, 32, 96, 96)
        yield f"phi-2 {short(dtype)}", lambda d=dtype: case(d, 32, 32, 80, 32)
        yield f"glm-4 {short(dtype)}", lambda d=dtype: case(d, 32, 2, 128, 64, interleaved=True)
        yield f"gpt-j {short(dtype)}", lambda d=dtype: case(d, 16, 16, 256, 64, interleaved=True)
        yield f"deepseek {short(dtype)}", lambda d=dtype: case(d, 128, 1, 64, 64, interleaved=True)
    bf16 = torch.bfloat16
    yield "llama bf16, q alone", lambda: case(bf16, 32, 0, 128, 128)
    yield "llama bf16, fp32 tables", lambda: case(bf16, 32, 8, 128, 128, tables=torch.float32)
    yield "qwen2-vl bf16", lambda: case(bf16, 28, 4, 128, 128, sections=[16, 24, 24])
