"""The rewriting as a pre-grad pass of Inductor's own backend."""

import pytest
import torch
from torch import nn

import fusedops
from fusedops.compiler.pre_grad import _PreGradPass
from tests.rewriting import distance, sites, step, tiny, tokens


def test_pre_grad_pass_under_inductor() -> None:
    """A real compilation: norms are replaced; the loss on logits too, but not its projection, as logits are returned."""
    torch._dynamo.reset()
    model, report, ids = tiny(), fusedops.Report(), tokens()
    options = {"pre_grad_custom_pass": fusedops.pre_grad_pass(report=report)}
    call = torch.compile(model, backend="inductor", options=options)
    expected, expected_gradients = step(model, model, ids)
    out, gradients = step(model, call, ids)
    torch.testing.assert_close(out.loss, expected.loss)
    assert distance(expected_gradients, gradients) < 1e-5
    assert report.counts() == sites(cross_entropy=1, linear_cross_entropy=0) and not report.failures


def graph_of(model: nn.Module, *args, **kwargs) -> torch.fx.GraphModule:
    """The graph as Dynamo captures it."""
    torch._dynamo.reset()
    graphs = []

    def backend(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(model, backend=backend)(*args, **kwargs)
    return graphs[0]


class LossOnly(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.model = tiny().train()
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self, ids):
        return self.model(ids, labels=ids).loss


@pytest.mark.parametrize("checkpointing", [False, True])
def test_pre_grad_pass_fuses_the_projection_where_logits_stay_inside(checkpointing) -> None:
    gm, report = graph_of(LossOnly(checkpointing), tokens()), fusedops.Report()
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    fusedops.pre_grad_pass(report=report)(gm.graph)
    gm.graph.lint()
    # The sum at the end of a layer and the norm at the beginning of the next are in two bodies.
    assert report.counts() == (sites(add_rms_norm=2, rms_norm=3) if checkpointing else sites())
    assert [n for n in gm.graph.nodes if n.op == "placeholder"] == placeholders


def test_pre_grad_pass_keeps_the_graph_when_it_fails(monkeypatch) -> None:
    gm, report = graph_of(LossOnly(), tokens()), fusedops.Report()
    before = str(gm.graph)
    monkeypatch.setattr("fusedops.compiler.backend.normalise", lambda gm: 1 / 0)
    with pytest.warns(fusedops.FusedopsWarning, match="ZeroDivisionError"):
        fusedops.pre_grad_pass(report=report)(gm.graph)
    assert str(gm.graph) == before and report.failures


def test_pre_grad_pass_has_a_cache_key() -> None:
    one, other = fusedops.pre_grad_pass(), fusedops.pre_grad_pass(disable=["rms_norm"])
    assert isinstance(one, _PreGradPass) and one.uuid() == fusedops.pre_grad_pass().uuid() != other.uuid()


def test_pre_grad_pass_rejects_unknown_names() -> None:
    with pytest.raises(fusedops.OptionError, match="rms_nrom"):
        fusedops.pre_grad_pass(disable=["rms_nrom"])
