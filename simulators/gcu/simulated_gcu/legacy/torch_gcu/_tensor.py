"""What the vendor's package changes of torch's own tensors."""

from __future__ import annotations

from typing import Any

import torch

from torch_gcu import _C

__all__ = ["install", "rebuild_tensor"]


def is_gcu(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a card."""
    return tensor.device.type == "xla"


def rebuild_tensor(data: Any, dtype: torch.dtype, device: str, requires_grad: bool) -> torch.Tensor:
    """Make a tensor that was saved from a card; called by ``torch.load``.

    torch 1.10 saves such a tensor as an array with the name of its card, and never asks ``map_location``. The vendor's
    package puts it on that card where it is the current one, and leaves it on the CPU where it is not. A file with
    such tensors names this function, and so cannot be read without the package: save CPU tensors.
    """
    tensor = torch.from_numpy(data).to(dtype=dtype)
    if not device.startswith("xla") or device == f"xla:{_C.current_device()}":
        tensor = tensor.to(device)
    tensor.requires_grad = requires_grad
    return tensor


_text_of = torch._tensor_str._tensor_str


def _text(tensor: torch.Tensor, indent: int) -> str:
    """The numbers of a tensor as text; formatted on the CPU, in 64 bits."""
    return _text_of(tensor.cpu() if is_gcu(tensor) else tensor, indent)


def install() -> None:
    """Give tensors ``is_gcu()``, have them printed by the CPU, and ``torch.load`` call the function above."""
    torch.Tensor.is_gcu = is_gcu  # type: ignore[attr-defined]
    torch._tensor_str._tensor_str = _text
    torch._utils._rebuild_device_tensor_from_numpy = rebuild_tensor
