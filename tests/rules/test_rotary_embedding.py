"""Rotary position embedding: the spellings that are rewritten, and their neighbours that are not."""

import importlib
from functools import partial

import pytest
import torch
from expecttest import assert_expected_inline

import fusedops
from tests.rewriting import calls, compiled, rewritten

# Batch, heads of queries and of keys, positions and columns all differ.
B, HEADS, KV_HEADS, T, D = 2, 6, 3, 5, 8


def huggingface(model: str, name: str = "apply_rotary_pos_emb"):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def inputs(dtype=torch.float32, table=None, rotary=D, layout="bhtd"):
    """Queries and keys as projections give them, (B, T, H, D) in memory, with tables for each position."""
    q, k = torch.randn(B, T, HEADS, D, dtype=dtype), torch.randn(B, T, KV_HEADS, D, dtype=dtype)
    cos, sin = torch.randn(2, 1, T, rotary, dtype=table or dtype)
    return (q.transpose(1, 2), k.transpose(1, 2), cos, sin) if layout == "bhtd" else (q, k, cos, sin)


WIDE = {"table": torch.float32}
SPELLINGS = {
    "half": ("llama", {}, ["rotary_embedding.half"]),
    "partial": ("phi3", {"rotary": 4}, ["rotary_embedding.partial"]),
    "partial of all columns": ("phi3", {}, ["rotary_embedding.partial"]),
    "partial, joined later": ("gpt_neox", {"rotary": 6}, ["rotary_embedding.partial"]),
    "rounded once": ("olmo", WIDE, ["rotary_embedding.half_rounded_once"]),
    "interleaved": ("cohere", {}, ["rotary_embedding.interleaved_in_float32"]),
    "interleaved, float32 tables": ("cohere", WIDE, ["rotary_embedding.interleaved_in_float32"]),
    "interleaved, cast late": ("ernie4_5", {}, ["rotary_embedding.interleaved_in_float32_late"]),
    "interleaved, partial": ("glm", {"rotary": 4}, ["rotary_embedding.interleaved_partial"]),
}


def assert_rewritten(function, arguments, rules) -> list[str]:
    """The calls left. Results lie in memory as eager's do; they and gradients are as close to float64 as eager's."""
    torch._dynamo.reset()
    report = fusedops.Report()
    got, got_gradients = differentiated(compiled(function, report), arguments)
    eager, eager_gradients = differentiated(function, arguments)
    true, true_gradients = differentiated(function, [a.double() for a in arguments])
    assert [s.rule for s in report.sites] == rules and not report.declined and not report.failures
    assert [x.stride() for x in got] == [x.stride() for x in eager]
    for x, y, z in zip(got + got_gradients, eager + eager_gradients, true + true_gradients, strict=True):
        assert x.dtype == y.dtype
        assert (x.double() - z).norm() <= 1.5 * (y.double() - z).norm() + 1e-6 * z.norm()
    return calls(report)


def differentiated(function, arguments) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and gradients of everything but the tables, which come last."""
    leaves = [a.detach().requires_grad_() for a in arguments[:-2]]
    results = function(*leaves, *arguments[-2:])
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    torch.manual_seed(1)
    upstream = [torch.randn(r.shape, dtype=torch.float64).to(r.dtype) for r in results]
    return [r.detach() for r in results], list(torch.autograd.grad(results, leaves, upstream))


CASES = [(name, dtype) for name in SPELLINGS for dtype in (torch.float32, torch.bfloat16)] + [("half", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_rotary_embedding_rewrites(name, dtype) -> None:
    model, options, rules = SPELLINGS[name]
    if dtype == torch.float32:  # without casts those spellings are the plain ones
        rules = [r.removesuffix("_late").removesuffix("_rounded_once").removesuffix("_in_float32") for r in rules]
    assert_rewritten(huggingface(model), inputs(dtype, **options), rules)


def test_rotary_embedding_rewrites_heads_behind_positions() -> None:
    """(B, T, H, D): the operator gets transposed views, and its results are transposed back."""
    function = partial(huggingface("llama"), unsqueeze_dim=2)
    left = assert_rewritten(function, inputs(torch.bfloat16, layout="bthd"), ["rotary_embedding.half"])
    assert not {"aten.mul.Tensor", "aten.cat.default"} & set(left)


def test_rotary_embedding_rewrites_tensors_one_at_a_time() -> None:
    """GPT-J rotates with tables of their own."""
    rotate = huggingface("gptj")

    def function(q, k, cos, sin):
        return rotate(q, sin[..., : D // 2], cos[..., : D // 2]), rotate(k, sin[..., D // 2 :], cos[..., D // 2 :])

    assert_rewritten(function, inputs(layout="bthd"), ["rotary_embedding.interleaved_single"] * 2)


def test_rotary_embedding_rewrites_sections() -> None:
    """mRoPE takes each section of columns from another table, before it rotates."""

    def select(table):
        return torch.cat([m[i % 3] for i, m in enumerate(table.split([1, 1, 2] * 2, dim=-1))], dim=-1)

    def function(q, k, cos, sin):
        return huggingface("llama")(q, k, select(cos), select(sin))

    q, k, *_ = inputs()
    assert_rewritten(function, (q, k, *torch.randn(2, 3, B, T, D)), ["rotary_embedding.half"])


def test_rotary_embedding_rewritten_graph() -> None:
    report = rewritten(huggingface("phi3"), *inputs(rotary=4))
    lines = [
        f"{n.name}: {n.target} {n.args} {dict(n.kwargs)}"
        for n in report.graph_modules[0].graph.nodes
        if n.op == "call_function"
    ]
    assert_expected_inline(
        "\n".join(lines),
        """\
unsqueeze: aten.unsqueeze.default (arg0_1, 1) {}
unsqueeze_1: aten.unsqueeze.default (arg1_1, 1) {}
squeeze: aten.squeeze.dim (unsqueeze, 1) {}
squeeze_1: aten.squeeze.dim (unsqueeze_1, 1) {}
rotary_embedding: fusedops.rotary_embedding.default (arg2_1, arg3_1, squeeze, squeeze_1) {'memory_format': torch.contiguous_format}
getitem: <built-in function getitem> (rotary_embedding, 0) {}
getitem_1: <built-in function getitem> (rotary_embedding, 1) {}""",
    )


def rotate_half(x, cut=D // 2):
    return torch.cat((-x[..., cut:], x[..., :cut]), dim=-1)


def rotated(x, cos, sin, turn=rotate_half):
    return x * cos[:, None] + turn(x) * sin[:, None]


def _first_half_negative(x, cos, sin):
    return rotated(x, cos, sin, lambda x: torch.cat((x[..., D // 2 :], -x[..., : D // 2]), dim=-1))


def _halves_not_swapped(x, cos, sin):
    return rotated(x, cos, sin, lambda x: torch.cat((-x[..., : D // 2], x[..., D // 2 :]), dim=-1))


def _cut_elsewhere(x, cos, sin):
    return rotated(x, cos, sin, lambda x: rotate_half(x, 3))


def _halves_overlap(x, cos, sin):
    return rotated(x, cos, sin, lambda x: torch.cat((-x[..., 3:-1], x[..., :4]), dim=-1))


def _another_axis(x, cos, sin):
    return rotated(x, cos, sin, lambda x: torch.cat((-x[:, 3:], x[:, :3]), dim=1))


def _subtracted(x, cos, sin):
    return x * cos[:, None] - rotate_half(x) * sin[:, None]


def _another_tensor_turned(x, cos, sin):
    return x * cos[:, None] + rotate_half(x.exp()) * sin[:, None]


def _one_position_for_all(x, cos, sin):
    return rotated(x, cos[:, :1], sin[:, :1])


def _one_angle_for_all_columns(x, cos, sin):
    return rotated(x, cos[..., :1], sin[..., :1])


def _a_table_for_each_head(x, cos, sin):
    return x * cos[:, None].expand(1, HEADS, T, D) + rotate_half(x) * sin[:, None].expand(1, HEADS, T, D)


def _tables_of_two_widths(x, cos, sin):
    return rotated(x, cos, sin[..., :1])


def _three_dimensions(x, cos, sin):
    x = x[0]
    return x * cos + rotate_half(x) * sin


def _turned_read_elsewhere(x, cos, sin):
    turned = rotate_half(x)
    return x * cos[:, None] + turned * sin[:, None], turned


def _written_to_in_between(x, cos, sin):
    x = x * 1.0
    turned = rotate_half(x)
    x.add_(1.0)
    return x * cos[:, None] + turned * sin[:, None]


def _float32_tables(x, cos, sin):
    return rotated(x.to(torch.bfloat16), cos, sin)


def _negated(x, cos, sin):
    return -x * cos[:, None]


NEAR_MISSES = [
    _first_half_negative,
    _halves_not_swapped,
    _cut_elsewhere,
    _halves_overlap,
    _another_axis,
    _subtracted,
    _another_tensor_turned,
    _one_position_for_all,
    _one_angle_for_all_columns,
    _a_table_for_each_head,
    _tables_of_two_widths,
    _three_dimensions,
    _turned_read_elsewhere,
    _written_to_in_between,
    _float32_tables,
    _negated,
]


def test_rotary_embedding_keeps() -> None:
    q, _, cos, sin = inputs()
    reasons = []
    for spelling in NEAR_MISSES:
        report = rewritten(spelling, q, cos, sin)
        assert not report.sites and not report.failures
        reasons.append(f"{spelling.__name__.strip('_')}: {report.declined[0].reason}")
    assert_expected_inline(
        "\n".join(reasons),
        """\
first_half_negative: no rule describes its surroundings
halves_not_swapped: aten.slice.Tensor: expected 9223372036854775807, found 4
cut_elsewhere: columns are cut at 3, and tables have 8: not halves
halves_overlap: aten.slice.Tensor: expected 9223372036854775807, found -1
another_axis: aten.slice.Tensor: expected -1, found -3
subtracted: no rule describes its surroundings
another_tensor_turned: q would be two different values
one_position_for_all: cos (1, 1, 1, 8) has not one row for each position of q (2, 6, 5, 8)
one_angle_for_all_columns: columns are cut at 4, and tables have 1: not halves
a_table_for_each_head: cos (1, 6, 5, 8) has not one row for each position of q (2, 6, 5, 8)
tables_of_two_widths: cos (1, 1, 5, 8) and sin (1, 1, 5, 1) differ in shape
three_dimensions: cos (1, 5, 8) has not one row for each position of q (6, 5, 8)
turned_read_elsewhere: aten.cat.default inside the pattern is also read by the graph's output
written_to_in_between: q would be two different values
float32_tables: aten.cat.default computes in torch.bfloat16, the pattern in torch.float32
negated: no rule describes its surroundings""",
    )


def test_rotary_embedding_keeps_square_shapes_apart() -> None:
    """Where all sizes are one, a check of shapes alone would take heads for columns."""
    assert not rewritten(_another_axis, torch.randn(6, 6, 6, 6), *torch.randn(2, 1, 6, 6)).sites


def _rotated_columns_overlap_the_rest(x, cos, sin):
    return torch.cat([rotated(x[..., :4], cos, sin, lambda x: rotate_half(x, 2)), x[..., 3:-1]], dim=-1)


def _the_rest_in_front(x, cos, sin):
    return torch.cat([x[..., 4:], rotated(x[..., :4], cos, sin, lambda x: rotate_half(x, 2))], dim=-1)


@pytest.mark.parametrize("spelling", [_rotated_columns_overlap_the_rest, _the_rest_in_front])
def test_rotary_embedding_rewrites_only_the_rotated_columns(spelling) -> None:
    """The concatenation is not the operator's: it stays, around the rotation of a slice."""
    q, _, cos, sin = inputs(rotary=4)
    report = rewritten(spelling, q, cos, sin)
    assert [s.rule for s in report.sites] == ["rotary_embedding.half_single"] and "aten.cat.default" in calls(report)


def test_rotary_embedding_keeps_tensors_apart_that_share_no_tables() -> None:
    def function(q, k, cos, sin):
        return rotated(q, cos, sin), rotated(k, sin, cos)

    assert_rewritten(function, inputs(), ["rotary_embedding.half_single"] * 2)


def test_rotary_embedding_keeps_tensors_apart_of_which_one_needs_the_other() -> None:
    def function(q, k, cos, sin):
        q = rotated(q, cos, sin)
        return q, rotated(k * q[:, :KV_HEADS], cos, sin)

    assert_rewritten(function, inputs(), ["rotary_embedding.half_single"] * 2)
