"""Functions that torch.autocast calls in a device's module."""

from __future__ import annotations

import torch
from simulated_gcu import device_type


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes that autocast may cast to."""
    return [torch.float16, torch.bfloat16]


def is_autocast_enabled() -> bool:
    """Whether autocast is on."""
    return torch.is_autocast_enabled(device_type())


def get_autocast_dtype() -> torch.dtype:
    """The dtype that autocast casts to."""
    return torch.get_autocast_dtype(device_type())


def set_autocast_enabled(enabled: bool) -> None:
    """Turn autocast on or off."""
    torch.set_autocast_enabled(device_type(), enabled)


def set_autocast_dtype(dtype: torch.dtype) -> None:
    """Set the dtype that autocast casts to."""
    torch.set_autocast_dtype(device_type(), dtype)
