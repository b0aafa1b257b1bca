"""The measurement of host times, at tiny sizes on a CPU, where there are no launches to record."""

import pytest
import torch

from bench import host
from bench.peers.operator import EAGER, OURS
from tests.bench.tiny import CPU, SHAPES, operator


@pytest.mark.parametrize("name", ["rms_norm", "swiglu"])
def test_all_take_turns_and_become_a_table(name, monkeypatch):
    monkeypatch.setattr(host, "ROUNDS", 2)
    case = host.measure(operator(name), SHAPES[name], CPU)
    assert {host.NOTHING, host.BY_HAND, OURS} <= set(case["host_ms"])
    assert any(peer.startswith(EAGER) for peer in case["host_ms"])
    assert host.table({"machine": {"device": "cpu"}, "cases": [case]}).row_count == len(case["host_ms"])


def test_by_hand_makes_what_the_operator_makes():
    op = operator("rms_norm")
    inputs = op.inputs(SHAPES["rms_norm"], CPU.generator())
    made = []

    def function(x, weight, *args):
        y = torch.empty_like(x).copy_(x) * weight
        made.append(y)
        return y

    dx, dweight = host.by_hand(inputs, function)()
    assert (dx.shape, dweight.shape) == tuple(t.shape for t in (*inputs.activations, *inputs.parameters))
    assert len(made) == 2  # to compile and to be recorded, not again


def test_shapes_are_of_operators_with_those_letters():
    for name, shape in host.SHAPES.items():
        assert len(shape) == len(operator(name).letters.split(" x "))
