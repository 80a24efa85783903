"""The dtype in which kernels compute; arguments for each axis."""

from __future__ import annotations

from typing import Sequence

import torch

__all__ = ["per_axis", "to_float32"]


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as float32 if it is float16 or bfloat16, else ``tensor`` itself; do not modify the result in place."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def per_axis(values: Sequence[int], axes: int) -> list[int]:
    """One value for each axis; a single value is for all."""
    return list(values) * axes if len(values) == 1 else list(values)
