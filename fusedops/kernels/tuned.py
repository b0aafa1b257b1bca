"""Launch configurations that were measured, by architecture, kernel, element size and number of columns.

``tuned.json`` is written by ``python -m bench.tune``. Where it has no entry a launcher falls back on a rule of thumb:
nothing is tuned while a model runs.
"""

import functools
import json
from importlib import resources

import torch

# {architecture: {kernel: {bytes of an element: {columns, rounded up to a power of two: {setting: value}}}}}
Table = dict[str, dict[str, dict[str, dict[str, dict[str, int]]]]]


@functools.cache
def table() -> Table:
    return json.loads((resources.files(__package__) / "tuned.json").read_text())


@functools.cache
def architecture(device: torch.device) -> str:
    """The name of a device's instruction set, as in the table: sm_90, gfx942; "" where there is none."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return name.partition(":")[0]


def find(arch: str, kernel: str, element_size: int, columns: int) -> dict[str, int]:
    """The measured settings of a kernel on an architecture for a power of two of columns, or none."""
    return table().get(arch, {}).get(kernel, {}).get(str(element_size), {}).get(str(columns), {})
