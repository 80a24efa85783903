"""The changes that the vendor's package makes to torch's tensors."""

from __future__ import annotations

from typing import Any

import torch

from torch_gcu import _C

__all__ = ["install", "rebuild_tensor"]


def is_gcu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a card."""
    return tensor.device.type == "xla"


def rebuild_tensor(data: Any, dtype: torch.dtype, device: str, requires_grad: bool) -> torch.Tensor:
    """Rebuild a tensor that was saved from a card; called by ``torch.load``.

    torch 1.10 saves such a tensor as an array with the name of its card, and ignores ``map_location``. The vendor's
    package puts the tensor on that card if it is the current card, and otherwise leaves it on the CPU. A file with such
    tensors refers to this function, so it cannot be read without the package: save CPU tensors.
    """
    tensor = torch.from_numpy(data).to(dtype=dtype)
    if not device.startswith("xla") or device == f"xla:{_C.current_device()}":
        tensor = tensor.to(device)
    tensor.requires_grad = requires_grad
    return tensor


_text_of = torch._tensor_str._tensor_str


def _text(tensor: torch.Tensor, indent: int) -> str:
    """The values of a tensor as text, formatted on the CPU, in 64 bits."""
    return _text_of(tensor.cpu() if is_gcu(tensor) else tensor, indent)


def install() -> None:
    """Add ``Tensor.is_gcu()``, format tensors on the CPU, and make ``torch.load`` call :func:`rebuild_tensor`."""
    torch.Tensor.is_gcu = is_gcu  # type: ignore[attr-defined]
    torch._tensor_str._tensor_str = _text
    torch._utils._rebuild_device_tensor_from_numpy = rebuild_tensor
