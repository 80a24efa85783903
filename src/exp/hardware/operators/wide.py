"""The type in which kernels compute."""

from __future__ import annotations

from typing import overload

import torch

__all__ = ["wide"]


@overload
def wide(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def wide(tensor: None) -> None: ...
def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """``tensor`` as float32 where it is float16 or bfloat16, else itself: not to be written to."""
    if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor
