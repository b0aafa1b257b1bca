"""Train a small HuggingFace Llama plainly and through fusedops, from one seed on the same text, and compare.

Usage: python -m bench.demo [--device cpu|cuda] [--preset tiny|small] [--steps N] [--output DIR]
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import machine
from bench.demo_tables import loss_picture, show
from bench.training import PRESETS, WARM_UP, Preset, Result, batches, build_model, corpus, train

SEED = 0
CORPUS_BYTES = 4 * 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = options.preset or ("small" if device.type == "cuda" else "tiny")
    preset = PRESETS[name]
    steps = options.steps or preset.steps
    if steps <= WARM_UP:
        console.print(f"--steps {steps}: wants more than {WARM_UP}, which are the warm-up.")
        return 2

    text = corpus(CORPUS_BYTES)
    data = batches(text, preset, steps, SEED)
    parameters = sum(p.numel() for p in build_model(preset, torch.device("meta"), SEED).parameters())
    settings = {
        **asdict(preset),
        "preset": name,
        "steps": steps,
        "seed": SEED,
        "parameters": parameters,
        "warm-up steps": WARM_UP,
        "text": f"{len(text)} bytes of the Python standard library's sources",
    }
    console.print(introduction(settings, device))

    results = _run_all(console, preset, data, device)
    record = {"machine": machine.describe(device), "settings": settings, "runs": [asdict(r) for r in results]}
    show(console, record)

    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "demo.json").write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"Everything above as data: {options.output / 'demo.json'}")
    console.print(loss_picture(record, options.output / "losses.png"))
    return 1 if any(r.failure or r.fallbacks for r in results) else 0


def introduction(settings: dict[str, Any], device: torch.device) -> str:
    lines = [
        f"A Llama of {settings['parameters'] / 1e6:.1f}M parameters, {settings['dtype']}, on {device.type}: "
        f"{settings['steps']} steps of {settings['batch']} x {settings['sequence']} tokens, AdamW.",
        f"Text: {settings['text']}, a token a byte.",
    ]
    if settings["vocabulary"] > 256:
        lines.append(
            f"Bytes use 256 of the vocabulary's {settings['vocabulary']} rows: the rest is there so that the loss has "
            "its real cost."
        )
    if device.type == "cpu":
        lines.append("Without a GPU the operators run as their CPU references: this shows the path, not the speed.")
    return "\n".join(lines)


def plans(device: torch.device, report: Any) -> dict[str, Callable[[torch.nn.Module], Any]]:
    """The runs by name. On a CPU, compiling twice would take longer than it tells: eager stands for plain."""
    runs: dict[str, Callable[[torch.nn.Module], Any]] = {"eager": lambda model: model}
    if device.type == "cuda":
        runs["torch.compile"] = torch.compile
    backend = _backend()
    runs["fusedops"] = lambda model: torch.compile(model, backend=backend, options={"report": report})
    return runs


def _backend() -> Any:
    """By name, as users write it; from sources that are not installed, which no name leads to, the function itself."""
    if "fusedops" in torch.compiler.list_backends(exclude_tags=()):
        return "fusedops"
    from fusedops.compiler.backend import fusedops

    return fusedops


def _run_all(console: Console, preset: Preset, data: list[torch.Tensor], device: torch.device) -> list[Result]:
    import fusedops

    report = fusedops.Report()
    results = []
    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for name, prepare in plans(device, report).items():
            bar = progress.add_task(name, total=len(data))
            results.append(train(name, prepare, preset, data, device, SEED, partial(progress.advance, bar)))
            progress.stop_task(bar)
    ours = results[-1]
    ours.sites = [{"rule": s.rule, "op": s.op, "module": s.module} for s in report.sites]
    ours.declined = [{"anchor": d.anchor, "module": d.module, "reason": d.reason} for d in report.declined]
    ours.fallbacks = list(report.failures)
    return results


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--preset", choices=tuple(PRESETS), help="default: small on a GPU, tiny on a CPU")
    parser.add_argument("--steps", type=int, help="training steps of each run")
    parser.add_argument("--output", type=Path, default=Path("demo-results"), help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
