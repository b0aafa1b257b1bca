"""Rotary position embedding of queries and keys: pairs of columns are rotated by an angle of their position."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from csrc_meta import checks
from csrc_meta.registry import composite, no_flops, primitive
from csrc_meta.results import compute_dtype
from csrc_meta.spec import Sample, Spec

FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def check(
    op: str, tensors: dict[str, Tensor | None], cos: Tensor, sin: Tensor, interleaved: bool, sections: list[int] | None
) -> None:
    """``tensors`` are the one or two that are rotated, by their names in the operator."""
    given = {name: t for name, t in tensors.items() if t is not None}
    like, first = next(iter(given.items()))
    for name, t in given.items():
        checks.check_dtype(op, name, t, checks.FLOATING, "Cast it to a floating-point dtype.")
        if t.dim() != 4:
            raise checks.UnsupportedInputError(
                checks.message(op, name, checks.describe(t), "shape (B, H, T, D)", f"Add a dimension: {name}[None].")
            )
        checks.check_same_dtype(op, name, t, like, first)
        checks.check_same_device(op, name, t, like, first)
        shape = (first.shape[0], t.shape[1], *first.shape[2:])
        checks.check_shape(op, name, t, shape, f"It differs from {like} in the number of heads alone.")
    _check_tables(op, like, first, cos, sin, sections)
    if sections is not None and interleaved:
        raise checks.UnsupportedInputError(
            checks.message(op, "sections", sections, "None where interleaved", "Sections are of the two halves.")
        )


def _check_tables(op: str, like: str, x: Tensor, cos: Tensor, sin: Tensor, sections: list[int] | None) -> None:
    batch, _, tokens, columns = x.shape
    checks.check_dtype(op, "cos", cos, checks.FLOATING, "Cast it to a floating-point dtype.")
    checks.check_same_device(op, "cos", cos, like, x)
    fits = cos.dim() == (3 if sections is None else 4) and cos.shape[-3] in (1, batch) and cos.shape[-2] == tokens
    rotated = cos.shape[-1] if fits else 0
    if rotated % 2 or not 0 < rotated <= columns:
        batches, tables = "1" if batch == 1 else f"1 or {batch}", "" if sections is None else "S, "
        wants = f"shape ({tables}{batches}, {tokens}, R) with R even, at most {columns}"
        remedy = "Tables have no head dimension: leave out unsqueeze(1)."
        raise checks.UnsupportedInputError(checks.message(op, "cos", checks.describe(cos), wants, remedy))
    checks.check_same_dtype(op, "sin", sin, "cos", cos)
    checks.check_same_device(op, "sin", sin, "cos", cos)
    checks.check_shape(op, "sin", sin, cos.shape, "cos and sin have one shape.")
    if sections is not None and (
        len(sections) != cos.shape[0] or sum(sections) != rotated // 2 or any(s < 0 for s in sections)
    ):
        wants = f"{cos.shape[0]} sizes, as cos has tables, with a sum of R / 2 = {rotated // 2}"
        raise checks.UnsupportedInputError(
            checks.message(op, "sections", sections, wants, "Pass the model's mrope_section.")
        )


def _check_forward(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    memory_format: torch.memory_format | None,
) -> None:
    check("rotary_embedding", {"q": q, "k": k}, cos, sin, interleaved, sections)
    checks.check_choice("rotary_embedding", "memory_format", memory_format, FORMATS)


def _check_backward(
    dq: Tensor | None,
    dk: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    q_order: list[int],
    k_order: list[int],
) -> None:
    check("rotary_embedding_backward", {"dq": dq, "dk": dk}, cos, sin, interleaved, sections)


def select(table: Tensor, sections: list[int] | None) -> Tensor:
    """(1|B, T, R) of a table with sections: column j of either half is that of the section which j falls into."""
    if sections is None:
        return table
    columns = table.split(sections * 2, dim=-1)
    return torch.cat([part[i % len(sections)] for i, part in enumerate(columns)], dim=-1)


def _turned(x: Tensor, interleaved: bool) -> Tensor:
    """x with each pair (a, b) turned by a right angle: (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool = False) -> Tensor:
    """x with its first R columns rotated by tables (1|B, T, R); ``transposed`` rotates gradients back."""
    wide = compute_dtype(x, cos)
    cos, sin = cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)
    head, tail = x[..., : cos.shape[-1]].to(wide), x[..., cos.shape[-1] :]
    y = head * cos - _turned(head * sin, interleaved) if transposed else head * cos + _turned(head, interleaved) * sin
    return torch.cat((y.to(x.dtype), tail), dim=-1)


def forward_fake(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    memory_format: torch.memory_format | None,
) -> tuple[Tensor, Tensor]:
    memory_format = memory_format or torch.preserve_format
    return (
        torch.empty_like(q, memory_format=memory_format),
        q.new_empty((0,)) if k is None else torch.empty_like(k, memory_format=memory_format),
    )


def forward_ref(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    memory_format: torch.memory_format | None,
) -> tuple[Tensor, Tensor]:
    outputs = forward_fake(q, k, cos, sin, interleaved, sections, memory_format)
    cos, sin = select(cos, sections), select(sin, sections)
    for x, y in zip((q, k), outputs, strict=True):
        if x is not None:
            y.copy_(rotated(x, cos, sin, interleaved))
    return outputs


def backward_fake(
    dq: Tensor | None,
    dk: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    q_order: list[int],
    k_order: list[int],
) -> tuple[Tensor, Tensor]:
    def gradient(dy: Tensor | None, order: list[int]) -> Tensor:
        if dy is None:
            return cos.new_empty((0,))
        return torch.empty_permuted(dy.shape, order, dtype=dy.dtype, device=dy.device)

    return gradient(dq, q_order), gradient(dk, k_order)


def backward_ref(
    dq: Tensor | None,
    dk: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    q_order: list[int],
    k_order: list[int],
) -> tuple[Tensor, Tensor]:
    gradients = backward_fake(dq, dk, cos, sin, interleaved, sections, q_order, k_order)
    cos, sin = select(cos, sections), select(sin, sections)
    for dy, dx in zip((dq, dk), gradients, strict=True):
        if dy is not None:
            dx.copy_(rotated(dy, cos, sin, interleaved, transposed=True))
    return gradients


def _order(x: Tensor | None) -> list[int]:
    """The dimensions from the outermost in memory to the innermost, which are the columns.

    Gradients are laid out as x is, not as they arrive: x is a transposed view of (B, T, H, D) as a rule, and the
    gradient of what it is a view of then needs no copy.
    """
    return [0, 1, 2, 3] if x is None else [*sorted((0, 1, 2), key=lambda d: x.stride(d), reverse=True), 3]


def _setup_context(ctx, inputs, output) -> None:
    q, k, cos, sin, ctx.interleaved, ctx.sections, _ = inputs
    ctx.orders = _order(q), _order(k)
    ctx.save_for_backward(cos, sin)
    needed = ctx.needs_input_grad[:2]
    ctx.mark_non_differentiable(*(y for y, wanted in zip(output, needed, strict=True) if not wanted))
    ctx.set_materialize_grads(False)


def _backward(ctx, dq, dk):
    if dq is None and dk is None:
        return (None,) * 7
    arguments = (*ctx.saved_tensors, ctx.interleaved, ctx.sections, *ctx.orders)
    grad_q, grad_k = _backward_op(dq, dk, *arguments)
    return None if dq is None else grad_q, None if dk is None else grad_k, *(None,) * 5


def rotary_embedding(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    sections: list[int] | None = None,
    memory_format: torch.memory_format | None = None,
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return _differentiable(q, k, cos, sin, interleaved, sections, memory_format)
    return _forward_op(q, k, cos, sin, interleaved, sections, memory_format)


def _differentiable(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    sections: list[int] | None,
    memory_format: torch.memory_format | None,
) -> tuple[Tensor, Tensor]:
    """The same by plain operators, for tables that are trained: their gradients sum over heads, which no kernel does."""
    _check_forward(q, k, cos, sin, interleaved, sections, memory_format)
    outputs = forward_fake(q, k, cos, sin, interleaved, sections, memory_format)
    cos, sin = select(cos, sections), select(sin, sections)
    return (
        outputs[0].copy_(rotated(q, cos, sin, interleaved)),
        outputs[1] if k is None else outputs[1].copy_(rotated(k, cos, sin, interleaved)),
    )


_forward_op = primitive(
    "rotary_embedding_forward(Tensor q, Tensor? k, Tensor cos, Tensor sin, bool interleaved, int[]? sections,"
    " MemoryFormat? memory_format) -> (Tensor, Tensor)",
    check=_check_forward,
    fake=forward_fake,
    reference=forward_ref,
    flops=no_flops,
    setup_context=_setup_context,
    backward=_backward,
)
_backward_op = primitive(
    "rotary_embedding_backward(Tensor? dq, Tensor? dk, Tensor cos, Tensor sin, bool interleaved, int[]? sections,"
    " int[] q_order, int[] k_order) -> (Tensor, Tensor)",
    check=_check_backward,
    fake=backward_fake,
    reference=backward_ref,
    flops=no_flops,
)
operator = composite(
    "rotary_embedding(Tensor q, Tensor? k, Tensor cos, Tensor sin, *, bool interleaved=False, int[]? sections=None,"
    " MemoryFormat? memory_format=None) -> (Tensor, Tensor)",
    rotary_embedding,
)


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def tables(*shape: int) -> tuple[Tensor, Tensor]:
        # Every column has an angle of its own: in real tables both columns of a pair have the same.
        angles = torch.rand(shape, device=device, dtype=torch.float64) * 6.3
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def sample(label: str, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **kwargs) -> Sample:
        leaves = tuple(t.detach().requires_grad_() if t is not None else None for t in (q, k))
        return Sample(label, (*leaves, cos, sin), kwargs)

    def transposed(batch: int, heads: int, tokens: int, columns: int) -> Tensor:
        return tensor(batch, tokens, heads, columns).transpose(1, 2)

    packed = tensor(2, 5, 6, 16).transpose(1, 2)
    yield sample("half split", transposed(2, 4, 5, 16), transposed(2, 2, 5, 16), *tables(1, 5, 16))
    yield sample("interleaved", tensor(2, 4, 5, 16), tensor(2, 2, 5, 16), *tables(1, 5, 16), interleaved=True)
    yield sample("sections", tensor(2, 4, 5, 16), tensor(2, 2, 5, 16), *tables(3, 2, 5, 16), sections=[2, 3, 3])
    yield sample("partial", transposed(2, 3, 5, 20), transposed(2, 1, 5, 20), *tables(2, 5, 12))
    yield sample("partial interleaved", tensor(2, 3, 5, 20), tensor(2, 1, 5, 20), *tables(2, 5, 12), interleaved=True)
    yield sample("partial sections", tensor(2, 1, 5, 20), None, *tables(2, 1, 5, 12), sections=[4, 2])
    yield sample("one tensor", transposed(2, 3, 5, 16), None, *tables(2, 5, 16))
    yield sample("odd columns", tensor(1, 3, 5, 17), tensor(1, 3, 5, 17), *tables(1, 5, 6))
    yield sample("one pair", tensor(1, 3, 5, 2), tensor(1, 1, 5, 2), *tables(1, 5, 2))
    yield sample("one token", tensor(2, 9, 1, 16), tensor(2, 1, 1, 16), *tables(2, 1, 16))
    yield sample("no rows", tensor(2, 4, 0, 16), tensor(2, 2, 0, 16), *tables(1, 0, 16))
    yield sample("slices", packed[:, :4], packed[:, 4:], *tables(2, 5, 16))
    yield sample("column stride", tensor(2, 4, 16, 5).mT, tensor(2, 2, 16, 5).mT, *tables(1, 5, 16))
    yield sample("table strides", tensor(2, 4, 5, 8), None, *(t.mT[:, :, ::2] for t in tables(1, 16, 5)))
    yield sample(
        "expanded", tensor(2, 1, 5, 16).expand(2, 4, 5, 16), None, *(t.expand(2, 5, 16) for t in tables(1, 5, 16))
    )
    yield sample("misaligned", tensor(2 * 4 * 5 * 16 + 1)[1:].view(2, 4, 5, 16), tensor(2, 2, 5, 16), *tables(1, 5, 16))
    if dtype in (torch.bfloat16, torch.float16):
        wide = [t.float() for t in tables(1, 5, 16)]
        yield sample("float32 tables", transposed(2, 4, 5, 16), transposed(2, 2, 5, 16), *wide)


def _rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _eager(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    memory_format: torch.memory_format | None = None,
) -> tuple[Tensor, Tensor]:
    if sections is not None:
        cos, sin = (
            torch.cat([m[i % len(sections)] for i, m in enumerate(t.split([*sections] * 2, dim=-1))], dim=-1)
            for t in (cos, sin)
        )
    cos, sin = (t.to(compute_dtype(q, t)).unsqueeze(1) for t in (cos, sin))
    turn = _rotate_every_two if interleaved else _rotate_half

    def apply(x: Tensor) -> Tensor:
        head, tail = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat(((head * cos + turn(head) * sin).to(x.dtype), tail), dim=-1)

    return apply(q), q.new_empty((0,)) if k is None else apply(k)


def _bytes_moved(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **kwargs) -> int:
    """Forward and backward read and write q and k, and read the columns of the tables that belong to a section."""
    rotated_bytes = sum(t.numel() * t.element_size() for t in (q, k) if t is not None)
    tables = cos.shape[-3:].numel() * cos.element_size()
    return 4 * rotated_bytes + 4 * tables


SPEC = Spec(
    name="rotary_embedding",
    samples=_samples,
    eager=_eager,
    bytes_moved=_bytes_moved,
    flops=lambda q, k, cos, sin, **kwargs: (
        2 * 3 * cos.shape[-1] * sum(t.shape[:-1].numel() for t in (q, k) if t is not None)
    ),
    source="RoFormer (arXiv 2104.09864), equation 34; transformers LlamaAttention, CohereAttention, Qwen2VLRotaryEmbedding",
)
