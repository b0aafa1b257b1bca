"""One training run of a small Llama on the standard library's sources: what `bench.demo` compares."""

import gc
import statistics
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Compilation, the optimizer's state and the allocator's first growth all fall into these steps.
WARM_UP = 3


@dataclass(frozen=True)
class Preset:
    """A model and its batches."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    batch: int
    sequence: int
    steps: int
    dtype: str
    learning_rate: float


# A token is a byte: ids above 255 exist in the vocabulary and never occur.
PRESETS = {
    # Llama 3's vocabulary, so that the loss costs what it costs in earnest.
    "small": Preset(768, 2048, 12, 12, 128256, 8, 1024, 40, "bfloat16", 3e-4),
    "tiny": Preset(128, 384, 2, 4, 256, 4, 128, 25, "float32", 1e-3),
}


@dataclass
class Result:
    """What a run gave; `failure` says why it ended early."""

    name: str
    losses: list[float] = field(default_factory=list)
    first_step_s: float | None = None
    step_ms: dict[str, float] | None = None
    tokens_per_s: float | None = None
    held_mib: float | None = None
    peak_mib: float | None = None
    failure: str | None = None
    sites: list[dict[str, str]] = field(default_factory=list)
    declined: list[dict[str, str]] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)


def corpus(wanted: int) -> bytes:
    """The standard library's own sources, in alphabetical order, at least `wanted` bytes of them."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.rglob("*.py"), key=lambda p: p.relative_to(library).parts):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= wanted:
            break
    if not text:
        raise FileNotFoundError(f"no .py file under {library}: this Python came without its library's sources")
    return bytes(text)


def batches(text: bytes, preset: Preset, steps: int, seed: int) -> list[Tensor]:
    """`steps` batches of random windows of the text, (batch, sequence) int64; the same for the same seed."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - preset.sequence, (steps, preset.batch), generator=generator)
    return [torch.stack([ids[s : s + preset.sequence] for s in row.tolist()]) for row in starts]


def build_model(preset: Preset, device: torch.device, seed: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=preset.vocabulary,
        hidden_size=preset.hidden,
        intermediate_size=preset.intermediate,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads,
        num_key_value_heads=preset.heads,
        max_position_embeddings=preset.sequence,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, preset.dtype))
    return model.to(device).train()


def train(
    name: str,
    prepare: Callable[[torch.nn.Module], Any],
    preset: Preset,
    data: list[Tensor],
    device: torch.device,
    seed: int,
    on_step: Callable[[], None],
) -> Result:
    """Train from the seed on every batch. A failure ends the run and is told in the result, not raised."""
    result = Result(name)
    try:
        _forget_earlier_runs(device)
        _train(result, prepare, preset, data, device, seed, on_step)
    except KeyboardInterrupt:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        # Some messages carry pages of advice; the first lines say what happened.
        told = "\n".join(str(error).splitlines()[:4])
        result.failure = f"{type(error).__name__}: {told} ({Path(last.filename).name}:{last.lineno})"
    return result


def _train(
    result: Result,
    prepare: Callable[[torch.nn.Module], Any],
    preset: Preset,
    data: list[Tensor],
    device: torch.device,
    seed: int,
    on_step: Callable[[], None],
) -> None:
    model = build_model(preset, device, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate, fused=device.type == "cuda")
    step_model = prepare(model)
    inputs = [batch.to(device) for batch in data]
    losses: list[Tensor] = []
    clock = _Clock(device)
    try:
        for i, ids in enumerate(inputs):
            if i == WARM_UP:
                result.held_mib = _mib(device, torch.cuda.memory_allocated)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
            if i >= WARM_UP:
                clock.mark()
            began = time.perf_counter()
            loss = step_model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            del loss
            if i == 0:
                losses[0].item()
                result.first_step_s = time.perf_counter() - began
            on_step()
        clock.mark()
        times = clock.intervals_ms()
        if times:
            result.step_ms = quantiles(times)
            result.tokens_per_s = preset.batch * preset.sequence / result.step_ms["median"] * 1e3
            result.peak_mib = _mib(device, torch.cuda.max_memory_allocated)
    finally:
        result.losses = [float(loss) for loss in losses]


class _Clock:
    """Marks between steps. On a GPU they are events, so that measuring makes nobody wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals_ms(self) -> list[float]:
        if self.on_gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return [(b - a) * 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]


def quantiles(values: list[float]) -> dict[str, float]:
    """Median, 20 % and 80 % quantile."""
    if len(values) == 1:
        return {"median": values[0], "q20": values[0], "q80": values[0]}
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return {"median": statistics.median(values), "q20": fifths[0], "q80": fifths[3]}


def _mib(device: torch.device, read: Callable[[], int]) -> float | None:
    return read() / 2**20 if device.type == "cuda" else None


def _forget_earlier_runs(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
