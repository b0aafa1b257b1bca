"""The error of the gradient of linear_cross_entropy's weight in every step of a training, by number of chunks.

Usage: python -m bench.accumulation [--output DIR] [--seconds S]

A small Llama of random weights, all in bfloat16, learns a Markov chain with the chunks that the operator takes by itself.
In every step, from the hidden states and the weight of that step, the weight's gradient is computed with 1 to 64 chunks
and their sums in float32 and in bfloat16, and compared with float64. One chunk has no sum: its error is that of one
product, and the others are told as multiples of it.
"""

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import case, machine, recording
from bench.figures import NO_FIGURE, finish, pyplot
from bench.peers.linear_cross_entropy import OPERATOR
from bench.peers.operator import Inputs
from bench.sweep_figures import caption
from bench.timing import CudaTimer
from bench.training import Preset, build_model
from csrc_meta import chunks
from fusedops import functional

CHUNKS = (1, 2, 4, 8, 16, 32, 64)
SUMS = ("float32", "bfloat16")
PRESET = Preset(512, 1536, 4, 8, 32768, 8, 512, 100, "bfloat16", 1e-3)
SUCCESSORS = 4
FIGURE = "accumulation.png"


def walks(preset: Preset, generator: torch.Generator) -> Tensor:
    """Walks along a random Markov chain, (steps, batch, sequence + 1) token ids: a label for each token but the last.

    A token has a few successors, all alike likely. They are drawn as words are in text: the n-th as often as 1 / n.
    """
    on: dict[str, Any] = {"device": generator.device, "generator": generator}
    walkers = preset.steps * preset.batch
    chain = (preset.vocabulary ** torch.rand((preset.vocabulary, SUCCESSORS), **on)).long() - 1
    ids = [torch.randint(preset.vocabulary, (walkers,), **on)]
    for choice in torch.randint(SUCCESSORS, (preset.sequence, walkers), **on):
        ids.append(chain[ids[-1], choice])
    return torch.stack(ids, 1).view(preset.steps, preset.batch, -1)


def measure(preset: Preset, setting: case.Setting, save: recording.Save, seconds: float | None) -> dict[str, Any]:
    """Train, and record the loss and the errors of every step; `save` sees the record after each."""
    model: Any = build_model(preset, setting.device, case.SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=preset.learning_rate, fused=setting.device.type == "cuda")
    record: dict[str, Any] = {"machine": machine.describe(setting.device), "settings": asdict(preset)}
    record |= {"chunks": list(CHUNKS), "steps": [], "not_run": []}
    for (step, ids), begins in recording.in_time(enumerate(walks(preset, setting.generator())), seconds):
        if not begins:
            record["not_run"].append(step)
            continue
        hidden = model.model(ids[:, :-1]).last_hidden_state.flatten(0, 1)
        labels = ids[:, 1:].flatten()
        found = errors(hidden.detach(), model.lm_head.weight, labels)
        loss = functional.linear_cross_entropy(hidden, model.lm_head.weight, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ratios = {sums: [error / of_sums[0] for error in of_sums] for sums, of_sums in found.items()}
        record["steps"].append({"loss": loss.item(), "errors": found, "error_ratios": ratios})
        save(record)
    save(record)
    return record


def errors(hidden: Tensor, weight: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Relative errors of the weight's gradient, for each dtype of sums by number of chunks."""
    inputs = Inputs((hidden, weight, labels), (), (weight,), (torch.ones((), device=hidden.device),))
    truth = OPERATOR.truth(inputs)[2]
    return {sums: [_error(inputs, truth, -(-len(labels) // count), sums) for count in CHUNKS] for sums in SUMS}


def _error(inputs: Inputs, truth: Tensor, rows: int, sums: str) -> float:
    """With so many rows to a chunk."""
    function = partial(functional.linear_cross_entropy, accum_dtype=getattr(torch, sums))
    with mock.patch.object(chunks, "chunk_rows", return_value=rows):
        _, dweight = inputs.forward_backward(function)
    return case.relative_error(dweight, truth)


def _ratios(record: dict[str, Any], sums: str) -> list[tuple[float, ...]]:
    """For each number of chunks the ratio in every step."""
    return list(zip(*(step["error_ratios"][sums] for step in record["steps"]), strict=True))


def table(record: dict[str, Any]) -> Table:
    names = [f"sums in {sums}, {of}" for sums in SUMS for of in ("median of steps", "last step")]
    result = Table("chunks", *names, title="Error of the weight's gradient, of one product's", title_justify="left")
    for i, count in enumerate(record["chunks"] if record["steps"] else ()):
        of_sums = [_ratios(record, sums)[i] for sums in SUMS]
        result.add_row(str(count), *(f"{r:.3f}" for ratios in of_sums for r in (statistics.median(ratios), ratios[-1])))
    return result


def draw(record: dict[str, Any], folder: Path) -> Iterator[str]:
    """Errors in every step, a panel for each dtype of sums."""
    plot = pyplot()
    if plot is None:
        yield NO_FIGURE
        return
    if not record["steps"]:
        return
    figure, panels = plot.subplots(1, len(SUMS), figsize=(11, 4.5), layout="constrained", sharey=True)
    colours = plot.get_cmap("viridis_r", len(record["chunks"]) + 1)  # the first is too light
    lines: dict[str, Any] = {}
    for axes, sums in zip(panels, SUMS, strict=True):
        for i, (count, ratios) in enumerate(zip(record["chunks"], _ratios(record, sums), strict=True), 1):
            name = f"{count} chunks" if count > 1 else "one product"
            (lines[name],) = axes.plot(ratios, color=colours(i), linewidth=1.2)
        axes.set_title(f"sums over chunks in {sums}", fontsize=10)
        axes.set_xlabel("step")
        axes.grid(visible=True, alpha=0.25)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("error of the weight's gradient,\nof one product's")
    first, last = (record["steps"][i]["loss"] for i in (0, -1))
    title = f"linear_cross_entropy in a training whose loss goes from {first:.2f} to {last:.2f}"
    finish(figure, f"{title}\n{caption(record)}", lines, folder / FIGURE)
    yield f"Figure: {folder / FIGURE}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = recording.options("bench.accumulation", __doc__, arguments)
    console = Console()
    setting = recording.gpu_setting(console, "bench.accumulation", CudaTimer())
    if setting is None:
        return 2
    record = measure(PRESET, setting, recording.saving(options.output / "accumulation.json"), options.seconds)
    console.print(table(record))
    for line in draw(record, options.output):
        console.print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
