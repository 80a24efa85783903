"""The loss of TimeBridge: mean absolute error in time and in frequency."""

from __future__ import annotations

import math

import torch
from torch import nn

from exp.forecasting.losses import PointLoss, masked_difference, masked_mean
from exp.hardware.compat import autocast_disabled

# Smaller squared magnitudes count as zero; those of relevant float32 differences are far larger.
_TINY = 1e-30


def dft_matrix(length: int) -> torch.Tensor:
    """The real discrete Fourier transform as a matrix: ``x @ matrix`` is ``[rfft(x).real, rfft(x).imag]``.

    Args:
        length: time steps H.

    Returns:
        (H, 2 F), float32, with F = H // 2 + 1; built in float64.
    """
    steps = torch.arange(length, dtype=torch.int64)
    frequencies = torch.arange(length // 2 + 1, dtype=torch.int64)
    # The product is reduced modulo H as an integer: large angles would lose precision.
    turns = (steps[:, None] * frequencies[None, :]) % length
    angle = turns.double() * (2.0 * math.pi / length)
    return torch.cat([torch.cos(angle), -torch.sin(angle)], dim=1).float()


class TimeFrequencyLoss(nn.Module):
    """``(1 - alpha) * mean |d| + alpha * mean |rFFT(d)|`` for ``d = prediction - target`` (arXiv 2410.04442, sec. 4).

    The Fourier transform is one real matrix product, since complex numbers and FFT are missing or slow on some
    accelerators. The magnitude's gradient is 0 where the magnitude is 0. Computed in float32, also under autocast.

    Args:
        horizon: time steps H.
        alpha: weight of the frequency part, in [0, 1].
    """

    dft: torch.Tensor

    def __init__(self, horizon: int, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.register_buffer("dft", dft_matrix(horizon), persistent=False)

    def forward(
        self, prediction: torch.Tensor, target: torch.Tensor, observed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``prediction`` and ``target``: (B, H, C); result: 0-dim, float32.

        ``observed`` (B, H, C) is 1 where there is a truth, else 0; None: 1 everywhere. The difference is 0 where there
        is no truth. Means are over each window's cells with a truth (in time) or its series with a truth (in
        frequency), and then over windows (:func:`exp.forecasting.losses.masked_mean`).
        """
        with autocast_disabled(prediction.device.type):
            if observed is not None:
                return self._masked_loss(masked_difference(prediction.float(), target.float(), observed), observed)
            difference = prediction.float() - target.float()
            magnitude = self._magnitude(difference)
            return (1.0 - self.alpha) * difference.abs().mean() + self.alpha * magnitude.mean()

    def _magnitude(self, difference: torch.Tensor) -> torch.Tensor:
        """Magnitude of the Fourier transform: (B, H, C) to (B, C, F)."""
        real, imaginary = (difference.transpose(1, 2) @ self.dft).chunk(2, dim=-1)
        return (real * real + imaginary * imaginary).clamp_min(_TINY).sqrt()

    def _masked_loss(self, difference: torch.Tensor, observed: torch.Tensor) -> torch.Tensor:
        series = observed.sum(dim=1).clamp_max(1.0)  # (B, C): 1 where a series has a truth in a window
        magnitude = (self._magnitude(difference).mean(dim=2) * series).sum(dim=1)
        frequency_loss = (magnitude / series.sum(dim=1).clamp_min(1.0)).mean()
        return (1.0 - self.alpha) * masked_mean(difference.abs(), observed) + self.alpha * frequency_loss


def make_loss(name: str | None, horizon: int, alpha: float) -> nn.Module:
    """The loss of points that ``model.loss`` names.

    Args:
        name: of :class:`exp.forecasting.losses.PointLoss`; None: :class:`TimeFrequencyLoss`.
        horizon: time steps H.
        alpha: see :class:`TimeFrequencyLoss`.

    Raises:
        ConfigError: there is no such loss.
    """
    return TimeFrequencyLoss(horizon, alpha) if name is None else PointLoss(name)
