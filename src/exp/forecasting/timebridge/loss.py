"""The training loss: mean absolute error in time and in frequency."""

from __future__ import annotations

import math

import torch
from torch import nn

from exp.compat import autocast_disabled

__all__ = ["TimeFrequencyLoss", "dft_matrix"]

_TINY = 1e-30
"""Squared magnitudes below it count as zero; the squares of float32 differences that matter lie far above."""


def dft_matrix(length: int) -> torch.Tensor:
    """The real discrete Fourier transform as a matrix: ``x @ matrix`` is ``[rfft(x).real, rfft(x).imag]``.

    Args:
        length: time steps H.

    Returns:
        (H, 2 F), float32, with F = H // 2 + 1; built in float64.
    """
    steps = torch.arange(length, dtype=torch.int64)
    frequencies = torch.arange(length // 2 + 1, dtype=torch.int64)
    # The product is reduced modulo H as an integer: angles of many turns would lose digits.
    turns = (steps[:, None] * frequencies[None, :]) % length
    angle = turns.double() * (2.0 * math.pi / length)
    return torch.cat([torch.cos(angle), -torch.sin(angle)], dim=1).float()


class TimeFrequencyLoss(nn.Module):
    """``(1 - alpha) * mean |d| + alpha * mean |rFFT(d)|`` for ``d = prediction - target`` (arXiv 2410.04442, sec. 4).

    The Fourier transform is one real matrix product, since complex numbers and FFT are not available or slow on some
    accelerators. The magnitude's gradient is 0 where the magnitude is 0. Computed in float32 under autocast too.

    Args:
        horizon: time steps H.
        alpha: weight of the frequency part, in [0, 1].
    """

    dft: torch.Tensor

    def __init__(self, horizon: int, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha
        self.register_buffer("dft", dft_matrix(horizon), persistent=False)

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """``prediction`` and ``target``: (B, H, C); result: 0-dim, float32."""
        with autocast_disabled(prediction.device.type):
            difference = prediction.float() - target.float()
            real, imaginary = (difference.transpose(1, 2) @ self.dft).chunk(2, dim=-1)
            magnitude = (real * real + imaginary * imaginary).clamp_min(_TINY).sqrt()
            return (1.0 - self.alpha) * difference.abs().mean() + self.alpha * magnitude.mean()
