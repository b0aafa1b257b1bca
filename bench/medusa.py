"""Training steps of the Medusa example: time and peak memory by heads, stage and batch, beside its peers.

Usage: python -m bench.medusa [--output DIR] [--seconds S]

The model is a Llama 3.2 1B of random weights on random tokens. A step is forward and backward, gradients included, without
an optimizer. The backbone is HuggingFace's own for all; peers differ in the heads' losses, but for the last, whose backbone
is compiled with fusedops too.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from bench import case, machine, recording
from bench.figures import NO_FIGURE, finish, pyplot
from bench.peers.operator import COMPILE, EAGER, LIGER, OURS, liger
from bench.sweep_figures import STYLES, caption
from bench.timing import CudaTimer
from examples.medusa.medusa import Medusa, MedusaHead

HEADS = (3, 5)
STAGES = (1, 2)
BATCHES = (2, 4, 8)
TOKENS = 2048
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
COMPILED = "fusedops (backbone compiled)"
FIGURE = "medusa.png"
# A head's gradient differs from eager's by rounding.
MOST_ERROR = 0.05

Step = Callable[[], Tensor]


def _plain(hidden: Tensor, weight: Tensor, labels: Tensor, factor: float) -> Tensor:
    return factor * F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), labels.flatten())


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor, factor: float) -> Tensor:
    return factor * liger().liger_fused_linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten())


def peers(model: Medusa, ids: Tensor) -> Iterator[tuple[str, Step]]:
    """Each peer's step, which answers with the weighted sum of losses; gradients are in the parameters."""

    def differentiated(loss: Callable[..., Tensor], head_loss: Callable[..., Tensor]) -> Step:
        def step() -> Tensor:
            value = loss(ids, ids, head_loss)
            value.backward()
            return value.detach()

        return step

    def ours() -> Tensor:
        losses = model.backward(ids, ids)
        return (losses.heads * losses.heads.new_tensor(model.factors())).sum() + losses.model

    yield EAGER, differentiated(model.loss, _plain)
    yield COMPILE, differentiated(torch.compile(model.loss, dynamic=False), _plain)
    if liger():
        yield LIGER, differentiated(model.loss, _liger)
    yield OURS, ours
    backbone: nn.Module = model.model.model
    backbone.compile(backend="fusedops", dynamic=False)
    yield COMPILED, ours


def measure(
    config: dict[str, Any],
    heads: int,
    stage: int,
    batch: int,
    tokens: int,
    setting: case.Setting,
    without: Sequence[str],
) -> dict[str, Any]:
    torch._dynamo.reset()
    torch.manual_seed(case.SEED)
    with torch.device(setting.device):
        model = Medusa(LlamaForCausalLM(LlamaConfig(**config)).bfloat16(), heads, stage)
    ids = torch.randint(0, config["vocab_size"], (batch, tokens), device=setting.device)
    record: dict[str, Any] = {"heads": heads, "stage": stage, "batch": batch, "tokens": tokens, "peers": []}
    truth: tuple[Tensor, Tensor] | None = None
    for name, step in peers(model, ids):
        if name in without:
            continue
        told: dict[str, Any] = {"name": name, "failure": None}
        record["peers"].append(told)
        try:
            model.zero_grad()
            found = step(), _gradient(model)
            truth = truth or found
            told["failure"] = _wrong(found, truth)
            if told["failure"] is None:
                told |= _cost(model, step, setting)
        except Exception as error:
            told["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        model.zero_grad()
        setting.timer.release()
    return record


def _gradient(model: Medusa) -> Tensor:
    last = model.heads[-1]
    assert isinstance(last, MedusaHead) and last.projection.weight.grad is not None
    return last.projection.weight.grad.clone()


def _wrong(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> str | None:
    names = ("loss", "gradient of the last head")
    for name, a, b in zip(names, found, truth, strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm())
        if not error <= MOST_ERROR:
            return f"wrong {name}: {error:.1e} from eager's"
    return None


def _cost(model: Medusa, step: Step, setting: case.Setting) -> dict[str, Any]:
    def anew(i: int) -> Tensor:
        model.zero_grad()
        return step()

    timing = setting.timer.uncaptured(anew)
    model.zero_grad()
    return {**asdict(timing), "peak_mib": setting.timer.peak_mib(lambda i: step())}


def table(record: dict[str, Any]) -> Table:
    names = ("stage", "heads", "batch", "implementation", "ms", "20-80 %", "peak MiB", "note")
    result = Table(*names, title="Medusa, forward plus backward", title_justify="left")
    for measured in record["cases"]:
        for peer in measured["peers"]:
            cells = [
                str(measured["stage"]),
                str(measured["heads"]),
                f"{measured['batch']}x{measured['tokens']}",
                peer["name"],
            ]
            if "median" in peer:
                cells += [
                    f"{peer['median']:.1f}",
                    f"{peer['q20']:.1f}-{peer['q80']:.1f}",
                    f"{peer['peak_mib']:.0f}",
                    "",
                ]
            else:
                cells += ["-", "-", "-", peer["failure"]]
            result.add_row(*cells)
    for left in record["not_run"]:
        result.add_row(str(left["stage"]), str(left["heads"]), str(left["batch"]), "not run", "", "", "", "")
    return result


def draw(record: dict[str, Any], folder: Path) -> Iterator[str]:
    """Time and memory by batch, a column for each stage and number of heads."""
    plot = pyplot()
    if plot is None:
        yield NO_FIGURE
        return
    columns: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for measured in record["cases"]:
        columns.setdefault((measured["stage"], measured["heads"]), []).append(measured)
    if not columns:
        return
    styles = STYLES | {COMPILED: STYLES[OURS] | {"linestyle": "--", "marker": "x"}}
    size = (3.4 * len(columns) + 1, 7.0)
    figure, grid = plot.subplots(2, len(columns), figsize=size, layout="constrained", squeeze=False)
    lines: dict[str, Any] = {}
    for (above, below), ((stage, heads), cases) in zip(grid.T, columns.items(), strict=True):
        for axes, measure_of in ((above, "median"), (below, "peak_mib")):
            for name, style in styles.items():
                found = [
                    (c["batch"], p[measure_of])
                    for c in cases
                    for p in c["peers"]
                    if p["name"] == name and "median" in p
                ]
                if found:
                    (lines[name],) = axes.plot(*zip(*sorted(found), strict=True), **({"markersize": 5} | style))
            axes.set_xlabel(f"batch of {cases[0]['tokens']} tokens")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.25)
        above.set_title(f"stage {stage}, {heads} heads", fontsize=10)
    grid[0, 0].set_ylabel("ms")
    grid[1, 0].set_ylabel("peak memory beyond the weights, MiB")
    finish(figure, f"Medusa on a Llama 3.2 1B, forward plus backward\n{caption(record)}", lines, folder / FIGURE)
    yield f"Figure: {folder / FIGURE}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = recording.options("bench.medusa", __doc__, arguments)
    console = Console()
    timer = CudaTimer(repetitions=10, least_ms=0.0, warm_up_s=0.5)
    setting = recording.gpu_setting(console, "bench.medusa", timer)
    if setting is None:
        return 2
    record: dict[str, Any] = {"machine": machine.describe(setting.device), "cases": [], "not_run": []}
    save = recording.saving(options.output / "medusa.json")
    # Compiling takes longest: it comes last, with the largest batch alone.
    tasks = itertools.product(BATCHES, HEADS, STAGES)
    for (batch, heads, stage), begins in recording.in_time(tasks, options.seconds):
        if not begins:
            record["not_run"].append({"heads": heads, "stage": stage, "batch": batch})
            continue
        without = () if batch == max(BATCHES) else (COMPILE, COMPILED)
        console.print(f"batch {batch}, {heads} heads, stage {stage}")
        record["cases"].append(measure(LLAMA_1B, heads, stage, batch, TOKENS, setting, without))
        save(record)
    console.print(table(record))
    for line in draw(record, options.output):
        console.print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
