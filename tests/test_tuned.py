"""The table of launch configurations: entries that launchers understand, and none where nothing was measured."""

import pytest
import torch

from fusedops.kernels import tuned
from tests.conftest import INTERPRETED

pytest.importorskip("triton")

SETTINGS = {"fwd": {"BLOCK_M", "num_warps"}, "bwd": {"BLOCK_M", "num_warps", "STAGES", "programs", "RECONVERT"}}


def entries():
    for arch, kernels in tuned.table().items():
        for kernel, sizes in kernels.items():
            for size, widths in sizes.items():
                for width, settings in widths.items():
                    yield arch, kernel, int(size), int(width), settings


def test_table_is_not_empty():
    assert len(list(entries())) > 10


@pytest.mark.parametrize("entry", list(entries()), ids=lambda e: "-".join(map(str, e[:4])))
def test_entries_are_whole_tiles(entry):
    arch, kernel, size, width, settings = entry
    assert arch.startswith(("sm_", "gfx"))
    assert settings.keys() == SETTINGS[kernel.rpartition("_")[2]]
    for value in (width, settings["BLOCK_M"], settings["num_warps"]):
        assert value & (value - 1) == 0
    assert tuned.find(arch, kernel, size, width) == settings


def test_what_was_not_measured_is_left_to_the_launcher():
    assert tuned.find("sm_90", "rms_norm_fwd", 2, 3) == {}
    assert tuned.find("sm_1", "rms_norm_fwd", 2, 4096) == {}
    assert tuned.find("sm_90", "no_such_kernel", 2, 4096) == {}


def test_a_cpu_has_no_architecture():
    assert tuned.architecture(torch.device("cpu")) == ""


@pytest.mark.skipif(INTERPRETED, reason="launchers are not run, only asked")
def test_launchers_take_the_table(monkeypatch):
    from fusedops.kernels import norm

    _, sizes, per_processor = norm._backward_sizes("sm_90", "rms_norm", 4096, 2, True)
    found = tuned.find("sm_90", "rms_norm_bwd", 2, 4096)
    assert per_processor == found["programs"]
    assert sizes == {"BLOCK_N": 4096, **{k: v for k, v in found.items() if k != "programs"}}
    # What measured faster for one width says nothing of another, or of an architecture that was not measured.
    assert norm._backward_sizes("sm_80", "rms_norm", 4096, 2, True)[1] != sizes
