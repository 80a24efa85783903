"""Principal components of features, and feature maps in which they are red, green and blue."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import cv2
import numpy as np
import torch

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed

__all__ = ["Components", "Moments"]

_DEVIATIONS = 2.0  # of a component, from the mean to the darkest and the brightest color


class Moments:
    """Count, mean and covariance of features, gathered piece by piece on the CPU, so that none of them is kept.

    The sums are float64: some features of a vision transformer are a hundred times larger than the rest, and float32
    would lose the small ones when the mean is taken off.

    Args:
        dim: elements of a feature (D).
    """

    def __init__(self, dim: int) -> None:
        self._sums = torch.zeros((dim + 1, dim + 1), dtype=torch.float64)  # of [x, 1] [x, 1]^T

    def add(self, features: torch.Tensor) -> None:
        """Take in features (..., D), any floating dtype and device."""
        flat = features.reshape(-1, features.shape[-1]).float().cpu().double()
        flat = torch.cat([flat, flat.new_ones((len(flat), 1))], dim=1)
        self._sums += flat.t() @ flat

    def components(self, distributed: Distributed, count: int = 3) -> Components:
        """The leading principal components over all ranks: the eigenvectors of the covariance.

        Their signs, which no theory fixes, are such that the largest element of each is positive.

        Args:
            distributed: to add up the ranks' sums; every rank must call.
            count: how many.
        """
        sums = distributed.sum(self._sums.clone())
        number = sums[-1, -1].clamp(min=1.0)
        mean = sums[-1, :-1] / number
        covariance = sums[:-1, :-1] / number - torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(covariance)  # ascending
        axes = vectors[:, -count:].flip(-1).t()
        strongest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
        axes = axes * torch.where(strongest < 0, -1.0, 1.0)
        variance = values[-count:].flip(-1).clamp(min=0.0)
        explained = variance / values.clamp(min=0.0).sum().clamp(min=1e-30)
        return Components(
            mean.float().numpy(), axes.float().numpy(), variance.sqrt().float().numpy(), explained.tolist()
        )


class Components(NamedTuple):
    """Principal axes; of :meth:`Moments.components`.

    Attributes:
        mean: float32 (D,).
        axes: float32 (3, D), of length 1.
        deviation: standard deviation along each axis, float32 (3,).
        explained: share of the variance along each axis.
    """

    mean: np.ndarray
    axes: np.ndarray
    deviation: np.ndarray
    explained: list[float]

    def rgb(self, patches: np.ndarray) -> np.ndarray:
        """Features as colors, the same for the same feature in every image.

        Args:
            patches: (h, w, D), any floating dtype.

        Returns:
            (h, w, 3), float32, 0..1: the mean feature is gray, two standard deviations from it are black or full.
        """
        along = (patches.astype(np.float32) - self.mean) @ self.axes.T
        colors = 0.5 + along / np.maximum(2.0 * _DEVIATIONS * self.deviation, 1e-12)
        return np.clip(colors, 0.0, 1.0).astype(np.float32)

    def picture(self, patches: np.ndarray, height: int, width: int, patch_size: float) -> np.ndarray:
        """A map of the features of an image, up-sampled to its pixels.

        Args:
            patches: (h, w, D).
            height: of the image in pixels.
            width: of the image in pixels.
            patch_size: pixels along a patch; the last patches may reach beyond the image.

        Returns:
            RGB (height, width, 3), uint8.
        """
        colors = (self.rgb(patches) * 255.0).round().astype(np.uint8)
        size = (round(patches.shape[1] * patch_size), round(patches.shape[0] * patch_size))
        return cv2.resize(colors, size, interpolation=cv2.INTER_CUBIC)[:height, :width]
