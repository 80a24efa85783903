"""``torch.gcu.amp``: torch's mixed precision for the device ``gcu``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from simulated_gcu import device_type

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(torch.amp.autocast):  # noqa: N801 - torch's name
    """``torch.autocast("gcu")``."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__(device_type(), enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler("gcu")``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(device_type(), *args, **kwargs)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=device_type())
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=device_type())
