"""The gate catches what it is for, and sees every kernel that there is."""

import importlib
import pkgutil

import pytest
import torch

from fusedops import kernels
from tests.conftest import INTERPRETED

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from tests.aot.gate import TARGETS, judge, units  # noqa: E402
from tests.aot.record import Launch, all_launches, recorded_launches  # noqa: E402

each_target = pytest.mark.parametrize("target", TARGETS)


@triton.jit
def copy_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    columns = tl.arange(0, BLOCK_N)
    tl.store(y_ptr + columns, tl.load(x_ptr + columns))


@triton.jit
def strided_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    """Reads every other element: one load for each."""
    columns = tl.arange(0, BLOCK_N)
    tl.store(y_ptr + columns, tl.load(x_ptr + 2 * columns))


@triton.jit
def spilling_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    """Holds a whole row, since its sum comes before its use."""
    columns = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + columns)
    tl.store(y_ptr + columns, x / tl.sum(x, 0))


@triton.jit
def broken_kernel(x_ptr, y_ptr, BLOCK_N: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK_N), tl.load(x_ptr + tl.arange(0, 2 * BLOCK_N)))


# Fewer registers than that row needs. A row that needs more than there are would take a minute to compile.
FEW_REGISTERS = {"cuda": {"maxnreg": 32}, "hip": {"waves_per_eu": 8}}


def verdict(kernel, target: str, columns: int, **options):
    tensors = torch.empty(2 * columns), torch.empty(columns)
    with recorded_launches() as calls:
        kernel[(1,)](*tensors, columns, **options)
    (unit,) = units([Launch("test", *call) for call in calls], {target: TARGETS[target]})
    return judge(unit)


@each_target
def test_gate_passes_a_copy(target):
    result = verdict(copy_kernel, target, 4096, num_warps=4)
    assert not result.problem
    assert result.vector_loads >= result.wanted_loads > 0


@each_target
def test_gate_catches_scalar_loads(target):
    assert "main loads are 16 bytes wide" in verdict(strided_kernel, target, 4096, num_warps=4).problem


@each_target
def test_gate_catches_spills(target):
    columns, options = 128 * TARGETS[target].warp_size, FEW_REGISTERS[TARGETS[target].backend]
    assert "spills" in verdict(spilling_kernel, target, columns, num_warps=1, **options).problem


def test_gate_catches_what_does_not_compile():
    assert "does not compile" in verdict(broken_kernel, "sm_90", 64, num_warps=4).problem


def test_gate_sees_every_kernel():
    """A kernel that no case launches would never be compiled here."""
    launched = {launch.kernel.__name__ for target in TARGETS for launch in all_launches(target)}
    written = set()
    for module in pkgutil.iter_modules(kernels.__path__):
        written |= {
            name
            for name in vars(importlib.import_module(f"fusedops.kernels.{module.name}"))
            if name.endswith("_kernel")
        }
    assert launched == written


def test_recording_ends():
    run = triton.runtime.jit.JITFunction.run
    with pytest.raises(KeyError), recorded_launches():
        raise KeyError
    assert triton.runtime.jit.JITFunction.run is run
