"""What a benchmark ran on: recorded with every result."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("fusedops", "torch", "triton", "transformers", "liger_kernel", "numpy")


def describe(device: torch.device) -> dict[str, Any]:
    """Hardware and versions; names that are absent here are absent there."""
    found: dict[str, Any] = {"device": device.type, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    # A version from the source tree counts where the package was not installed.
    if "fusedops" not in found:
        import fusedops

        found["fusedops"] = fusedops.__version__
    found["torch"] = torch.__version__
    found["system"] = f"{platform.system()} {platform.machine()}"
    found["processor"] = _processor()
    found["processor cores"] = os.cpu_count()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu memory, MiB"] = properties.total_memory // 2**20
        found["gpu multiprocessors"] = properties.multi_processor_count
        found["gpu L2, MiB"] = round(l2_bytes(device) / 2**20)
        found["CUDA"] = torch.version.cuda
        found["HIP"] = torch.version.hip
    return {name: value for name, value in found.items() if value is not None}


def l2_bytes(device: torch.device) -> int:
    """Size of the last-level cache that a benchmark must not measure by accident."""
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "L2_cache_size", 0) or 64 * 2**20


def _processor() -> str | None:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
