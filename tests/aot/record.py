"""What launchers launch: they run on CPU tensors of real widths while Triton's launch is replaced by a recorder."""

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from csrc_meta.cross_entropy import compute_dtype

ROWS = 3  # not a multiple of 16: the number of rows must not help the compiler
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of ``kernel[grid](*args, **options)`` and the case that made it."""

    case: str
    kernel: JITFunction
    args: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recorded_launches() -> Iterator[list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]]]:
    """Launches inside are recorded instead of made. Outputs keep whatever memory held."""
    calls: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: calls.append((self, args, options))
    try:
        yield calls
    finally:
        JITFunction.run = run


def short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def rms_norm_cases(launchers: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """q and k norms (128), hidden sizes up to 16384, a width walked in blocks, one that is no power of two."""

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


def cross_entropy_cases(launchers: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Vocabularies of Llama 2 and 3, Gemma, and GPT-2, whose odd rows can't be aligned."""

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


# linear_cross_entropy launches the kernels of cross_entropy on its chunks, and none of its own.
CASES = {"rms_norm": rms_norm_cases, "cross_entropy": cross_entropy_cases}


def all_launches() -> list[Launch]:
    launches = []
    for op, cases in CASES.items():
        launchers = importlib.import_module(f"fusedops.kernels.{op}")
        for label, call in cases(launchers):
            with recorded_launches() as calls:
                call()
            launches += [Launch(f"{op} {label}", kernel, args, options) for kernel, args, options in calls]
    return launches
