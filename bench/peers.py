"""The operators that are measured, their inputs, their peers and the truth their results are checked against."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fusedops.functional
from csrc_meta import SPECS

EPS = 1e-6
# Logits of a trained model are spread out: with this deviation the softmax's share of the gradient is worth checking.
LOGIT_STD = 3.0
TRUTH_ROWS = 1024

Shape = tuple[int, ...]
Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Inputs:
    """Arguments of the operator, which of them are differentiated, and the upstream gradient."""

    args: tuple[Any, ...]
    leaves: tuple[Tensor, ...]
    upstream: Tensor

    def forward_backward(self, function: Function) -> tuple[Tensor, ...]:
        result = function(*self.args)
        return (result.detach(), *torch.autograd.grad(result, self.leaves, self.upstream.to(result.dtype)))

    def bytes(self) -> int:
        tensors = {id(t): t for t in (*self.args, self.upstream) if isinstance(t, Tensor)}
        return sum(t.numel() * t.element_size() for t in tensors.values())


@dataclass(frozen=True)
class Operator:
    """One operator to measure.

    Attributes:
        letters: what the numbers of a shape are.
        shapes: the shapes that are measured on a GPU.
        results: names of what `forward_backward` returns.
        inputs: random inputs of a shape.
        peers: name and function of every implementation, fusedops among them; eager comes first.
        truth: the results in float64, rounded to float32 for keeping.
        floor: a step that does nothing but the work nobody can leave out, or None where that is moving bytes.
    """

    name: str
    letters: str
    shapes: tuple[Shape, ...]
    results: tuple[str, ...]
    inputs: Callable[[Shape, torch.Generator], Inputs]
    peers: Callable[[], Iterator[tuple[str, Function]]]
    truth: Callable[[Inputs], tuple[Tensor, ...]]
    floor: Callable[[Inputs], Callable[[], None]] | None = None


def _random(generator: torch.Generator, *shape: int, std: float = 1.0) -> Tensor:
    t = torch.empty(shape, device=generator.device, dtype=torch.bfloat16)
    return t.normal_(std=std, generator=generator)


def _labels(generator: torch.Generator, rows: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (rows,), device=generator.device, generator=generator)


def _spellings(name: str) -> Iterator[tuple[str, Function]]:
    eager = SPECS[name].eager
    yield "eager, as HF spells it", eager
    yield "torch.compile of that", torch.compile(eager, dynamic=False)


# rms_norm ------------------------------------------------------------------------------------------------------------


def _rms_norm_inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, columns = shape
    x, weight = _random(generator, rows, columns), _random(generator, columns)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    return Inputs((*leaves, EPS), leaves, _random(generator, rows, columns))


def _rms_norm_peers() -> Iterator[tuple[str, Function]]:
    yield from _spellings("rms_norm")
    yield "torch F.rms_norm", lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps)
    if liger := _liger():
        # in_place=False: otherwise the upstream gradient would be gone after the first step.
        yield "Liger", lambda x, weight, eps: liger.liger_rms_norm(x, weight, eps, in_place=False)
    yield "fusedops", fusedops.functional.rms_norm


def _rms_norm_truth(inputs: Inputs) -> tuple[Tensor, ...]:
    x, weight, eps = (a.detach().double() if isinstance(a, Tensor) else a for a in inputs.args)
    dy = inputs.upstream.double()
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalised, g = x * rstd, dy * weight
    dx = rstd * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    return (normalised * weight).float(), dx.float(), (dy * normalised).sum(0).float()


# cross_entropy -------------------------------------------------------------------------------------------------------


def _cross_entropy_inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, vocabulary = shape
    logits = _random(generator, rows, vocabulary, std=LOGIT_STD).requires_grad_()
    return Inputs((logits, _labels(generator, rows, vocabulary)), (logits,), torch.ones((), device=generator.device))


def _cross_entropy_peers() -> Iterator[tuple[str, Function]]:
    yield from _spellings("cross_entropy")
    if liger := _liger():
        yield "Liger (overwrites the logits)", liger.liger_cross_entropy
    yield "fusedops", fusedops.functional.cross_entropy


def _row_truth(logits: Tensor, labels: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Summed loss of some rows and their logits' gradient, in float64, where the mean is over `rows` rows."""
    log_p = logits.double().log_softmax(-1)
    index = labels.unsqueeze(1)
    loss = -log_p.gather(1, index).sum()
    gradient = log_p.exp_()
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, -1.0))
    return loss, gradient.div_(rows)


def _cross_entropy_truth(inputs: Inputs) -> tuple[Tensor, ...]:
    logits, labels = inputs.args
    logits, rows = logits.detach(), len(labels)
    loss, dlogits = torch.zeros((), dtype=torch.float64, device=logits.device), torch.empty_like(logits).float()
    for start in range(0, rows, TRUTH_ROWS):
        part = slice(start, start + TRUTH_ROWS)
        chunk_loss, dlogits[part] = _row_truth(logits[part], labels[part], rows)
        loss += chunk_loss
    return (loss / rows).float(), dlogits


# linear_cross_entropy ------------------------------------------------------------------------------------------------


def _linear_cross_entropy_inputs(shape: Shape, generator: torch.Generator) -> Inputs:
    rows, hidden_size, vocabulary = shape
    hidden = _random(generator, rows, hidden_size).requires_grad_()
    weight = _random(generator, vocabulary, hidden_size, std=LOGIT_STD / math.sqrt(hidden_size)).requires_grad_()
    labels = _labels(generator, rows, vocabulary)
    return Inputs((hidden, weight, labels), (hidden, weight), torch.ones((), device=generator.device))


def _linear_cross_entropy_peers() -> Iterator[tuple[str, Function]]:
    yield from _spellings("linear_cross_entropy")
    if fused := getattr(F, "linear_cross_entropy", None):
        yield "torch F.linear_cross_entropy", fused
    if liger := _liger():
        lce = liger.liger_fused_linear_cross_entropy
        yield "Liger", lce
        yield "Liger, float32 dW", functools.partial(lce, accum_dtype=torch.float32)
    yield "fusedops", fusedops.functional.linear_cross_entropy


def _linear_cross_entropy_truth(inputs: Inputs) -> tuple[Tensor, ...]:
    hidden, weight, labels = (a.detach() for a in inputs.args)
    rows, wide = len(labels), weight.double()
    loss, dweight = torch.zeros((), dtype=torch.float64, device=weight.device), torch.zeros_like(wide)
    dhidden = torch.empty_like(hidden).float()
    for start in range(0, rows, TRUTH_ROWS):
        part = slice(start, start + TRUTH_ROWS)
        chunk = hidden[part].double()
        chunk_loss, dlogits = _row_truth(chunk @ wide.t(), labels[part], rows)
        loss += chunk_loss
        dhidden[part] = dlogits @ wide
        dweight.addmm_(dlogits.t(), chunk)
    return (loss / rows).float(), dhidden, dweight.float()


def _three_gemms(inputs: Inputs) -> Callable[[], None]:
    """The projection and its two gradients on whole matrices, results in the dtype of the inputs."""
    hidden, weight, _ = (a.detach() for a in inputs.args)
    logits = hidden.new_empty((hidden.shape[0], weight.shape[0]))
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def step() -> None:
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.t(), hidden, out=dweight)

    return step


def _liger() -> Any:
    """Liger's functions, where it is installed and imports."""
    try:
        from liger_kernel.transformers import functional
    except Exception:
        return None
    return functional


OPERATORS = (
    Operator(
        name="rms_norm",
        letters="rows x columns",
        shapes=((8192, 4096), (8192, 8192), (4096, 16384), (65536, 128)),
        results=("y", "dx", "dweight"),
        inputs=_rms_norm_inputs,
        peers=_rms_norm_peers,
        truth=_rms_norm_truth,
    ),
    Operator(
        name="cross_entropy",
        letters="tokens x vocabulary",
        shapes=((8192, 128256),),
        results=("loss", "dlogits"),
        inputs=_cross_entropy_inputs,
        peers=_cross_entropy_peers,
        truth=_cross_entropy_truth,
    ),
    Operator(
        name="linear_cross_entropy",
        letters="tokens x hidden x vocabulary",
        shapes=((8192, 4096, 128256), (8192, 2048, 128256), (512, 4096, 128256)),
        results=("loss", "dhidden", "dweight"),
        inputs=_linear_cross_entropy_inputs,
        peers=_linear_cross_entropy_peers,
        truth=_linear_cross_entropy_truth,
        floor=_three_gemms,
    ),
)
