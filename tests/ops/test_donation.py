"""A gradient takes over a saved tensor's storage where nobody can read that tensor again, and nowhere else.

Seen through cross_entropy, whose logits are saved: each test says who else could read them, and compares the gradient
with that of a run that donates nothing.
"""

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from csrc_meta import donation
from fusedops import functional
from tests.conftest import INTERPRETED

ROWS, HIDDEN, VOCABULARY = 6, 8, 40


def collect_arguments() -> None:
    """A launch under the interpreter leaves cycles behind that hold its arguments."""
    if INTERPRETED:
        gc.collect()


class Step:
    """hidden @ weight -> logits -> loss, with a record of where the logits and their gradient were in memory."""

    def __init__(self, device: torch.device) -> None:
        self.hidden = torch.randn(ROWS, HIDDEN, device=device).requires_grad_()
        self.weight = torch.randn(HIDDEN, VOCABULARY, device=device)
        self.labels = torch.randint(0, VOCABULARY, (ROWS,), device=device)
        self.logits_at = self.gradient_at = 0
        self.held: Any = None

    def logits(self) -> Tensor:
        logits = self.hidden @ self.weight
        self.logits_at = logits.data_ptr()
        logits.register_hook(self._see)
        return logits

    def _see(self, gradient: Tensor) -> None:
        self.gradient_at = gradient.data_ptr()

    def loss(self, hold: Callable[[Tensor], Any] = lambda logits: None) -> Tensor:
        """``hold``'s result stays alive. Nothing else here refers to the logits when this returns."""
        logits = self.logits()
        loss = functional.cross_entropy(logits, self.labels)
        self.held = hold(logits)
        del logits
        collect_arguments()
        return loss

    def gradient(self, loss: Tensor, **kwargs) -> Tensor:
        (dhidden,) = torch.autograd.grad(loss, self.hidden, **kwargs)
        torch.testing.assert_close(dhidden, self.wanted())
        return dhidden

    def wanted(self) -> Tensor:
        return torch.autograd.grad(F.cross_entropy(self.hidden @ self.weight, self.labels), self.hidden)[0]

    @property
    def donated(self) -> bool:
        assert self.logits_at
        assert self.gradient_at, "no gradient of the logits was seen"
        return self.logits_at == self.gradient_at


@pytest.fixture
def step(device) -> Step:
    return Step(device)


def test_counts_tell_dead_from_live():
    """Without this, donation is off on this version of torch and every test below that wants none passes for nothing."""
    assert donation._references_of_dead() is not None


def test_dead_intermediate_is_donated(step):
    step.gradient(step.loss())
    assert step.donated


def test_dead_intermediate_is_donated_in_backward(step):
    step.loss().backward()
    assert step.donated
    torch.testing.assert_close(step.hidden.grad, step.wanted())


def test_donated_gradient_is_no_part_of_the_graph(step):
    """The gradient that a hook is given is a tensor of its own: without a grad_fn, and writable."""
    seen = []
    loss = step.loss(lambda logits: logits.register_hook(seen.append) and None)
    loss.backward()
    (dlogits,) = seen
    assert step.donated
    assert not dlogits.requires_grad
    dlogits.zero_()


def test_donation_frees_as_before(step):
    loss = step.loss(lambda logits: StorageWeakRef(logits.untyped_storage()))
    loss.backward()
    assert step.donated
    collect_arguments()
    assert step.held.expired()


@pytest.mark.gpu
def test_donation_takes_no_memory(device):
    rows, vocabulary = 1024, 32768
    leaf = torch.randn(rows, vocabulary, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    loss = functional.cross_entropy(leaf * 1.0, labels)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.backward()
    # One gradient: the logits' own storage became dlogits, and the multiplication made the leaf's.
    assert torch.cuda.max_memory_allocated() - before < 1.1 * leaf.nbytes


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, g):
        return g.expand_as(ctx.saved_tensors[0])


# Who else can read the logits after the loss was computed from them.
HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "reference": lambda logits: logits,
    "container": lambda logits: {"logits": [logits]},
    "closure": lambda logits: lambda: logits.sum(),
    "weak reference": weakref.ref,
    "detach": lambda logits: logits.detach(),
    "data": lambda logits: logits.data,
    "view": lambda logits: logits.view(-1),
    "one element": lambda logits: logits[0, 0],
    "alias of an alias": lambda logits: logits.detach().view(-1).detach()[1:],
    "storage": lambda logits: logits.untyped_storage(),
    "dlpack": lambda logits: torch.utils.dlpack.to_dlpack(logits.detach()),
    "imported dlpack": lambda logits: torch.from_dlpack(logits.detach()),
    "node that saved its input": lambda logits: logits * logits,
    "node that saved it beside another": lambda logits: logits * torch.ones_like(logits, requires_grad=True),
    "another loss": lambda logits: functional.cross_entropy(logits, torch.zeros(len(logits)).long().to(logits.device)),
    "custom function": Saves.apply,
    "hook on the logits": lambda logits: logits.register_hook(lambda gradient: gradient + 0 * logits.detach()),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_readable_logits_are_kept(step, holder):
    step.gradient(step.loss(HOLDERS[holder]))
    assert not step.donated


def test_dead_again_when_its_holder_is_gone(step):
    for holder in HOLDERS.values():
        loss = step.loss(holder)
        step.held = None
        hooked = holder is HOLDERS["hook on the logits"]
        collect_arguments()
        step.gradient(loss)
        assert step.donated is not hooked


def test_numpy_array_keeps_logits():
    step = Step(torch.device("cpu"))
    loss = step.loss(lambda logits: logits.detach().numpy())
    before = step.held.copy()
    step.gradient(loss)
    assert not step.donated
    assert (step.held == before).all()


def test_node_that_saved_its_output_keeps_logits(step):
    """exp's gradient is computed from its result, the logits, after ours was."""
    hidden = step.hidden

    def run(cross_entropy):
        logits = (hidden @ step.weight).exp()
        step.logits_at = logits.data_ptr()
        logits.register_hook(step._see)
        return cross_entropy(logits, step.labels)

    (got,) = torch.autograd.grad(run(functional.cross_entropy), hidden)
    assert not step.donated
    (wanted,) = torch.autograd.grad(run(F.cross_entropy), hidden)
    torch.testing.assert_close(got, wanted)


def test_second_loss_on_the_same_logits(step):
    """Both nodes saved them: the first to run may not write, the second may."""

    def both(cross_entropy):
        logits = step.logits()
        return cross_entropy(logits, step.labels) + 2 * cross_entropy(logits, step.labels.flip(0))

    (got,) = torch.autograd.grad(both(functional.cross_entropy), step.hidden)
    (wanted,) = torch.autograd.grad(both(F.cross_entropy), step.hidden)
    torch.testing.assert_close(got, wanted)


def test_view_of_something_is_kept(step):
    """Others may have views of the same base, and do here."""
    base = step.hidden @ step.weight
    part = base[:3]
    loss = functional.cross_entropy(part, step.labels[:3])
    before = base.detach().clone()
    del part
    torch.autograd.grad(loss, step.hidden)
    assert torch.equal(base, before)


def test_leaves_are_kept(device):
    """The caller's own, with and without a gradient of their own."""
    logits = torch.randn(ROWS, VOCABULARY, device=device).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (ROWS,), device=device)
    address, before = logits.data_ptr(), logits.detach().clone()
    functional.cross_entropy(logits, labels).backward()
    assert logits.grad.data_ptr() != address
    assert torch.equal(logits, before)


def test_anonymous_leaf_is_kept(device):
    """A leaf that only the graph refers to: its gradient is accumulated into a tensor that nobody can reach either."""
    labels = torch.randint(0, VOCABULARY, (ROWS,), device=device)
    loss = functional.cross_entropy(torch.randn(ROWS, VOCABULARY, device=device).requires_grad_(), labels)
    with_address = loss.grad_fn.next_functions[0][0].variable.data_ptr()
    loss.backward()
    assert loss.grad_fn.next_functions[0][0].variable.grad.data_ptr() != with_address


def test_retain_graph_keeps_logits(step):
    loss = step.loss()
    once = step.gradient(loss, retain_graph=True)
    assert not step.donated
    collect_arguments()
    assert torch.equal(step.gradient(loss), once)
    assert step.donated


def test_create_graph_keeps_logits(step):
    step.gradient(step.loss(), create_graph=True)
    assert not step.donated


def test_batched_gradients_keep_logits(step):
    """The formula runs once, the operator once for each gradient of the batch."""
    upstream = torch.eye(ROWS, device=step.hidden.device)

    def gradients(cross_entropy):
        losses = cross_entropy(step.hidden @ step.weight, step.labels, reduction="none")
        return torch.autograd.grad(losses, step.hidden, upstream, is_grads_batched=True)[0]

    torch.testing.assert_close(gradients(functional.cross_entropy), gradients(F.cross_entropy))


HOOKS = {
    "identity": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "detached": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t),
    "on the CPU": lambda: torch.autograd.graph.save_on_cpu(),
}


@pytest.mark.parametrize("hooks", HOOKS)
def test_hooked_logits_are_kept(step, hooks):
    with HOOKS[hooks]():
        loss = step.loss()
    step.gradient(loss)
    assert not step.donated
    with HOOKS[hooks]():
        step.gradient(step.loss())
    assert not step.donated


def test_allowed_mutation_keeps_logits(step):
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        step.gradient(step.loss(lambda logits: logits.mul_(2.0)))
        assert not step.donated


def test_hooks_registered_later_keep_logits(step):
    packed = []

    def pack(t):
        packed.append(t)
        return t

    loss = step.loss()
    loss.grad_fn._raw_saved_tensors[0].register_hooks(pack, lambda t: t)
    before = packed[0].clone()
    step.gradient(loss)
    assert not step.donated
    assert torch.equal(packed[0], before)


def test_node_hook_cannot_read_overwritten_logits(step):
    """A hook that runs after the formula finds that its node's saved tensor has changed, rather than other numbers."""
    loss = step.loss()
    loss.grad_fn.register_hook(lambda *_: loss.grad_fn.saved_tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoint(step, use_reentrant):
    """Without re-entrance the logits are packed by hooks; with it they belong to a graph that is made for one use."""

    def forward(hidden):
        logits = hidden @ step.weight
        step.logits_at = logits.data_ptr()
        if logits.requires_grad:
            logits.register_hook(step._see)
        return functional.cross_entropy(logits, step.labels)

    checkpoint(forward, step.hidden, use_reentrant=use_reentrant).backward()
    torch.testing.assert_close(step.hidden.grad, step.wanted())
    if not use_reentrant:
        assert not step.donated


def test_modification_after_the_loss_raises_as_ever(step):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step.loss(lambda logits: logits.mul_(2.0)).backward()


@pytest.mark.skipif(INTERPRETED, reason="traces, which no kernel takes part in")
def test_compiled_graph_mutates_nothing(step):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(
        fw_compiler=lambda gm, inputs: make_boxed_func(backend(gm, inputs)),
        bw_compiler=lambda gm, inputs: make_boxed_func(backend(gm, inputs)),
    )

    def forward(hidden):
        return functional.cross_entropy(hidden @ step.weight, step.labels)

    torch.compile(forward, backend=compiler, fullgraph=True)(step.hidden).backward()
    torch.testing.assert_close(step.hidden.grad, step.wanted())
    targets = {str(node.target) for gm in graphs for node in gm.graph.nodes}
    assert "fusedops.cross_entropy_backward.default" in targets
    assert "fusedops.cross_entropy_backward_.default" not in targets


@pytest.mark.skipif(INTERPRETED, reason="traces, which no kernel takes part in")
def test_traced_backward_mutates_nothing(step):
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradient(hidden):
        loss = functional.cross_entropy(hidden @ step.weight, step.labels)
        return torch.autograd.grad(loss, hidden)[0]

    graph = make_fx(gradient)(step.hidden)
    assert "cross_entropy_backward_." not in graph.code
    torch.testing.assert_close(graph(step.hidden), step.wanted())


def test_functorch_never_sees_a_mutation(step):
    """torch.func differentiates no registered operator: it must say so, not write over anything."""
    logits = (step.hidden @ step.weight).detach()
    before = logits.clone()
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: functional.cross_entropy(x * 1.0, step.labels))(logits)
    assert torch.equal(logits, before)


class Subclass(Tensor):
    pass


def test_subclass_is_kept(step):
    logits = (step.hidden @ step.weight).as_subclass(Subclass)
    step.logits_at = logits.data_ptr()
    logits.register_hook(step._see)
    loss = functional.cross_entropy(logits, step.labels)
    del logits
    step.gradient(loss.as_subclass(Tensor))
    assert not step.donated


def test_transposed_logits_are_kept(device):
    """A kernel writes contiguous rows: another layout could not be written in place."""
    step = Step(device)
    logits = (step.weight.t() @ step.hidden.t()).t()
    step.logits_at = logits.data_ptr()
    logits.register_hook(step._see)
    loss = functional.cross_entropy(logits, step.labels)
    del logits
    step.gradient(loss)
    assert not step.donated


def test_references_that_somebody_unknown_holds_are_no_measure():
    """A debugger that copies every frame's variables holds the probe too: its counts would be those of a live tensor."""
    copies = []
    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: copies.append(dict(frame.f_locals)))
    try:
        assert donation._references_of_dead.__wrapped__() is None
    finally:
        sys.settrace(before)


@pytest.mark.gpu
def test_captured_backward_keeps_logits(device):
    """What a replay writes into nobody counts: captured backward passes leave saved tensors alone."""
    step = Step(device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.gradient(step.loss())
    torch.cuda.synchronize()
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    with torch.cuda.graph(forward, pool=pool):
        loss = step.loss()
    with torch.cuda.graph(backward, pool=pool):
        (dhidden,) = torch.autograd.grad(loss, step.hidden)
    assert not step.donated
    for _ in range(2):
        forward.replay()
        backward.replay()
        torch.testing.assert_close(dhidden, step.wanted())
