"""Mixed precision of this generation, which exists, but fails.

Users of real cards report that it crashes in the driver with ``free(): invalid pointer``. The simulation raises an
error instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

__all__ = ["GradScaler", "autocast"]


def _crash(what: str) -> NoReturn:
    raise RuntimeError(
        f"free(): invalid pointer, from {what}: mixed precision crashes the driver of this generation of cards; "
        "train in float32"
    )


class autocast:  # noqa: N801 (the vendor's name)
    """Fails when entered, if enabled."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        del cache_enabled
        if dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(
                f"Current GCU Device does not support {dtype}. Please switch dtype to float16 && bfloat16."
            )
        self._enabled = enabled

    def __enter__(self) -> None:
        """Raise the error of the crash, if enabled."""
        if self._enabled:
            _crash("torch_gcu.amp.autocast")

    def __exit__(self, *_exception: Any) -> None:
        """Do nothing."""


class GradScaler:
    """Fails when constructed, if enabled."""

    def __init__(self, *_arguments: Any, enabled: bool = True, **_options: Any) -> None:
        if enabled:
            _crash("torch_gcu.amp.GradScaler")
