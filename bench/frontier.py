"""linear_cross_entropy by rows of a chunk: time against memory against the error of the weight's gradient.

Usage: python -m bench.frontier [--output DIR] [--seconds S]

At each size every chunk that is a power of two is measured, with sums in float32 and in bfloat16; the one that the
operator takes by itself and the one of the paper's formula are among them. Then the operator with 60 % of the labels
ignored, and without gradients. The floor is three bare matrix products, or one where there are no gradients.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch import Tensor

from bench import case, frontier_figure, machine, recording
from bench.peers import linear_cross_entropy
from bench.peers.operator import Inputs, Shape
from bench.timing import CudaTimer
from csrc_meta import chunks
from fusedops import functional

# Llama 3 8B with a batch and with a long one, Gemma 7B, Llama 3 1B and 70B, a short batch, Gemma 2 2B's hidden size with
# Gemma 3's vocabulary.
SHAPES: tuple[Shape, ...] = (
    (8192, 4096, 128256),
    (32768, 4096, 128256),
    (16384, 3072, 256000),
    (8192, 2048, 128256),
    (4096, 8192, 128256),
    (512, 4096, 128256),
    (32768, 2304, 262144),
)
FEWEST_ROWS = 1024
SUMS = (torch.float32, torch.bfloat16)
IGNORED = 0.6
OPERATOR = linear_cross_entropy.OPERATOR


def chunk_sizes(shape: Shape) -> list[int]:
    rows = shape[0]
    powers = [1 << i for i in range(rows.bit_length()) if FEWEST_ROWS <= 1 << i < rows]
    taken = [frontier_figure.taken_rows(shape, str(sums)) for sums in SUMS]
    return sorted({frontier_figure.paper_rows(shape), *taken, *powers, rows})


def measure(shape: Shape, setting: case.Setting) -> dict[str, Any]:
    inputs = OPERATOR.inputs(shape, setting.generator())
    truth = OPERATOR.truth(inputs)[2]
    assert OPERATOR.floor is not None
    floor = setting.timer.device(partial(_ignoring_its_set, OPERATOR.floor[1](inputs)), 1).median
    record: dict[str, Any] = {"shape": list(shape), "floor_ms": floor, "points": []}
    for rows, sums in _points(shape):
        told = {"rows": rows, "accum_dtype": str(sums).removeprefix("torch.")}
        record["points"].append(told | _point(inputs, truth, rows, sums, setting))
    # The error is that of a single product where one chunk has all rows.
    whole = next(p["error"] for p in record["points"] if p["rows"] == shape[0])
    for point in record["points"]:
        point["error_ratio"] = point["error"] / whole
    del truth
    return record | _with_ignored(inputs, setting) | _without_gradients(inputs, setting)


def _points(shape: Shape) -> Iterator[tuple[int, torch.dtype]]:
    for sums in SUMS:
        # One chunk has no sum.
        yield from ((rows, sums) for rows in chunk_sizes(shape) if rows < shape[0] or sums is SUMS[0])


def _point(inputs: Inputs, truth: Tensor, rows: int, sums: torch.dtype, setting: case.Setting) -> dict[str, Any]:
    """Time, memory and error with so many rows to a chunk."""
    function = partial(functional.linear_cross_entropy, accum_dtype=sums)
    with mock.patch.object(chunks, "chunk_rows", return_value=rows):
        _, _, dweight = inputs.forward_backward(function)
        error = float((dweight.float() - truth).norm() / truth.norm())
        del dweight
        timing = setting.timer.device(lambda i: inputs.forward_backward(function), 1)
        peak = setting.timer.peak_mib(lambda i: inputs.forward_backward(function))
    return {**asdict(timing), "peak_mib": peak, "error": error}


def _with_ignored(inputs: Inputs, setting: case.Setting) -> dict[str, Any]:
    """Uncaptured, since the host has to learn how many there are."""
    hidden, weight, labels = inputs.args
    generator = setting.generator()
    ignored = torch.rand(labels.shape, device=labels.device, generator=generator) < IGNORED
    some = labels.masked_fill(ignored, -100)

    def step(labels: Tensor) -> Callable[[int], object]:
        given = Inputs((hidden, weight, labels), inputs.activations, inputs.parameters, inputs.upstreams)
        return lambda i: given.forward_backward(functional.linear_cross_entropy)

    all_kept, most_ignored = (setting.timer.uncaptured(step(which)) for which in (labels, some))
    return {"uncaptured_ms": all_kept.median, "ignored_share": IGNORED, "ignored_ms": most_ignored.median}


@torch.no_grad()
def _without_gradients(inputs: Inputs, setting: case.Setting) -> dict[str, Any]:
    hidden, weight, labels = (a.detach() for a in inputs.args)
    logits = hidden.new_empty((len(hidden), len(weight)))
    product = setting.timer.device(partial(_product, hidden, weight.t(), logits), 1)

    def step(i: int) -> Tensor:
        return functional.linear_cross_entropy(hidden, weight, labels)

    timing = setting.timer.device(step, 1)
    return {"product_ms": product.median, "eval_ms": timing.median, "eval_peak_mib": setting.timer.peak_mib(step)}


def _product(a: Tensor, b: Tensor, out: Tensor, i: int) -> None:
    torch.mm(a, b, out=out)


def _ignoring_its_set(step: Callable[[], None], i: int) -> None:
    step()


def main(arguments: Sequence[str] | None = None) -> int:
    options = recording.options("bench.frontier", __doc__, arguments)
    console = Console()
    timer = CudaTimer(repetitions=3, least_ms=0.0, warm_up_s=0.0)
    setting = recording.gpu_setting(console, "bench.frontier", timer)
    if setting is None:
        return 2
    record: dict[str, Any] = {"machine": machine.describe(setting.device), "cases": [], "not_run": []}
    save = recording.saving(options.output / "frontier.json")
    for shape, begins in recording.in_time(SHAPES, options.seconds):
        if not begins:
            record["not_run"].append(list(shape))
            continue
        record["cases"].append(measure(shape, setting))
        setting.timer.release()
        save(record)
    save(record)
    console.print(frontier_figure.table(record))
    for line in frontier_figure.draw(record, options.output):
        console.print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
