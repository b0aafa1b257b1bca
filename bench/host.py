"""Host time of small operators, forward plus backward in eager mode, beside what a Python operator costs at least.

Usage: python -m bench.host [--output DIR] [--only rms_norm ...]

At these sizes a GPU waits for the host. Nothing is compiled in this process, and the implementations take turns, since
a host's times differ from minute to minute by more than they do. "By hand" is an autograd function in Python that makes
the same tensors and launches the same compiled kernels as fusedops, and does nothing else.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import case, machine, recording
from bench.peers import OPERATORS
from bench.peers.operator import COMPILE, OURS, Inputs, Operator, Shape
from bench.timing import CudaTimer
from bench.training import quantiles
from fusedops.kernels import launch

ROUNDS = 7
NOTHING = "a Python function that does nothing"
BY_HAND = "by hand"
# One per operator: what a step takes on the device is far less than what it takes on the host.
SHAPES: dict[str, Shape] = {
    "rms_norm": (512, 2048),
    "add_rms_norm": (512, 2048),
    "layer_norm": (512, 2048),
    "rotary_embedding": (1, 256, 32, 8, 64),
    "swiglu": (512, 2048),
    "geglu": (512, 2048),
    "cross_entropy": (256, 4096),
}


@dataclass
class Work:
    """What a pass of an operator asks of torch and of Triton."""

    tensors: list[Callable[[], Tensor]] = field(default_factory=list)
    launches: list[Callable[[], object]] = field(default_factory=list)

    def again(self) -> list[Tensor]:
        made = [make() for make in self.tensors]
        for run in self.launches:
            run()
        return made


@contextmanager
def recorded(work: Work) -> Iterator[None]:
    """Tensors that are made and kernels that are launched inside are added to the work."""

    def recording_calls(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            work.tensors.append(lambda: function(*args, **kwargs))
            return function(*args, **kwargs)

        return make

    real = launch._launch

    def launched(key: Any, kernel: Any, programs: int, args: Any, values: Any, options: Any) -> None:
        real(key, kernel, programs, args, values, options)
        compiled, constants = launch._compiled[key]
        # The tensors are held, so that their addresses stay theirs.
        work.launches.append(lambda held=args: compiled[programs, 1, 1](*values, *constants))  # type: ignore[misc]

    with ExitStack() as stack:
        for name in ("empty", "empty_like", "empty_permuted", "zeros"):
            stack.enter_context(mock.patch.object(torch, name, recording_calls(getattr(torch, name))))
        stack.enter_context(mock.patch.object(launch, "_launch", launched))
        yield


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, works: tuple[Work, Work], likes: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.work = works[1]
        ctx.save_for_backward(*inputs)
        return _those_like(likes, works[0].again())

    @staticmethod
    def backward(ctx: Any, *upstreams: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, None, *_those_like(ctx.saved_tensors, ctx.work.again())


def _those_like(likes: Sequence[Tensor], made: list[Tensor]) -> tuple[Tensor, ...]:
    """A tensor for each of ``likes``, taken out of those that were made; made, where there is none."""
    found = []
    for like in likes:
        i = next((i for i, t in enumerate(made) if t.shape == like.shape and t.dtype == like.dtype), None)
        found.append(torch.empty_like(like) if i is None else made.pop(i))
    return tuple(found)


def by_hand(inputs: Inputs, function: Callable[..., Any]) -> Callable[[], object]:
    """A step that makes the same tensors and launches the same kernels as a function's, chosen beforehand."""
    leaves = (*inputs.activations, *inputs.parameters)
    inputs.forward_backward(function)  # compiles
    works = Work(), Work()
    with recorded(works[0]):
        results = function(*inputs.args)
    results = (results,) if isinstance(results, Tensor) else tuple(results)
    with recorded(works[1]):
        torch.autograd.grad(results, leaves, inputs.upstreams)
    likes = [r.detach() for r in results]
    return lambda: torch.autograd.grad(_ByHand.apply(works, likes, *leaves), leaves, inputs.upstreams)


def measure(op: Operator, shape: Shape, setting: case.Setting) -> dict[str, Any]:
    inputs = op.inputs(shape, setting.generator())
    peers = {p.name: p for p in op.peers() if p.kind != COMPILE}
    steps: dict[str, Callable[[], object]] = {NOTHING: case.nothing(setting)}
    steps[BY_HAND] = by_hand(inputs, next(p.function for p in peers.values() if p.kind == OURS))
    for name, peer in peers.items():
        steps[name] = lambda peer=peer: inputs.forward_backward(peer.function)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            times[name].append(setting.timer.host(lambda i, step=step: step()).median)  # type: ignore[misc]
    return {"op": op.name, "shape": list(shape), "host_ms": {name: quantiles(t) for name, t in times.items()}}


def table(record: dict[str, Any]) -> Table:
    where = record["machine"].get("gpu", record["machine"]["device"])
    title = f"Host time of forward plus backward, eager, {where}: ms (20-80 %)"
    result = Table("operator", "implementation", "ms", "20-80 %", title=title, title_justify="left")
    for measured in record["cases"]:
        label = f"{measured['op']} {'x'.join(map(str, measured['shape']))}"
        for name, ms in measured["host_ms"].items():
            result.add_row(label, name, f"{ms['median']:.3f}", f"{ms['q20']:.3f}-{ms['q80']:.3f}")
        result.add_section()
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = recording.options("bench.host", __doc__, arguments)
    console = Console()
    setting = recording.gpu_setting(console, "bench.host", CudaTimer())
    if setting is None:
        return 2
    record: dict[str, Any] = {"machine": machine.describe(setting.device), "cases": []}
    save = recording.saving(options.output / "host.json")
    for op in OPERATORS:
        if op.name in SHAPES and (not options.only or op.name in options.only):
            record["cases"].append(measure(op, SHAPES[op.name], setting))
            save(record)
    console.print(table(record))
    ratio = statistics.median(c["host_ms"][OURS]["median"] / c["host_ms"][BY_HAND]["median"] for c in record["cases"])
    console.print(f"fusedops takes {ratio:.2f} times as long as what is done by hand (median over operators).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
