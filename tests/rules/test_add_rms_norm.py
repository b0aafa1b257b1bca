"""A residual addition and the norm after it: the spellings that are rewritten, and their neighbours that are not."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

import fusedops
from tests.rewriting import calls, compiled, rewritten

X = (2, 3, 24)


def norm(cls=LlamaRMSNorm, dtype=torch.float32, weight_dtype=None) -> nn.Module:
    module = cls(X[-1], eps=1e-5).to(weight_dtype or dtype)
    nn.init.normal_(module.weight)
    return module


class Block(nn.Module):
    """As in a decoder layer: the sum is normalised and goes on as the residual."""

    def __init__(self, norm: nn.Module, swapped: bool = False) -> None:
        super().__init__()
        self.norm, self.swapped = norm, swapped

    def forward(self, x, residual):
        residual = x + residual if self.swapped else residual + x
        return self.norm(residual), residual * 2


@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm, Olmo2RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["", "float32 weight"])
def test_add_rms_norm_rewrites(cls, dtype, weight_dtype) -> None:
    torch._dynamo.reset()
    module, report = Block(norm(cls, dtype, weight_dtype)), fusedops.Report()
    leaves = [torch.randn(X, dtype=dtype).requires_grad_() for _ in range(2)]
    got, expected = compiled(module, report)(*leaves), module(*leaves)
    assert report.counts() == {"add_rms_norm": 1} and not report.declined
    assert calls(report) == ["fusedops.add_rms_norm.default", *["<built-in function getitem>"] * 2, "aten.mul.Tensor"]
    torch.testing.assert_close(got, expected)
    assert [(y.dtype, y.stride()) for y in got] == [(y.dtype, y.stride()) for y in expected]
    leaves.append(module.norm.weight)
    gradients = [torch.autograd.grad(sum(y.float().square().sum() for y in out), leaves) for out in (got, expected)]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


def test_add_rms_norm_rewrites_either_order() -> None:
    leaves = torch.randn(X), torch.randn(X)
    assert rewritten(Block(norm(), swapped=True), *leaves).counts() == {"add_rms_norm": 1}


def test_add_rms_norm_rewritten_graph() -> None:
    x = torch.randn(X, dtype=torch.bfloat16)
    report = rewritten(Block(norm(GemmaRMSNorm, torch.bfloat16)), x, x + 1)
    lines = [
        f"{n.name}: {n.target} {n.args} {dict(n.kwargs)}"
        for n in report.graph_modules[0].graph.nodes
        if n.op == "call_function"
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
add_rms_norm: fusedops.add_rms_norm.default (arg1_1, arg0_1, arg2_1, 1e-05) {'weight_offset': 1.0, 'cast': 'gemma'}
getitem: <built-in function getitem> (add_rms_norm, 0) {}
getitem_1: <built-in function getitem> (add_rms_norm, 1) {}
mul_2: aten.mul.Tensor (getitem_1, 2) {}""",
    )


def test_add_rms_norm_of_two_norms() -> None:
    """Blocks in parallel normalise one sum twice: the second norm reads the first one's sum."""

    def function(x, residual, w, v):
        total = residual + x
        return _llama(total, w), _llama(total, v)

    report = rewritten(function, torch.randn(X), torch.randn(X), torch.randn(24), torch.randn(24))
    assert report.counts() == {"add_rms_norm": 1, "rms_norm": 1}


def test_add_rms_norm_with_a_sum_read_before_the_norm() -> None:
    def function(x, residual, w):
        total = residual + x
        return _llama(total, w * total.sum()), total

    report = rewritten(function, torch.randn(X), torch.randn(X), torch.randn(24))
    assert report.counts() == {"rms_norm": 1}  # its weight has to wait for the sum


def _llama(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _scaled_residual(x, w):
    return _llama(torch.add(x, x.sin(), alpha=2), w)


def _broadcast_row(x, w):
    return _llama(x + x[:1], w)


def _broadcast_column(x, w):
    return _llama(x + x[..., :1], w)


def _added_number(x, w):
    return _llama(x + 1.0, w)


def _two_dtypes(x, w):
    return _llama(x + x.to(torch.bfloat16), w)


def _difference(x, w):
    return _llama(x - x.sin(), w)


def _in_place(x, w):
    total = x * 1.0
    total += x.sin()
    return _llama(total, w)


def _written_to_in_between(x, w):
    total = x + x.sin()
    kept = total * 1.0
    total.mul_(2.0)
    return _llama(total, w), kept


NORM_ALONE = [
    _scaled_residual,
    _broadcast_row,
    _broadcast_column,
    _added_number,
    _two_dtypes,
    _difference,
    _in_place,
    _written_to_in_between,
]


@pytest.mark.parametrize("spelling", NORM_ALONE, ids=lambda f: f.__name__.strip("_"))
def test_add_rms_norm_keeps_the_addition(spelling) -> None:
    report = rewritten(spelling, torch.randn(X), torch.randn(24))
    assert report.counts() == {"rms_norm": 1} and not report.failures


def test_add_rms_norm_reasons() -> None:
    """Said where the norm alone is not rewritten either."""
    reasons = []
    for spelling in (_broadcast_row, _broadcast_column, _two_dtypes):
        torch._dynamo.reset()
        report = fusedops.Report()
        compiled(spelling, report, disable=["rms_norm"])(torch.randn(X), torch.randn(24))
        assert not report.sites
        reasons.append(f"{spelling.__name__.strip('_')}: {report.declined[0].reason}")
    assert_expected_inline(
        "\n".join(reasons),
        """\
broadcast_row: x (1, 3, 24) and residual (2, 3, 24) differ in shape
broadcast_column: x (2, 3, 1) and residual (2, 3, 24) differ in shape
two_dtypes: x is torch.bfloat16 and residual torch.float32""",
    )


def test_add_rms_norm_keeps_sums_in_half_precision_arithmetic() -> None:
    def uncast(x, w):
        total = x + x.sin()
        return w * (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5))

    report = rewritten(uncast, torch.randn(X, dtype=torch.bfloat16), torch.randn(24, dtype=torch.bfloat16))
    assert not report.sites and "bfloat16" in report.declined[0].reason
