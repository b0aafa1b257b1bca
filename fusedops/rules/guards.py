"""What guards of several rules ask of a match."""

from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusedops.compiler.match import Match


def same_kind(match: Match, one: str, other: str) -> str | None:
    """Two operands of one shape and dtype: eager would broadcast and promote, the operator does neither."""
    a, b = match.value(one), match.value(other)
    if a.dtype != b.dtype:
        return f"{one} is {a.dtype} and {other} {b.dtype}"
    if not same_shape(a.shape, b.shape):
        return f"{one} {tuple(a.shape)} and {other} {tuple(b.shape)} differ in shape"
    return None


def same_shape(a, b) -> bool:
    """Equal in rank and in every size, whatever values symbolic sizes will have."""
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))
