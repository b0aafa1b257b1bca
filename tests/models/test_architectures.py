"""Architectures: what their spellings become, with the loss, logits and gradients of eager."""

import pytest
import torch

import fusedops
from tests.rewriting import SITES, compiled, distance, rewritten, sites, step, tiny, tokens

# A feed-forward network without a gate has an activation, and no site.
UNGATED = {"gpt_neox": 2, "gpt2": 0}


@pytest.mark.parametrize("name", SITES)
def test_architecture_trains_alike(name) -> None:
    torch._dynamo.reset()
    model, ids, report = tiny(name).eval(), tokens(), fusedops.Report()
    expected, expected_gradients = step(model, model, ids)
    out, gradients = step(model, compiled(model, report), ids)
    assert report.counts() == sites(name) and report.graphs == (2 if name == "gpt2" else 1) and not report.failures
    assert [d.anchor for d in report.declined] == ["aten.gelu.default"] * UNGATED.get(name, 0)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert distance(expected_gradients, gradients) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma", "phi3", "gpt_neox", "olmo2", "gemma2"])
def test_architecture_in_half_precision(name) -> None:
    """Casts don't vanish, and the same sites are found."""
    ids = tokens()
    assert rewritten(tiny(name, torch.bfloat16), ids, labels=ids).counts() == sites(name)


def test_partial_rotation() -> None:
    """Phi-4-mini rotates three quarters of each head."""
    torch._dynamo.reset()
    model, ids, report = tiny("phi3", partial_rotary_factor=0.75), tokens(), fusedops.Report()
    expected, expected_gradients = step(model, model, ids)
    out, gradients = step(model, compiled(model, report), ids)
    assert report.counts() == sites("phi3") and not report.declined
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-5)
    assert distance(expected_gradients, gradients) < 1e-5
