"""The Medusa example: loss and gradients of both stages are those of plain PyTorch, and memory is that of one head."""

import copy

import pytest
import torch
import torch.nn.functional as F

from examples.medusa import train
from examples.medusa.medusa import Medusa, shifted
from tests.conftest import DEVICE
from tests.rewriting import SIZES, tiny


def medusa(heads: int, stage: int, **sizes) -> Medusa:
    model = Medusa(tiny(**sizes), heads, stage)
    for head in model.heads:  # as after some steps
        torch.nn.init.normal_(head.block.weight, std=0.1)
    return model


def batch(rows: int = 2, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, SIZES["vocab_size"], (rows, tokens), device=DEVICE)
    labels = ids.clone()
    labels[0, :5] = -100
    return ids, labels


def plain(hidden, weight, labels, factor):
    return factor * F.cross_entropy(F.linear(hidden, weight).float().flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
def test_gradients_are_those_of_the_sum_of_all_losses(heads, stage):
    model = medusa(heads, stage)
    reference, (ids, labels) = copy.deepcopy(model), batch()
    losses = model.backward(ids, labels)
    expected = reference.loss(ids, labels, plain)
    expected.backward()
    total = (losses.heads * losses.heads.new_tensor(model.factors())).sum() + losses.model
    torch.testing.assert_close(total, expected.detach())
    for (name, got), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None) == (stage == 1 and name.startswith("model.")), name
        if got.grad is not None:
            torch.testing.assert_close(got.grad, wanted.grad, atol=1e-6, rtol=1e-4)


def test_each_head_is_trained_on_its_own_token():
    labels = torch.arange(6, device=DEVICE).view(1, 6)
    assert shifted(labels, 2).tolist() == [[2, 3, 4, 5, -100, -100]]
    model, (ids, labels) = medusa(3, 1), batch()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    first = model.backward(ids, labels).heads
    for _ in range(40):
        optimizer.step()
        optimizer.zero_grad()
        last = model.backward(ids, labels).heads
    assert (last < 0.5 * first).all()


def test_training_script_lowers_the_losses(capsys):
    assert train.main(["--steps", "31", "--heads", "2", "--tokens", "64"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    first, last = (float(line.rpartition(":")[2]) for line in (lines[0], lines[-1]))
    assert len(lines) == 4 and last < first - 1.0


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2])
def test_memory_is_that_of_one_head(device, stage):
    """But for weights, their gradients, and nothing else of a head's."""
    peaks = []
    for heads in (1, 4):
        model = medusa(heads, stage, vocab_size=65536, hidden_size=1024).to(torch.bfloat16)
        ids, labels = batch(4, 2048)
        model.backward(ids, labels)
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model.backward(ids, labels)
        gradients = sum(p.numel() * p.element_size() for h in model.heads for p in h.parameters())
        peaks.append(torch.cuda.max_memory_allocated() - before - gradients)
    assert abs(peaks[1] - peaks[0]) <= 2**20
