"""What every fusedops operator is: schema, fake kernel, CPU reference, autograd formula and SPEC.

Importing this package defines ``torch.ops.fusedops.*`` and costs a few milliseconds: it needs torch alone. How an
operator runs on a GPU lives in :mod:`fusedops.kernels` under the same file name.
"""

import importlib
import pkgutil

from csrc_meta.spec import Sample, Spec

# A new operator is a new file with a module-level ``SPEC``: there is no list to edit. Files without one hold what
# operators share.
SPECS: dict[str, Spec] = {}
for _module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
    _spec = getattr(importlib.import_module(f"{__name__}.{_module}"), "SPEC", None)
    if _spec is not None:
        SPECS[_module] = _spec

__all__ = ["SPECS", "Sample", "Spec"]
