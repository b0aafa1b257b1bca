"""What tests of rewriting share: compiling without Inductor, tiny HuggingFace models, one training step, distances."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from transformers import AutoConfig, AutoModelForCausalLM

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
# Operators that a tiny model of two layers becomes. The first norm alone follows no addition.
_LLAMA = {"add_rms_norm": 4, "linear_cross_entropy": 1, "rms_norm": 1, "rotary_embedding": 2, "swiglu": 2}
SITES = {
    "llama": _LLAMA,
    "gemma": {"geglu" if op == "swiglu" else op: n for op, n in _LLAMA.items()},
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"rms_norm": 5},  # queries and keys are normalised
    "phi3": _LLAMA,
    "granite": _LLAMA,  # divides its logits
    # Norms at the end of blocks, queries and keys normalised as a whole.
    "olmo2": {"add_rms_norm": 1, "linear_cross_entropy": 1, "rms_norm": 8, "rotary_embedding": 2, "swiglu": 2},
    # What a block adds is normalised too, and logits are softcapped.
    "gemma2": {"add_rms_norm": 4, "geglu": 2, "linear_cross_entropy": 1, "rms_norm": 5, "rotary_embedding": 2},
    # And queries and keys are normalised.
    "gemma3_text": {"add_rms_norm": 4, "geglu": 2, "linear_cross_entropy": 1, "rms_norm": 9, "rotary_embedding": 2},
    "gpt_neox": {"layer_norm": 5, "linear_cross_entropy": 1, "rotary_embedding": 2},
    "gpt2": {"layer_norm": 5, "cross_entropy": 1},  # its graph breaks between projection and loss
}


def tiny(name: str = "llama", dtype: torch.dtype = torch.float32, **config) -> nn.Module:
    torch.manual_seed(0)
    if name in ("phi3", "olmo2"):  # whose defaults are beyond the tiny vocabulary
        config = {"pad_token_id": 0, "eos_token_id": 1} | config
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SIZES | config))).to(DEVICE, dtype)


def sites(name: str = "llama", **other: int) -> dict[str, int]:
    """The operators of a tiny model, with another number of some of them."""
    return {op: n for op, n in sorted((SITES[name] | other).items()) if n}


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
    """The largest relative difference between gradients of the same name.

    One that cancels to nothing, as that of a key's bias does, is measured by the largest of the others.
    """
    assert a.keys() == b.keys()
    floor = 1e-4 * max(g.float().norm().item() for g in a.values())
    return max((a[n] - b[n]).float().norm().item() / max(a[n].float().norm().item(), floor, 1e-30) for n in a)


def rewritten(function: Callable, *args, **kwargs) -> fusedops.Report:
    """The report of one capture, without what other tests have made Dynamo remember of the function."""
    torch._dynamo.reset()
    return fusedops.explain(function, *args, **kwargs)


def calls(report: fusedops.Report) -> list[str]:
    """Names of the operators that the rewritten graphs call, in order."""
    return [str(n.target) for gm in report.graph_modules for n in gm.graph.nodes if n.op == "call_function"]
