"""Graphs with bodies of their own: patterns inside are rewritten, and the calls keep their meaning."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import fusedops
from tests.rewriting import compiled

X = (2, 3, 24)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(24)
        self.linear = nn.Linear(24, 24)
        nn.init.normal_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Regional(nn.Module):
    """Two calls of one region, as torchtitan compiles its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.compiler.nested_compile_region(layer)(x)
        return x


class Conditional(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.norm(x), lambda x: x.sin() * self.norm.weight, (x,))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        return 3 * ctx.saved_tensors[0] ** 2 * dy


class WithFunction(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(super().forward(x))


class Vmapped(Layer):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.vmap(lambda i: i >= torch.arange(x.shape[-1], device=x.device))(
            torch.arange(x.shape[1], device=x.device)
        )
        return super().forward(x) * mask


@pytest.mark.parametrize("cls", [Checkpointed, Regional, Conditional, WithFunction, Vmapped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trains_alike(cls, dtype) -> None:
    torch._dynamo.reset()
    model, report = cls().to(dtype), fusedops.Report()
    leaves = [torch.randn(X, dtype=dtype), *model.parameters()]
    leaves[0].requires_grad_()
    outcomes = []
    for call in (model, compiled(model, report)):
        out = call(leaves[0])
        outcomes.append((out, *torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)))
    for got, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            # Relative to the whole: a cube and sums over rows magnify the rounding of single elements.
            distance = (got - expected).float().norm() / expected.float().norm()
            assert distance < (1e-5 if dtype == torch.float32 else 0.03)
    assert not report.failures
    assert report.counts()["rms_norm"] >= 1


class InferenceMode(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = self.norm(x).mean()
        return super().forward(x) * scale.clone()


class ChosenAttention(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x)[:, None]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("cls", [InferenceMode, ChosenAttention])
def test_switches_stay_in_the_graph(cls) -> None:
    """A mode that a part of the model runs in is still switched when AOTAutograd traces the rewritten graph."""
    torch._dynamo.reset()
    model, x, report = cls(), torch.randn(X), fusedops.Report()
    before = torch.is_inference_mode_enabled(), torch.backends.cuda.flash_sdp_enabled()
    out, expected = compiled(model, report)(x), torch.compile(model, backend="aot_eager")(x)
    torch.testing.assert_close(out, expected)
    assert out.requires_grad == expected.requires_grad
    assert (torch.is_inference_mode_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before
    assert report.counts()["rms_norm"] >= 1 and not report.failures
    switches = [
        n
        for n in report.graph_modules[0].graph.nodes
        if "inference_mode" in str(n.target) or "_sdpa_kernel" in str(n.target)
    ]
    assert len(switches) == 2


def test_transforms_inside_a_graph_are_left_as_they_are() -> None:
    torch._dynamo.reset()

    def function(x: Tensor) -> Tensor:
        return torch.func.grad(lambda t: (t**3).sum())(x)

    report, x = fusedops.Report(), torch.randn(4)
    with pytest.warns(fusedops.FusedopsWarning, match="torch.func"):
        torch.testing.assert_close(compiled(function, report)(x), 3 * x**2)
