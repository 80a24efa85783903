"""Memory of a card, in bytes: the real allocations, in blocks of 512 bytes, without a cache."""

from __future__ import annotations

from typing import Any

from torch_gcu import _C
from torch_gcu.gcu.cards import _get_device_index


def memory_allocated(device: Any = None) -> int:
    """Bytes in use."""
    return _C.memory_stats(_get_device_index(device))[0]


def max_memory_allocated(device: Any = None) -> int:
    """Largest number of bytes in use since the start, or since :func:`reset_peak_memory_stats`."""
    return _C.memory_stats(_get_device_index(device))[1]


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    """Reset :func:`max_memory_allocated` to the bytes in use."""
    _C.reset_peak(_get_device_index(device))


def empty_cache() -> None:
    """Do nothing: there is no cache."""


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes."""
    current, _, _, total = _C.memory_stats(_get_device_index(device))
    return total - current, total


def memory_stats(device: Any = None) -> dict[str, int]:
    """These values under the names of ``torch.cuda.memory_stats``."""
    current, peak, allocations, _ = _C.memory_stats(_get_device_index(device))
    return {
        "allocated_bytes.all.current": current,
        "allocated_bytes.all.peak": peak,
        "allocation.all.allocated": allocations,
    }
