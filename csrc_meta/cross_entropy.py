"""Cross entropy of logits with integer labels: loss_i = log(sum_j exp(z_ij)) - z_i,label, z the logits or a map of them.

With class weights w, label smoothing s and z-loss k, a row of V logits x that is not ignored has

    z = c * tanh(a * x / c), or a * x without softcap c        a: logit_scale
    lse = log(sum_j exp(z_j))
    loss = (1 - s) * w_label * (lse - z_label) + s / V * sum_j w_j * (lse - z_j) + k * w_label * lse^2

and an ignored one 0. The mean divides the sum of these by the sum of w_label over the rows that are not ignored.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from csrc_meta import checks, donation
from csrc_meta.registry import composite, no_flops, primitive
from csrc_meta.results import compute_dtype
from csrc_meta.spec import Sample, Spec


class Options(NamedTuple):
    """What a row's loss depends on besides tensors. Primitive operators take it apart, as their last arguments."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0
    z_loss: float = 0.0


OPTIONS_SCHEMA = "int ignore_index, float label_smoothing, float? softcap, float logit_scale, float z_loss"


class RowKernels(NamedTuple):
    """How rows of logits become losses and gradients: torch on a CPU, Triton on a GPU.

    Attributes:
        check_values: ``(op, labels, vocabulary, ignore_index)``, raises on a label out of range where reading it is free.
        losses: see :func:`row_losses_ref`.
        reduce: see :func:`reduce_ref`.
        gradients: see :func:`row_gradients_ref`.
    """

    check_values: Callable[[str, Tensor, int, int], None]
    losses: Callable[..., None]
    reduce: Callable[..., tuple[Tensor, Tensor]]
    gradients: Callable[..., None]


def check_labels(op: str, labels: Tensor, like: str, other: Tensor, shape: torch.Size) -> None:
    checks.check_dtype(
        op, "labels", labels, checks.LABELS, "Class probabilities are not supported: use torch.nn.functional."
    )
    checks.check_same_device(op, "labels", labels, like, other)
    checks.check_shape(op, "labels", labels, shape, f"One label for each row of {like}.")


def check_class_weights(op: str, argument: str, weight: Tensor, like: str, other: Tensor, vocabulary: int) -> None:
    checks.check_dtype(op, argument, weight, checks.FLOATING, "Cast it to a floating-point dtype.")
    checks.check_same_device(op, argument, weight, like, other)
    checks.check_shape(op, argument, weight, (vocabulary,), "One weight for each class.")


def refuse_trained(op: str, argument: str, needs_grad: bool) -> None:
    if needs_grad:
        remedy = f"Detach it: {argument}.detach()."
        raise checks.UnsupportedInputError(
            checks.message(op, argument, "a tensor that requires grad", "one that does not", remedy)
        )


def check_options(op: str, reduction: str, options: Options) -> None:
    def require(fits: bool, argument: str, wants: str, remedy: str) -> None:
        if not fits:
            got = getattr(options, argument)
            raise checks.UnsupportedInputError(checks.message(op, argument, got, wants, remedy))

    _, _, softcap, logit_scale, z_loss = options
    checks.check_choice(op, "reduction", reduction, checks.REDUCTIONS)
    checks.check_label_smoothing(op, options.label_smoothing)
    capped = softcap is None or 0.0 < softcap < math.inf
    require(capped, "softcap", "a positive number or None", "Pass the bound of the logits' magnitude.")
    require(-math.inf < logit_scale < math.inf, "logit_scale", "a finite number", "Pass the factor of the logits.")
    require(0.0 <= z_loss < math.inf, "z_loss", "a number that is not negative", "Pass the factor of lse^2.")


def check(op: str, logits: Tensor, labels: Tensor, weight: Tensor | None, reduction: str, options: Options) -> None:
    checks.check_dtype(op, "logits", logits, checks.FLOATING, "Cast them to a floating-point dtype.")
    check_options(op, reduction, options)
    if logits.dim() != 2:
        raise checks.UnsupportedInputError(
            checks.message(op, "logits", checks.describe(logits), "shape (T, V)", "Flatten them: logits.view(-1, V).")
        )
    check_labels(op, labels, "logits", logits, logits.shape[:1])
    if weight is not None:
        check_class_weights(op, "weight", weight, "logits", logits, logits.shape[1])


def _check_forward(logits: Tensor, labels: Tensor, weight: Tensor | None, reduction: str, *options: Any) -> None:
    check("cross_entropy", logits, labels, weight, reduction, Options(*options))


def _check_backward(
    op: str,
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    total: Tensor,
    reduction: str,
    *options: Any,
) -> None:
    check(op, logits, labels, weight, reduction, Options(*options))
    shape = labels.shape if reduction == "none" else labels.shape[:0]
    checks.check_shape(op, "dloss", dloss, shape, "dloss has the shape of the loss.")


def _check_mutating(dloss: Tensor, logits: Tensor, *args: Any) -> None:
    op = "cross_entropy_backward_"
    _check_backward(op, dloss, logits, *args)
    if not logits.is_contiguous():
        got = f"{checks.describe(logits)} with strides {logits.stride()}"
        raise checks.UnsupportedInputError(
            checks.message(op, "logits", got, "a contiguous tensor", "Take cross_entropy_backward instead.")
        )


def mapped(x: Tensor, options: Options) -> tuple[Tensor, Tensor | float]:
    """z and dz / dx."""
    scale, softcap = options.logit_scale, options.softcap
    if softcap is None:
        return x * scale, scale
    tanh = torch.tanh(x * scale / softcap)
    return softcap * tanh, scale * (1.0 - tanh * tanh)


def label_weights(labels: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """w_label of each row, 0 where ignored."""
    ignored = labels == ignore_index
    if weight is None:
        return ignored.logical_not().to(dtype)
    return F.pad(weight.to(dtype), (0, 1))[labels.masked_fill(ignored, len(weight)).long()]


def row_losses_ref(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    options: Options,
    losses: Tensor,
    stats: Tensor,
    metrics: Tensor | None = None,
) -> None:
    """Write each row's loss, zero where ignored, and its statistics (2, T): m = max(z), log(sum(exp(z - m))).

    ``metrics`` (4, T), where given, gets log(p_label), the entropy -sum_j p_j log(p_j), 1 if no z_j is above z_label and
    none before it is equal, and lse; zeros where ignored.
    """
    if logits.shape[1] == 0:
        for t in (losses, stats, metrics):
            if t is not None:
                t.zero_()
        return
    z, _ = mapped(logits.to(stats.dtype), options)
    maximum = z.amax(1)
    log_sum = (z - maximum.unsqueeze(1)).exp().sum(1).log()
    surprise = log_sum.unsqueeze(1) - (z - maximum.unsqueeze(1))  # lse - z
    ignored = labels == options.ignore_index
    of_label = label_weights(labels, weight, options.ignore_index, stats.dtype)
    loss = of_label * surprise.gather(1, labels.masked_fill(ignored, 0).long().unsqueeze(1)).squeeze(1)
    if options.label_smoothing:
        of_all = (surprise if weight is None else surprise * weight.to(stats.dtype)).mean(1)
        loss = (1.0 - options.label_smoothing) * loss + options.label_smoothing * of_all
    if options.z_loss:
        loss = loss + options.z_loss * of_label * (maximum + log_sum).square()
    losses.copy_(loss.masked_fill(ignored, 0.0))
    stats.copy_(torch.stack((maximum, log_sum)))
    if metrics is not None:
        known = labels.masked_fill(ignored, 0).long()
        log_prob = -surprise.gather(1, known.unsqueeze(1)).squeeze(1)
        # Of no probability there is no surprise: 0 * inf counts nothing.
        entropy = torch.where(z.isneginf(), 0.0, (-surprise).exp() * surprise).sum(1)
        values = torch.stack((log_prob, entropy, (z.argmax(1) == known).to(z.dtype), maximum + log_sum))
        metrics.copy_(values.masked_fill(ignored, 0.0))


def reduce_ref(
    losses: Tensor, labels: Tensor, weight: Tensor | None, vocabulary: int, options: Options, reduction: str
) -> tuple[Tensor, Tensor]:
    """The loss, and the sum of w_label that a mean divides by: over no row at all it is 0 / 0 = NaN, as in eager."""
    total = label_weights(labels, weight, options.ignore_index, losses.dtype).sum()
    if reduction == "none":
        return losses, total
    return losses.sum() / total if reduction == "mean" else losses.sum(), total


def row_gradients_ref(
    dloss: Tensor,
    total: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    options: Options,
    out: Tensor,
) -> None:
    """Write d loss / d logits times each row's dloss (/ total) into ``out``, which may be the logits.

    dz_j = p_j * ((1 - s) * w_label + s * mean(w) + 2 * k * w_label * lse) - (1 - s) * w_label * [j = label]
           - s / V * w_j        p = exp(z - lse)
    """
    smoothing, vocabulary = options.label_smoothing, logits.shape[1]
    if vocabulary == 0:
        return
    ignored = labels == options.ignore_index
    z, slope = mapped(logits.to(stats.dtype), options)
    probability = (z - stats[0].unsqueeze(1) - stats[1].unsqueeze(1)).exp()
    of_label = label_weights(labels, weight, options.ignore_index, stats.dtype)
    of_all = stats.new_ones(vocabulary) if weight is None else weight.to(stats.dtype)
    mass = (1.0 - smoothing) * of_label + smoothing * of_all.mean()
    mass = mass + 2.0 * options.z_loss * of_label * (stats[0] + stats[1])
    gradient = probability * mass.unsqueeze(1) - smoothing / vocabulary * of_all
    index = labels.masked_fill(ignored, 0).long().unsqueeze(1)
    gradient.scatter_add_(1, index, (smoothing - 1.0) * of_label.unsqueeze(1))
    upstream = dloss.to(stats.dtype) if total is None else dloss.to(stats.dtype) / total
    gradient = gradient * slope * upstream.expand(labels.shape).unsqueeze(1)
    out.copy_(gradient.masked_fill_(ignored.unsqueeze(1), 0.0))


REFERENCE = RowKernels(checks.check_label_values, row_losses_ref, reduce_ref, row_gradients_ref)


def forward(
    kernels: RowKernels, logits: Tensor, labels: Tensor, weight: Tensor | None, reduction: str, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    given, vocabulary = Options(*options), logits.shape[1]
    kernels.check_values("cross_entropy", labels, vocabulary, given.ignore_index)
    losses = torch.empty(labels.shape, dtype=compute_dtype(logits), device=logits.device)
    stats = torch.empty((2, *labels.shape), dtype=losses.dtype, device=logits.device)
    kernels.losses(logits, labels, weight, given, losses, stats)
    loss, total = kernels.reduce(losses, labels, weight, vocabulary, given, reduction)
    return loss, stats, total


def forward_fake(
    logits: Tensor, labels: Tensor, weight: Tensor | None, reduction: str, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wide = compute_dtype(logits)
    loss = logits.new_empty(labels.shape if reduction == "none" else (), dtype=wide)
    return loss, logits.new_empty((2, *labels.shape), dtype=wide), logits.new_empty((), dtype=wide)


def backward_into(
    kernels: RowKernels,
    out: Tensor,
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    total: Tensor,
    reduction: str,
    *options: Any,
) -> None:
    divisor = total if reduction == "mean" else None
    kernels.gradients(dloss, divisor, logits, labels, weight, stats, Options(*options), out)


def backward(kernels: RowKernels, dloss: Tensor, logits: Tensor, *args: Any) -> Tensor:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    backward_into(kernels, dlogits, dloss, logits, *args)
    return dlogits


def backward_mutating(kernels: RowKernels, dloss: Tensor, logits: Tensor, *args: Any) -> None:
    backward_into(kernels, logits, dloss, logits, *args)


def _setup_context(ctx, inputs, output) -> None:
    logits, labels, weight, ctx.reduction, *ctx.options = inputs
    refuse_trained("cross_entropy", "weight", ctx.needs_input_grad[2])
    _, stats, total = output
    donation.save(ctx, logits, labels, weight, stats, total)
    ctx.mark_non_differentiable(stats, total)
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, _dstats, _dtotal):
    if dloss is None:
        return (None,) * 9
    (logits, *saved), (dead,) = donation.unpack(ctx, dloss)
    args = (dloss, logits, *saved, ctx.reduction, *ctx.options)
    if dead:
        _backward_op_(*args)
        return logits.detach(), *(None,) * 8
    return _backward_op(*args), *(None,) * 8


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
) -> Tensor:
    options = Options(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
    return _forward_op(logits, labels, weight, reduction, *options)[0]


_forward_op = primitive(
    f"cross_entropy_forward(Tensor logits, Tensor labels, Tensor? weight, str reduction, {OPTIONS_SCHEMA})"
    " -> (Tensor, Tensor, Tensor)",
    check=_check_forward,
    fake=forward_fake,
    reference=partial(forward, REFERENCE),
    flops=no_flops,
    setup_context=_setup_context,
    backward=_backward,
)
_backward_op = primitive(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor labels, Tensor? weight, Tensor stats, Tensor total,"
    f" str reduction, {OPTIONS_SCHEMA}) -> Tensor",
    check=partial(_check_backward, "cross_entropy_backward"),
    fake=lambda dloss, logits, *args: torch.empty_like(logits, memory_format=torch.contiguous_format),
    reference=partial(backward, REFERENCE),
    flops=no_flops,
)
_backward_op_ = primitive(
    "cross_entropy_backward_(Tensor dloss, Tensor(a!) logits, Tensor labels, Tensor? weight, Tensor stats,"
    f" Tensor total, str reduction, {OPTIONS_SCHEMA}) -> ()",
    check=_check_mutating,
    fake=lambda *args: None,
    reference=partial(backward_mutating, REFERENCE),
    flops=no_flops,
)
operator = composite(
    "cross_entropy(Tensor logits, Tensor labels, Tensor? weight=None, *, int ignore_index=-100, str reduction='mean',"
    " float label_smoothing=0.0, float? softcap=None, float logit_scale=1.0, float z_loss=0.0) -> Tensor",
    cross_entropy,
)


def sample_labels(rows: int, vocabulary: int, device: torch.device, ignored: int = 0) -> Tensor:
    labels = torch.randint(0, max(vocabulary, 1), (rows,), device=device)
    labels[:ignored] = -100
    return labels


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(label: str, logits: Tensor, ignored: int = 0, weighted: bool = False, **kwargs) -> Sample:
        labels = sample_labels(*logits.shape, device, ignored)
        weight = (torch.rand(logits.shape[1], device=device) + 0.5).to(dtype) if weighted else None
        return Sample(label, (logits.detach().requires_grad_(), labels, weight), kwargs)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield sample("mean", tensor(6, 64), ignored=2)
    yield sample("sum", tensor(6, 64), ignored=1, reduction="sum")
    yield sample("none", tensor(6, 64), ignored=2, reduction="none")
    yield sample("label smoothing", tensor(6, 64), ignored=2, label_smoothing=0.1)
    yield sample("weight", tensor(6, 64), ignored=2, weighted=True)
    yield sample("weight and label smoothing", tensor(6, 37), ignored=1, weighted=True, label_smoothing=0.1)
    yield sample("softcap", 3 * tensor(6, 64), ignored=1, softcap=2.0)
    yield sample("logit scale", tensor(6, 64), logit_scale=0.7)
    yield sample("z-loss", tensor(6, 64), ignored=1, z_loss=0.01)
    together = {"label_smoothing": 0.2, "softcap": 3.0, "logit_scale": -1.5, "z_loss": 0.05}
    yield sample("all options", tensor(6, 37), ignored=2, weighted=True, **together)
    yield sample("all ignored", tensor(3, 16), ignored=3, reduction="sum")
    yield sample("odd vocabulary", tensor(5, 37), reduction="none", label_smoothing=0.2)
    yield sample("one class", tensor(3, 1))
    yield sample("no rows", tensor(0, 16), reduction="sum")
    yield sample("row stride", tensor(4, 50)[:, :33])
    yield sample("transposed", tensor(33, 4).t())
    yield sample("expanded", tensor(1, 33).expand(4, 33))
    yield sample("misaligned", tensor(4 * 33 + 1)[1:].view(4, 33))


def eager(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
) -> Tensor:
    z = logits.to(compute_dtype(logits)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    labels, weight = labels.long(), None if weight is None else weight.to(z.dtype)
    losses = F.cross_entropy(
        z, labels, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if z_loss == 0.0:
        return losses
    kept = labels != ignore_index
    of_label = kept.to(z.dtype) if weight is None else weight[labels * kept] * kept
    squares = z_loss * of_label * z.logsumexp(1).square()
    if reduction == "none":
        return losses + squares
    return losses + (squares.sum() / of_label.sum() if reduction == "mean" else squares.sum())


SPEC = Spec(
    name="cross_entropy",
    samples=_samples,
    eager=eager,
    bytes_moved=lambda logits, *args, **kwargs: 3 * logits.numel() * logits.element_size(),
    flops=lambda logits, *args, **kwargs: 8 * logits.numel(),
    source="arXiv 2410.10989, equations 6 and 7; transformers ForCausalLMLoss on logits that exist; arXiv 2204.02311, "
    "section 5 (z-loss); Gemma2ForCausalLM (softcap); CohereForCausalLM (logit scale)",
)
