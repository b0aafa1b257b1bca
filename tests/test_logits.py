"""Logits on demand: whoever reads them, and whenever, gets what eager would have given."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedops
from fusedops.logits import DeferredLogits, logits_on_demand
from tests.rewriting import compiled, distance, step, tiny, tokens


class Saved(torch.autograd.Function):
    """A custom function that saves its input, as trainers' fused kernels do."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x.float() ** 2).sum()

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


def write_slice(z):
    z[:, :, 3:7] = 0.5
    return z.pow(2).mean()


def write_through_view(z):
    z[:, :-1].mul_(3.0)
    return z.pow(2).mean()


CONSUMERS = {
    "pointwise": lambda z: z.float().pow(2).mean(),
    "cross_entropy": lambda z: F.cross_entropy(
        z.view(-1, z.shape[-1]), torch.arange(z[..., 0].numel(), device=z.device)
    ),
    "log_softmax and gather": lambda z: z.log_softmax(-1).gather(-1, z.argmax(-1, keepdim=True)).sum(),
    "custom function": Saved.apply,
    "read twice": lambda z: z.exp().mean() + z.sin().sum(),
    "in place": lambda z: z.div_(2.0).pow(2).mean(),
    "written slice": write_slice,
    "written view": write_through_view,
    "indexing": lambda z: z[..., 3].sum() + z[0].mean(),
    "concatenation": lambda z: torch.cat([z, z]).logsumexp(-1).mean(),
    "compiled": torch.compile(lambda z: z.float().log_softmax(-1)[..., 0].sum(), backend="aot_eager"),
}


def operands(dtype=torch.float32, bias=True):
    leaves = [torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16) if bias else None]
    return [None if t is None else t.to(dtype).requires_grad_() for t in leaves]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CONSUMERS)
def test_consumers_get_values_and_gradients(name, bias) -> None:
    leaves = operands(bias=bias)
    expected = CONSUMERS[name](F.linear(*leaves))
    result = CONSUMERS[name](logits_on_demand(*leaves, torch.float32))
    torch.testing.assert_close(result, expected)
    differentiated = [t for t in leaves if t is not None]
    gradients = torch.autograd.grad(result, differentiated)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, differentiated))


READERS = {
    "detach": lambda z: z.detach(),
    "numpy": lambda z: z.detach().numpy(),
    "numpy of a differentiable": lambda z: z.numpy(),
    "tolist": lambda z: z.tolist(),
    "array": lambda z: z.detach().__array__(),
    "item": lambda z: z.item(),
    "repr": repr,
    "deepcopy": lambda z: copy.deepcopy(z.detach()),
    "deepcopy of a differentiable": copy.deepcopy,
    "pickle": lambda z: pickle.loads(pickle.dumps(z.detach())),
    "dlpack": lambda z: torch.from_dlpack(z.detach()),
    "storage": lambda z: z.untyped_storage().nbytes(),
    "iteration": lambda z: next(iter(z)),
    "length": len,
    "argmax": lambda z: z.argmax(-1),
    "cast": lambda z: z.double(),
    "comparison": lambda z: z == z,
    "new tensor": lambda z: torch.zeros_like(z),
    "format": lambda z: f"{z.mean():.3f}",
    "resize": lambda z: z.resize_(2),
    "attributes": lambda z: (z.shape, z.dtype, z.device, z.stride(), z.layout, z.is_leaf, z.requires_grad, z.numel()),
}


def outcome(read, z):
    try:
        return read(z)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", READERS)
def test_readers_get_what_eager_gives(name) -> None:
    hidden, weight, _ = operands()
    expected = outcome(READERS[name], F.linear(hidden, weight))
    got = outcome(READERS[name], logits_on_demand(hidden, weight, None, torch.float32))
    if name == "repr":  # where eager names a grad_fn, the values have only requires_grad
        expected, got = expected.split("grad_fn")[0], got.split("requires_grad")[0]
    if isinstance(expected, torch.Tensor):
        assert got.requires_grad == expected.requires_grad
        torch.testing.assert_close(got, expected)
    elif hasattr(expected, "__array_interface__"):
        assert (got == expected).all()
    else:
        assert got == expected


@pytest.mark.parametrize("bias", [False, True])
def test_a_function_of_the_linear(bias) -> None:
    def softcapped(x):
        return torch.tanh(x / 3.0) * 3.0

    hidden, weight, b = operands(bias=bias)
    differentiated = [t for t in (hidden, weight, b) if t is not None]
    expected = softcapped(torch.nn.functional.linear(hidden, weight, b))
    got = logits_on_demand(hidden, weight, b, hidden.dtype, softcapped)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(got * 1.0, expected)
    gradients = torch.autograd.grad(got, differentiated, upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, differentiated, upstream))


def test_saved_to_a_file_as_a_plain_tensor() -> None:
    hidden, weight, _ = operands()
    file = io.BytesIO()
    torch.save(logits_on_demand(hidden, weight, None, torch.float32), file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded) is torch.Tensor
    torch.testing.assert_close(loaded, F.linear(hidden, weight))


def test_foreign_kernels_get_an_address() -> None:
    hidden, weight, _ = operands()
    logits = logits_on_demand(hidden, weight, None, torch.float32)
    assert logits.data_ptr() == logits.data_ptr() == logits._projection.values.data_ptr() != 0


def test_metadata_and_detach_compute_nothing() -> None:
    hidden, weight, _ = operands()
    logits = logits_on_demand(hidden, weight, None, torch.float32)
    assert logits.shape == (2, 3, 16) and logits.requires_grad and logits.detach().grad_fn is None
    assert logits._projection.values is None and logits.detach()._projection.values is None


def test_autocast_dtype() -> None:
    hidden, weight, bias = operands()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(hidden, weight, bias)
    logits = logits_on_demand(hidden, weight, bias, torch.bfloat16)
    torch.testing.assert_close(logits.clone(), expected)
    upstream = torch.randn_like(expected)
    got = torch.autograd.grad(logits, (hidden, weight, bias), upstream)
    torch.testing.assert_close(got, torch.autograd.grad(expected, (hidden, weight, bias), upstream))


def test_hidden_gradient_survives_a_second_backward() -> None:
    hidden, weight, _ = operands()
    logits = logits_on_demand(hidden, weight, None, torch.float32)
    logits.sum().backward(retain_graph=True)
    once = hidden.grad.clone()
    logits.sum().backward()
    torch.testing.assert_close(hidden.grad, 2 * once)


def optimizer_step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), 0.1).step()


def write_to_data(model: nn.Module) -> None:
    model.lm_head.weight.data.add_(1e-3)


def write_one_element_to_data(model: nn.Module) -> None:
    model.lm_head.weight.data[3, 5] += 1e-3


def load_state_dict(model: nn.Module) -> None:
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})


@pytest.mark.parametrize("change", [optimizer_step, write_to_data, write_one_element_to_data, load_state_dict])
def test_never_the_logits_of_changed_weights(change) -> None:
    torch._dynamo.reset()
    model, ids = tiny(), tokens()
    out = compiled(model)(ids, labels=ids)
    assert isinstance(out.logits, DeferredLogits)
    out.loss.backward()
    change(model)
    with pytest.raises(fusedops.StaleLogitsError, match="weight: got a tensor that was written to or freed"):
        out.logits.sum()


def test_never_the_logits_of_a_changed_bias() -> None:
    hidden, weight, bias = operands()
    logits = logits_on_demand(hidden, weight, bias, torch.float32)
    bias.data[3] += 1
    with pytest.raises(fusedops.StaleLogitsError, match="bias"):
        logits.sum()


def test_replaced_weights_leave_old_logits() -> None:
    torch._dynamo.reset()
    model, ids = tiny(), tokens()
    expected, out = model(ids, labels=ids).logits, compiled(model)(ids, labels=ids).logits
    model.lm_head.weight.data = model.lm_head.weight.data + 1
    torch.testing.assert_close(out.detach().clone(), expected.detach())


def test_logits_read_before_the_step_keep_their_values() -> None:
    torch._dynamo.reset()
    model, ids = tiny(), tokens()
    out = compiled(model)(ids, labels=ids)
    expected = model(ids, labels=ids).logits.detach()
    out.logits.argmax()
    out.loss.backward()
    optimizer_step(model)
    torch.testing.assert_close(out.logits.detach().clone(), expected)


@pytest.mark.parametrize("name", CONSUMERS)
def test_auxiliary_loss_on_a_models_logits(name) -> None:
    """Loss and logits of one compiled model, both differentiated."""
    torch._dynamo.reset()
    model, ids = tiny(), tokens()

    def loss(out):
        return out.loss + CONSUMERS[name](out.logits)

    _, expected = step(model, model, ids, loss)
    _, gradients = step(model, compiled(model), ids, loss)
    assert distance(expected, gradients) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_logits_without_the_loss(name) -> None:
    """Only the logits are differentiated: the loss's part of the compiled backward gets no gradient."""
    torch._dynamo.reset()
    model, ids = tiny(name), tokens()
    _, expected = step(model, model, ids, lambda out: out.logits.pow(2).mean())
    _, gradients = step(model, compiled(model), ids, lambda out: out.logits.pow(2).mean())
    assert distance(expected, gradients) < 1e-5


def head_and_inputs():
    """A projection with its loss, in both spellings' smallest form, and what it is called with."""
    weight, labels = torch.randn(16, 8).requires_grad_(), torch.randint(0, 16, (2, 3))

    def loss_and_logits(hidden):
        logits = F.linear(hidden, weight)
        return F.cross_entropy(logits.float().view(-1, 16), labels.view(-1)), logits

    return loss_and_logits, torch.randn(2, 3, 8), weight


def test_a_graph_that_writes_to_hidden_later_keeps_its_logits() -> None:
    """Logits on demand would be computed from what the graph left behind."""
    torch._dynamo.reset()
    head, hidden, _ = head_and_inputs()

    def call(hidden):
        loss, logits = head(hidden)
        hidden.add_(1)
        return loss, logits

    report = fusedops.Report()
    with torch.no_grad():
        _, expected = call(hidden.clone())
        _, logits = compiled(call, report)(hidden.clone())
    torch.testing.assert_close(logits, expected)
    assert report.counts() == {"cross_entropy": 1}


def test_grad_mode_is_the_graphs_own() -> None:
    torch._dynamo.reset()
    head, hidden, weight = head_and_inputs()
    call = torch.enable_grad()(head)
    gradients = []
    for function in (call, compiled(call)):
        with torch.no_grad():
            loss, logits = function(hidden)
        assert logits.requires_grad
        gradients.append(torch.autograd.grad(loss + logits.pow(2).mean(), weight)[0])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_read_in_inference_mode_and_differentiated_later() -> None:
    torch._dynamo.reset()
    head, hidden, weight = head_and_inputs()
    gradients = []
    for function in (head, compiled(head)):
        _, logits = function(hidden)
        with torch.inference_mode():
            logits.argmax(-1)
        gradients.append(torch.autograd.grad(logits[:, :-1].log_softmax(-1).pow(2).sum(), weight)[0])
    torch.testing.assert_close(gradients[1], gradients[0])


def test_two_projections_of_the_same_operands_stay_two() -> None:
    torch._dynamo.reset()
    head, hidden, _ = head_and_inputs()

    def call(hidden):
        with torch.autocast("cpu", torch.bfloat16):
            first = head(hidden)
        return first, head(hidden)

    (_, half), (_, single) = compiled(call)(hidden)
    assert (half.dtype, single.dtype) == (torch.bfloat16, torch.float32)
    with torch.no_grad():
        half.zero_()
        torch.testing.assert_close(single.clone(), head(hidden)[1])


@pytest.mark.parametrize("change", ["hidden", "rows of weight swapped", "weight freed"])
def test_never_the_logits_of_changed_operands(change) -> None:
    torch._dynamo.reset()
    head, hidden, weight = head_and_inputs()
    _, logits = compiled(head)(hidden)
    if change == "hidden":
        hidden.data.zero_()
    elif change == "weight freed":  # as FSDP does
        weight.untyped_storage().resize_(0)
    else:
        weight.data.copy_(weight.data.flip(0).clone())
    with pytest.raises(fusedops.StaleLogitsError):
        logits.sum()


def set_data(z):
    z.data = torch.ones(3)


@pytest.mark.parametrize(
    "reshape", [lambda z: z.unsqueeze_(0), lambda z: z.transpose_(0, 1), lambda z: z.resize_(2), set_data]
)
def test_rejects_reshaping_in_place(reshape) -> None:
    hidden, weight, _ = operands()
    with torch.no_grad():
        logits = logits_on_demand(hidden, weight, None, torch.float32)
        with pytest.raises(fusedops.UnsupportedInputError, match="in place"):
            reshape(logits)
    torch.testing.assert_close(logits.clone(), F.linear(hidden, weight))


def test_no_gradient_where_the_graph_switches_it_off() -> None:
    torch._dynamo.reset()
    model, ids = tiny(), tokens()

    @torch.no_grad()
    def evaluate(ids):
        return model(ids, labels=ids)

    out = compiled(evaluate)(ids)
    assert isinstance(out.logits, DeferredLogits) and not out.logits.requires_grad and not out.loss.requires_grad
