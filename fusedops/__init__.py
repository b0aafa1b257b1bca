"""Triton kernels for LLM training as ``torch.library`` operators, put into models by ``torch.compile``.

Importing fusedops registers ``torch.ops.fusedops.*`` and imports neither Triton nor Inductor.
"""

import csrc_meta
from csrc_meta.errors import (
    DoubleBackwardError,
    FusedopsError,
    FusedopsWarning,
    LabelOutOfRangeError,
    NoKernelError,
    OptionError,
    StaleLogitsError,
    UnsupportedDtypeError,
    UnsupportedInputError,
)
from fusedops import functional, kernels

__version__ = "0.1.0"

kernels.register()

__all__ = [
    "DoubleBackwardError",
    "FusedopsError",
    "FusedopsWarning",
    "LabelOutOfRangeError",
    "NoKernelError",
    "OptionError",
    "StaleLogitsError",
    "UnsupportedDtypeError",
    "UnsupportedInputError",
    "csrc_meta",
    "functional",
    "kernels",
]
