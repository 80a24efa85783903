"""The dtype in which kernels compute."""

from __future__ import annotations

from typing import overload

import torch

__all__ = ["wide"]


@overload
def wide(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def wide(tensor: None) -> None: ...
def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """``tensor`` as float32 if it is float16 or bfloat16, else ``tensor`` itself; do not modify the result in place."""
    if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16):
        return tensor.float()
    return tensor
