"""What can only be seen on a GPU: real sizes, 64-bit offsets, no host synchronisation, assertions on the device."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from csrc_meta import SPECS, Sample
from fusedops import functional
from tests.ops.compare import EAGER_FACTOR, TOLERANCES, assert_close_to_eager, in_dtype, op, run, several, upstream_like

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    torch.cuda.empty_cache()


# How many tensors of rows each norm takes, and how many of columns.
NORMS = {"rms_norm": (1, 1), "add_rms_norm": (2, 1), "layer_norm": (1, 2)}


@DTYPES
@pytest.mark.parametrize("columns", [128, 4096, 8192, 16384, 65536])
@pytest.mark.parametrize("name", NORMS)
def test_norms_at_real_sizes(device, name, columns, dtype):
    rows, vectors = NORMS[name]
    shapes = [(4096, columns)] * rows + [(columns,)] * vectors
    tensors = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]
    assert_close_to_eager(getattr(functional, name), SPECS[name].eager, Sample("", (*tensors, 1e-6)))


@DTYPES
@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "logit_scale": 0.5, "z_loss": 1e-4}], ids=["plain", "all"])
def test_cross_entropy_real_size(device, dtype, options):
    logits = torch.randn(4096, 128256, device=device, dtype=dtype).mul_(4).requires_grad_()
    labels = torch.randint(0, 128256, (4096,), device=device)
    labels[::3] = -100
    weight = torch.rand(128256, device=device) + 0.5 if options else None
    case = Sample("", (logits, labels, weight), {"label_smoothing": 0.1, **options})
    assert_close_to_eager(functional.cross_entropy, SPECS["cross_entropy"].eager, case)


def largest_relative_error(a: torch.Tensor, truth: torch.Tensor) -> float:
    return float((a.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@DTYPES
def test_linear_cross_entropy_real_size(device, dtype, reduction):
    """Norms, since single elements of sums over 128256 products differ in eager itself, by GEMM tile."""
    hidden = torch.randn(4096, 2048, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(128256, 2048, device=device) / 45).to(dtype).requires_grad_()
    labels = torch.randint(0, 128256, (4096,), device=device)
    labels[::3] = -100
    case = Sample("", (hidden, weight, labels), {"reduction": reduction})
    function, eager = functional.linear_cross_entropy, SPECS["linear_cross_entropy"].eager
    upstream = upstream_like(function(*case.args, **case.kwargs))
    ours, theirs = run(function, case, upstream).tensors(), run(eager, case, upstream).tensors()
    truths = run(eager, in_dtype(case, torch.float64), upstream).tensors()
    for a, b, truth in zip(ours, theirs, truths, strict=True):
        bound = EAGER_FACTOR * largest_relative_error(b, truth) + TOLERANCES[dtype].rtol
        assert largest_relative_error(a, truth) < bound


@pytest.fixture
def _waits_for_labels(monkeypatch):
    from fusedops.kernels import linear_cross_entropy

    monkeypatch.setattr(linear_cross_entropy, "WORTH_WAITING", 0)


@pytest.mark.usefixtures("_waits_for_labels")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_linear_cross_entropy_leaves_ignored_rows_out_on_a_gpu(device, share, reduction):
    """Also of large products nothing changes but what is computed."""
    from fusedops.kernels.linear_cross_entropy import kept_rows

    labels = torch.randint(0, 999, (512,), device=device)
    labels[torch.rand(512, device=device) < share] = -100
    kept = (labels != -100).nonzero().squeeze(1)
    index = kept_rows(labels, -100, 1)
    assert torch.equal(torch.arange(512, device=device) if index is None else index, kept)
    hidden, weight = (torch.randn(n, 64, device=device).requires_grad_() for n in (512, 999))
    case = Sample("", (hidden, weight, labels), {"reduction": "sum" if share == 1.0 else reduction})
    assert_close_to_eager(functional.linear_cross_entropy, SPECS["linear_cross_entropy"].eager, case)


@pytest.mark.usefixtures("_waits_for_labels")
def test_linear_cross_entropy_waits_for_nothing_while_captured(device):
    """A captured graph serves labels that nobody knew, however many of them are ignored."""
    hidden, weight = (torch.randn(n, 64, device=device).requires_grad_() for n in (512, 999))
    labels = torch.full((512,), 7, device=device)

    def step() -> tuple[torch.Tensor, ...]:
        loss = functional.linear_cross_entropy(hidden, weight, labels)
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    labels[::2] = -100
    labels[1::2] = torch.randint(0, 999, (256,), device=device)
    graph.replay()
    for got, wanted in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "accum_dtype", "bytes_of_sum"),
    [(torch.bfloat16, None, 4), (torch.bfloat16, torch.bfloat16, 2), (torch.float16, None, 4)],
    ids=["float32 sum", "bfloat16 sum", "float16"],
)
def test_linear_cross_entropy_peak_memory(device, dtype, accum_dtype, bytes_of_sum):
    """The sum of the weight's gradient, a chunk no larger than the weight and hidden's gradient, and nothing beside."""
    rows, columns, vocabulary = 12288, 2048, 65536
    hidden = torch.randn(rows, columns, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, columns, device=device) / 45).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = functional.linear_cross_entropy(hidden, weight, labels, accum_dtype=accum_dtype)
    peak = torch.cuda.max_memory_allocated() - before
    assert loss.isfinite()
    wanted = weight.numel() * (bytes_of_sum + 2) + hidden.numel() * 2
    # Copies of the first elements that are rounded, labels and statistics.
    assert 0.9 * wanted < peak < wanted + 2**26 + 2**20


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("q_heads", "k_heads", "columns", "rotated"), [(32, 8, 128, 128), (28, 4, 80, 32), (128, 1, 64, 64)]
)
def test_rotary_embedding_real_sizes(device, q_heads, k_heads, columns, rotated, interleaved, dtype):
    q, k = (
        torch.randn(4, 2048, heads, columns, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (q_heads, k_heads)
    )
    angles = torch.rand(1, 2048, rotated, device=device) * 6.3
    case = Sample("", (q, k, angles.cos().to(dtype), angles.sin().to(dtype)), {"interleaved": interleaved})
    assert_close_to_eager(op(SPECS["rotary_embedding"]), SPECS["rotary_embedding"].eager, case)


@DTYPES
@pytest.mark.parametrize("shapes", [[(4096, 14336)] * 2, [(4096, 28672)]], ids=["separate", "packed"])
@pytest.mark.parametrize(
    ("name", "kwargs"), [("swiglu", {}), ("geglu", {}), ("geglu", {"approximate": "tanh"})], ids=str
)
def test_gated_real_sizes(device, name, kwargs, shapes, dtype):
    args = tuple(torch.randn(shape, device=device, dtype=dtype).mul_(3).requires_grad_() for shape in shapes)
    assert_close_to_eager(op(SPECS[name]), SPECS[name].eager, Sample("", args, kwargs))


@pytest.mark.parametrize("name", NORMS)
def test_norms_beyond_32_bit_offsets(device, name):
    """2^31 elements and some: the last rows are right, forward and backward."""
    rows, columns, last = 2**31 // 4096 + 64, 4096, slice(-64, None)
    taken, vectors = NORMS[name]
    x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).requires_grad_()
    rest = [torch.randn(columns, device=device, dtype=torch.bfloat16) for _ in range(vectors)]

    def run_on(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # The same rows twice, where a residual is taken too: its gradient is that of x.
        y = several(getattr(functional, name)(*[x, x.detach()][:taken], *rest))[0]
        return y, torch.autograd.grad(y, x, dy)[0]

    dy = torch.zeros_like(x)
    dy[last] = torch.randn(64, columns, device=device, dtype=torch.bfloat16)
    y, dx = run_on(x, dy)
    tail_y, tail_dx = run_on(x.detach()[last].clone().requires_grad_(), dy[last].clone())
    assert torch.equal(y[last], tail_y)
    assert torch.equal(dx[last], tail_dx)
    assert not dx[:-64].any()


def test_cross_entropy_beyond_32_bit_offsets(device):
    rows, columns = 2**31 // 65536 + 8, 65536
    logits = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, columns, (rows,), device=device)
    losses = functional.cross_entropy(logits, labels, reduction="none")
    (dlogits,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
    tail = logits.detach()[-8:].clone().requires_grad_()
    tail_losses = functional.cross_entropy(tail, labels[-8:], reduction="none")
    (tail_dlogits,) = torch.autograd.grad(tail_losses, tail, torch.ones_like(tail_losses))
    assert torch.equal(losses[-8:], tail_losses)
    assert torch.equal(dlogits[-8:], tail_dlogits)


@pytest.mark.parametrize("packed", [False, True])
def test_swiglu_beyond_32_bit_offsets(device, packed):
    """As one long row of more than 2^31 elements, and as rows."""
    rows, columns = 2**31 // 8192 + 64, 8192
    shapes = [(rows, 2 * columns)] if packed else [(rows, columns)] * 2
    args = tuple(torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for shape in shapes)
    y = functional.swiglu(*args)
    dy = torch.zeros_like(y)
    dy[-64:] = torch.randn(64, columns, device=device, dtype=torch.bfloat16)
    gradients = torch.autograd.grad(y, args, dy)
    tails = tuple(t.detach()[-64:].clone().requires_grad_() for t in args)
    tail_y = functional.swiglu(*tails)
    assert torch.equal(y[-64:], tail_y)
    for gradient, wanted in zip(gradients, torch.autograd.grad(tail_y, tails, dy[-64:]), strict=True):
        assert torch.equal(gradient[-64:], wanted)
        assert not gradient[:-64].any()


@pytest.mark.parametrize("transposed", [False, True])
def test_rotary_embedding_beyond_32_bit_offsets(device, transposed):
    heads, tokens, columns = 32, 2**31 // 4096 + 64, 128
    shape = (1, tokens, heads, columns) if transposed else (1, heads, tokens, columns)
    q = torch.randn(shape, device=device, dtype=torch.bfloat16)
    q = (q.transpose(1, 2) if transposed else q).requires_grad_()
    angles = torch.rand(1, tokens, columns, device=device)
    cos, sin = angles.cos(), angles.sin()
    y, _ = functional.rotary_embedding(q, None, cos, sin)
    dy = torch.zeros_like(y)
    dy[:, :, -64:] = torch.randn(1, heads, 64, columns, device=device, dtype=torch.bfloat16)
    (dq,) = torch.autograd.grad(y, q, dy)
    tail = q.detach()[:, :, -64:].clone().requires_grad_()
    tail_y, _ = functional.rotary_embedding(tail, None, cos[:, -64:], sin[:, -64:])
    (tail_dq,) = torch.autograd.grad(tail_y, tail, dy[:, :, -64:])
    assert torch.equal(y[:, :, -64:], tail_y)
    assert torch.equal(dq[:, :, -64:], tail_dq)
    assert not dq[:, :, :-64].any()


@pytest.mark.parametrize("name", SPECS)
def test_no_host_synchronisation(device, name):
    for sample in SPECS[name].samples(device, torch.bfloat16):
        upstream = upstream_like(op(SPECS[name])(*sample.args, **sample.kwargs))
        run(op(SPECS[name]), sample, upstream)  # compiles, which may synchronise
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(op(SPECS[name]), sample, upstream)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", SPECS)
def test_cuda_graph(device, name):
    """Capture and replay: new inputs in the same buffers give their own result."""
    sample = next(iter(SPECS[name].samples(device, torch.float32)))
    upstream = upstream_like(op(SPECS[name])(*sample.args, **sample.kwargs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(op(SPECS[name]), sample, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(op(SPECS[name]), sample, upstream)
    sample.args[0].data.mul_(2.0)
    graph.replay()
    for a, b in zip(captured.tensors(), run(op(SPECS[name]), sample, upstream).tensors(), strict=True):
        assert torch.equal(a, b)


def test_number_of_rows_compiles_nothing_new(device):
    from fusedops.kernels import cross_entropy, norm

    kernels = (
        *(norm.norm_fwd_kernel, norm.norm_bwd_kernel, norm.norm_parts_kernel),
        *(cross_entropy.cross_entropy_fwd_kernel, cross_entropy.cross_entropy_bwd_kernel),
        cross_entropy.cross_entropy_reduce_kernel,
    )

    def step(rows: int) -> int:
        x = torch.randn(rows, 256, device=device).requires_grad_()
        weight = torch.randn(256, device=device).requires_grad_()
        labels = torch.randint(0, 256, (rows,), device=device)
        functional.cross_entropy(functional.rms_norm(x, weight), labels).backward()
        return sum(len(k.device_caches[torch.cuda.current_device()][0]) for k in kernels)

    compiled = step(48)
    assert [step(rows) for rows in (1, 2, 7, 16, 4096)] == [compiled] * 5


def test_number_of_tokens_compiles_nothing_new(device):
    from fusedops.kernels import gated, rotary_embedding

    kernels = gated.gated_fwd_kernel, gated.gated_bwd_kernel, rotary_embedding.rotary_embedding_kernel
    qkv = torch.randn(2, 4096, 8, 64, device=device)
    angles = torch.rand(1, 4096, 64, device=device)

    def step(tokens: int) -> int:
        packed = qkv[:, :tokens].clone().requires_grad_()
        q, k, _ = packed.transpose(1, 2).split([4, 2, 2], 1)
        q, k = functional.rotary_embedding(q, k, angles[:, :tokens].cos(), angles[:, :tokens].sin())
        h = q.transpose(1, 2).reshape(2, tokens, 256)
        (functional.swiglu(h, h + 1.0).sum() + functional.swiglu(h).sum() + k.sum()).backward()
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    compiled = step(48)
    assert [step(tokens) for tokens in (1, 2, 7, 16, 4096)] == [compiled] * 5


@pytest.mark.parametrize("call", ["cross_entropy(logits, labels)", "linear_cross_entropy(logits, weight, labels)"])
@pytest.mark.parametrize("label", [-1, 64])
def test_label_out_of_range_stops_the_device(call, label):
    """In a process of its own: after the assertion, its device is gone."""
    done = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import torch, fusedops\n"
            "logits, weight = torch.randn(8, 64, device='cuda'), torch.randn(64, 64, device='cuda')\n"
            f"labels = torch.full((8,), {label}, device='cuda')\n"
            f"loss = fusedops.functional.{call}\n"
            "print('value', loss.item())\n",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    assert "value" not in done.stdout
    assert "device-side assert" in done.stderr
    assert "fusedops: labels" in done.stderr


def test_runs_on_the_device_of_its_inputs():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    x = torch.randn(16, 256, device=other).requires_grad_()
    labels = torch.randint(0, 256, (16,), device=other)
    loss = functional.cross_entropy(functional.rms_norm(x), labels)
    loss.backward()
    wanted = F.cross_entropy(F.rms_norm(x, (256,), eps=1e-6), labels)
    torch.testing.assert_close(loss, wanted)
    assert torch.cuda.current_device() == 0
