"""Cross entropy on logits that exist."""

import pytest
import torch
import torch.nn.functional as F

from tests.rewriting import calls, rewritten


def logits_and_labels(dtype):
    return torch.randn(6, 40, dtype=dtype), torch.randint(0, 40, (6,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_rewrites(dtype, reduction) -> None:
    def loss(logits, labels):
        return F.cross_entropy(logits.float(), labels, reduction=reduction, ignore_index=5, label_smoothing=0.1)

    logits, labels = logits_and_labels(dtype)
    report = rewritten(loss, logits, labels)
    assert calls(report) == ["fusedops.cross_entropy.default"]
    torch.testing.assert_close(report.graph_modules[0](logits, labels)[0], loss(logits, labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_rewrites_class_weights(dtype, reduction) -> None:
    def loss(logits, labels, weight):
        return F.cross_entropy(logits.float(), labels, weight, reduction=reduction, label_smoothing=0.1)

    logits, labels = logits_and_labels(dtype)
    weight = torch.rand(40)
    report = rewritten(loss, logits, labels, weight)
    assert calls(report) == ["fusedops.cross_entropy.default"]
    assert [s.rule for s in report.sites] == [f"cross_entropy.{reduction}_weighted"]
    torch.testing.assert_close(report.graph_modules[0](logits, labels, weight)[0], loss(logits, labels, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_rewrites_without_upcast(dtype, reduction) -> None:
    """The loss stays in the logits' dtype, but is no further from the truth than eager's."""

    def loss(logits, labels):
        return F.cross_entropy(logits, labels, reduction=reduction, ignore_index=5)

    logits, labels = logits_and_labels(dtype)
    report = rewritten(loss, logits, labels)
    assert [s.rule for s in report.sites] == [f"cross_entropy.{reduction}_not_upcast"]
    got, eager, truth = report.graph_modules[0](logits, labels)[0], loss(logits, labels), loss(logits.double(), labels)
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps * truth.abs().max()
    assert (got - truth).abs().max() <= max((eager - truth).abs().max(), step)


def test_cross_entropy_keeps_probabilities() -> None:
    report = rewritten(lambda x: F.cross_entropy(x, x.softmax(-1)), torch.randn(6, 40))
    assert not report.sites and "probabilities" in report.declined[0].reason


def test_cross_entropy_keeps_classes_in_the_middle() -> None:
    report = rewritten(lambda x, y: F.cross_entropy(x, y), torch.randn(2, 40, 3), torch.randint(0, 40, (2, 3)))
    assert not report.sites and report.declined
