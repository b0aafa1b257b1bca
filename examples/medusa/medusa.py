"""Medusa (arXiv 2401.10774) on a Llama: heads that predict later tokens, trained without the logits of any of them.

Each head is a residual block on the last hidden state, followed by a projection of its own to the vocabulary. Head i
predicts the token i + 2 places on; the model's own head predicts the next one. In stage 1 the model is frozen and the heads
alone are trained; in stage 2 all is.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from fusedops import functional

DECAY = 0.8  # of a head's share of the loss with each token further on
SHARE = 0.2  # of the heads' loss beside the model's own in stage 2
IGNORED = -100

# (hidden, weight, labels, factor) -> factor * cross_entropy(hidden @ weight.T, labels), a mean
HeadLoss = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class MedusaHead(nn.Module):
    """hidden + silu(linear(hidden)), and a projection. The block begins as the identity, as in Medusa."""

    def __init__(self, hidden_size: int, vocabulary: int, like: Tensor) -> None:
        super().__init__()
        where = {"device": like.device, "dtype": like.dtype}
        self.block = nn.Linear(hidden_size, hidden_size, **where)
        self.projection = nn.Linear(hidden_size, vocabulary, bias=False, **where)
        nn.init.zeros_(self.block.weight)
        nn.init.zeros_(self.block.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """The hidden states that the projection is applied to: the logits are left to the loss."""
        return hidden + F.silu(self.block(hidden))


class Losses(NamedTuple):
    """Each head's mean loss, without its factor, and the model's own, which is zero in stage 1; no gradients."""

    heads: Tensor
    model: Tensor


class Medusa(nn.Module):
    """A Llama with heads. The heads' projections begin as the model's own.

    Args:
        model: any LlamaForCausalLM.
        heads: how many tokens after the next one are predicted.
        stage: 1 freezes the model, 2 trains it too.
    """

    def __init__(self, model: LlamaForCausalLM, heads: int, stage: int) -> None:
        super().__init__()
        own = model.lm_head.weight
        self.model, self.stage = model.requires_grad_(stage == 2), stage
        self.heads = nn.ModuleList(MedusaHead(own.shape[1], own.shape[0], own) for _ in range(heads))
        with torch.no_grad():
            for head in self.heads:
                head.projection.weight.copy_(own)

    def factors(self) -> list[float]:
        return [(SHARE if self.stage == 2 else 1.0) * DECAY**i for i in range(len(self.heads))]

    def _hidden(self, input_ids: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.stage == 2):
            return self.model.model(input_ids).last_hidden_state

    def backward(self, input_ids: Tensor, labels: Tensor) -> Losses:
        """Loss and gradients of one batch; ``labels`` are input_ids, or -100 where nothing is to be predicted.

        One head after the other goes back to the hidden states at once, where their gradients are added up: whatever the
        number of heads, the logits, activations and gradients of hidden states are those of one.
        """
        hidden = self._hidden(input_ids)
        seen = hidden.detach().requires_grad_(self.stage == 2)
        losses = []
        for i, (head, factor) in enumerate(zip(self.heads, self.factors(), strict=True)):
            losses.append(_backward(head(seen), head.projection.weight, shifted(labels, i + 2), factor))
        own = seen.new_zeros((), dtype=torch.float32)
        if self.stage == 2:
            own = _backward(seen, self.model.lm_head.weight, shifted(labels, 1), 1.0)
            hidden.backward(seen.grad)
        return Losses(torch.stack(losses), own)

    def loss(self, input_ids: Tensor, labels: Tensor, head_loss: HeadLoss) -> Tensor:
        """The same loss as one number to differentiate, with a loss of one's own: every head is kept until then."""
        hidden = self._hidden(input_ids)
        terms = [
            head_loss(head(hidden), head.projection.weight, shifted(labels, i + 2), factor)
            for i, (head, factor) in enumerate(zip(self.heads, self.factors(), strict=True))
        ]
        if self.stage == 2:
            terms.append(head_loss(hidden, self.model.lm_head.weight, shifted(labels, 1), 1.0))
        return torch.stack(terms).sum()


def shifted(labels: Tensor, places: int) -> Tensor:
    """Of each position the label so many places on."""
    return F.pad(labels, (0, places), value=IGNORED)[:, places:]


def _backward(hidden: Tensor, weight: Tensor, labels: Tensor, factor: float) -> Tensor:
    """Gradients of factor times a mean. The factor is in what the sum is divided by: they are made with it, in one pass."""
    count = (labels != IGNORED).sum()
    loss = functional.linear_cross_entropy(hidden, weight, labels, reduction="sum", divisor=count / factor)
    loss.backward()
    return loss.detach() / factor
