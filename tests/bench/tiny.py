"""Every measured operator at a size for a CPU, and what it takes to measure one there."""

import dataclasses

import torch
from rich.console import Console

from bench.case import Setting
from bench.peers import OPERATORS
from bench.peers.operator import COMPILE, KINDS, LIGER
from bench.timing import WallTimer

SHAPES = {
    "rms_norm": (6, 32),
    "add_rms_norm": (6, 32),
    "layer_norm": (6, 32),
    "rotary_embedding": (2, 5, 4, 2, 8),
    "swiglu": (6, 32),
    "packed_swiglu": (6, 32),
    "geglu": (6, 32),
    "cross_entropy": (5, 40),
    "linear_cross_entropy": (5, 16, 40),
}
CPU = Setting(torch.device("cpu"), WallTimer(), 1000, 2**16, Console(quiet=True))
# Compiling takes seconds, and Liger has no CPU kernels.
KINDS_HERE = [kind for kind in KINDS if kind not in (COMPILE, LIGER)]


def operator(name, **changes):
    (op,) = (op for op in OPERATORS if op.name == name)
    return dataclasses.replace(op, shapes=(SHAPES[name],), **changes)
