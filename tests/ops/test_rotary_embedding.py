"""rotary_embedding: tiles of tokens and heads, layouts in memory, sections, trained tables, rejected inputs."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from csrc_meta import SPECS, Sample
from csrc_meta.errors import UnsupportedDtypeError, UnsupportedInputError
from fusedops import functional
from tests.conftest import INTERPRETED
from tests.ops.compare import Recorder, assert_close_to_eager, op, rejection, run, snapshot, upstream_like

SPEC = SPECS["rotary_embedding"]
EAGER = SPEC.eager


def tables(device, *shape: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """An angle of its own for every column: in real tables both columns of a pair have the same."""
    angles = torch.rand(shape, device=device) * 6.3
    return angles.cos().to(dtype), angles.sin().to(dtype)


def heads(device, batch: int, count: int, tokens: int, columns: int, dtype=torch.float32) -> Tensor:
    """As attention has them: a transposed view."""
    return torch.randn(batch, tokens, count, columns, device=device).to(dtype).transpose(1, 2).requires_grad_()


def sample(device, q_heads: int, k_heads: int, tokens: int, columns: int, rotated: int, dtype=torch.float32, **kwargs):
    q = heads(device, 2, q_heads, tokens, columns, dtype)
    k = heads(device, 2, k_heads, tokens, columns, dtype) if k_heads else None
    return Sample("", (q, k, *tables(device, 1, tokens, rotated, dtype=dtype)), kwargs)


# Heads of q and k, tokens, columns, rotated columns: tiles with several tokens, of two sequences too; heads in several
# blocks, the last one short (28, 20) or full (24); columns that are no power of two; a tail; one head.
SHAPES = (
    (32, 8, 3, 128, 128),
    (28, 4, 5, 16, 16),
    (20, 1, 37, 8, 6),
    (24, 2, 2, 96, 96),
    (3, 0, 21, 80, 32),
    (1, 1, 9, 256, 64),
)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_embedding_shapes(device, shape, dtype, interleaved):
    assert_close_to_eager(op(SPEC), EAGER, sample(device, *shape, dtype=dtype, interleaved=interleaved))


@pytest.mark.parametrize("sections", [[4], [2, 2], [1, 0, 3], [0, 4], [1, 1, 1, 1]], ids=str)
def test_rotary_embedding_sections(device, sections):
    q, k = heads(device, 2, 4, 5, 10), heads(device, 2, 2, 5, 10)
    for batch in (1, 2):
        args = (q, k, *tables(device, len(sections), batch, 5, 8))
        assert_close_to_eager(op(SPEC), EAGER, Sample("", args, {"sections": sections}))


def test_rotary_embedding_sections_are_those_of_qwen2_vl(device):
    modeling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    sections = [4, 6, 6]
    choose = functools.partial(
        modeling.Qwen2VLRotaryEmbedding.recomposition_frequencies, SimpleNamespace(mrope_section=sections)
    )
    q, k = heads(device, 2, 4, 5, 32), heads(device, 2, 2, 5, 32)
    cos, sin = tables(device, 3, 2, 5, 16)
    got = functional.rotary_embedding(q, k, *(torch.cat((t, t), -1) for t in (cos, sin)), sections=sections)
    wanted = modeling.apply_rotary_pos_emb(q, k, choose(cos), choose(sin))
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("model", ["llama", "cohere"])
def test_rotary_embedding_is_that_of(device, model):
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    q, k = heads(device, 2, 4, 5, 32), heads(device, 2, 2, 5, 32)
    cos, sin = tables(device, 2, 5, 32)
    got = functional.rotary_embedding(q, k, cos, sin, interleaved=model == "cohere")
    torch.testing.assert_close(got, modeling.apply_rotary_pos_emb(q, k, cos, sin), atol=1e-6, rtol=1e-5)


def test_rotary_embedding_wide_tables_are_not_rounded(device):
    """float32 tables under float16: the product is rounded once, to q's dtype."""
    q, _, cos, sin = sample(device, 4, 0, 8, 64, 64).args
    q = q.detach().half()
    got, none = functional.rotary_embedding(q, None, cos, sin)
    assert none is None
    assert got.dtype == torch.float16
    wanted = EAGER(q.float(), None, cos, sin)[0].half()
    assert (got != wanted).float().mean() < 0.01
    rounded = EAGER(q, None, cos.half(), sin.half())[0]
    assert (rounded != wanted).float().mean() > 0.1


@pytest.mark.parametrize(("needs_q", "needs_k"), [(True, False), (False, True), (False, False)])
def test_rotary_embedding_one_gradient(device, needs_q, needs_k):
    q, k, cos, sin = sample(device, 4, 2, 5, 16, 16).args
    case = Sample("", (q.detach().requires_grad_(needs_q), k.detach().requires_grad_(needs_k), cos, sin))
    outputs = functional.rotary_embedding(*case.args)
    assert [y.requires_grad for y in outputs] == [needs_q, needs_k]
    assert_close_to_eager(op(SPEC), EAGER, case)


@pytest.mark.parametrize("used", [0, 1])
def test_rotary_embedding_one_result_used(device, used):
    """The other costs nothing in the backward pass, and its input has no gradient."""
    case = sample(device, 4, 2, 5, 16, 16)
    y = functional.rotary_embedding(*case.args)[used]
    upstream = upstream_like(y)
    with Recorder() as recorder:
        gradients = torch.autograd.grad(y, case.args[:2], upstream, allow_unused=True)
    ((*given, _, _, _, _, _, _),) = recorder.arguments("rotary_embedding_backward")
    assert [g is not None for g in given] == [g is not None for g in gradients] == [used == 0, used == 1]
    wanted = torch.autograd.grad(EAGER(*case.args)[used], case.args[used], upstream)[0]
    torch.testing.assert_close(gradients[used], wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_strided_gradient(device, interleaved):
    """Gradients arrive as attention leaves them: contiguous, transposed, expanded, or a slice of a packed tensor."""
    case = sample(device, 4, 2, 6, 16, 12, interleaved=interleaved)
    upstreams = (
        (torch.randn(2, 4, 6, 16, device=device), torch.randn(2, 6, 2, 16, device=device).transpose(1, 2)),
        (
            torch.randn((), device=device).expand(2, 4, 6, 16),
            torch.randn(16, 6, 2, 2, device=device).permute(3, 2, 1, 0),
        ),
        torch.randn(2, 6, 6, 16, device=device).transpose(1, 2).split([4, 2], 1),
    )
    for upstream in upstreams:
        got = run(op(SPEC), case, upstream)
        wanted = run(op(SPEC), case, tuple(u.contiguous() for u in upstream))
        torch.testing.assert_close(got.tensors(), wanted.tensors(), atol=1e-6, rtol=1e-5)


# q in memory, and the dimensions of its gradient from the outermost to the innermost.
LAYOUTS = {
    "contiguous": (lambda: torch.randn(2, 4, 5, 16), (0, 1, 2, 3)),
    "transposed": (lambda: torch.randn(2, 5, 4, 16).transpose(1, 2), (0, 2, 1, 3)),
    "packed": (lambda: torch.randn(2, 5, 3, 4, 16)[:, :, 1].transpose(1, 2), (0, 2, 1, 3)),
    "tokens outermost": (lambda: torch.randn(5, 2, 4, 16).permute(1, 2, 0, 3), (2, 0, 1, 3)),
    "columns outside": (lambda: torch.randn(2, 4, 16, 5).mT, (0, 1, 2, 3)),
    "expanded": (lambda: torch.randn(2, 1, 5, 16).expand(2, 4, 5, 16), (0, 2, 1, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_embedding_layouts(device, layout):
    """Results have the strides of empty_like; gradients are laid out as q is, with contiguous columns."""
    make, order = LAYOUTS[layout]
    with device:  # a copy to the device would not keep every layout
        q = make().requires_grad_()
    k = torch.randn(2, 2, 5, 16, device=device)
    cos, sin = tables(device, 1, 5, 16)
    y, k_out = functional.rotary_embedding(q, k, cos, sin)
    assert y.stride() == torch.empty_like(q).stride()
    assert k_out.is_contiguous()
    (dq,) = torch.autograd.grad(y, q, torch.randn(2, 4, 5, 16, device=device))
    assert dq.permute(order).is_contiguous()
    y, k_out = functional.rotary_embedding(q, k, cos, sin, memory_format=torch.contiguous_format)
    assert y.is_contiguous()
    torch.testing.assert_close(y, EAGER(q, None, cos, sin)[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("trained", ["cos", "sin"])
@pytest.mark.parametrize("kwargs", [{}, {"interleaved": True}, {"sections": [3, 5]}], ids=str)
def test_rotary_embedding_trained_tables(device, trained, kwargs):
    """Tables that require grad get theirs, from plain operators; so do q and k, and second derivatives exist."""
    q, k = heads(device, 2, 4, 5, 20).double(), heads(device, 2, 2, 5, 20).double()
    cos, sin = tables(device, *((2, 1, 5, 16) if "sections" in kwargs else (1, 5, 16)), dtype=torch.float64)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    cos.requires_grad_(trained == "cos"), sin.requires_grad_(trained == "sin")
    assert_close_to_eager(op(SPEC), EAGER, Sample("", (q, k, cos, sin), kwargs))
    with Recorder() as recorder:
        y, _ = functional.rotary_embedding(q, k, cos, sin, **kwargs)
    assert not recorder.calls
    assert y.stride() == q.stride()
    torch.autograd.gradgradcheck(lambda *t: functional.rotary_embedding(*t, **kwargs), (q, k, cos, sin), fast_mode=True)
    with torch.no_grad(), Recorder() as recorder:
        functional.rotary_embedding(q, k, cos, sin, **kwargs)
    assert recorder.calls


def test_rotary_embedding_extreme(device):
    """Infinities and NaN reach what eager lets them reach, and columns that pass are copied bit by bit."""
    q = torch.randn(1, 2, 6, 20, device=device)
    q[0, 0, :4, 3] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38], device=device)
    q[0, 1, :, 17] = torch.nan
    cos, sin = tables(device, 1, 6, 12)
    sin[0, 4] = 0.0
    q.requires_grad_()
    case = Sample("", (q, None, cos, sin))
    upstream = upstream_like(EAGER(*case.args))
    ours, theirs = run(op(SPEC), case, upstream), run(EAGER, case, upstream)
    for got, wanted in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True, atol=1e-6, rtol=1e-5)
    assert torch.equal(ours.output[..., 12:].view(torch.int32), q.detach()[..., 12:].contiguous().view(torch.int32))


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 4, 0), (2, 0, 5)], ids=str)
def test_rotary_embedding_empty(device, shape):
    batch, count, tokens = shape
    q, k = (torch.randn(batch, h, tokens, 16, device=device).requires_grad_() for h in (count, 2))
    cos, sin = tables(device, 1, tokens, 16)
    outputs = functional.rotary_embedding(q, k, cos, sin)
    gradients = torch.autograd.grad(outputs, (q, k), [torch.ones_like(y) for y in outputs])
    assert [t.shape for t in (*outputs, *gradients)] == [q.shape, k.shape] * 2
    torch.testing.assert_close(outputs[1], EAGER(q, k, cos, sin)[1], atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(INTERPRETED, reason="traces, which no kernel takes part in")
def test_rotary_embedding_one_graph_for_all_lengths(device):
    """Strides of what is traced with symbolic sizes are those that come out, and no length is compiled anew."""
    counter = CompileCounterWithBackend("aot_eager")

    def attention_inputs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k = x.view(batch, tokens, 6, 16).transpose(1, 2).split([4, 2], 1)
        q, k = functional.rotary_embedding(q, k, cos, sin)
        return q.transpose(1, 2).reshape(batch, tokens, 64).square().sum() + k.sum()

    compiled = torch.compile(attention_inputs, backend=counter, dynamic=True)
    for tokens in (5, 7, 33, 2):
        x = torch.randn(2, tokens, 96, device=device).requires_grad_()
        cos, sin = tables(device, 1, tokens, 16)
        (got,), (wanted,) = (torch.autograd.grad(f(x, cos, sin), x) for f in (compiled, attention_inputs))
        assert torch.equal(got, wanted)
    assert counter.frame_count == 1


def test_rotary_embedding_autocast(device):
    """Under autocast it computes what it is given, as products and sums do."""
    for dtype in (torch.float32, torch.bfloat16):
        case = sample(device, 4, 2, 5, 16, 16, dtype=dtype)
        with torch.autocast(device.type, torch.bfloat16):
            assert_close_to_eager(op(SPEC), EAGER, case)


def rejects(error: type[Exception], q=(2, 4, 5, 16), k=(2, 2, 5, 16), cos=(1, 5, 16), sin=(1, 5, 16), **kwargs) -> str:
    """Shapes stand for tensors of ones."""
    args = (torch.ones(t) if isinstance(t, tuple) else t for t in (q, k, cos, sin))
    return rejection(error, lambda: functional.rotary_embedding(*args, **kwargs))


def test_rotary_embedding_rejects_dtypes():
    snapshot(
        rejects(UnsupportedDtypeError, q=torch.ones(2, 4, 5, 16).int()),
        """fusedops.rotary_embedding: q: got (2, 4, 5, 16) int32 on cpu, wants one of bfloat16, float16, float32, float64. Cast it to a floating-point dtype.""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, k=torch.ones(2, 2, 5, 16).half()),
        """fusedops.rotary_embedding: k: got (2, 2, 5, 16) float16 on cpu, wants the dtype of q, torch.float32. Cast one of them: k.to(q.dtype).""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, cos=torch.ones(1, 5, 16, dtype=torch.complex64)),
        """fusedops.rotary_embedding: cos: got (1, 5, 16) complex64 on cpu, wants one of bfloat16, float16, float32, float64. Cast it to a floating-point dtype.""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, sin=torch.ones(1, 5, 16).half()),
        """fusedops.rotary_embedding: sin: got (1, 5, 16) float16 on cpu, wants the dtype of cos, torch.float32. Cast one of them: sin.to(cos.dtype).""",
    )


def test_rotary_embedding_rejects_shapes():
    snapshot(
        rejects(UnsupportedInputError, q=(4, 5, 16)),
        """fusedops.rotary_embedding: q: got (4, 5, 16) float32 on cpu, wants shape (B, H, T, D). Add a dimension: q[None].""",
    )
    snapshot(
        rejects(UnsupportedInputError, k=(2, 2, 6, 16)),
        """fusedops.rotary_embedding: k: got (2, 2, 6, 16) float32 on cpu, wants shape (2, 2, 5, 16). It differs from q in the number of heads alone.""",
    )
    snapshot(
        rejects(UnsupportedInputError, sin=(1, 5, 14)),
        """fusedops.rotary_embedding: sin: got (1, 5, 14) float32 on cpu, wants shape (1, 5, 16). cos and sin have one shape.""",
    )


@pytest.mark.parametrize("cos", [(5, 16), (3, 5, 16), (1, 1, 5, 16), (1, 6, 16)], ids=str)
def test_rotary_embedding_rejects_tables_of_other_shapes(cos):
    message = rejects(UnsupportedInputError, cos=cos, sin=cos)
    assert message == (
        f"fusedops.rotary_embedding: cos: got {cos} float32 on cpu, wants shape (1 or 2, 5, R) with R even, at most 16. "
        "Tables have no head dimension: leave out unsqueeze(1)."
    )


@pytest.mark.parametrize("columns", [0, 7, 18])
def test_rotary_embedding_rejects_tables_of_other_widths(columns):
    assert "with R even, at most 16" in rejects(UnsupportedInputError, cos=(1, 5, columns), sin=(1, 5, columns))


def test_rotary_embedding_rejects_sections():
    snapshot(
        rejects(UnsupportedInputError, cos=(2, 1, 5, 16), sin=(2, 1, 5, 16), sections=[4, 5]),
        """fusedops.rotary_embedding: sections: got [4, 5], wants 2 sizes, as cos has tables, with a sum of R / 2 = 8. Pass the model's mrope_section.""",
    )
    snapshot(
        rejects(UnsupportedInputError, cos=(2, 1, 5, 16), sin=(2, 1, 5, 16), sections=[8]),
        """fusedops.rotary_embedding: sections: got [8], wants 2 sizes, as cos has tables, with a sum of R / 2 = 8. Pass the model's mrope_section.""",
    )
    snapshot(
        rejects(UnsupportedInputError, sections=[4, 4]),
        """fusedops.rotary_embedding: cos: got (1, 5, 16) float32 on cpu, wants shape (S, 1 or 2, 5, R) with R even, at most 16. Tables have no head dimension: leave out unsqueeze(1).""",
    )
    args = {"cos": (2, 1, 5, 16), "sin": (2, 1, 5, 16), "sections": [4, 4]}
    snapshot(
        rejects(UnsupportedInputError, **args, interleaved=True),
        """fusedops.rotary_embedding: sections: got [4, 4], wants None where interleaved. Sections are of the two halves.""",
    )


def test_rotary_embedding_rejects_other_devices():
    snapshot(
        rejects(UnsupportedInputError, k=torch.ones(2, 2, 5, 16, device="meta")),
        """fusedops.rotary_embedding: k: got (2, 2, 5, 16) float32 on meta, wants the device of q, cpu. Move it: k.to(q.device).""",
    )
    snapshot(
        rejects(UnsupportedInputError, cos=torch.ones(1, 5, 16, device="meta")),
        """fusedops.rotary_embedding: cos: got (1, 5, 16) float32 on meta, wants the device of q, cpu. Move it: cos.to(q.device).""",
    )


def test_rotary_embedding_rejects_memory_formats():
    snapshot(
        rejects(UnsupportedInputError, memory_format=torch.channels_last),
        """fusedops.rotary_embedding: memory_format: got torch.channels_last, wants one of None, torch.preserve_format, torch.contiguous_format. Pass one of these.""",
    )
