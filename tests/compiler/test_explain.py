"""explain and the report it returns."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import fusedops
from tests.rewriting import rewritten, sites, tiny, tokens


class TwoNorms(nn.Module):
    """One norm that is rewritten, and one over another axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, x):
        for block in self.blocks:
            x = block(self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)))
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6)


def test_explain_prints_a_table() -> None:
    report = rewritten(TwoNorms(), torch.randn(3, 8))
    text = str(report).translate({ord(c): "-" for c in "━─┏┳┓┡╇┩└┴┘"} | {ord(c): "|" for c in "┃│"})
    assert_expected_inline(
        "\n".join(line.rstrip() for line in text.splitlines()),
        """\
Replaced
----------------------------------------------------------
| operator | rule           | module             | sites |
----------------------------------------------------------
| rms_norm | rms_norm.llama | (the model itself) | 2     |
----------------------------------------------------------
Declined
----------------------------------------------------------------------------------------
| looks like         | module             | why it was left                    | sites |
----------------------------------------------------------------------------------------
| aten.rsqrt.default | (the model itself) | no rule describes its surroundings | 1     |
----------------------------------------------------------------------------------------
1 graph captured.""",
    )


def test_explain_is_structured() -> None:
    ids = tokens()
    report = rewritten(tiny(), input_ids=ids, labels=ids)
    assert report.counts() == sites() and report.graphs == 1
    norms = [s.module for s in report.sites if "rms_norm" in s.op]
    assert norms == [
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
    ]
    assert sum("fusedops" in str(n.target) for n in report.graph_modules[0].graph.nodes) == len(report.sites) == 10


@pytest.mark.parametrize("how", ["module.compile", "torch.compile", "function"])
def test_explain_looks_into_what_is_compiled_already(how) -> None:
    torch._dynamo.reset()
    model, ids = tiny(), tokens()
    if how == "module.compile":
        model.compile(backend="eager")
        compiled = model
    else:
        compiled = torch.compile(model if how == "torch.compile" else model.forward, backend="eager")
    compiled(input_ids=ids, labels=ids)
    report = fusedops.explain(compiled, input_ids=ids, labels=ids)
    assert report.counts() == sites()
    assert report.sites[0].module == "model.layers.0.input_layernorm"


def test_explain_changes_nothing() -> None:
    model, ids = tiny(attention_dropout=0.5).train(), tokens()
    before = torch.get_rng_state()
    rewritten(model, input_ids=ids, labels=ids)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_report_is_added_to() -> None:
    one, two = fusedops.Report(graphs=1, failures=["a"]), fusedops.Report(graphs=2, failures=["b"])
    one.add(two)
    assert one.graphs == 3 and one.failures == ["a", "b"] and "Failed, running as captured: b" in str(one)
