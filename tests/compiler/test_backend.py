"""The backend: found by name, its options, what it keeps of training, and what happens when something of ours fails."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import fusedops
from fusedops.compiler import backend
from tests.conftest import DEVICE
from tests.rewriting import compiled, distance, sites, step, tiny, tokens

# Under autocast a residual of float32 is added to a bfloat16 result, and float32 tables rotate bfloat16 queries to float32
# ones: eager's promotions, which these operators don't make.
AUTOCAST = {"add_rms_norm": 0, "rms_norm": 5, "rotary_embedding": 0}
FP32 = 1e-5  # relative distance of gradients that differ in the order of float32 sums


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def trained_alike(
    model: nn.Module, *, tolerance: float = FP32, compile_kwargs=None, call=None, **kwargs
) -> fusedops.Report:
    """One step eager and one rewritten give the same loss, logits and gradients; the report of the latter."""
    report = fusedops.Report()
    ids = tokens()
    rewritten = compiled(call or model, report, **(compile_kwargs or {}))
    expected, expected_gradients = step(model, call or model, ids, **kwargs)
    out, gradients = step(model, rewritten, ids, **kwargs)
    torch.testing.assert_close(out.loss, expected.loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.logits, expected.logits, rtol=tolerance, atol=tolerance)
    assert distance(expected_gradients, gradients) < tolerance
    assert not report.failures
    return report


@pytest.mark.parametrize("count", [20, torch.tensor(20)], ids=["int", "tensor"])
def test_num_items_in_batch(count) -> None:
    assert trained_alike(tiny(), num_items_in_batch=count).counts() == sites()


def test_constants_made_on_the_device() -> None:
    """As a cache makes them, which models fill unless they are told not to."""
    model, report = tiny(use_cache=True), fusedops.Report()
    assert trained_alike(model).counts() == sites()

    def function(x, weight):
        none, some = torch.tensor([], device=x.device), torch.tensor([1.0, 2.0], device=x.device)
        flat = torch.cat([torch.tensor([[], []], device=x.device).sum(1), none, x.flatten(), some])
        return torch.nn.functional.layer_norm(flat, weight.shape, weight)

    args = torch.randn(3, 8, device=DEVICE), torch.randn(28, device=DEVICE)
    torch.testing.assert_close(compiled(function, report)(*args), function(*args))
    assert report.counts()["layer_norm"] == 1 and not report.failures


def test_data_of_a_parameter_is_written_to() -> None:
    """As Gemma 3n clamps coefficients in training: autograd doesn't see it, and what reads the weight after it does."""

    def function(x, weight):
        weight.data.clamp_(-0.5, 0.5)
        return torch.nn.functional.layer_norm(x, weight.shape, weight).square().sum()

    initial, x, results = torch.randn(8, device=DEVICE), torch.randn(3, 8, device=DEVICE), []
    assert initial.abs().max() > 0.5
    report = fusedops.Report()
    for call in (function, compiled(function, report)):
        weight = initial.clone().requires_grad_()
        loss = call(x, weight)
        loss.backward()
        results.append((loss.detach(), weight.detach(), weight.grad))
    torch.testing.assert_close(results[1], results[0])
    assert report.counts() == {"layer_norm": 1} and not report.failures


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(name, reentrant) -> None:
    model = tiny(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    report = trained_alike(model)
    # The sum at the end of a layer and the norm at the beginning of the next are in two bodies.
    assert report.counts() == sites(name, add_rms_norm=2, rms_norm=3)
    kept = [str(n.target) for gm in report.graph_modules for n in gm.graph.nodes if "checkpoint" in str(n.target)]
    assert reentrant or len(kept) == 2  # one call for each layer is still a checkpoint


def test_autocast_around_the_call() -> None:
    bf16 = 0.02
    report = trained_alike(tiny(), tolerance=bf16, around=lambda: torch.autocast(DEVICE.type, torch.bfloat16))
    assert report.counts() == sites(**AUTOCAST)


def test_autocast_inside_the_graph() -> None:
    model = tiny()

    def call(**kwargs):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return model(**kwargs)

    report = trained_alike(model, tolerance=0.02, call=call)
    assert report.counts() == sites(**AUTOCAST)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_autocast_inside_the_graph_around_checkpointed_layers(name) -> None:
    """The bodies of checkpoints are traced apart: in the regions that they are called in."""
    model = tiny(name).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def call(**kwargs):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return model(**kwargs)

    report = trained_alike(model, tolerance=0.02, call=call)
    assert report.counts() == sites(name, **AUTOCAST)
    linears = [
        n.meta["val"].dtype
        for gm in report.graph_modules
        for body in gm.modules()
        for n in getattr(body, "graph", torch.fx.Graph()).nodes
        if "linear.default" in str(n.target)
    ]
    assert len(linears) == 14 and set(linears) == {torch.bfloat16}


def test_patterns_know_nothing_of_the_first_compilation() -> None:
    """In a fresh process, where the first compilation is under autocast and inference mode, and a later one is not."""
    script = """
import torch, fusedops
from tests.rewriting import sites, rewritten, tiny, tokens
model, ids = tiny(), tokens()
with torch.autocast(ids.device.type, torch.bfloat16), torch.no_grad():
    assert rewritten(model, ids, labels=ids).counts()["swiglu"] == 2
assert rewritten(model, ids, labels=ids).counts() == sites()
assert rewritten(model.to(torch.bfloat16), ids, labels=ids).counts() == sites()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_dynamic_shapes_compile_once() -> None:
    model, report = tiny(), fusedops.Report()
    rewritten = compiled(model, report, dynamic=True)
    graphs = []
    for length in (16, 9, 23, 12):
        ids = tokens(2, length)
        expected, expected_gradients = step(model, model, ids)
        out, gradients = step(model, rewritten, ids)
        torch.testing.assert_close(out.loss, expected.loss)
        assert distance(expected_gradients, gradients) < FP32
        graphs.append(report.graphs)
    assert graphs == graphs[:1] * 4  # the later lengths found the first one's graph
    assert report.counts().keys() == sites().keys() and not report.declined


def test_no_grad_and_evaluation() -> None:
    model = tiny().eval()
    rewritten, ids = compiled(model), tokens()
    with torch.no_grad():
        expected, out = model(ids, labels=ids), rewritten(ids, labels=ids)
    torch.testing.assert_close(out.loss, expected.loss)
    assert not out.loss.requires_grad and not out.logits.requires_grad
    torch.testing.assert_close(out.logits, expected.logits)


def test_gradient_accumulation() -> None:
    model = tiny()
    rewritten, batches = compiled(model), [tokens(), tokens()]
    gradients = []
    for call in (model, rewritten):
        model.zero_grad()
        for ids in batches:
            (call(ids, labels=ids).loss / 2).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert distance(*gradients) < FP32


def test_tied_embeddings() -> None:
    model = tiny(tie_word_embeddings=True)
    assert trained_alike(model).counts() == sites()
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("frozen", ["lm_head", "model"])
def test_frozen_parts_get_no_gradients(frozen) -> None:
    model = tiny()
    getattr(model, frozen).requires_grad_(False)
    trained_alike(model)
    assert all(p.grad is None for p in getattr(model, frozen).parameters())


def test_hidden_states_and_no_labels() -> None:
    model = tiny()
    trained_alike(model, output_hidden_states=True)
    report, ids = fusedops.Report(), tokens()
    torch.testing.assert_close(compiled(model, report)(ids).logits, model(ids).logits)
    assert report.counts() == sites(linear_cross_entropy=0)


def test_disable() -> None:
    report = trained_alike(tiny(), compile_kwargs={"disable": ["rms_norm"]})
    assert report.counts() == sites(rms_norm=0)
    assert {d.reason for d in report.declined} == {"rms_norm is disabled by options"}
    report = trained_alike(tiny(), compile_kwargs={"disable": ["linear_cross_entropy", "add_rms_norm"]})
    assert report.counts() == sites(cross_entropy=1, linear_cross_entropy=0, rms_norm=5, add_rms_norm=0)


def test_grad_mode_left_switched_by_the_graph() -> None:
    def call(x):
        a = x * 2
        torch.set_grad_enabled(False)
        return a, a * 3

    report = fusedops.Report()
    try:
        a, b = compiled(call, report)(torch.ones(3, requires_grad=True))
        assert (a.requires_grad, b.requires_grad, torch.is_grad_enabled()) == (True, False, False)
    finally:
        torch.set_grad_enabled(True)
    assert not report.failures


def test_whole_training_step_with_its_optimizer() -> None:
    """After the graph break at backward the optimizer's step is a graph of its own, with parameters as attributes."""
    losses, reports = [], fusedops.Report()
    ids = tokens()
    for wrap in (lambda f: f, lambda f: compiled(f, reports)):
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(ids, model=model, optimizer=optimizer):
            out = model(input_ids=ids, labels=ids)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return out.loss.detach()

        step_once = wrap(train)
        losses.append([step_once(ids).item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert reports.counts() == sites() and not reports.failures


def test_int32_labels_are_refused_as_eager_refuses_them() -> None:
    def loss(x, y):
        return torch.nn.functional.cross_entropy(x, y)

    with pytest.raises(RuntimeError):
        compiled(loss)(torch.randn(3, 5), torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("options", [{"disable": ["rms_nrom"]}, {"disable": "rms_norm"}, {"report": []}])
def test_rejects_options(options) -> None:
    with pytest.raises(fusedops.OptionError, match="wants"):
        backend.fusedops(torch.fx.symbolic_trace(nn.Identity()), [torch.ones(1)], options=options)


def test_rejects_option_that_nobody_reads() -> None:
    with pytest.raises(RuntimeError, match="no_such_option"):
        backend.fusedops(torch.fx.symbolic_trace(nn.Identity()), [torch.ones(1)], options={"no_such_option": 1})


@pytest.mark.parametrize("broken", ["normalise", "rewrite", "defer_logits"])
def test_failure_of_ours_runs_the_graph_as_captured(broken, monkeypatch) -> None:
    def fail(*args):
        raise AssertionError("a bug in fusedops")

    monkeypatch.setattr(backend, broken, fail)
    model, report, ids = tiny(), fusedops.Report(), tokens()
    rewritten = compiled(model, report)
    with pytest.warns(fusedops.FusedopsWarning, match="a bug in fusedops") as caught:
        out, gradients = step(model, rewritten, ids)
    assert sum(w.category is fusedops.FusedopsWarning for w in caught) == 1
    expected, expected_gradients = step(model, model, ids)
    torch.testing.assert_close(out.loss, expected.loss)
    assert distance(expected_gradients, gradients) < FP32
    assert report.failures == ["AssertionError: a bug in fusedops"] and not report.sites


def test_failure_of_the_rewritten_graph_compiles_the_captured_one() -> None:
    seen, report = [], fusedops.Report()

    def compiler(gm, inputs):
        seen.append(gm)
        if any("fusedops" in str(n.target) for n in gm.graph.nodes):
            raise RuntimeError("Inductor cannot")
        return gm.forward

    model, ids = tiny(), tokens()
    call = torch.compile(
        model, backend=lambda g, x: backend.compile_graph(g, x, backend.Settings(report=report), compiler)
    )
    with pytest.warns(fusedops.FusedopsWarning, match="Inductor cannot"):
        out = call(ids, labels=ids)
    torch.testing.assert_close(out.loss, model(ids, labels=ids).loss)
    assert len(seen) == 2 and report.failures == ["RuntimeError: Inductor cannot"]


def test_failure_of_the_users_is_not_ours() -> None:
    """A graph that nothing was replaced in goes to Inductor untouched, and so do its errors."""

    def compiler(gm, inputs):
        raise RuntimeError("not ours")

    call = torch.compile(torch.sin, backend=lambda g, x: backend.compile_graph(g, x, backend.Settings(), compiler))
    with warnings.catch_warnings(), pytest.raises(Exception, match="not ours"):
        warnings.simplefilter("error", fusedops.FusedopsWarning)
        call(torch.randn(3))


def test_found_by_name_without_import() -> None:
    """In a fresh process, through Inductor, with the entry point of the installed package and nothing imported."""
    script = """
import sys, torch
assert "fusedops" not in sys.modules
model = torch.nn.Linear(8, 8)
compiled = torch.compile(model, backend="fusedops", mode="max-autotune-no-cudagraphs")
x = torch.randn(4, 8)
torch.testing.assert_close(compiled(x), model(x))
assert "fusedops" in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
