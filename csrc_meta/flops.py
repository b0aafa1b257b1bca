"""FLOP formulas for ``torch.utils.flop_counter``, handed over when that module is first imported.

The module imports Triton, which importing this package must not, and its counters copy the table of formulas when they
are made: so the hand-over happens right after its import, whoever causes it.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_COUNTER = "torch.utils.flop_counter"
_formulas: dict[str, Callable[..., int]] = {}


def register(name: str, formula: Callable[..., int]) -> None:
    """Count ``torch.ops.fusedops.<name>`` by ``formula``, a function of argument shapes."""
    _formulas[name] = formula
    if _COUNTER in sys.modules:
        _hand_over(sys.modules[_COUNTER])
    elif not any(isinstance(f, _AfterImport) for f in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _hand_over(counter: ModuleType) -> None:
    for name, formula in _formulas.items():
        packet = getattr(torch.ops.fusedops, name)
        if packet not in counter.flop_registry:
            counter.register_flop_formula(packet)(formula)


class _AfterImport:
    """A finder that lets the counter's own loader run, hands the formulas over and is gone."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _hand_over(module)

        spec.loader.exec_module = exec_module
        return spec
