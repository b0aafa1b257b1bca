"""One operator at one shape: every peer checked against a float64 truth, then its time and memory.

Time is with the inputs held, so that the same step can run again and again. Memory is as in a model, where nobody but
the operator holds the activations that it was given: who reuses dead memory gets the credit for it.
"""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench.peers.operator import KINDS, Inputs, Operator, Peer, Shape
from bench.timing import CudaTimer, Timing, WallTimer

SEED = 0
# A result is red where its error exceeds both: a multiple of eager's own error, and what sums in bfloat16 may lose.
ERROR_FACTOR = 4.0
LEAST_BOUND = 3e-2
ERROR_ROWS = 1024
# Input sets are rotated so that no step finds its inputs in the L2 cache.
L2_SIZES = 4
MOST_SETS = 64
MOVING = "two kernels that move the bytes"


@dataclass(frozen=True)
class Setting:
    """Where and with what is measured; `copy_bytes` is the size of the buffers of the copy rate."""

    device: torch.device
    timer: CudaTimer | WallTimer
    l2_bytes: int
    copy_bytes: int
    console: Console

    def generator(self) -> torch.Generator:
        # One of our own: a failed graph capture can leave torch's default generator unusable.
        return torch.Generator(self.device).manual_seed(SEED)

    def sets(self, size: int) -> int:
        """How many sets of `size` bytes exceed the L2 cache by far."""
        return min(max(1, math.ceil(L2_SIZES * self.l2_bytes / max(size, 1))), MOST_SETS)


def copy_rate(setting: Setting) -> float:
    """Bytes read plus written a second, in units of 10^9."""
    step = _copy(setting, setting.copy_bytes)
    return 2 * setting.copy_bytes / setting.timer.device(lambda i: step(), 1).median / 1e6


def _copy(setting: Setting, size: int) -> Callable[[], object]:
    """Read `size` bytes and write as many, by a kernel: a copy in a graph may be given to another engine."""
    a = torch.randn(max(size // 4, 1), device=setting.device, generator=setting.generator())
    b = torch.empty_like(a)
    return lambda: torch.neg(a, out=b)


class _Nothing(torch.autograd.Function):
    """Forward and backward in Python that make one tensor each and launch nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return torch.empty_like(ctx.saved_tensors[0])


def nothing(setting: Setting) -> Callable[[], object]:
    """A step of an operator written in Python whose forward and backward do nothing."""
    x = torch.randn(512, 512, device=setting.device, generator=setting.generator()).requires_grad_()
    dy = torch.ones_like(x)
    return lambda: torch.autograd.grad(_Nothing.apply(x), x, dy)


def host_floor(setting: Setting) -> Timing:
    """Host time that no operator written in Python gets below."""
    step = nothing(setting)
    return setting.timer.host(lambda i: step())


def measure(
    op: Operator, shape: Shape, setting: Setting, copy_gb_per_s: float, kinds: Collection[str] = KINDS
) -> dict[str, Any]:
    """The record of a case, with the peers of these kinds; what fails says so in it."""
    case: dict[str, Any] = {"op": op.name, "shape": list(shape), "letters": op.letters, "floor": None, "peers": []}
    began = time.perf_counter()
    torch._dynamo.reset()
    try:
        case["bytes_moved"] = op.bytes_moved(op.inputs(shape, setting.generator()))
        truth = op.truth(op.inputs(shape, setting.generator()))
        floor_name, timing = _floor(op, shape, case["bytes_moved"], setting)
        case["floor"] = {"name": floor_name, **asdict(timing)}
    except Exception as error:
        case["failure"] = _told(error)
        return case
    eager_errors: dict[str, float] = {}
    for peer in op.peers():
        if peer.kind not in kinds:
            continue
        setting.timer.release()
        setting.console.print(f"{op.name} {'x'.join(map(str, shape))}: {peer.name}", highlight=False)
        told: dict[str, Any] = {"name": peer.name, "kind": peer.kind, "failure": None, "errors": {}}
        case["peers"].append(told)
        peer_began = time.perf_counter()
        try:
            _peer(told, op, shape, peer, truth, eager_errors, setting)
        except Exception as error:
            told["failure"] = _told(error)
        if "device" in told:
            told["share_of_copy"] = case["bytes_moved"] / told["device"]["median"] / 1e6 / copy_gb_per_s
            told["share_of_floor"] = case["floor"]["median"] / told["device"]["median"]
        told["seconds"] = time.perf_counter() - peer_began
    case["floor"]["share_of_copy"] = case["bytes_moved"] / case["floor"]["median"] / 1e6 / copy_gb_per_s
    case["seconds"] = time.perf_counter() - began
    return case


def _floor(op: Operator, shape: Shape, bytes_moved: int, setting: Setting) -> tuple[str, Timing]:
    """What takes time whoever does it: an operator's own floor, or its bytes moved by a forward and a backward kernel."""
    if op.floor is not None:
        name, make = op.floor
        step = make(op.inputs(shape, setting.generator()))
        return name, setting.timer.device(lambda i: step(), 1)
    each = bytes_moved // 4  # two kernels, each of which reads this much and writes as much
    copies = [(_copy(setting, each), _copy(setting, each)) for _ in range(setting.sets(bytes_moved))]
    return MOVING, setting.timer.device(lambda i: [copy() for copy in copies[i]], len(copies))


def _peer(
    told: dict[str, Any],
    op: Operator,
    shape: Shape,
    peer: Peer,
    truth: tuple[Tensor, ...],
    eager_errors: dict[str, float],
    setting: Setting,
) -> None:
    # Both ways of calling it are checked, each on fresh inputs: some peers write into theirs.
    for call in (Inputs.as_in_a_model, Inputs.forward_backward):
        results = call(op.inputs(shape, setting.generator()), peer.function)
        for name, result, true in zip(op.results, results, truth, strict=True):
            error = relative_error(result, true)
            told["errors"][name] = error = max(error, told["errors"].get(name, 0.0), key=_nan_last)
            bound = max(ERROR_FACTOR * eager_errors.setdefault(name, error), LEAST_BOUND)
            if not error <= bound:
                told["failure"] = f"wrong: {name} is off by {error:.1e}, allowed {bound:.1e}"
                return
        del results, result
    generator = setting.generator()
    sets = [op.inputs(shape, generator)]
    sets += [op.inputs(shape, generator) for _ in range(setting.sets(sets[0].bytes()) - 1)]

    def step(i: int) -> object:
        return sets[i].forward_backward(peer.function)

    peak = setting.timer.peak_mib(lambda i: sets[i].as_in_a_model(peer.function))
    told["peak_mib"] = max(peak - sets[0].activation_bytes() / 2**20, 0.0)
    host = setting.timer.host(step)
    told["host_ms"], told["host_20_80_ms"] = host.median, [host.q20, host.q80]
    told["device"] = asdict(setting.timer.device(step, len(sets)))
    told["sets"] = len(sets)


def _nan_last(error: float) -> float:
    return math.inf if math.isnan(error) else error


def relative_error(result: Tensor, truth: Tensor) -> float:
    """Norm of the difference by norm of the truth, NaN where the result has one; by rows, to spare memory."""
    if result.shape != truth.shape:
        return math.nan
    if result.dim() == 0:
        result, truth = result.reshape(1), truth.reshape(1)
    off = torch.zeros((), dtype=torch.float64, device=truth.device)
    size = torch.zeros_like(off)
    for start in range(0, len(truth), ERROR_ROWS):
        t = truth[start : start + ERROR_ROWS].double()
        off += (result[start : start + ERROR_ROWS].double() - t).square().sum()
        size += t.square().sum()
    return math.sqrt(off.item() / size.item()) if size.item() else math.sqrt(off.item())


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
