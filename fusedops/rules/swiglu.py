"""SwiGLU: silu(gate) * up, as gated MLPs of the Llama family spell it."""

import torch
import torch.nn.functional as F

from fusedops.rules import gated

RULES = gated.rules("swiglu", "", F.silu, torch.ops.aten.silu.default)
