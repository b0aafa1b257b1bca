"""How the GPU timer chooses its method, on a pretended GPU: what it measures needs a real one."""

import contextlib
import types

import pytest
import torch

from bench.timing import CudaTimer


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self): ...

    def synchronize(self): ...

    def elapsed_time(self, end):
        return 6.0


class Graph:
    replays = 0

    def replay(self):
        Graph.replays += 1

    def reset(self): ...


@pytest.fixture
def cuda(monkeypatch):
    """Stands for torch.cuda; `mode` is its synchronisation debug mode, `capture` may be made to fail."""
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    fake = types.SimpleNamespace(
        mode=0, Event=Event, CUDAGraph=Graph, Stream=lambda: stream, current_stream=lambda: stream,
        synchronize=lambda: None, stream=lambda s: contextlib.nullcontext(), graph=lambda g: contextlib.nullcontext(),
        get_sync_debug_mode=lambda: fake.mode, set_sync_debug_mode=lambda mode: setattr(fake, "mode", mode),
        empty_cache=lambda: None, reset_peak_memory_stats=lambda: None, memory_allocated=lambda: 2**20,
        max_memory_allocated=lambda: 3 * 2**20,
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", fake)
    Graph.replays = 0
    return fake


TIMER = CudaTimer(repetitions=10, least_ms=0.0, warm_up_s=0.0)


def test_graph_replay_is_divided_by_its_steps(cuda):
    seen = []
    timing = TIMER.device(seen.append, 3)
    assert (timing.median, timing.repetitions, timing.method) == (2.0, 10, "CUDA graph")
    assert Graph.replays >= 10
    assert set(seen) == {0, 1, 2}
    assert cuda.mode == 0


def test_step_that_synchronises_is_timed_by_events(cuda):
    def step(i):
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    timing = TIMER.device(step, 2)
    assert timing.method == "events (it synchronises with the host)"
    assert timing.median == 3.0
    assert Graph.replays == 0
    assert cuda.mode == 0


def test_failed_capture_is_timed_by_events(cuda):
    def refuse(graph):
        raise RuntimeError("operation not permitted when stream is capturing")

    cuda.graph = refuse
    assert TIMER.device(lambda i: None, 2).method == "events (capture failed: RuntimeError)"


def test_peak_is_beyond_what_was_allocated(cuda):
    assert TIMER.peak_mib(lambda i: None) == 2.0
    host = TIMER.host(lambda i: None)
    assert host.median >= 0.0
    assert host.repetitions >= 10
