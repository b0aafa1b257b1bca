"""What tests of rewriting share: compiling without Inductor, tiny HuggingFace models, one training step, distances."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

import fusedops
from fusedops.compiler.backend import Settings, compile_graph
from tests.conftest import DEVICE

SIZES = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    use_cache=False,
)
MODELS = {"llama": (LlamaForCausalLM, LlamaConfig), "gemma": (GemmaForCausalLM, GemmaConfig)}
SITES = {"linear_cross_entropy": 1, "rms_norm": 5}


def tiny(name: str = "llama", dtype: torch.dtype = torch.float32, **config) -> nn.Module:
    torch.manual_seed(0)
    model, config_class = MODELS[name]
    return model(config_class(**(SIZES | config))).to(DEVICE, dtype)


def compiled(model: Callable, report: fusedops.Report | None = None, disable=(), **kwargs) -> Callable:
    """The rewriting of ``backend="fusedops"`` with AOTAutograd and without Inductor, which takes most of the time."""
    settings = Settings.of(disable, report)

    def backend(gm, example_inputs):
        return compile_graph(gm, example_inputs, settings, aot_eager)

    return torch.compile(model, backend=backend, **kwargs)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], shape or (2, 16)).to(DEVICE)


def step(
    model: nn.Module, call: Callable, ids: Tensor, loss=lambda out: out.loss, around=contextlib.nullcontext, **kwargs
):
    """Outputs of one call and the gradients of all parameters that have one."""
    model.zero_grad()
    with around():
        out = call(input_ids=ids, labels=ids, **kwargs)
    loss(out).backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest relative difference between gradients of the same name."""
    assert a.keys() == b.keys()
    return max(((a[n] - b[n]).float().norm() / a[n].float().norm().clamp_min(1e-30)).item() for n in a)


def rewritten(function: Callable, *args, **kwargs) -> fusedops.Report:
    """The report of one capture, without what other tests have made Dynamo remember of the function."""
    torch._dynamo.reset()
    return fusedops.explain(function, *args, **kwargs)


def calls(report: fusedops.Report) -> list[str]:
    """Names of the operators that the rewritten graphs call, in order."""
    return [str(n.target) for gm in report.graph_modules for n in gm.graph.nodes if n.op == "call_function"]
