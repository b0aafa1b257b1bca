"""cross_entropy: vocabularies that take several blocks, extreme logits, ignored rows, rejected inputs."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from csrc_meta import SPECS, Sample
from csrc_meta.errors import LabelOutOfRangeError, UnsupportedDtypeError, UnsupportedInputError
from fusedops import functional
from tests.ops.compare import assert_bounded, assert_close_to_eager, in_dtype, rejection, run, snapshot

REDUCTIONS = ("none", "mean", "sum")
EAGER = SPECS["cross_entropy"].eager
INF, NAN = float("inf"), float("nan")


def sample(device, rows, vocabulary, dtype=torch.float32, scale=1.0, weight_dtype=None, **kwargs) -> Sample:
    logits = (torch.randn(rows, vocabulary, device=device) * scale).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), device=device)
    labels[::4] = kwargs.get("ignore_index", -100)
    weight = None if weight_dtype is None else (torch.rand(vocabulary, device=device) * 2).to(weight_dtype)
    return Sample("", (logits, labels, weight), kwargs)


# One block that is full, two with a short one, several; an odd vocabulary has rows that start misaligned.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [4096, 4099, 12345])
def test_cross_entropy_blocks(device, vocabulary, dtype):
    assert_close_to_eager(functional.cross_entropy, EAGER, sample(device, 5, vocabulary, dtype, label_smoothing=0.1))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy_reductions(device, reduction, label_smoothing):
    for ignore_index in (-100, 3, -1):
        kwargs = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
        assert_close_to_eager(functional.cross_entropy, EAGER, sample(device, 8, 50, **kwargs))


NUMBERS = {
    "label_smoothing": (0.0, 0.1),
    "softcap": (None, 4.0),
    "logit_scale": (1.0, 0.3, -2.0),
    "z_loss": (0.0, 0.02),
}
COMBINATIONS = [dict(zip(NUMBERS, values, strict=True)) for values in itertools.product(*NUMBERS.values())]


def named(options: dict) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items() if value != NUMBERS[name][0]) or "plain"


@pytest.mark.parametrize("options", COMBINATIONS, ids=named)
def test_cross_entropy_options(device, options):
    """Every combination, with and without class weights; two blocks, the last one short."""
    for reduction, weight_dtype in (("none", None), ("mean", torch.float32)):
        case = sample(device, 5, 4099, scale=3.0, weight_dtype=weight_dtype, reduction=reduction, **options)
        assert_close_to_eager(functional.cross_entropy, EAGER, case)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_all_options(device, reduction, dtype):
    for ignore_index, weight_dtype in ((-100, dtype), (3, torch.float32), (-1, torch.bfloat16)):
        options = {"label_smoothing": 0.1, "softcap": 4.0, "logit_scale": 0.5, "z_loss": 0.02, "reduction": reduction}
        case = sample(device, 8, 50, dtype, 3.0, weight_dtype, ignore_index=ignore_index, **options)
        assert_close_to_eager(functional.cross_entropy, EAGER, case)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_weights_as_in_torch(device, label_smoothing):
    """Against torch's own function, of which EAGER makes more: a mean divides by the weights of the labels."""
    logits, labels, weight = sample(device, 8, 50, weight_dtype=torch.float32).args
    for reduction in REDUCTIONS:
        kwargs = {"reduction": reduction, "label_smoothing": label_smoothing}
        got = functional.cross_entropy(logits, labels, weight, **kwargs)
        torch.testing.assert_close(got, F.cross_entropy(logits, labels, weight, **kwargs))


def test_cross_entropy_z_loss_is_that_of_palm(device):
    """The equation as it was published: z_loss * log(Z)^2 for each token, in the mean over them."""
    logits, labels, _ = sample(device, 8, 50).args
    kept = labels != -100
    wanted = F.cross_entropy(logits, labels) + 1e-2 * logits.exp().sum(1).log().square()[kept].mean()
    torch.testing.assert_close(functional.cross_entropy(logits, labels, z_loss=1e-2), wanted)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_zero_weights(device, reduction):
    """Classes without weight: a row of such a label has no loss, and a mean over no weight at all is 0 / 0, as in eager."""
    logits, labels, weight = sample(device, 8, 50, weight_dtype=torch.float32).args
    weight[labels[1:3]] = 0.0
    kwargs = {"reduction": reduction, "label_smoothing": 0.1}
    assert_close_to_eager(functional.cross_entropy, EAGER, Sample("", (logits, labels, weight), kwargs))
    loss = functional.cross_entropy(logits, labels, weight * 0.0, reduction=reduction)
    wanted = F.cross_entropy(logits, labels, weight * 0.0, reduction=reduction)
    torch.testing.assert_close(loss, wanted, equal_nan=True)


@pytest.mark.parametrize("magnitude", [1e-6, 1e-3, 1.0, 50.0, 1e4, 1e30])
def test_cross_entropy_softcap_range(device, magnitude):
    """From where tanh is the identity to where it is flat; exp of twice the argument would overflow on the way."""
    case = sample(device, 6, 300, scale=magnitude, softcap=30.0, reduction="none")
    assert_close_to_eager(functional.cross_entropy, EAGER, case)


@pytest.mark.parametrize("argument", [1e-4, 1e-3, 0.1, 0.24, 0.26])
def test_cross_entropy_softcap_near_zero(device, argument):
    """Logits of 1 and -1 far below the cap: a small tanh's relative error is that of z."""
    cap = 1.0 / argument
    loss = functional.cross_entropy(
        torch.tensor([[1.0, -1.0]], device=device), torch.zeros(1, device=device).long(), softcap=cap
    )
    truth = F.softplus(-2.0 * cap * torch.tensor(argument, dtype=torch.float64).tanh())
    assert float(loss) == pytest.approx(float(truth), rel=3e-6)


def test_cross_entropy_softcap_infinite_logits(device):
    """The cap makes them finite: loss and gradient are eager's, which are zero beyond the cap."""
    logits = torch.randn(4, 5000, device=device)
    logits[0, 3], logits[1, 3], logits[2, 4500], logits[3] = INF, -INF, -INF, INF
    labels = torch.tensor([3, 3, 4, 7], device=device)
    case = Sample("", (logits.requires_grad_(), labels), {"softcap": 5.0, "reduction": "none"})
    assert_close_to_eager(functional.cross_entropy, EAGER, case)


def test_cross_entropy_int32_labels(device):
    logits, labels, _ = sample(device, 8, 50).args
    case = Sample("", (logits, labels.int()), {})
    assert_close_to_eager(functional.cross_entropy, EAGER, case)


def test_cross_entropy_strided_labels(device):
    logits, labels, _ = sample(device, 8, 50).args
    case = Sample("", (logits, torch.stack((labels, labels), 1)[:, 0]), {})
    assert_close_to_eager(functional.cross_entropy, EAGER, case)


def test_cross_entropy_strided_gradient(device):
    case = sample(device, 8, 50, reduction="none")
    for upstream in (torch.randn(8, 3, device=device)[:, 1], torch.randn((), device=device).expand(8)):
        got = run(functional.cross_entropy, case, upstream)
        wanted = run(functional.cross_entropy, case, upstream.contiguous())
        torch.testing.assert_close(got.tensors(), wanted.tensors(), atol=0.0, rtol=0.0)


# Whatever eager gives is right, infinities and NaN included. Each row: what the logits hold and where the label is.
EXTREMES = {
    "label on +1e30": ([(3, 1e30)], 3),
    "label off +1e30": ([(3, 1e30)], 4),
    "label on -1e30": ([(3, -1e30)], 3),
    "all -1e30 but one": ([(slice(1, None), -1e30)], 0),
    "first block masked": ([(slice(0, 4500), -INF)], 4600),
    "last block masked": ([(slice(3000, None), -INF)], 7),
    "label masked": ([(slice(0, 9), -INF)], 4),
    "all masked": ([(slice(None), -INF)], 4),
    "+inf": ([(11, INF)], 4),
    "label on +inf": ([(11, INF)], 11),
    "+inf after a masked block": ([(slice(0, 4096), -INF), (4500, INF)], 4600),
    "nan": ([(4500, NAN)], 4),
    "label on nan": ([(4, NAN)], 4),
    "all nan": ([(slice(None), NAN)], 4),
    "all equal": ([(slice(None), 700.0)], 4),
}


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_extreme(device, dtype, label_smoothing):
    logits = torch.randn(len(EXTREMES), 5000, device=device, dtype=dtype)
    labels = torch.empty(len(EXTREMES), device=device, dtype=torch.int64)
    for row, (values, label) in enumerate(EXTREMES.values()):
        labels[row] = label
        for where, value in values:
            logits[row, where] = value
    case = Sample("", (logits.requires_grad_(), labels), {"reduction": "none", "label_smoothing": label_smoothing})
    wide = in_dtype(case, torch.float64)
    upstream = torch.linspace(0.5, 2.0, len(EXTREMES), device=device)
    results = [run(f, c, upstream) for f, c in ((functional.cross_entropy, case), (EAGER, case), (EAGER, wide))]
    for name, tensors in (("loss", [r.output for r in results]), ("gradient", [r.gradients[0] for r in results])):
        for label, *rows in zip(EXTREMES, *tensors, strict=True):
            assert_bounded(f"{label}: {name}", *rows)


@pytest.mark.parametrize("scale", [300.0, 3000.0])
def test_cross_entropy_large_logits(device, scale):
    """Losses near zero beside a maximum of several hundred: log(sum(exp)) as one number would lose them."""
    logits = torch.randn(16, 300, device=device)
    logits += scale
    labels = logits.argmax(1)
    logits[torch.arange(16), labels] += 8.0
    logits.requires_grad_()
    for reduction in ("none", "mean"):
        case = Sample("", (logits, labels), {"reduction": reduction})
        assert_close_to_eager(functional.cross_entropy, EAGER, case)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cross_entropy_ignored_rows(device, reduction):
    """Loss and gradient of an ignored row are zeros that were written, whatever the row holds."""
    logits = torch.randn(6, 5000, device=device)
    logits[1], logits[2, 7], logits[3] = NAN, INF, -INF
    labels = torch.tensor([4, -100, -100, -100, 4999, -100], device=device)
    case = Sample("", (logits.requires_grad_(), labels), {"reduction": reduction})
    assert_close_to_eager(
        functional.cross_entropy, lambda x, *a, **k: EAGER(x.nan_to_num(0.0, 0.0, 0.0), *a, **k), case
    )
    loss = functional.cross_entropy(logits, labels, reduction=reduction)
    (dlogits,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
    assert torch.equal(dlogits[labels == -100], torch.zeros(4, 5000, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_all_ignored(device, dtype):
    logits = torch.randn(3, 40, device=device, dtype=dtype).requires_grad_()
    labels = torch.full((3,), -100, device=device)
    weight = torch.rand(40, device=device)
    for args, kwargs in (((), {}), ((weight,), {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1})):
        loss = functional.cross_entropy(logits, labels, *args, **kwargs)
        (dlogits,) = torch.autograd.grad(loss, logits)
        assert loss.isnan()
        assert torch.equal(dlogits, torch.zeros_like(dlogits))


def test_cross_entropy_loss_scale_in_float16(device):
    """The upstream gradient is multiplied in before rounding: unscaled, most of these would be zero in float16."""
    logits = torch.randn(8, 3000, device=device, dtype=torch.float16).requires_grad_()
    logits.data[:, 5] += 16.0
    labels = torch.full((8,), 5, device=device)
    upstream = torch.tensor(65536.0, device=device)
    case = Sample("", (logits, labels), {})
    (dlogits,) = run(functional.cross_entropy, case, upstream).gradients
    wide = logits.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(F.cross_entropy(wide, labels), wide, upstream.double())
    (unscaled,) = run(EAGER, case, torch.tensor(1.0, device=device)).gradients
    assert (unscaled == 0).float().mean() > 0.5
    assert (dlogits == 0).float().mean() < 0.01
    assert_bounded("gradient", dlogits, truth.half(), truth)


@pytest.mark.parametrize("shape", [(0, 16), (0, 0), (3, 0)], ids=str)
def test_cross_entropy_empty(device, shape):
    logits = torch.randn(shape, device=device).requires_grad_()
    labels = torch.full(shape[:1], -100, device=device)
    for reduction in ("none", "mean", "sum"):
        loss = functional.cross_entropy(logits, labels, reduction=reduction)
        (dlogits,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
        assert dlogits.shape == shape
        assert loss.isnan() if reduction == "mean" else torch.equal(loss, torch.zeros_like(loss))


def test_cross_entropy_autocast(device):
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device.type, torch.bfloat16):
            assert_close_to_eager(functional.cross_entropy, EAGER, sample(device, 6, 40, dtype))


def rejects(error: type[Exception], logits, labels, weight=None, **kwargs) -> str:
    return rejection(error, lambda: functional.cross_entropy(logits, labels, weight, **kwargs))


def test_cross_entropy_rejects_labels_out_of_range():
    logits = torch.ones(2, 4)
    snapshot(
        rejects(LabelOutOfRangeError, logits, torch.tensor([0, 4])),
        """fusedops.cross_entropy: labels: got 4, wants labels in [0, 4) or ignore_index=-100. Check the tokenizer against the vocabulary, or mark the position with ignore_index.""",
    )
    snapshot(
        rejects(LabelOutOfRangeError, logits, torch.tensor([-1, 0])),
        """fusedops.cross_entropy: labels: got -1, wants labels in [0, 4) or ignore_index=-100. Check the tokenizer against the vocabulary, or mark the position with ignore_index.""",
    )


def test_cross_entropy_rejects_probabilities():
    snapshot(
        rejects(UnsupportedDtypeError, torch.ones(2, 4), torch.ones(2, 4)),
        """fusedops.cross_entropy: labels: got (2, 4) float32 on cpu, wants one of int64, int32. Class probabilities are not supported: use torch.nn.functional.""",
    )


def test_cross_entropy_rejects_integer_logits():
    snapshot(
        rejects(UnsupportedDtypeError, torch.ones(2, 4).int(), torch.zeros(2).long()),
        """fusedops.cross_entropy: logits: got (2, 4) int32 on cpu, wants one of bfloat16, float16, float32, float64. Cast them to a floating-point dtype.""",
    )


def test_cross_entropy_rejects_shapes():
    snapshot(
        rejects(UnsupportedInputError, torch.ones(2, 3, 4), torch.zeros(2, 3).long()),
        """fusedops.cross_entropy: logits: got (2, 3, 4) float32 on cpu, wants shape (T, V). Flatten them: logits.view(-1, V).""",
    )
    snapshot(
        rejects(UnsupportedInputError, torch.ones(2, 4), torch.zeros(3).long()),
        """fusedops.cross_entropy: labels: got (3,) int64 on cpu, wants shape (2,). One label for each row of logits.""",
    )


def test_cross_entropy_rejects_labels_on_another_device():
    labels = torch.zeros(2, device="meta", dtype=torch.int64)
    snapshot(
        rejects(UnsupportedInputError, torch.ones(2, 4), labels),
        """fusedops.cross_entropy: labels: got (2,) int64 on meta, wants the device of logits, cpu. Move it: labels.to(logits.device).""",
    )


def test_cross_entropy_rejects_options():
    args = torch.ones(2, 4), torch.zeros(2).long()
    snapshot(
        rejects(UnsupportedInputError, *args, reduction="batchmean"),
        """fusedops.cross_entropy: reduction: got 'batchmean', wants one of 'none', 'mean', 'sum'. Pass one of these.""",
    )
    snapshot(
        rejects(UnsupportedInputError, *args, label_smoothing=1.5),
        """fusedops.cross_entropy: label_smoothing: got 1.5, wants a number in [0, 1]. Pass the probability mass to spread.""",
    )
    snapshot(
        rejects(UnsupportedInputError, *args, softcap=0.0),
        """fusedops.cross_entropy: softcap: got 0.0, wants a positive number or None. Pass the bound of the logits' magnitude.""",
    )
    snapshot(
        rejects(UnsupportedInputError, *args, logit_scale=NAN),
        """fusedops.cross_entropy: logit_scale: got nan, wants a finite number. Pass the factor of the logits.""",
    )
    snapshot(
        rejects(UnsupportedInputError, *args, z_loss=-1e-4),
        """fusedops.cross_entropy: z_loss: got -0.0001, wants a number that is not negative. Pass the factor of lse^2.""",
    )


def test_cross_entropy_rejects_weights():
    args = torch.ones(2, 4), torch.zeros(2).long()
    snapshot(
        rejects(UnsupportedInputError, *args, torch.ones(3)),
        """fusedops.cross_entropy: weight: got (3,) float32 on cpu, wants shape (4,). One weight for each class.""",
    )
    snapshot(
        rejects(UnsupportedDtypeError, *args, torch.ones(4).long()),
        """fusedops.cross_entropy: weight: got (4,) int64 on cpu, wants one of bfloat16, float16, float32, float64. Cast it to a floating-point dtype.""",
    )
    snapshot(
        rejects(UnsupportedInputError, *args, torch.ones(4, device="meta")),
        """fusedops.cross_entropy: weight: got (4,) float32 on meta, wants the device of logits, cpu. Move it: weight.to(logits.device).""",
    )


def test_cross_entropy_rejects_weights_that_require_grad():
    """They would get no gradient: eager has none for them either."""
    args = torch.ones(2, 4).requires_grad_(), torch.zeros(2).long(), torch.ones(4).requires_grad_()
    snapshot(
        rejects(UnsupportedInputError, *args),
        """fusedops.cross_entropy: weight: got a tensor that requires grad, wants one that does not. Detach it: weight.detach().""",
    )
    with torch.no_grad():
        functional.cross_entropy(*args)
