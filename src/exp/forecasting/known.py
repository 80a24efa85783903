"""Differences and means over the cells that have a truth: not every column is forecast, and some cells are empty."""

from __future__ import annotations

import torch

__all__ = ["known_difference", "mean_over_known"]


def known_difference(prediction: torch.Tensor, truth: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """``prediction - truth``, and 0 without gradient where there is no truth.

    Args:
        prediction: (B, H, C).
        truth: (B, H, C); any value where ``known`` is 0, also NaN.
        known: (B, H, C), 1 where there is a truth, else 0.
    """
    difference = prediction - truth
    return torch.where(known > 0, difference, torch.zeros_like(difference))


def mean_over_known(errors: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The mean over each window's cells that have a truth, and then over windows; a window without truth counts as 0.

    Every window has the same weight, so the result does not depend on how windows are distributed over devices.

    Args:
        errors: (B, H, C), 0 where ``known`` is 0.
        known: (B, H, C), 1 or 0.

    Returns:
        0-dim.
    """
    return (errors.sum(dim=(1, 2)) / known.sum(dim=(1, 2)).clamp_min(1.0)).mean()
