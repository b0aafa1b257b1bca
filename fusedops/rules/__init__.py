"""Which spelling becomes which operator: one file per operator, each ending in a list ``RULES``.

A module without one holds what several share.
"""

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusedops.compiler.rule import Rule


@functools.cache
def all_rules() -> "tuple[Rule, ...]":
    """Every built-in rule."""
    modules = [importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    return tuple(rule for module in modules for rule in getattr(module, "RULES", ()))
