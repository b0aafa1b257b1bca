"""Twenty steps of training, several times from the same weights: eager and fusedops against a run in float64."""

import pytest
import torch
import torch.nn.functional as F

import fusedops
from tests.rewriting import sites, tiny, tokens

STEPS = 20
# How much further from the float64 runs fusedops may be than eager. Both are dominated by the rounding of weights and
# activations to the model's dtype; the distances of single runs differ by a factor of two with the order of sums alone.
FACTOR = 1.5
RUNS = 5
# Below this, in units of the loss, distances are float32's own noise and their ratio says nothing.
NOISE = 2e-6


class Norm64(torch.nn.Module):
    """The norm without a cast to float32: HuggingFace's would make the float64 run a float32 one."""

    def __init__(self, weight, eps, offset) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


def float64_runs(name: str, dtype: torch.dtype, runs) -> list[list[float]]:
    """The losses that the dtype's initial weights lead to in float64 throughout."""
    model = tiny(name, dtype).double()
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, Norm64(module.weight, eps, float(name == "gemma")))

    def loss(ids):
        logits = model(ids).logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))

    return [train(model, loss, batches) for batches in runs]


def train(model, loss, batches) -> list[float]:
    """The losses of a run, after which the weights are again what they were."""
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for ids in batches:
        optimizer.zero_grad()
        value = loss(ids)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    model.load_state_dict(initial)
    return losses


def train_all(name: str, dtype: torch.dtype, runs, backend: str | None, checkpointing: bool, options=None):
    torch._dynamo.reset()
    model = tiny(name, dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    call = torch.compile(model, backend=backend, options=options) if backend else model
    return [train(model, lambda ids: call(input_ids=ids, labels=ids).loss, batches) for batches in runs]


def distance(a: list[list[float]], b: list[list[float]]) -> float:
    """The largest distance of two runs' losses, on average over the runs."""
    return sum(max(abs(x - y) for x, y in zip(p, q, strict=True)) for p, q in zip(a, b, strict=True)) / len(a)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_trains_as_close_to_float64_as_eager(name, dtype, checkpointing) -> None:
    runs = [[tokens(4, 16) for _ in range(STEPS)] for _ in range(RUNS)]
    report = fusedops.Report()
    truth = float64_runs(name, dtype, runs)
    eager = train_all(name, dtype, runs, None, checkpointing)
    fused = train_all(name, dtype, runs, "fusedops", checkpointing, {"report": report})
    # The sum at the end of a checkpointed layer and the norm at the beginning of the next are in two bodies.
    expected = sites(name, add_rms_norm=2, rms_norm=3) if checkpointing else sites(name)
    assert report.counts() == expected and not report.declined and not report.failures
    bound = FACTOR * max(distance(eager, truth), NOISE)
    assert distance(fused, truth) <= bound, f"eager {distance(eager, truth)}"
    # There is something to be close to: what the bound lets pass is small beside what the losses do.
    assert bound < (max(truth[0]) - min(truth[0])) / 2
