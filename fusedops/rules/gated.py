"""What the rules of swiglu and geglu share: act(gate) * up, with gate and up as two tensors or as halves of one."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusedops.compiler.match import Match
from fusedops.compiler.rule import Rule
from fusedops.rules import guards

HALF = 1237  # a marker: where a packed tensor is cut is read from the model
Activation = Callable[[Tensor], Tensor]


def separate(gate: Tensor, up: Tensor, *, activation: Activation) -> Tensor:
    return activation(gate) * up


def chunked(gate: Tensor, *, activation: Activation) -> Tensor:
    return separate(*gate.chunk(2, -1), activation=activation)


def split(gate: Tensor, *, half: int, activation: Activation) -> Tensor:
    return separate(*gate.split(half, -1), activation=activation)


def sliced(gate: Tensor, *, half: int, activation: Activation) -> Tensor:
    return separate(gate[..., :half], gate[..., half:], activation=activation)


def _examples(names: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield {name: torch.empty(2, 3, 2 * HALF, dtype=dtype) for name in names}


def _is_cut_in_halves(match: Match) -> str | None:
    half, columns = match.value("half"), match.value("gate").shape[-1]
    return None if statically_known_true(2 * half == columns) else f"{columns} columns are cut at {half}: not halves"


def rules(op: str, name: str, activation: Activation, anchor: torch._ops.OpOverload, **options) -> list[Rule]:
    """One rule for each way of spelling gate and up, for one activation."""

    def fused(gate: Tensor, up: Tensor | None = None, *, half: int | None = None) -> Tensor:
        return getattr(torch.ops.fusedops, op)(gate, up, **options)

    def rule(spelling: Callable[..., Tensor], names: tuple[str, ...], numbers: dict[str, int], guard) -> Rule:
        return Rule(
            name=f"{op}.{name}{spelling.__name__}",
            op=op,
            pattern=partial(spelling, activation=activation),
            replacement=fused,
            examples=partial(_examples, names),
            numbers=numbers,
            anchor=anchor,
            recomputes=True,
            guard=guard,
        )

    return [
        rule(separate, ("gate", "up"), {}, lambda match: guards.same_kind(match, "gate", "up")),
        rule(chunked, ("gate",), {}, lambda match: None),
        rule(split, ("gate",), {"half": HALF}, _is_cut_in_halves),
        rule(sliced, ("gate",), {"half": HALF}, _is_cut_in_halves),
    ]
