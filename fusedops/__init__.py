"""Triton kernels for LLM training as ``torch.library`` operators, put into models by ``torch.compile``.

Importing fusedops registers ``torch.ops.fusedops.*`` and imports neither Triton nor Inductor.
"""

import importlib
from typing import Any

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
from fusedops.cache_key import tag_compile_caches

__version__ = "0.1.0"

kernels.register()
tag_compile_caches()

# The compiler costs a second to import: it comes when first asked for.
_LAZY = {
    "Report": "fusedops.compiler.report",
    "explain": "fusedops.compiler.backend",
    "pre_grad_pass": "fusedops.compiler.pre_grad",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DoubleBackwardError",
    "FusedopsError",
    "FusedopsWarning",
    "LabelOutOfRangeError",
    "NoKernelError",
    "OptionError",
    "Report",
    "StaleLogitsError",
    "UnsupportedDtypeError",
    "UnsupportedInputError",
    "explain",
    "functional",
    "kernels",
    "pre_grad_pass",
]
