"""The cases of swiglu, for the exact formula and for the one by tanh."""

from typing import Any

from csrc_meta.geglu import ACTIVATIONS
from tests.aot.cases import Cases
from tests.aot.cases.swiglu import gated_cases


def cases(launchers: Any) -> Cases:
    for activation in ACTIVATIONS.values():
        yield from gated_cases(launchers.geglu_fwd, launchers.geglu_bwd, launchers.geglu_bwd_, activation)
