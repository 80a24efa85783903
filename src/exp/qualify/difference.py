"""How far what two devices have computed is apart."""

from __future__ import annotations

import math
from typing import Any

import torch

__all__ = ["difference", "largest", "leaves"]


def difference(ours: Any, theirs: Any, floor: float) -> dict[str, Any]:
    """How far the tensors and numbers in two structures are apart.

    Args:
        ours: of the device.
        theirs: of the CPU.
        floor: least scale of what is relative.

    Returns:
        ``relative`` (to the largest absolute value; infinite where only one is finite, or shapes differ), ``absolute``
        and ``dtype`` of the tensor that is furthest off.
    """
    worst: dict[str, Any] = {"relative": 0.0, "absolute": 0.0, "dtype": None}
    mine, other = leaves(ours), leaves(theirs)
    if len(mine) != len(other):
        return {"relative": math.inf, "absolute": math.inf, "dtype": None}
    for left, right in zip(mine, other):
        absolute, scale, dtype = _apart(left, right)
        relative = 0.0 if absolute == 0 else absolute / max(scale, floor, 1e-30)
        if worst["dtype"] is None or relative > worst["relative"]:
            worst = {"relative": relative, "absolute": absolute, "dtype": dtype}
    return worst


def _apart(left: Any, right: Any) -> tuple[float, float, str]:
    a, b = (each if isinstance(each, torch.Tensor) else torch.tensor(each) for each in (left, right))
    dtype = str(b.dtype)[6:]
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf, 1.0, dtype
    a, b = a.detach().cpu(), b.detach()
    if not b.is_floating_point():
        return float((a != b).any()), 1.0, dtype
    a, b = a.double(), b.double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    if bool(same.all()):
        return 0.0, 1.0, dtype
    gap, finite = float((a - b)[~same].abs().max()), b[torch.isfinite(b)].abs()
    return (gap if math.isfinite(gap) else math.inf), float(finite.max()) if finite.numel() else 0.0, dtype


def largest(tensor: torch.Tensor) -> float:
    """The largest finite absolute value; 0 where there is none, or whole numbers."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return 0.0
    values = tensor.detach().cpu().float().abs()
    return float(values[torch.isfinite(values)].max()) if bool(torch.isfinite(values).any()) else 0.0


def leaves(value: Any) -> list[Any]:
    """Tensors and numbers at any depth, in order."""
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in leaves(each)]
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    return [value] if isinstance(value, (torch.Tensor, bool, int, float)) else []
