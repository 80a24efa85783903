"""Registers the process group ``eccl`` for the device type ``gcu`` only: CPU tensors need gloo beside it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_gcu import _C

__all__ = ["is_available"]


def is_available() -> bool:
    """Whether there are collectives."""
    return dist.is_available()


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=timeout)
    return _C.make_eccl(store, rank, size, gloo)


if is_available():
    dist.Backend.register_backend("eccl", _create, devices=["gcu"])
    dist.is_eccl_available = is_available  # where torch itself looks, as is_nccl_available
