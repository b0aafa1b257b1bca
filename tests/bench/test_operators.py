"""The operator benchmark's logic, at tiny sizes on a CPU: its numbers mean nothing there, its checks do."""

import functools
import json
import math

import pytest
import torch

from bench import operator_tables, operators, recording
from bench.case import MOVING
from bench.peers import OPERATORS
from bench.peers.operator import EAGER, OURS, Inputs, Peer
from bench.recording import Task
from csrc_meta import SPECS
from tests.bench.tiny import CPU, KINDS_HERE, SHAPES, operator


def run(op, seconds=None):
    saved = []
    record = recording.measure([Task(op, SHAPES[op.name], KINDS_HERE)], CPU, saved.append, seconds)
    assert saved
    return json.loads(json.dumps(record))


def peers(op):
    return [peer for peer in op.peers() if peer.kind in KINDS_HERE]


def test_every_operator_has_a_tiny_size():
    assert [op.name for op in OPERATORS] == list(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_every_peer_agrees_with_the_truth(name):
    record = run(operator(name))
    (case,) = record["cases"]
    assert {p["kind"] for p in case["peers"]} >= {EAGER, OURS}
    for peer in case["peers"]:
        assert peer["failure"] is None, peer
        assert peer["share_of_copy"] > 0
        assert peer["host_ms"] > 0
    assert (case["floor"]["name"] == MOVING) == (name != "linear_cross_entropy")
    assert recording.ours_is_right(record)
    assert operator_tables.measurements(record).row_count == len(case["peers"]) + 1
    (summary,) = operator_tables.summaries(record)
    assert summary.row_count == 1


@pytest.mark.parametrize("name", SHAPES)
def test_truth_is_float64_autograd(name):
    op = operator(name)
    inputs = op.inputs(SHAPES[name], torch.Generator().manual_seed(1))
    doubles = {id(a): a.detach().double().requires_grad_(a.requires_grad) for a in inputs.args
               if isinstance(a, torch.Tensor) and a.is_floating_point()}  # fmt: skip
    args, activations, parameters = (
        tuple(doubles.get(id(a), a) for a in group) for group in (inputs.args, inputs.activations, inputs.parameters)
    )
    upstreams = tuple(u.double() for u in inputs.upstreams)
    eager = functools.partial(SPECS[op.op or name].eager, **({"approximate": "tanh"} if name == "geglu" else {}))
    expected = Inputs(args, activations, parameters, upstreams).forward_backward(eager)
    for result, got, want in zip(op.results, op.truth(inputs), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6, msg=lambda m, r=result: f"{r}: {m}")


@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_let_go_of_and_leave_the_caller_alone(name):
    op = operator(name)
    inputs = op.inputs(SHAPES[name], torch.Generator().manual_seed(1))
    before = [a.clone() for a in inputs.args if isinstance(a, torch.Tensor)]
    assert all(a.is_leaf and a.requires_grad for a in (*inputs.activations, *inputs.parameters))

    for peer in peers(op):
        held = inputs.forward_backward(peer.function)
        assert all(map(torch.equal, inputs.as_in_a_model(peer.function), held)), peer.name
    assert all(map(torch.equal, (a for a in inputs.args if isinstance(a, torch.Tensor)), before))
    assert inputs.activation_bytes() < inputs.bytes()


def test_nobody_holds_the_activations_of_a_model():
    import weakref

    op = operator("swiglu")
    inputs = op.inputs(SHAPES["swiglu"], torch.Generator().manual_seed(1))
    seen = []

    def swiglu(gate, up):
        assert not gate.is_leaf
        assert gate.requires_grad
        seen.extend(weakref.ref(t) for t in (gate, up))
        return gate + up

    class Watch(tuple):
        def __iter__(self):
            # Looked at when the result is there and its gradients are about to be asked for.
            assert all(ref() is None for ref in seen)
            return super().__iter__()

    watched = Inputs(inputs.args, inputs.activations, (), Watch(inputs.upstreams))
    watched.as_in_a_model(swiglu)
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["swiglu", "geglu", "cross_entropy"])
def test_fusedops_reuses_dead_activations_of_a_model_and_spares_held_ones(name):
    op = operator(name)
    inputs = op.inputs(SHAPES[name], torch.Generator().manual_seed(1))
    (function,) = (peer.function for peer in op.peers() if peer.kind == OURS)
    given = set()

    def noted(*args):
        given.update(a.data_ptr() for a in args)
        return function(*args)

    def reused(results):
        return given & {r.data_ptr() for r in results}

    held = inputs.forward_backward(noted)
    assert not reused(held)
    given.clear()
    made = inputs.as_in_a_model(noted)
    assert len(reused(made)) == len(inputs.activations)


def wrong_by(factor):
    """rms_norm's eager spelling, right and scaled."""
    eager = peers(operator("rms_norm"))[0]
    wrong = Peer(OURS, lambda *args: factor * eager.function(*args))
    return operator("rms_norm", peers=lambda: iter([eager, wrong]))


@pytest.mark.parametrize("factor", [1.2, math.nan])
def test_wrong_result_gets_no_time(factor):
    record = run(wrong_by(factor))
    right, red = record["cases"][0]["peers"]
    assert right["failure"] is None
    assert red["failure"].startswith("wrong: y is off by")
    assert "device" not in red
    assert not recording.ours_is_right(record)
    (summary,) = operator_tables.summaries(record)
    assert summary.columns[1]._cells == ["-"]


def test_wrong_result_where_nobody_holds_the_activations_gets_no_time():
    eager = peers(operator("rms_norm"))[0]
    breaks = Peer(OURS, lambda x, w, eps: eager.function(x, w, eps) * (1.0 if x.is_leaf else 1.2))
    red = run(operator("rms_norm", peers=lambda: iter([eager, breaks])))["cases"][0]["peers"][1]
    assert red["failure"].startswith("wrong: y")


def test_peer_that_raises_is_told_and_the_rest_measured():
    def broken(*args):
        raise RuntimeError("no kernel\nfor this")

    op = operator("cross_entropy")
    record = run(operator("cross_entropy", peers=lambda: iter([Peer(EAGER, broken), *peers(op)])))
    first, *rest = record["cases"][0]["peers"]
    assert first["failure"] == "RuntimeError: no kernel for this"
    assert all("device" in peer for peer in rest)
    assert "no kernel" in operator_tables.measurements(record).columns[-1]._cells[1]


def test_no_case_is_begun_after_the_time_is_up():
    record = run(operator("rms_norm"), seconds=0.0)
    assert record["cases"] == []
    assert record["not_run"] == [{"op": "rms_norm", "shape": list(SHAPES["rms_norm"])}]
    assert operator_tables.measurements(record).columns[-1]._cells == ["not run"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it needs where there is no GPU")
def test_without_a_gpu_it_says_what_it_needs(tmp_path, capsys):
    assert operators.main(["--output", str(tmp_path)]) == 2
    assert "GPU" in capsys.readouterr().out
