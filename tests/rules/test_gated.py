"""SwiGLU and GEGLU: the spellings that are rewritten, and their neighbours that are not."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from transformers import GemmaConfig, LlamaConfig, Phi3Config
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from tests.rewriting import calls, rewritten

ACTIVATIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu tanh": partial(F.gelu, approximate="tanh"),
}
X = (2, 3, 10)  # three sizes that differ, the last of them even


def separate(act, gate, up):
    return act(gate) * up


def swapped(act, gate, up):
    return up * act(gate)


def chunked(act, x):
    gate, up = x.chunk(2, dim=-1)
    return up * act(gate)


def split(act, x):
    gate, up = torch.split(x, x.shape[-1] // 2, dim=2)
    return act(gate) * up


def sliced(act, x):
    half = x.shape[-1] // 2
    return act(x[..., :half]) * x[..., half:]


SPELLINGS = (separate, swapped, chunked, split, sliced)
CASES = [(spelling, name, torch.float32) for spelling in SPELLINGS for name in ACTIVATIONS]
CASES += [(spelling, "swiglu", dtype) for spelling in (separate, chunked) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("spelling", "name", "dtype"), CASES, ids=lambda p: getattr(p, "__name__", str(p)))
def test_gated_rewrites(spelling, name, dtype) -> None:
    inputs = [torch.randn(X, dtype=dtype) for _ in range(2 if spelling in (separate, swapped) else 1)]
    report = rewritten(partial(spelling, ACTIVATIONS[name]), *inputs)
    (call,) = [n for n in report.graph_modules[0].graph.nodes if n.op == "call_function"]
    assert report.counts() == {name.split()[0]: 1} and not report.declined
    assert [n.op for n in call.args] == ["placeholder"] * len(inputs)  # a packed tensor goes in as it is
    expected = spelling(ACTIVATIONS[name], *inputs)
    torch.testing.assert_close(report.graph_modules[0](*inputs)[0], expected)


@pytest.mark.parametrize(
    ("cls", "config", "op"),
    [(LlamaMLP, LlamaConfig, "swiglu"), (Phi3MLP, Phi3Config, "swiglu"), (GemmaMLP, GemmaConfig, "geglu")],
)
def test_gated_rewrites_models(cls, config, op) -> None:
    module = cls(config(hidden_size=8, intermediate_size=20, num_attention_heads=2, pad_token_id=0))
    report = rewritten(module, torch.randn(2, 3, 8))
    assert report.counts() == {op: 1} and not report.declined


def test_gated_rewritten_graph() -> None:
    report = rewritten(GemmaMLP(GemmaConfig(hidden_size=8, intermediate_size=20)), torch.randn(2, 3, 8))
    lines = [
        f"{n.name}: {n.target} {n.args} {dict(n.kwargs)}"
        for n in report.graph_modules[0].graph.nodes
        if n.op == "call_function"
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
linear: aten.linear.default (arg1_1, arg0_1) {}
linear_1: aten.linear.default (arg1_1, arg2_1) {}
geglu: fusedops.geglu.default (linear, linear_1) {'approximate': 'tanh'}
linear_2: aten.linear.default (geglu, arg3_1) {}""",
    )


def test_gated_rewrites_two_activations() -> None:
    """silu(a) * silu(b): the second one is an operand like any other."""
    a, b = torch.randn(X), torch.randn(X)
    report = rewritten(lambda a, b: F.silu(a) * F.silu(b), a, b)
    assert calls(report) == ["aten.silu.default", "fusedops.swiglu.default"]
    torch.testing.assert_close(report.graph_modules[0](a, b)[0], F.silu(a) * F.silu(b))


def _second_half_is_the_gate(x):
    up, gate = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def test_gated_second_half_is_the_gate() -> None:
    """No packed order of the operator's: its halves go in as two tensors."""
    x = torch.randn(X)
    report = rewritten(_second_half_is_the_gate, x)
    assert calls(report)[-1] == "fusedops.swiglu.default" and len(calls(report)) == 4
    torch.testing.assert_close(report.graph_modules[0](x)[0], _second_half_is_the_gate(x))


def _broadcast(x):
    return F.silu(x) * x[:1]


def _one_column(x):
    return F.silu(x) * x[..., :1]


def _number(x):
    return F.silu(x) * 2.0


def _other_dtype(x):
    return F.silu(x) * x.to(torch.bfloat16)


def _sum(x):
    return F.silu(x) + x.sin()


def _activation_read_elsewhere(x):
    activated = F.silu(x)
    return activated * x.sin(), activated


def _written_to_in_between(x):
    gate = x * 1.0
    activated = F.silu(gate)
    gate.add_(1.0)
    return activated * gate


def _silu_with_slope(x):
    return x * torch.sigmoid(1.702 * x) * x.sin()


NEAR_MISSES = [
    _broadcast,
    _one_column,
    _number,
    _other_dtype,
    _sum,
    _activation_read_elsewhere,
    _written_to_in_between,
]


@pytest.mark.parametrize("spelling", [*NEAR_MISSES, _silu_with_slope], ids=lambda f: f.__name__.strip("_"))
def test_gated_keeps(spelling) -> None:
    report = rewritten(spelling, torch.randn(X))
    assert not report.sites and not report.failures


def test_gated_reasons() -> None:
    reasons = [rewritten(f, torch.randn(X)).declined[0].reason for f in NEAR_MISSES]
    assert_expected_inline(
        "\n".join(f"{f.__name__.strip('_')}: {r}" for f, r in zip(NEAR_MISSES, reasons, strict=True)),
        """\
broadcast: gate (2, 3, 10) and up (1, 3, 10) differ in shape
one_column: gate (2, 3, 10) and up (2, 3, 1) differ in shape
number: up: expected a plain tensor, found 2.0
other_dtype: gate is torch.float32 and up torch.bfloat16
sum: no rule describes its surroundings
activation_read_elsewhere: aten.silu.default inside the pattern is also read by the graph's output
written_to_in_between: something between its nodes writes to tensors or switches grad mode or autocast""",
    )


def _first_of_three(x):
    gate, up, _ = x.chunk(3, -1)
    return F.silu(gate) * up


def _other_axis(x):
    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up


def _overlapping(x):
    return F.silu(x[..., :4]) * x[..., 2:]


def _first_two_of_split(x):
    gate, up, _ = x.split(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    "spelling", [_first_of_three, _other_axis, _overlapping, _first_two_of_split], ids=lambda f: f.__name__.strip("_")
)
def test_gated_keeps_other_cuts(spelling) -> None:
    """Nothing packed: two views go into the operator."""
    x = torch.randn(2, 4, 6)
    report = rewritten(spelling, x)
    (call,) = [n for n in report.graph_modules[0].graph.nodes if "fusedops" in str(n.target)]
    assert len(call.args) == 2
    torch.testing.assert_close(report.graph_modules[0](x)[0], spelling(x))


def test_gated_keeps_float64() -> None:
    assert not rewritten(lambda x: F.silu(x) * x.sin(), torch.randn(X, dtype=torch.float64)).sites
