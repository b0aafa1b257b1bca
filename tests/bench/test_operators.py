"""The operator benchmark's logic, at tiny sizes on a CPU: its numbers mean nothing there, its checks do."""

import dataclasses
import json
import math

import pytest
import torch
from rich.console import Console

from bench import operators, peers
from bench.timing import WallTimer

TINY = {"rms_norm": (6, 32), "cross_entropy": (5, 40), "linear_cross_entropy": (5, 16, 40)}
CPU = torch.device("cpu")


def tiny(name, **changes):
    (op,) = (op for op in peers.OPERATORS if op.name == name)
    return dataclasses.replace(op, shapes=(TINY[name],), **changes)


def without_compile(op):
    return lambda: ((name, f) for name, f in op.peers() if not name.startswith(("torch.compile", "Liger")))


def run(op):
    saved = []
    record = operators.measure([op], CPU, WallTimer(), 1000, 2**16, saved.append, Console(quiet=True))
    assert saved
    return json.loads(json.dumps(record))


@pytest.mark.parametrize("name", TINY)
def test_every_peer_agrees_with_the_truth(name):
    op = tiny(name)
    record = run(dataclasses.replace(op, peers=without_compile(op)))
    (case,) = record["cases"]
    assert {p["name"] for p in case["peers"]} >= {"eager, as HF spells it", "fusedops"}
    for peer in case["peers"]:
        assert peer["failure"] is None, peer
        assert peer["share_of_copy"] > 0
    assert (case["floor"] is not None) == (name == "linear_cross_entropy")
    assert operators.table(record).row_count == len(case["peers"]) + (case["floor"] is not None)


@pytest.mark.parametrize("name", TINY)
def test_truth_is_float64_autograd(name):
    op = tiny(name)
    inputs = op.inputs(TINY[name], torch.Generator().manual_seed(1))
    wide = [a.detach().double().requires_grad_(a.requires_grad) if a.is_floating_point() else a
            for a in inputs.args if isinstance(a, torch.Tensor)]  # fmt: skip
    rest = [a for a in inputs.args if not isinstance(a, torch.Tensor)]
    leaves = tuple(a for a in wide if a.requires_grad)
    eager = next(iter(op.peers()))[1]
    expected = peers.Inputs((*wide, *rest), leaves, inputs.upstream.double()).forward_backward(eager)
    for got, want in zip(op.truth(inputs), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-9)


def test_wrong_result_gets_no_time():
    op = tiny("rms_norm")
    eager = next(iter(op.peers()))[1]
    wrong = dataclasses.replace(
        op, peers=lambda: iter([("eager", eager), ("wrong", lambda x, w, eps: 1.2 * eager(x, w, eps))])
    )
    right, red = run(wrong)["cases"][0]["peers"]
    assert right["failure"] is None
    assert red["failure"].startswith("wrong: y is off by")
    assert "device" not in red


def test_nan_is_wrong():
    op = tiny("rms_norm")
    eager = next(iter(op.peers()))[1]
    nan = dataclasses.replace(
        op, peers=lambda: iter([("eager", eager), ("nan", lambda x, w, eps: eager(x, w, eps) * math.nan)])
    )
    assert run(nan)["cases"][0]["peers"][1]["failure"].startswith("wrong: y")


def test_peer_that_raises_is_told_and_the_rest_measured():
    def broken(*args):
        raise RuntimeError("no kernel\nfor this")

    op = tiny("cross_entropy")
    record = run(dataclasses.replace(op, peers=lambda: iter([("broken", broken), *without_compile(op)()])))
    first, *rest = record["cases"][0]["peers"]
    assert first["failure"] == "RuntimeError: no kernel for this"
    assert all("device" in peer for peer in rest)
    assert "no kernel" in operators.table(record).columns[-1]._cells[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path, capsys):
    assert operators.main(["--output", str(tmp_path)]) == 2
    assert "GPU" in capsys.readouterr().out
