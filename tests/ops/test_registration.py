"""How launchers are found and registered, and what importing fusedops costs."""

import importlib
import subprocess
import sys

import pytest
import torch

from csrc_meta import cross_entropy, registry
from csrc_meta.errors import DoubleBackwardError
from fusedops import kernels
from tests.conftest import INTERPRETED

imports = pytest.mark.skipif(INTERPRETED, reason="starts a new process, which no kernel takes part in")


def in_new_process(code: str) -> str:
    """Python that has imported nothing yet; its output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@imports
def test_import_is_cheap():
    in_new_process(
        "import sys, torch, fusedops\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] == 'triton' or m.startswith('torch._inductor')]\n"
        "assert not loaded, loaded"
    )


@imports
def test_without_triton_no_kernel_is_registered_for_gpus():
    in_new_process(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch, fusedops, csrc_meta.registry\n"
        "for name in csrc_meta.registry.primitives():\n"
        "    for key in ('CUDA', 'XPU'):\n"
        "        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f'fusedops::{name}', key)\n"
        "assert fusedops.functional.rms_norm(torch.ones(2, 4)).shape == (2, 4)"
    )


@imports
def test_flop_formulas_reach_a_counter_imported_later():
    in_new_process(
        "import csrc_meta.registry, fusedops, torch, sys\n"
        "assert 'torch.utils.flop_counter' not in sys.modules\n"
        "from torch.utils.flop_counter import flop_registry\n"
        "for name in csrc_meta.registry.primitives():\n"
        "    assert getattr(torch.ops.fusedops, name) in flop_registry, name"
    )


@pytest.mark.parametrize("key", kernels.GPU_KEYS)
@pytest.mark.parametrize("name", registry.primitives())
def test_every_primitive_has_a_launcher(name, key):
    pytest.importorskip("triton")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fusedops::{name}", key)
    module, function = kernels.launcher_name(name)
    assert callable(getattr(importlib.import_module(module), function))


def test_launcher_names():
    assert kernels.launcher_name("rms_norm_forward") == ("fusedops.kernels.rms_norm", "rms_norm_fwd")
    assert kernels.launcher_name("cross_entropy_backward") == ("fusedops.kernels.cross_entropy", "cross_entropy_bwd")
    assert kernels.launcher_name("cross_entropy_backward_") == ("fusedops.kernels.cross_entropy", "cross_entropy_bwd_")
    assert kernels.launcher_name("linear_cross_entropy_scale") == (
        "fusedops.kernels.linear_cross_entropy",
        "linear_cross_entropy_scale",
    )


MUTATING = [name for name in registry.primitives() if getattr(torch.ops.fusedops, name).default._schema.is_mutable]


@pytest.mark.parametrize("name", MUTATING)
def test_mutating_variants_take_the_arguments_of_their_operators(name):
    schemas = [getattr(torch.ops.fusedops, n).default._schema for n in (name, name.removesuffix("_"))]
    mutating, functional = (
        [(a.name, str(a.type)) for a in schema.arguments if a.name not in ("output_mask", "dtype")]
        for schema in schemas
    )
    assert mutating == functional
    assert not schemas[0].returns


def test_differentiating_a_mutating_variant_raises(device):
    """It has no formula, and without one of ours torch would leave its gradient out in silence."""
    leaf = torch.randn(3, 5, device=device).requires_grad_()
    one, labels, stats = torch.ones((), device=device), torch.zeros(3, device=device).long(), leaf.new_zeros(2, 3)

    def call(logits: torch.Tensor) -> None:
        options = cross_entropy.Options()
        torch.ops.fusedops.cross_entropy_backward_(one, logits, labels, None, stats, one, "mean", *options)

    with pytest.raises(DoubleBackwardError):
        call(leaf * 1.0)
    saved = leaf.exp()
    with torch.no_grad():
        call(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_registering_again_is_harmless(device):
    kernels.register()
    importlib.reload(kernels).register()
    x = torch.randn(2, 8, device=device)
    assert torch.ops.fusedops.rms_norm(x, None, 1e-6).shape == (2, 8)


@imports
def test_reimport_is_harmless():
    in_new_process(
        "import sys, torch, fusedops\n"
        "for name in [m for m in sys.modules if m.split('.')[0] in ('fusedops', 'csrc_meta')]:\n"
        "    del sys.modules[name]\n"
        "import csrc_meta.registry, fusedops\n"
        "assert fusedops.functional.rms_norm(torch.ones(2, 4)).shape == (2, 4)\n"
        "assert csrc_meta.registry.primitives()"
    )
