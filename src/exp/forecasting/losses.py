"""Losses of points, over the cells that have a truth."""

from __future__ import annotations

import torch
from torch import nn

from exp.errors import ConfigError


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


class PointLoss(nn.Module):
    """A mean of errors, for the key ``loss`` of a forecaster: ``l1``, ``l2`` or ``huber`` (quadratic below 1).

    Computed in float32. Where cells have no truth, it is the mean of each window, and then over windows
    (:func:`masked_mean`).

    Args:
        name: of the loss.

    Raises:
        ConfigError: there is no such loss.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in ("l1", "l2", "huber"):
            raise ConfigError(f"model.loss={name} is not one of l1, l2, huber (null: the loss of the model's authors)")
        self.name = name

    def forward(
        self, prediction: torch.Tensor, target: torch.Tensor, observed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``prediction``, ``target`` and ``observed`` (1 where there is a truth): (B, H, C); result: 0-dim."""
        prediction, target = prediction.float(), target.float()
        error = prediction - target if observed is None else masked_difference(prediction, target, observed)
        size = error.abs()
        if self.name == "l2":
            size = error * error
        elif self.name == "huber":
            low = size.clamp(max=1.0)
            size = low * (size - 0.5 * low)
        return size.mean() if observed is None else masked_mean(size, observed)
