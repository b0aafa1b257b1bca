"""Every error that fusedops raises on purpose.

Each names the operator, the argument, what it got, what it wants and what to do about it. Each also derives from the
built-in exception that eager PyTorch users would catch in its place.
"""


class FusedopsError(Exception):
    """Base of all errors raised by fusedops."""


class UnsupportedInputError(FusedopsError, ValueError):
    """An argument's shape, device or value is outside what the operator accepts."""


class UnsupportedDtypeError(FusedopsError, TypeError):
    """An argument's dtype is outside what the operator accepts."""


class LabelOutOfRangeError(FusedopsError, IndexError):
    """A label is neither ``ignore_index`` nor inside ``[0, vocabulary)``."""


class DoubleBackwardError(FusedopsError, NotImplementedError):
    """A second derivative was asked of an operator that has only a first one."""


class NoKernelError(FusedopsError, NotImplementedError):
    """The operator has no kernel for the device of its inputs."""


class OptionError(FusedopsError, ValueError):
    """``torch.compile(..., backend="fusedops", options=...)`` got an option that nobody reads."""


class StaleLogitsError(FusedopsError, RuntimeError):
    """Logits were read for the first time after a tensor they are computed from had changed."""


class FusedopsWarning(UserWarning):
    """Something of ours failed and the unrewritten graph runs in its place."""


def message(op: str, argument: str, got: object, wants: str, remedy: str) -> str:
    """The one wording that all errors share."""
    return f"fusedops.{op}: {argument}: got {got}, wants {wants}. {remedy}"
