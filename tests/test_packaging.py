"""What is shipped: one wheel of two typed packages, cheap imports, a backend found by name."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import fusedops

ROOT = Path(__file__).parent.parent
BACKEND = "fusedops.compiler.backend:fusedops"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # Built from a copy: setuptools writes beside the sources.
    source = tmp_path_factory.mktemp("source")
    for name in ("csrc_meta", "fusedops"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True, text=True)
    (built,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_wheel_holds_both_typed_packages_and_nothing_else(wheel):
    names = set(wheel.namelist())
    sources = {p.relative_to(ROOT).as_posix() for d in ("csrc_meta", "fusedops") for p in (ROOT / d).rglob("*.py")}
    assert sources <= names
    assert {"csrc_meta/py.typed", "fusedops/py.typed", "fusedops/kernels/tuned.json"} <= names
    assert {n.split("/")[0] for n in names} == {"csrc_meta", "fusedops", f"fusedops-{fusedops.__version__}.dist-info"}


def metadata(wheel, name):
    return wheel.read(f"fusedops-{fusedops.__version__}.dist-info/{name}").decode()


def test_wheel_declares_what_it_needs(wheel):
    text = metadata(wheel, "METADATA")
    assert "Requires-Python: >=3.10" in text
    assert "Requires-Dist: torch>=2.11\n" in text
    assert 'Requires-Dist: triton; sys_platform == "linux"' in text
    assert "License-Expression: Apache-2.0" in text


def test_backend_is_declared(wheel):
    assert f"[torch_dynamo_backends]\nfusedops = {BACKEND}" in metadata(wheel, "entry_points.txt")


def test_backend_loads_by_name():
    entries = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fusedops")
    if not entries:
        pytest.skip("fusedops runs from its sources, not installed")
    (entry,) = entries
    assert entry.value == BACKEND
    assert callable(entry.load())


@pytest.mark.parametrize("package", ["fusedops", "csrc_meta"])
def test_import_is_cheap(package):
    # torch itself may import either one day: what counts is what our import adds.
    code = (
        "import sys, torch; before = set(sys.modules); "
        f"import {package}; print(*(set(sys.modules) - before), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    added = run.stdout.split()
    assert package in added
    heavy = [m for m in added if m.split(".")[0] in ("triton", "transformers", "rich")]
    heavy += [m for m in added if m.startswith(("torch._inductor", "torch._dynamo"))]
    assert not heavy


def test_public_names_exist():
    assert {"Report", "explain", "functional", "pre_grad_pass"} <= set(fusedops.__all__)
    for name in fusedops.__all__:
        assert getattr(fusedops, name) is not None
