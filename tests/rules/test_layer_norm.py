"""LayerNorm: what is rewritten, and its neighbours that are not."""

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

import fusedops
from tests.rewriting import calls, compiled, rewritten

X = (2, 3, 24)
PARAMETERS = {
    "affine": {},
    "weight": {"bias": False},
    "plain": {"elementwise_affine": False},
}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_layer_norm_rewrites(name, dtype) -> None:
    torch._dynamo.reset()
    module, report = nn.LayerNorm(24, eps=1e-3, **PARAMETERS[name]).to(dtype), fusedops.Report()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    leaves = [torch.randn(X, dtype=dtype).requires_grad_(), *module.parameters()]
    got, expected = compiled(module, report)(leaves[0]), module(leaves[0])
    assert [s.rule for s in report.sites] == [f"layer_norm.{name}"] and not report.declined
    assert calls(report) == ["fusedops.layer_norm.default"]
    gradients = [torch.autograd.grad(y.float().pow(3).sum(), leaves) for y in (got, expected)]
    for a, b in zip((got, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (a - b).norm() <= (1e-5 if dtype in (torch.float32, torch.float64) else 0.01) * b.norm()


def test_layer_norm_rewritten_graph() -> None:
    report = rewritten(nn.LayerNorm(24, eps=1e-3), torch.randn(X))
    lines = [f"{n.name}: {n.target} {n.args}" for n in report.graph_modules[0].graph.nodes if n.op == "call_function"]
    assert_expected_inline(
        "\n".join(lines), """layer_norm_1: fusedops.layer_norm.default (arg2_1, arg0_1, arg1_1, 0.001)"""
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layer_norm_spelt_out_rewrites(dtype) -> None:
    torch._dynamo.reset()
    module, report = CohereLayerNorm(24, eps=1e-3).to(dtype), fusedops.Report()
    nn.init.normal_(module.weight)
    leaves = [torch.randn(X, dtype=dtype).requires_grad_(), module.weight]
    got, expected = compiled(module, report)(leaves[0]), module(leaves[0])
    assert [s.rule for s in report.sites] == ["layer_norm.spelt_out"] and not report.declined
    assert calls(report) == ["fusedops.layer_norm.default"]
    gradients = [torch.autograd.grad(y.float().pow(3).sum(), leaves) for y in (got, expected)]
    for a, b in zip((got, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert (a - b).norm() <= (1e-5 if dtype == torch.float32 else 0.01) * b.norm()


def _spelt_out(x, w, dim=-1, root=lambda variance: torch.rsqrt(variance + 1e-3), shift=lambda mean: mean):
    wide = x.float()
    mean = wide.mean(dim, keepdim=True)
    variance = (wide - mean).pow(2).mean(dim, keepdim=True)
    return (w.float() * ((wide - shift(mean)) * root(variance))).to(x.dtype)


SPELT_NEAR_MISSES = {
    "another axis": lambda x, w: _spelt_out(x, w, dim=1),
    "eps outside the root": lambda x, w: _spelt_out(x, w, root=lambda v: torch.rsqrt(v) + 1e-3),
    "another mean is subtracted": lambda x, w: _spelt_out(x, w, shift=lambda mean: mean * 0.5),
    "a weight for each head": lambda x, w: _spelt_out(x, torch.stack([w] * 3)),
}


@pytest.mark.parametrize("name", SPELT_NEAR_MISSES)
def test_layer_norm_spelt_out_keeps(name) -> None:
    report = rewritten(SPELT_NEAR_MISSES[name], torch.randn(X), torch.randn(24))
    assert not report.sites and not report.failures


def test_layer_norm_spelt_out_of_two_dtypes() -> None:
    """With a float32 weight all between the casts is float32's pattern."""
    torch._dynamo.reset()
    args = torch.randn(X, dtype=torch.bfloat16), torch.randn(24)
    report = rewritten(_spelt_out, *args)
    assert report.counts() == {"layer_norm": 1}
    got, expected = compiled(_spelt_out)(*args), _spelt_out(*args)
    assert got.dtype == expected.dtype and (got - expected).norm() <= 0.01 * expected.norm()


def test_layer_norm_spelt_out_keeps_what_else_is_read() -> None:
    def function(x, w):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return w * ((x - mean) * torch.rsqrt(variance + 1e-3)), variance

    torch._dynamo.reset()
    args = torch.randn(X), torch.randn(24)
    torch.testing.assert_close(compiled(function)(*args), function(*args))


def _two_dimensions(x, w):
    return F.layer_norm(x, x.shape[1:])


def _bias_alone(x, w):
    return F.layer_norm(x, (24,), None, w)


def _half_precision_x(x, w):
    return F.layer_norm(x.to(torch.bfloat16), (24,), w, w)


NEAR_MISSES = [_two_dimensions, _bias_alone, _half_precision_x]


def test_layer_norm_keeps() -> None:
    reasons = []
    for spelling in NEAR_MISSES:
        report = rewritten(spelling, torch.randn(X), torch.randn(24))
        assert not report.sites and not report.failures, spelling
        reasons.append(f"{spelling.__name__.strip('_')}: {report.declined[0].reason}")
    assert_expected_inline(
        "\n".join(reasons),
        """\
two_dimensions: aten.layer_norm.default: expected [columns], found [3, 24]
bias_alone: weight: expected a plain tensor, found None
half_precision_x: aten.layer_norm.default computes in torch.bfloat16, the pattern in torch.float32""",
    )


def test_layer_norm_under_autocast() -> None:
    """Autocast runs it in float32: a result of another dtype than half-precision x has."""
    x = torch.randn(X, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        report = rewritten(nn.LayerNorm(24), x)
        assert not report.sites and "float32" in report.declined[0].reason
        assert rewritten(nn.LayerNorm(24), x.float()).counts() == {"layer_norm": 1}
