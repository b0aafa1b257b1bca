"""GEGLU: gelu(gate) * up, with the exact GELU and with its tanh approximation, as Gemma spells it."""

from functools import partial

import torch
import torch.nn.functional as F

from fusedops.rules import gated

RULES = [
    rule
    for name, approximate in (("", "none"), ("tanh_", "tanh"))
    for rule in gated.rules(
        "geglu",
        name,
        partial(F.gelu, approximate=approximate),
        torch.ops.aten.gelu.default,
        approximate=approximate,
    )
]
