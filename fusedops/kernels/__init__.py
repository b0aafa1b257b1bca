"""How operators run on a GPU. Triton is imported when the first kernel is launched, not before.

Launchers are found by name, so that a new operator adds no line here. The primitive operator ``<op>_forward`` of
``csrc_meta/<op>.py`` is launched by ``<op>_fwd`` in ``fusedops/kernels/<op>.py``, ``<op>_backward`` by ``<op>_bwd``, its
mutating variant ``<op>_backward_`` by ``<op>_bwd_``, and any other ``<op>_<verb>`` by the function of that very name. A
launcher takes the operator's arguments as they come.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from csrc_meta import SPECS, registry

LAUNCHER_VERBS = {"_forward": "_fwd", "_backward": "_bwd", "_backward_": "_bwd_"}
GPU_KEYS = ("CUDA", "XPU")  # ROCm builds of torch dispatch on CUDA too

# torch forgets a kernel when the library that registered it is collected: the handles outlive a reload of this module.
_libraries: dict[str, torch.library.Library] = torch.library.__dict__.setdefault("_fusedops_kernels", {})


def register() -> None:
    """Register a launcher for each primitive operator; calling it again is harmless.

    Without Triton nothing is registered and the operators raise NoKernelError on a GPU. Where the environment has
    TRITON_INTERPRET=1, the kernels replace the references on the CPU too: that is how they are tested without a GPU.
    """
    if importlib.util.find_spec("triton") is None:
        return
    keys = (*GPU_KEYS, "CPU") if os.environ.get("TRITON_INTERPRET") == "1" else GPU_KEYS
    for key in keys:
        if key not in _libraries:
            _libraries[key] = torch.library.Library(registry.NAMESPACE, "IMPL")
            for name in registry.primitives():
                registry.register_kernel(name, key, _launcher(name), _libraries[key])


def launcher_name(primitive: str) -> tuple[str, str]:
    """Module and function that launch a primitive operator."""
    op = max((op for op in SPECS if primitive.startswith(f"{op}_")), key=len)
    verb = primitive.removeprefix(op)
    return f"{__name__}.{op}", op + LAUNCHER_VERBS.get(verb, verb)


def _launcher(primitive: str) -> Callable[..., Any]:
    module, function = launcher_name(primitive)

    @functools.cache
    def load() -> Callable[..., Any]:
        return getattr(importlib.import_module(module), function)

    def launch(*args: Any) -> Any:
        return load()(*args)

    return launch
