"""Which torch is installed, told without importing it: for what the command line refuses."""

from __future__ import annotations

import functools
import re
from importlib import metadata

__all__ = ["FULL_SHARDING_SINCE", "installed_torch"]

FULL_SHARDING_SINCE = (2, 7)
"""The first torch with ``torch.distributed.fsdp.fully_shard`` and what goes with it."""


@functools.lru_cache(maxsize=None)
def installed_torch() -> tuple[int, ...] | None:
    """Major and minor version; None: none is installed, or it does not say."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None
    return None if found is None else tuple(map(int, found.groups()))
