"""SPEC: what tests, benchmarks, the ahead-of-time gate and the reference pages need to know of an operator."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """One call of the operator: ``op(*args, **kwargs)``. Tensors that are differentiated require grad."""

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """One operator.

    Attributes:
        name: the public operator, ``torch.ops.fusedops.<name>``.
        samples: small inputs of every accepted kind, on a device and in a dtype; random, never zeros.
        eager: the same result spelt in plain PyTorch: the reading that errors are compared with.
        bytes_moved: the fewest bytes that forward plus backward must move through device memory for a sample.
        flops: the arithmetic of forward plus backward for a sample.
        source: equation of arXiv 2410.10989 and the HuggingFace spelling it mirrors.
    """

    name: str
    samples: Callable[[torch.device, torch.dtype], Iterator[Sample]]
    eager: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    bytes_moved: Callable[..., int]
    flops: Callable[..., int]
    source: str
