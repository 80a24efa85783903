"""What newer torch has, behind names that work on torch 1.10 too. The only module that compares torch versions."""

from __future__ import annotations

from typing import Tuple

import torch

__all__ = ["TORCH_VERSION", "device_part_of", "supports_composite_process_groups"]

TORCH_VERSION: Tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


def supports_composite_process_groups() -> bool:
    """Whether ``init_process_group`` takes strings such as ``"cpu:gloo,x:y"`` (torch >= 2.0)."""
    return TORCH_VERSION >= (2, 0)


def device_part_of(process_group: str, device_type: str) -> str:
    """The backend that a composite string gives to ``device_type``: ``("cpu:gloo,x:y", "x") -> "y"``."""
    if ":" not in process_group:
        return process_group
    parts = dict(part.split(":", 1) for part in process_group.split(","))
    return parts.get(device_type) or parts["cpu"]
