"""Matching and replacing in graphs of a few nodes: several results, several roots, lists, sizes, dimensions."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fusedops.compiler.engine import Policy, rewrite
from fusedops.compiler.normalise import trace
from fusedops.compiler.report import Report
from fusedops.compiler.rule import Rule

aten = torch.ops.aten
HALF = 1237


def rule(names: str, pattern: Callable, replacement: Callable, anchor, **kwargs) -> Rule:
    def examples():
        yield {name: torch.empty(3, 2 * HALF) for name in names}

    return Rule("op.test", "op", pattern, replacement, examples, anchor, **kwargs)


def applied(function: Callable, *rules: Rule, arguments: int = 2) -> tuple[list[str], Report]:
    """What the graph of a function calls after the rules. It still computes what the function computes."""
    values = [torch.rand(3, 8) for _ in range(arguments)]
    with FakeTensorMode() as mode:
        gm = trace(function, [mode.from_tensor(v) for v in values])
    report = Report()
    rewrite(gm, Policy(rules), report)
    torch.testing.assert_close(gm(*values), function(*values))
    return [n.target.__name__ for n in gm.graph.nodes if n.op == "call_function"], report


def scaled_sine(x, y, z):
    """Two results, one computed from the other."""
    total = x + y
    return total.sin() * z, total


def scaled_sine_replaced(x, y, z):
    """Any other spelling of the same values will do."""
    total = torch.rsub(x.neg(), y)
    return total.sin().mul(z), total


TWO_RESULTS = rule("xyz", scaled_sine, scaled_sine_replaced, aten.sin.default, results=2)
REPLACED = ["neg.default", "rsub.Tensor", "sin.default", "mul.Tensor"]


def _sum_read_later(x, y, z):
    scaled, total = scaled_sine(x, y, z)
    return scaled, total.cos()


def _sum_read_in_between(x, y, z):
    total = x + y
    early = total.cos()
    return total.sin() * z, early


@pytest.mark.parametrize("function", [_sum_read_later, _sum_read_in_between], ids=lambda f: f.__name__.strip("_"))
def test_every_result_is_replaced(function) -> None:
    names, report = applied(function, TWO_RESULTS, arguments=3)
    assert names == [*REPLACED, "cos.default"] and len(report.sites) == 1


def test_a_result_need_not_be_read() -> None:
    assert applied(lambda *xyz: scaled_sine(*xyz)[0], TWO_RESULTS, arguments=3)[0] == REPLACED


@pytest.mark.parametrize("scale", [lambda total: total, torch.cos], ids=["the sum itself", "computed from the sum"])
def test_no_operand_is_computed_from_a_result(scale) -> None:
    def function(x, y):
        total = x + y
        return total.sin() * scale(total)

    _, report = applied(function, TWO_RESULTS)
    assert (
        not report.sites and report.declined[0].reason == "one of its results is read before all its inputs are there"
    )


# Two results that only an operand holds together, and one of them alone.
PAIR = rule(
    "xyz",
    lambda x, y, z: (x.sin() * z, y.sin() * z),
    lambda x, y, z: tuple((torch.stack([x, y]).sin() * z).unbind()),
    aten.sin.default,
    results=2,
)
LONE = rule("xz", lambda x, z: x.sin() * z, lambda x, z: -(x.neg().sin() * z), aten.sin.default)


def _one_after_the_other(x, z):
    """The second root of a block is not the first one of the next, which is computed from it."""
    for _ in range(3):
        x = x.sin() * z + x.cos().sin() * z
    return x


def _partner_further_off(x, z):
    """Nearest to the first root is one that is computed from it."""
    first = x.sin() * z
    return first.sin() * z, x.cos().sin() * z


def _three_at_once(x, z):
    return tuple(t.sin() * z for t in (x, x.cos(), x.exp()))


def _other_operand(x, z):
    return x.sin() * z, x.cos().sin() * z.exp()


@pytest.mark.parametrize(
    ("function", "pairs", "alone"),
    [(_one_after_the_other, 3, 0), (_partner_further_off, 1, 1), (_three_at_once, 1, 1), (_other_operand, 0, 2)],
    ids=lambda f: f.__name__.strip("_") if callable(f) else "",
)
def test_roots_are_paired(function, pairs, alone) -> None:
    names, report = applied(function, LONE, PAIR)
    assert names.count("stack.default") == pairs and len(report.sites) == pairs + alone


def test_lists_and_items_of_tuples_match() -> None:
    def swapped(x):
        first, second = x.chunk(2, -1)
        return torch.cat([second, first], 1)

    swap = rule("x", swapped, lambda x: x.roll(x.shape[-1] // 2, -1), aten.cat.default)
    assert applied(swapped, swap, arguments=1)[0] == ["roll.default"]
    for other in (
        lambda x: torch.cat(x.chunk(2, -1), -1),
        lambda x: torch.cat([*reversed(x.chunk(2, -1)), x[:, :1]], -1),
        lambda x: torch.cat([*reversed(x.chunk(4, -1))][:2], -1),
    ):
        assert applied(other, swap, arguments=1)[1].declined[0].reason


def test_sizes_are_read_from_the_model() -> None:
    def product(x, half):
        return x[..., :half] * x[..., half:]

    halves = rule(
        "x",
        product,
        lambda x, half: x.unflatten(-1, (2, half)).prod(-2),
        aten.mul.Tensor,
        numbers={"half": HALF},
        guard=lambda match: None if 2 * match.value("half") == match.value("x").shape[-1] else "not halves",
    )
    assert applied(lambda x: product(x, 4), halves, arguments=1)[0] == ["unflatten.int", "prod.dim_int"]
    misses = {
        "half would be two different numbers": lambda x: x[..., :4] * x[..., 3:7],
        "aten.slice.Tensor: expected 9223372036854775807, found 8": lambda x: x[..., :4] * x[..., 4:8],
        "not halves": lambda x: x[..., :7] * x[..., 7:],
    }
    reasons = [applied(f, halves, arguments=1)[1].declined[0].reason for f in misses.values()]
    assert reasons == list(misses)


def test_a_new_dimension_is_counted_in_the_result() -> None:
    column = rule("x", lambda x: x.unsqueeze(-1).exp(), lambda x: x.exp().unsqueeze(2), aten.exp.default)
    assert applied(lambda x: x.unsqueeze(2).exp(), column, arguments=1)[1].sites
    assert not applied(lambda x: x.unsqueeze(1).exp(), column, arguments=1)[1].sites
