"""Device time, host time and peak memory of a step, apart from each other.

A step is `step(i)`: forward and backward on input set `i`. Callers rotate enough sets that no step finds its inputs in
the L2 cache.
"""

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.training import quantiles

Step = Callable[[int], object]

HOST_REPETITIONS = 15
HOST_STEPS = 5
LONG_STEP_MS = 5.0


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step; `method` is how they were taken."""

    median: float
    q20: float
    q80: float
    repetitions: int
    method: str


class CudaTimer:
    """Times on the current GPU."""

    def __init__(self, repetitions: int = 15, least_ms: float = 15.0, warm_up_s: float = 0.3) -> None:
        self.repetitions, self.least_ms, self.warm_up_s = repetitions, least_ms, warm_up_s

    def device(self, step: Step, sets: int) -> Timing:
        """Device time by replay of a CUDA graph of one step on each set; by events around the steps otherwise."""
        reason = _synchronises(step)
        if reason is None:
            try:
                return self._by_graph(step, sets)
            except Exception as error:
                reason = f"capture failed: {type(error).__name__}"
                torch.cuda.synchronize()
        return self._repeat(lambda: _all(step, sets), sets, f"events ({reason})")

    def uncaptured(self, step: Step) -> Timing:
        """Device time by events around steps as they run in eager mode, where it matters what the host does."""
        return self._repeat(lambda: step(0), 1, "events")

    def _by_graph(self, step: Step, sets: int) -> Timing:
        graph = torch.cuda.CUDAGraph()
        _warm_up_on_side_stream(step)
        with torch.cuda.graph(graph):
            _all(step, sets)
        timing = self._repeat(graph.replay, sets, "CUDA graph")
        torch.cuda.synchronize()
        graph.reset()
        return timing

    def _repeat(self, run: Callable[[], object], sets: int, method: str) -> Timing:
        # The clock settles under the power limit before anything is measured, and a repetition is long enough for
        # its launch not to count.
        runs, began = 0, time.perf_counter()
        while runs < 2 or time.perf_counter() - began < self.warm_up_s:
            run()
            torch.cuda.synchronize()
            runs += 1
        each_ms = (time.perf_counter() - began) * 1e3 / runs
        inner = max(1, math.ceil(self.least_ms / max(each_ms, 1e-3)))
        times = []
        for _ in range(self.repetitions):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(inner):
                run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / (inner * sets))
        return _summed_up(times, method)

    def host(self, step: Step) -> Timing:
        """Host time to enqueue a step while the device works on those before it, as in a training loop.

        The steps are few, so that the launch queue doesn't fill. A step that waits for the device itself takes as long
        as it waits.
        """
        step(0)
        torch.cuda.synchronize()
        began = time.perf_counter()
        step(0)
        torch.cuda.synchronize()
        steps = HOST_STEPS if (time.perf_counter() - began) * 1e3 < LONG_STEP_MS else 1
        times = []
        for _ in range(HOST_REPETITIONS):
            step(0)  # wakes the device up
            began = time.perf_counter()
            for _ in range(steps):
                step(0)
            times.append((time.perf_counter() - began) * 1e3 / steps)
            torch.cuda.synchronize()
        return _summed_up(times, f"{steps} steps in a row")

    def peak_mib(self, step: Step) -> float:
        """Peak memory of one step beyond what was allocated before it; its results count."""
        self.release()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = step(0)
        torch.cuda.synchronize()
        del result
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class WallTimer:
    """Wall-clock times of a CPU: for trying a benchmark's logic where there is no GPU. Its numbers mean nothing."""

    def device(self, step: Step, sets: int) -> Timing:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            _all(step, sets)
            times.append((time.perf_counter() - began) * 1e3 / sets)
        return _summed_up(times, "wall clock")

    def uncaptured(self, step: Step) -> Timing:
        return self.device(step, 1)

    def host(self, step: Step) -> Timing:
        return self.device(step, 1)

    def peak_mib(self, step: Step) -> float:
        return 0.0

    def release(self) -> None:
        gc.collect()


def _summed_up(times: list[float], method: str) -> Timing:
    return Timing(**quantiles(times), repetitions=len(times), method=method)


def _all(step: Step, sets: int) -> None:
    for i in range(sets):
        step(i)


def _synchronises(step: Step) -> str | None:
    """Why a step can't be captured: it makes the host wait. Asked beforehand, since a failed capture leaves traces."""
    step(0)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(0)
    except RuntimeError as error:
        return "it synchronises with the host" if "synchroniz" in str(error) else f"{type(error).__name__}"
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()
    return None


def _warm_up_on_side_stream(step: Step) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
