"""What all tests share: the device, seeds, and compile caches that are off.

The tests of operators run in three ways, chosen by the environment: on a GPU where there is one, else on the CPU
references, and with TRITON_INTERPRET=1, which has to be set before Python starts, on the Triton kernels on the CPU.
"""

import os

# Cached graphs would hide what the sources do now; compiled C++ is found by its own text and may stay. Read by torch
# when it is imported.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import warnings

import pytest
import torch

with warnings.catch_warnings():
    # Under the interpreter the kernels replace the references on purpose.
    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    import fusedops  # noqa: F401  (registers the operators)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() and not INTERPRETED else torch.device("cpu")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a GPU and takes real sizes")
    # Triton's interpreter computes with NumPy, which remarks on infinities and NaN where a GPU doesn't.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")
    config.addinivalue_line("filterwarnings", "ignore:dynamo_pgo force disabled:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE.type == "cpu":
        reason = "runs kernels under the interpreter" if INTERPRETED else "no GPU: torch.cuda.is_available() is False"
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device() -> torch.device:
    """Where tests put their tensors."""
    return DEVICE


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
