"""Checks and demo. Every session does its own set-up: `pip install nox`, then `nox -s demo` or `nox -s tests`."""

import hashlib
import os
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "typecheck", "tests", "aot"]

ROOT = Path(__file__).parent
CONSTRAINTS = "tests/constraints.txt"
LIGER = "liger-kernel==0.8.5"
WORKERS = str(min(os.cpu_count() or 1, 4))

# Each worker computes on one core: two that share two cores with two threads each wait for one another.
TEST_ENV = {"OMP_NUM_THREADS": "1"}


def shared_python(session: nox.Session) -> str:
    """The Python of the one environment that the sessions which need torch share: torch takes minutes to install.

    It is made again when the constraints or the project's dependencies change, and after an interrupted install.
    """
    inputs = [ROOT / CONSTRAINTS, ROOT / "pyproject.toml"]
    key = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:12]
    home = ROOT / ".nox" / f"shared-py{sys.version_info[0]}{sys.version_info[1]}"
    python = str(home / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    stamp = home / "installed"
    if not stamp.exists() or stamp.read_text() != key:
        session.log(f"installing torch and the rest into {home.relative_to(ROOT)}: this takes some minutes, once")
        session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(home), external=True)
        wanted = ["-c", CONSTRAINTS, "-e", ".[demo,test]", "mypy"]
        # Bytecode is left to the imports: compiling all of torch beforehand costs a minute.
        session.run(python, "-m", "pip", "install", "--quiet", "--no-compile", *wanted, external=True)
        stamp.write_text(key)
    return python


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small Llama plainly and through fusedops. Options after `--`: nox -s demo -- --help."""
    session.run(shared_python(session), "-m", "bench.demo", *session.posargs, external=True)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Operators beside their peers, then sweeps over sizes, on a GPU. Options after `--`: nox -s bench -- --help."""
    python = shared_python(session)
    # A peer alone: nothing that the other sessions do needs it, and of its own needs all are there.
    session.run(python, "-m", "pip", "install", "--quiet", "--no-deps", LIGER, external=True)
    for part in ("bench.operators", "bench.sweeps"):
        session.run(python, "-m", part, *session.posargs, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All tests on the CPU references (and the GPU, where there is one), then the kernels under Triton's interpreter."""
    pytest = [shared_python(session), "-m", "pytest", "-q", "--durations=5", "-n", WORKERS, "--dist", "worksteal"]
    session.run(*pytest, *(session.posargs or ["tests"]), env=TEST_ENV, external=True)
    if not session.posargs and sys.platform == "linux":
        session.run(*pytest, "tests/ops", env={**TEST_ENV, "TRITON_INTERPRET": "1"}, external=True)


@nox.session(venv_backend="none")
def aot(session: nox.Session) -> None:
    """Compile every kernel for NVIDIA and AMD targets, without a GPU: no spills, vectorised main loads."""
    session.run(shared_python(session), "-m", "tests.aot", *session.posargs, external=True)


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """mypy over csrc_meta, fusedops and bench, against the torch that the tests run with."""
    session.run(shared_python(session), "-m", "mypy", *session.posargs, external=True)


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def lint(session: nox.Session) -> None:
    """ruff: rules and formatting."""
    session.install("--quiet", "-c", CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
