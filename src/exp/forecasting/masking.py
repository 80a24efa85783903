"""Differences and means over the cells that have a truth: not every column is forecast, and some cells are empty."""

from __future__ import annotations

import torch

__all__ = ["masked_difference", "masked_mean"]


def masked_difference(prediction: torch.Tensor, truth: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
    """``prediction - truth``, and 0 without gradient where there is no truth.

    Args:
        prediction: (B, H, C).
        truth: (B, H, C); any value where ``observed`` is 0, also NaN.
        observed: (B, H, C), 1 where there is a truth, else 0.
    """
    difference = prediction - truth
    return torch.where(observed > 0, difference, torch.zeros_like(difference))


def masked_mean(errors: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
    """The mean over each window's cells that have a truth, and then over windows; a window without truth counts as 0.

    Every window has the same weight, so the result does not depend on how windows are distributed over devices.

    Args:
        errors: (B, H, C), 0 where ``observed`` is 0.
        observed: (B, H, C), 1 or 0.

    Returns:
        0-dim.
    """
    return (errors.sum(dim=(1, 2)) / observed.sum(dim=(1, 2)).clamp_min(1.0)).mean()
