"""Ties torch's compile caches to the sources of fusedops.

A cached graph is found again by the names of its operators. Were it not for this, a new version of fusedops with another
autograd formula or fake kernel would be served the graphs of the old one: silently wrong gradients.
"""

import functools
import hashlib
from pathlib import Path

import torch.compiler.config

import csrc_meta


@functools.cache
def sources_digest() -> str:
    """A digest of every source file of both packages."""
    digest = hashlib.sha256()
    for package in (Path(csrc_meta.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.relative_to(package.parent).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def tag_compile_caches() -> None:
    """Add the digest to torch's cache key. It changes which cached graphs are found, and nothing else."""
    config = torch.compiler.config
    tag = f"fusedops-{sources_digest()}"
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {tag}".strip()
