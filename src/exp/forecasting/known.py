"""Means over cells that have a truth: some columns are not forecast (``data.targets``), some cells are empty."""

from __future__ import annotations

import torch

__all__ = ["known_difference", "mean_over_known"]


def known_difference(prediction: torch.Tensor, truth: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """``prediction - truth``, and 0 where there is no truth; no gradient flows from there.

    Args:
        prediction: (B, H, C).
        truth: (B, H, C); anything where ``known`` is 0, NaN too.
        known: (B, H, C), 1 where there is a truth, else 0.
    """
    difference = prediction - truth
    return torch.where(known > 0, difference, torch.zeros_like(difference))


def mean_over_known(errors: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """The mean over each window's cells that have a truth, and then over windows; one without any counts as 0.

    So a batch weighs its windows alike, on any number of devices.

    Args:
        errors: (B, H, C), 0 where ``known`` is 0.
        known: (B, H, C), 1 or 0.

    Returns:
        0-dim.
    """
    return (errors.sum(dim=(1, 2)) / known.sum(dim=(1, 2)).clamp_min(1.0)).mean()
