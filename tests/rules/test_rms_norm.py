"""RMSNorm: the spellings that are rewritten, and their neighbours that are not."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

import fusedops
from tests.rewriting import calls, compiled, rewritten

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A column count that no other dimension has: square shapes hide mistaken axes.
X = (2, 3, 24)


def norm(cls=LlamaRMSNorm, dtype=torch.float32, weight_dtype=None) -> nn.Module:
    module = cls(X[-1], eps=1e-5).to(weight_dtype or dtype)
    nn.init.normal_(module.weight)
    return module


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm])
@pytest.mark.parametrize("weight_dtype", ["as x", torch.float32])
def test_rms_norm_rewrites(cls, dtype, weight_dtype) -> None:
    module = norm(cls, dtype, None if weight_dtype == "as x" else weight_dtype)
    x = torch.randn(X, dtype=dtype)
    report = rewritten(module, x)
    assert report.counts() == {"rms_norm": 1} and not report.declined
    assert calls(report) == ["fusedops.rms_norm.default"]  # casts included: nothing is left of the spelling
    torch.testing.assert_close(report.graph_modules[0](*_inputs(report, module, x))[0], module(x))


def _inputs(report, module, x):
    """The rewritten graph's inputs, in its order: it takes the parameters too."""
    by_rank = {1: module.weight, x.dim(): x}
    return [by_rank[n.meta["val"].dim()] for n in report.graph_modules[0].graph.nodes if n.op == "placeholder"]


def test_rms_norm_llama_rewritten_graph() -> None:
    report = rewritten(norm(dtype=torch.bfloat16), torch.randn(X, dtype=torch.bfloat16))
    lines = [
        f"{n.name}: {n.target} {n.args[2:]} {dict(n.kwargs)}"
        for n in report.graph_modules[0].graph.nodes
        if n.op == "call_function"
    ]
    assert_expected_inline("\n".join(lines), """rms_norm: fusedops.rms_norm.default (1e-05,) {}""")


def test_rms_norm_gemma_rewritten_graph() -> None:
    report = rewritten(norm(GemmaRMSNorm, torch.bfloat16), torch.randn(X, dtype=torch.bfloat16))
    lines = [
        f"{n.name}: {n.target} {n.args[2:]} {dict(n.kwargs)}"
        for n in report.graph_modules[0].graph.nodes
        if n.op == "call_function"
    ]
    assert_expected_inline(
        "\n".join(lines),
        """rms_norm: fusedops.rms_norm.default (1e-05,) {'weight_offset': 1.0, 'cast': 'gemma'}""",
    )


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 4, 24)])
def test_rms_norm_rewrites_any_rank(shape) -> None:
    assert rewritten(norm(), torch.randn(shape)).counts() == {"rms_norm": 1}


def test_rms_norm_rewrites_heads_in_front_of_positions() -> None:
    """Gemma 3 transposes, then normalises: the result lies in memory as eager's does."""
    torch._dynamo.reset()
    module, x, report = norm(GemmaRMSNorm), torch.randn(2, 5, 3, 24).transpose(1, 2), fusedops.Report()
    got, expected = compiled(module, report)(x), module(x)
    assert report.counts() == {"rms_norm": 1} and got.stride() == expected.stride() != x.contiguous().stride()
    torch.testing.assert_close(got, expected)


def test_rms_norm_rewrites_swapped_operands() -> None:
    def swapped(x, w):
        return (torch.rsqrt(1e-5 + x.pow(2).mean(-1, keepdim=True)) * x) * w

    assert rewritten(swapped, torch.randn(X), torch.randn(24)).counts() == {"rms_norm": 1}


def _llama(x, w, eps=1e-5, *, dims=-1, keep=True, power=2, dtype=torch.float32):
    wide = x.to(dtype)
    return w * (wide * torch.rsqrt(wide.pow(power).mean(dims, keepdim=keep) + eps)).to(x.dtype)


def _other_axis(x, w):
    return _llama(x, w, dims=1)


def _two_axes(x, w):
    return _llama(x, w, dims=(-2, -1))


def _other_power(x, w):
    return _llama(x, w, power=4)


def _eps_outside_the_root(x, w):
    return w * (x * (torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + 1e-5))


def _mean_subtracted(x, w):
    return w * (x * torch.rsqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + 1e-5))


def _variance_of_another(x, w):
    return w * (x * torch.rsqrt(x.exp().pow(2).mean(-1, keepdim=True) + 1e-5))


def _variance_used_elsewhere(x, w):
    variance = x.pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(variance + 1e-5)), variance


def _written_to_in_between(x, w):
    x = x * 1.0
    variance = x.pow(2).mean(-1, keepdim=True)
    x.add_(1.0)
    return w * (x * torch.rsqrt(variance + 1e-5))


def _tensor_eps(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[0]))


def _weight_of_two_dimensions(x, w):
    return _llama(x, w.expand(3, 24))


def _subtracted(x, w):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - 1e-5))


NEAR_MISSES = [
    _other_axis,
    _two_axes,
    _other_power,
    _eps_outside_the_root,
    _mean_subtracted,
    _variance_of_another,
    _variance_used_elsewhere,
    _written_to_in_between,
    _tensor_eps,
    _weight_of_two_dimensions,
    _subtracted,
]


@pytest.mark.parametrize("spelling", NEAR_MISSES, ids=lambda f: f.__name__.strip("_"))
def test_rms_norm_keeps(spelling) -> None:
    report = rewritten(spelling, torch.randn(X), torch.randn(24))
    assert not report.sites and not report.failures
    (declined,) = report.declined
    assert declined.anchor == "aten.rsqrt.default" and declined.reason


def test_rms_norm_keeps_square_shapes_apart() -> None:
    """Where every dimension has one size, a shape check alone would take the wrong axis."""
    assert not rewritten(_other_axis, torch.randn(4, 4, 4), torch.randn(4)).sites


def test_rms_norm_keeps_half_precision_arithmetic() -> None:
    """Without the casts to float32 eager rounds every intermediate: another result than the operator's."""

    def uncast(x, w):
        return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    report = rewritten(uncast, torch.randn(X, dtype=torch.bfloat16), torch.randn(24, dtype=torch.bfloat16))
    assert not report.sites and "bfloat16" in report.declined[0].reason


def test_rms_norm_keeps_float64() -> None:
    """Llama's cast to float32 narrows float64 inputs; the operator would not."""
    assert not rewritten(norm(dtype=torch.float64), torch.randn(X, dtype=torch.float64)).sites


def test_rms_norm_keeps_cast_orders_apart() -> None:
    """OLMo 2's and Llama's rules round in different places: one must not be taken for the other."""
    half = torch.randn(X, dtype=torch.bfloat16)
    for cls, rule in ((LlamaRMSNorm, "rms_norm.llama"), (Olmo2RMSNorm, "rms_norm.rounded_last")):
        assert [s.rule for s in rewritten(norm(cls, torch.bfloat16), half).sites] == [rule]


def test_rms_norm_keeps_other_cast_orders() -> None:
    def rounded_twice(x, w):
        wide = x.float()
        normalised = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        return (w.float() * normalised.float()).to(x.dtype)

    report = rewritten(rounded_twice, torch.randn(X, dtype=torch.bfloat16), torch.randn(24, dtype=torch.bfloat16))
    assert "fusedops.rms_norm.default" not in calls(report)


def test_rms_norm_reasons() -> None:
    reasons = [rewritten(f, torch.randn(X), torch.randn(24)).declined[0].reason for f in NEAR_MISSES]
    assert_expected_inline(
        "\n".join(f"{f.__name__.strip('_')}: {r}" for f, r in zip(NEAR_MISSES, reasons, strict=True)),
        """\
other_axis: aten.mean.dim: expected -1, found -2
two_axes: aten.mean.dim: expected [-1], found [-2, -1]
other_power: aten.pow.Tensor_Scalar: expected 2, found 4
eps_outside_the_root: no rule describes its surroundings
mean_subtracted: x would be two different values
variance_of_another: x would be two different values
variance_used_elsewhere: aten.mean.dim inside the pattern is also read by the graph's output
written_to_in_between: x would be two different values
tensor_eps: aten.add.Tensor: eps: expected a number, found aten.select.int
weight_of_two_dimensions: the weight (3, 24) does not have one element for each column of x (2, 3, 24)
subtracted: expected aten.add.Tensor, found aten.sub.Tensor""",
    )
