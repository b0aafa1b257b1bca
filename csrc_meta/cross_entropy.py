"""Cross entropy of logits with integer labels: loss_i = log(sum_j exp(x_ij)) - x_i,label."""

from collections.abc import Iterator

import torch
from torch import Tensor

from csrc_meta import checks, donation
from csrc_meta.registry import composite, primitive
from csrc_meta.spec import Sample, Spec

ops = torch.ops.fusedops


def compute_dtype(t: Tensor) -> torch.dtype:
    """float64 stays float64; everything else is computed, and its loss returned, in float32."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def check_labels(op: str, labels: Tensor, like: str, other: Tensor, shape: torch.Size) -> None:
    checks.check_dtype(
        op, "labels", labels, checks.LABELS, "Class probabilities are not supported: use torch.nn.functional."
    )
    checks.check_same_device(op, "labels", labels, like, other)
    checks.check_shape(op, "labels", labels, shape, f"One label for each row of {like}.")


def check(op: str, logits: Tensor, labels: Tensor, reduction: str, label_smoothing: float) -> None:
    checks.check_dtype(op, "logits", logits, checks.FLOATING, "Cast them to a floating-point dtype.")
    checks.check_choice(op, "reduction", reduction, checks.REDUCTIONS)
    checks.check_label_smoothing(op, label_smoothing)
    if logits.dim() != 2:
        raise checks.UnsupportedInputError(
            checks.message(op, "logits", checks.describe(logits), "shape (T, V)", "Flatten them: logits.view(-1, V).")
        )
    check_labels(op, labels, "logits", logits, logits.shape[:1])


def _check_forward(logits: Tensor, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float) -> None:
    check("cross_entropy", logits, labels, reduction, label_smoothing)


def _check_backward(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    count: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> None:
    check("cross_entropy_backward", logits, labels, reduction, label_smoothing)
    shape = labels.shape if reduction == "none" else labels.shape[:0]
    checks.check_shape("cross_entropy_backward", "dloss", dloss, shape, "dloss has the shape of the loss.")


def row_losses_ref(logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """Loss of each row, zero where ignored, and its statistics (2, T): the row's maximum, log(sum(exp(x - maximum)))."""
    wide = logits.to(compute_dtype(logits))
    if wide.shape[1] == 0:
        return wide.new_zeros(labels.shape), wide.new_zeros((2, *labels.shape))
    maximum = wide.amax(1)
    log_sum = (wide - maximum.unsqueeze(1)).exp().sum(1).log()
    ignored = labels == ignore_index
    index = labels.masked_fill(ignored, 0).long().unsqueeze(1)
    loss = log_sum - (wide.gather(1, index).squeeze(1) - maximum)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss + label_smoothing * (log_sum - (wide.mean(1) - maximum))
    return loss.masked_fill(ignored, 0.0), torch.stack((maximum, log_sum))


def row_gradients_ref(
    dloss: Tensor, logits: Tensor, labels: Tensor, stats: Tensor, ignore_index: int, label_smoothing: float, out: Tensor
) -> Tensor:
    """d loss / d logits times each row's upstream gradient, written into ``out`` (which may be the logits)."""
    ignored = labels == ignore_index
    gradient = (logits.to(stats.dtype) - stats[0].unsqueeze(1) - stats[1].unsqueeze(1)).exp()
    index = labels.masked_fill(ignored, 0).long().unsqueeze(1)
    if logits.shape[1]:
        gradient -= label_smoothing / logits.shape[1]
        gradient.scatter_add_(1, index, torch.full_like(index, label_smoothing - 1.0, dtype=stats.dtype))
    gradient *= dloss.to(stats.dtype).expand(labels.shape).unsqueeze(1)
    return out.copy_(gradient.masked_fill_(ignored.unsqueeze(1), 0.0))


def reduce(losses: Tensor, count: Tensor, reduction: str) -> Tensor:
    """A mean over no row at all is 0 / 0 = NaN, as in eager."""
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / count if reduction == "mean" else total


def cross_entropy_fake(
    logits: Tensor, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = compute_dtype(logits)
    rows = labels.shape[0]
    loss = logits.new_empty((rows,) if reduction == "none" else (), dtype=wide)
    return loss, logits.new_empty((2, rows), dtype=wide), logits.new_empty((), dtype=wide)


def cross_entropy_ref(
    logits: Tensor, labels: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    checks.check_label_values("cross_entropy", labels, logits.shape[1], ignore_index)
    losses, stats = row_losses_ref(logits, labels, ignore_index, label_smoothing)
    count = (labels != ignore_index).sum().to(losses.dtype)
    return reduce(losses, count, reduction), stats, count


def cross_entropy_backward_fake(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    count: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    return logits.new_empty(logits.shape)


def cross_entropy_backward_ref(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    count: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    dlogits = logits.new_empty(logits.shape)
    upstream = dloss / count if reduction == "mean" else dloss
    return row_gradients_ref(upstream, logits, labels, stats, ignore_index, label_smoothing, dlogits)


def cross_entropy_backward_mutating_ref(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    count: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> None:
    upstream = dloss / count if reduction == "mean" else dloss
    row_gradients_ref(upstream, logits, labels, stats, ignore_index, label_smoothing, logits)


def _setup_context(ctx, inputs, output) -> None:
    logits, labels, ctx.ignore_index, ctx.reduction, ctx.label_smoothing = inputs
    _, stats, count = output
    donation.save(ctx, logits, labels, stats, count)
    ctx.mark_non_differentiable(stats, count)
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss, _dstats, _dcount):
    if dloss is None:
        return (None,) * 5
    (logits, *saved), (dead,) = donation.unpack(ctx, dloss)
    args = (dloss, logits, *saved, ctx.ignore_index, ctx.reduction, ctx.label_smoothing)
    if dead:
        ops.cross_entropy_backward_(*args)
        dlogits = logits.detach()
    else:
        dlogits = ops.cross_entropy_backward(*args)
    return dlogits, None, None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    return ops.cross_entropy_forward(logits, labels, ignore_index, reduction, label_smoothing)[0]


def _no_flops(*args, **kwargs) -> int:
    return 0  # contractions alone count


primitive(
    "cross_entropy_forward(Tensor logits, Tensor labels, int ignore_index, str reduction, float label_smoothing)"
    " -> (Tensor, Tensor, Tensor)",
    check=_check_forward,
    fake=cross_entropy_fake,
    reference=cross_entropy_ref,
    flops=_no_flops,
    setup_context=_setup_context,
    backward=_backward,
)
primitive(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor labels, Tensor stats, Tensor count, int ignore_index,"
    " str reduction, float label_smoothing) -> Tensor",
    check=_check_backward,
    fake=cross_entropy_backward_fake,
    reference=cross_entropy_backward_ref,
    flops=_no_flops,
)
primitive(
    "cross_entropy_backward_(Tensor dloss, Tensor(a!) logits, Tensor labels, Tensor stats, Tensor count,"
    " int ignore_index, str reduction, float label_smoothing) -> ()",
    check=_check_backward,
    fake=lambda *args: None,
    reference=cross_entropy_backward_mutating_ref,
    flops=_no_flops,
)
composite(
    "cross_entropy(Tensor logits, Tensor labels, *, int ignore_index=-100, str reduction='mean',"
    " float label_smoothing=0.0) -> Tensor",
    cross_entropy,
)


def sample_labels(rows: int, vocabulary: int, device: torch.device, ignored: int = 0) -> Tensor:
    labels = torch.randint(0, max(vocabulary, 1), (rows,), device=device)
    labels[:ignored] = -100
    return labels


def _samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
    def sample(label: str, logits: Tensor, ignored: int = 0, **kwargs) -> Sample:
        labels = sample_labels(*logits.shape, device, ignored)
        return Sample(label, (logits.detach().requires_grad_(), labels), kwargs)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    yield sample("mean", tensor(6, 64), ignored=2)
    yield sample("sum", tensor(6, 64), ignored=1, reduction="sum")
    yield sample("none", tensor(6, 64), ignored=2, reduction="none")
    yield sample("label smoothing", tensor(6, 64), ignored=2, label_smoothing=0.1)
    yield sample("all ignored", tensor(3, 16), ignored=3, reduction="sum")
    yield sample("odd vocabulary", tensor(5, 37), reduction="none", label_smoothing=0.2)
    yield sample("one class", tensor(3, 1))
    yield sample("no rows", tensor(0, 16), reduction="sum")
    yield sample("row stride", tensor(4, 50)[:, :33])
    yield sample("transposed", tensor(33, 4).t())
    yield sample("expanded", tensor(1, 33).expand(4, 33))
    yield sample("misaligned", tensor(4 * 33 + 1)[1:].view(4, 33))


def eager(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.to(compute_dtype(logits)),
        labels.long(),
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


SPEC = Spec(
    name="cross_entropy",
    samples=_samples,
    eager=eager,
    bytes_moved=lambda logits, labels, **kwargs: 3 * logits.numel() * logits.element_size(),
    flops=lambda logits, labels, **kwargs: 8 * logits.numel(),
    source="arXiv 2410.10989, equations 6 and 7; transformers ForCausalLMLoss on logits that exist",
)
