"""The loss from hidden states: spellings that are rewritten, and their neighbours that are not."""

import math

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from transformers.loss.loss_utils import ForCausalLMLoss

from tests.rewriting import calls, compiled, rewritten

HIDDEN, VOCABULARY = 24, 40
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(dtype=torch.float32):
    hidden, weight = torch.randn(2, 5, HIDDEN, dtype=dtype), torch.randn(VOCABULARY, HIDDEN, dtype=dtype)
    return hidden, weight, torch.randint(0, VOCABULARY, (2, 5))


def causal_lm(hidden, weight, labels, bias=None, **kwargs):
    logits = F.linear(hidden, weight, bias)
    return ForCausalLMLoss(logits, labels, VOCABULARY, **kwargs), logits


def loss_only(*args, **kwargs):
    return causal_lm(*args, **kwargs)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("function", [causal_lm, loss_only])
def test_causal_lm_rewrites(function, with_bias, dtype) -> None:
    bias = torch.randn(VOCABULARY, dtype=dtype) if with_bias else None
    report = rewritten(function, *inputs(dtype), bias)
    assert report.counts() == {"linear_cross_entropy": 1} and not report.declined
    assert "aten.linear.default" not in calls(report)  # neither the loss nor the returned logits need it


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "rule"),
    [(7, "sum"), (torch.tensor(7), "sum_per_item"), (torch.tensor(7.0), "sum")],
    ids=["int", "tensor", "float tensor"],
)
def test_causal_lm_rewrites_num_items_in_batch(count, rule, dtype) -> None:
    torch._dynamo.reset()
    args = inputs(dtype)
    report = rewritten(causal_lm, *args, num_items_in_batch=count)
    assert [s.rule for s in report.sites] == [f"linear_cross_entropy.causal_lm_{rule}"]
    got, wanted = (f(*args, num_items_in_batch=count)[0] for f in (compiled(causal_lm), causal_lm))
    assert got.dtype == wanted.dtype and abs(got - wanted) <= 4 * torch.finfo(dtype).eps * wanted.abs()


def test_trained_num_items_gets_its_gradient() -> None:
    """The sum alone is replaced."""
    torch._dynamo.reset()
    args, gradients = inputs(), []
    for function in (causal_lm, compiled(causal_lm)):
        count = torch.tensor(7.0, requires_grad=True)
        function(*args, num_items_in_batch=count)[0].backward()
        gradients.append(count.grad)
    torch.testing.assert_close(*gradients)


def test_sum_that_is_read_before_it_is_divided_is_not_taken_over() -> None:
    def both(hidden, weight, labels, count):
        total = F.cross_entropy(F.linear(hidden, weight).view(-1, VOCABULARY), labels.view(-1), reduction="sum")
        return total, total / count

    report = rewritten(both, *inputs(), torch.tensor(7))
    assert [s.rule for s in report.sites] == ["linear_cross_entropy.causal_lm_sum"]


def test_several_counts_are_not_taken_over() -> None:
    def divided(hidden, weight, labels, counts):
        total = F.cross_entropy(F.linear(hidden, weight).view(-1, VOCABULARY), labels.view(-1), reduction="sum")
        return total / counts

    report = rewritten(divided, *inputs(), torch.tensor([7, 8]))
    assert [s.rule for s in report.sites] == ["linear_cross_entropy.causal_lm_sum"]


def test_causal_lm_rewrites_shift_labels_and_ignore_index() -> None:
    hidden, weight, labels = inputs()
    report = rewritten(causal_lm, hidden, weight, None, shift_labels=labels, ignore_index=3)
    (call,) = [n for n in report.graph_modules[0].graph.nodes if "fusedops" in str(n.target)]
    assert report.counts() == {"linear_cross_entropy": 1} and call.kwargs["ignore_index"] == 3


def test_causal_lm_rewrites_label_smoothing_and_none() -> None:
    def smoothed(hidden, weight, labels):
        flat = F.linear(hidden, weight).float().view(-1, VOCABULARY)
        return F.cross_entropy(flat, labels.view(-1), reduction="none", label_smoothing=0.25)

    report = rewritten(smoothed, *inputs())
    (call,) = [n for n in report.graph_modules[0].graph.nodes if "fusedops" in str(n.target)]
    assert call.kwargs["label_smoothing"] == 0.25 and call.kwargs["reduction"] == "none"


def test_several_heads_on_one_hidden_state_rewrite() -> None:
    def heads(hidden, weight, labels):
        return sum(
            loss_only(hidden, w, labels, shift_labels=labels.roll(-i, 1)) for i, w in enumerate((weight, -weight))
        )

    report = rewritten(heads, *inputs())
    assert report.counts() == {"linear_cross_entropy": 2} and "aten.linear.default" not in calls(report)


def test_sliced_hidden_states_rewrite() -> None:
    """logits_to_keep: the head sees the last positions alone."""

    def last(hidden, weight, labels):
        return causal_lm(hidden[:, -3:, :], weight, labels[:, -3:])

    torch._dynamo.reset()
    report = rewritten(last, *inputs())
    assert report.counts() == {"linear_cross_entropy": 1} and not report.declined
    torch.testing.assert_close(compiled(last)(*(given := inputs()))[0], last(*given)[0])


OWN_SPELLINGS = {
    "rows": lambda h, w, y: F.cross_entropy(F.linear(h.view(-1, HIDDEN), w).float(), y.view(-1)),
    "not upcast": lambda h, w, y: F.cross_entropy(F.linear(h.flatten(0, 1), w), y.flatten()),
    "reshape": lambda h, w, y: F.cross_entropy(F.linear(h, w).float().reshape(-1, VOCABULARY), y.reshape(-1)),
    "flatten": lambda h, w, y: F.cross_entropy(F.linear(h, w).float().flatten(0, 1), y.flatten()),
    "t": lambda h, w, y: F.cross_entropy((h @ w.t()).float().view(-1, VOCABULARY), y.view(-1)),
    "mm, T": lambda h, w, y: F.cross_entropy(torch.mm(h.view(-1, HIDDEN), w.T).float(), y.view(-1)),
    "mT": lambda h, w, y: F.cross_entropy(torch.matmul(h, w.mT).float().view(-1, VOCABULARY), y.view(-1)),
    "transpose": lambda h, w, y: F.cross_entropy((h @ w.transpose(-1, 0)).float().view(-1, VOCABULARY), y.view(-1)),
    "permute": lambda h, w, y: F.cross_entropy((h @ w.permute(1, 0)).float().view(-1, VOCABULARY), y.view(-1)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spelling", OWN_SPELLINGS)
def test_spellings_of_own_models_rewrite(spelling, dtype) -> None:
    """Rows that are rows already, other words for a view and for a linear map."""
    torch._dynamo.reset()
    function, args = OWN_SPELLINGS[spelling], inputs(dtype)
    report = rewritten(function, *args)
    assert report.counts() == {"linear_cross_entropy": 1} and not report.declined
    got, wanted = compiled(function)(*args), function(*args)
    assert got.dtype == wanted.dtype and abs(got - wanted) <= 4 * torch.finfo(dtype).eps * wanted.abs()


def test_returned_logits_of_rows_are_made_on_demand() -> None:
    def rows(hidden, weight, labels):
        logits = hidden.view(-1, HIDDEN) @ weight.t()
        return F.cross_entropy(logits, labels.view(-1)), logits

    torch._dynamo.reset()
    args = inputs()
    assert not {"aten.linear.default", "aten.matmul.default", "aten.mm.default"} & set(calls(rewritten(rows, *args)))
    torch.testing.assert_close(compiled(rows)(*args)[1] + 0, rows(*args)[1])


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_upcast_rewrites(with_bias, dtype) -> None:
    """The loss keeps its dtype, and is no further from the truth than eager's."""

    def function(hidden, weight, labels, bias):
        logits = F.linear(hidden, weight, bias)
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1)), logits

    torch._dynamo.reset()
    hidden, weight, labels = inputs(dtype)
    bias = torch.randn(VOCABULARY, dtype=dtype) if with_bias else None
    report = rewritten(function, hidden, weight, labels, bias)
    assert report.counts() == {"linear_cross_entropy": 1} and "aten.linear.default" not in calls(report)
    assert report.sites[0].rule.endswith("_not_upcast") == (dtype != torch.float32)
    loss, logits = compiled(function)(hidden, weight, labels, bias)
    expected, expected_logits = function(hidden, weight, labels, bias)
    truth = F.cross_entropy(expected_logits.double().view(-1, VOCABULARY), labels.view(-1))
    assert loss.dtype == dtype and abs(loss - truth) <= max(abs(expected - truth), torch.finfo(dtype).eps * truth)
    torch.testing.assert_close(logits + 0, expected_logits)


def _scaled(logits):
    return logits * 0.5


def _divided(logits):
    return logits / 8


def _softcapped(logits):
    return torch.tanh(logits / 2.0) * 2.0


def _scaled_and_softcapped(logits):
    return _softcapped(logits * 3)


MAPS = [_scaled, _divided, _softcapped, _scaled_and_softcapped]


def mapped(map_logits):
    def function(hidden, weight, labels, **kwargs):
        logits = map_logits(F.linear(hidden, weight))
        return ForCausalLMLoss(logits, labels, VOCABULARY, **kwargs), logits

    return function


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("map_logits", MAPS, ids=lambda f: f.__name__.strip("_"))
def test_mapped_logits_rewrite(map_logits, dtype) -> None:
    report = rewritten(mapped(map_logits), *inputs(dtype))
    assert [s.rule for s in report.sites] == [f"linear_cross_entropy.causal_lm{map_logits.__name__}_mean"]
    assert not report.declined and "aten.linear.default" not in calls(report)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("map_logits", MAPS, ids=lambda f: f.__name__.strip("_"))
def test_mapped_logits_are_eagers(map_logits, dynamic) -> None:
    """Loss, returned logits, and the gradients of both."""
    torch._dynamo.reset()
    hidden, weight, labels = inputs()
    leaves = hidden.requires_grad_(), weight.requires_grad_()

    def outcome(function):
        loss, logits = function(*leaves, labels)
        gradients = torch.autograd.grad(loss + logits.square().mean(), leaves)
        return loss, logits.detach() + 0.0, *gradients

    function = mapped(map_logits)
    torch.testing.assert_close(outcome(compiled(function, dynamic=dynamic)), outcome(function))


def test_mapped_logits_rewrite_num_items_in_batch() -> None:
    report = rewritten(mapped(_softcapped), *inputs(), num_items_in_batch=torch.tensor(7))
    assert [s.rule for s in report.sites] == ["linear_cross_entropy.causal_lm_softcapped_sum_per_item"]


def _two_caps(logits):
    return torch.tanh(logits / 2.0) * 3.0


def _negative_cap(logits):
    return torch.tanh(logits / -2.0) * -2.0


def _another_function(logits):
    return torch.sigmoid(logits / 2.0) * 2.0


def _cap_without_division(logits):
    return torch.tanh(logits) * 2.0


def _learned_scale(logits):
    return logits * logits.detach().mean()


def _shifted(logits):
    return logits + 0.5


def _infinite_scale(logits):
    return logits * math.inf


@pytest.mark.parametrize(
    "map_logits",
    [_two_caps, _negative_cap, _another_function, _cap_without_division, _learned_scale, _shifted, _infinite_scale],
    ids=lambda f: f.__name__.strip("_"),
)
def test_mapped_logits_near_misses(map_logits) -> None:
    """The projection is needed anyway; the loss on its logits is still one operator."""
    report = rewritten(mapped(map_logits), *inputs(torch.bfloat16))
    assert report.counts() == {"cross_entropy": 1} and "aten.linear.default" in calls(report)


def _linear_returned(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return ForCausalLMLoss(_softcapped(logits), labels, VOCABULARY), logits


def test_logits_before_their_map_are_kept_when_returned() -> None:
    report = rewritten(_linear_returned, *inputs())
    assert report.counts() == {"cross_entropy": 1} and "aten.linear.default" in calls(report)


def test_causal_lm_rewritten_graph() -> None:
    report = rewritten(causal_lm, *inputs(torch.bfloat16))
    graph = report.graph_modules[0].graph
    lines = [f"{n.name} = {n.target}{n.args[1:]} {dict(n.kwargs)}" for n in graph.nodes if n.op == "call_function"]
    assert_expected_inline(
        "\n".join(lines),
        """\
pad = aten.pad.default([0, 1], 'constant', -100.0) {}
slice_1 = aten.slice.Tensor(1, 1, 9223372036854775807) {}
contiguous = aten.contiguous.default() {}
view_1 = aten.view.default([-1],) {}
reshape = aten.reshape.default([-1, 24],) {}
linear_cross_entropy = fusedops.linear_cross_entropy.default(arg1_1, view_1) {}""",
    )


def _class_probabilities(hidden, weight, labels):
    flat = F.linear(hidden, weight).float().view(-1, VOCABULARY)
    return F.cross_entropy(flat, torch.softmax(flat.detach(), -1))


def _classes_in_the_middle(hidden, weight, labels):
    return F.cross_entropy(F.linear(hidden, weight).float().transpose(1, 2), labels)


@pytest.mark.parametrize(
    "spelling",
    [_class_probabilities, _classes_in_the_middle],
    ids=lambda f: f.__name__.strip("_"),
)
def test_loss_keeps(spelling) -> None:
    report = rewritten(spelling, *inputs())
    assert not report.sites and not report.failures
    (declined,) = report.declined
    assert declined.anchor == "aten.cross_entropy_loss.default" and declined.reason


def _class_weights(hidden, weight, labels):
    flat = F.linear(hidden, weight).float().view(-1, VOCABULARY)
    return F.cross_entropy(flat, labels.view(-1), weight=torch.ones(VOCABULARY))


def _rows_merged(hidden, weight, labels):
    flat = F.linear(hidden, weight).float().view(-1, 2 * VOCABULARY)
    return F.cross_entropy(flat, labels.view(-1)[: flat.shape[0]])


def _product_with_a_matrix(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.t().contiguous()).float().view(-1, VOCABULARY), labels.view(-1))


def _product_with_several_matrices(hidden, weight, labels):
    weights = weight.expand(2, -1, -1)
    return F.cross_entropy((hidden @ weights.mT).float().view(-1, VOCABULARY), labels.view(-1))


def _logits_read_in_the_graph(hidden, weight, labels):
    loss, logits = causal_lm(hidden, weight, labels)
    return loss, logits.argmax(-1)


@pytest.mark.parametrize(
    "spelling",
    [_class_weights, _logits_read_in_the_graph, _rows_merged, _product_with_a_matrix, _product_with_several_matrices],
    ids=lambda f: f.__name__.strip("_"),
)
def test_causal_lm_falls_back_to_cross_entropy(spelling) -> None:
    """The projection is needed anyway; the loss on its logits is still one operator."""
    report = rewritten(spelling, *inputs(torch.bfloat16))
    assert report.counts() == {"cross_entropy": 1}
    assert {"aten.linear.default", "aten.matmul.default"} & set(calls(report))


def test_causal_lm_keeps_weight_written_to_in_between() -> None:
    def written(hidden, weight, labels):
        weight = weight * 1.0
        logits = F.linear(hidden, weight)
        weight.zero_()
        return ForCausalLMLoss(logits, labels, VOCABULARY)

    assert "linear_cross_entropy" not in rewritten(written, *inputs()).counts()


def test_causal_lm_keeps_float64() -> None:
    """ForCausalLMLoss narrows float64 logits to float32; the operator would not."""
    report = rewritten(causal_lm, *inputs(torch.float64))
    assert not report.counts().get("linear_cross_entropy")
