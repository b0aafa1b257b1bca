"""Checks of operator inputs. All read metadata only, except for label values, which are read on the CPU alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from csrc_meta.errors import LabelOutOfRangeError, UnsupportedDtypeError, UnsupportedInputError, message

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LABELS = (torch.int64, torch.int32)
REDUCTIONS = ("none", "mean", "sum")


def describe(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"


def check_dtype(op: str, argument: str, t: Tensor, allowed: Sequence[torch.dtype], remedy: str) -> None:
    if t.dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise UnsupportedDtypeError(message(op, argument, describe(t), f"one of {names}", remedy))


def check_same_dtype(op: str, argument: str, t: Tensor, like: str, other: Tensor) -> None:
    if t.dtype != other.dtype:
        raise UnsupportedDtypeError(
            message(
                op,
                argument,
                describe(t),
                f"the dtype of {like}, {other.dtype}",
                f"Cast one of them: {argument}.to({like}.dtype).",
            )
        )


def check_same_device(op: str, argument: str, t: Tensor, like: str, other: Tensor) -> None:
    if t.device != other.device:
        raise UnsupportedInputError(
            message(
                op,
                argument,
                describe(t),
                f"the device of {like}, {other.device}",
                f"Move it: {argument}.to({like}.device).",
            )
        )


def check_shape(op: str, argument: str, t: Tensor, shape: Sequence[int], remedy: str) -> None:
    if t.shape != tuple(shape):
        raise UnsupportedInputError(message(op, argument, describe(t), f"shape {tuple(shape)}", remedy))


def check_choice(op: str, argument: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise UnsupportedInputError(
            message(op, argument, repr(value), f"one of {', '.join(map(repr, choices))}", "Pass one of these.")
        )


def check_label_smoothing(op: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UnsupportedInputError(
            message(op, "label_smoothing", value, "a number in [0, 1]", "Pass the probability mass to spread.")
        )


def check_label_values(op: str, labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise on the first label outside ``[0, vocabulary)``. CPU only: on a GPU the kernels assert on the device."""
    bad = (labels != ignore_index) & ((labels < 0) | (labels >= vocabulary))
    if bool(bad.any()):
        raise LabelOutOfRangeError(
            message(
                op,
                "labels",
                int(labels[bad][0]),
                f"labels in [0, {vocabulary}) or ignore_index={ignore_index}",
                "Check the tokenizer against the vocabulary, or mark the position with ignore_index.",
            )
        )
