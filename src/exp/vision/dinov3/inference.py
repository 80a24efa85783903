"""From scores of crops to labels of whole images: sliding windows, and averages over scaled and mirrored copies."""

from __future__ import annotations

from typing import Callable, Sequence

import torch
import torch.nn.functional as F

from exp.errors import ConfigError

__all__ = ["Inference", "augmented", "window_origins"]

_WINDOWS_AT_ONCE = 8

Scores = Callable[[torch.Tensor], torch.Tensor]
"""(B, C, H, W) -> logits (B, K, H, W)."""


class Inference:
    """How whole images are predicted.

    Every image is predicted by itself, so that its labels do not depend on what it is batched with.

    Args:
        kind: ``slide`` or ``whole``.
        window: side of a window in pixels.
        overlap: share of a window that the next one covers again.
        scales: images are predicted at each of these scales.
        flip: also mirrored left to right.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(self, kind: str, window: int, overlap: float, scales: Sequence[float], flip: bool) -> None:
        if kind not in ("slide", "whole"):
            raise ConfigError(f"model.inference={kind} is not one of slide, whole")
        if window < 1 or not 0.0 <= overlap < 1.0:
            raise ConfigError(
                f"model.window={window} must be at least 1, and model.overlap={overlap} from 0 to below 1"
            )
        if not scales or min(scales) <= 0.0:
            raise ConfigError(f"model.tta_scales={list(scales)} must be factors above 0, such as [1.0]")
        self.kind = kind
        self.window = window
        self.stride = max(round(window * (1.0 - overlap)), 1)
        self.scales = list(scales)
        self.flip = flip

    def labels(
        self, scores: Scores, image: torch.Tensor, sizes: Sequence[tuple[int, int]] | None, fill: int
    ) -> torch.Tensor:
        """The likeliest class of every pixel.

        Args:
            scores: the network.
            image: (B, C, H, W).
            sizes: (height, width) of each image without its padding; None: there is none.
            fill: the label of the padding.

        Returns:
            (B, H, W), uint8.
        """
        labels = torch.full((image.shape[0], *image.shape[-2:]), fill, dtype=torch.uint8, device=image.device)
        for row, (height, width) in enumerate(sizes or [(image.shape[-2], image.shape[-1])] * image.shape[0]):
            single = image[row : row + 1, :, :height, :width]
            labels[row, :height, :width] = self.averaged(scores, single)[0].argmax(dim=0).to(torch.uint8)
        return labels

    def averaged(self, scores: Scores, image: torch.Tensor) -> torch.Tensor:
        """:func:`augmented` over the windows of one image (1, C, H, W)."""
        return augmented(lambda copy: self._scores(scores, copy), image, self.scales, self.flip)

    def _scores(self, scores: Scores, image: torch.Tensor) -> torch.Tensor:
        """Logits (1, K, H, W), averaged where windows overlap."""
        height, width = image.shape[-2:]
        if self.kind == "whole" or (height <= self.window and width <= self.window):
            return scores(image)
        tall, wide = min(self.window, height), min(self.window, width)
        origins = [
            (top, left)
            for top in window_origins(height, tall, self.stride)
            for left in window_origins(width, wide, self.stride)
        ]
        total: torch.Tensor | None = None
        count = image.new_zeros((1, 1, height, width), dtype=torch.float32)
        for begin in range(0, len(origins), _WINDOWS_AT_ONCE):
            chunk = origins[begin : begin + _WINDOWS_AT_ONCE]
            windows = torch.cat([image[..., top : top + tall, left : left + wide] for top, left in chunk])
            logits = scores(windows)
            if total is None:
                total = logits.new_zeros((1, logits.shape[1], height, width))
            for row, (top, left) in enumerate(chunk):
                total[0, :, top : top + tall, left : left + wide] += logits[row]
                count[..., top : top + tall, left : left + wide] += 1.0
        assert total is not None
        return total / count


def augmented(scores: Scores, image: torch.Tensor, scales: Sequence[float], flip: bool) -> torch.Tensor:
    """Logits, or the sum of probabilities over scaled and mirrored copies, brought back to the image's own pixels.

    Args:
        scores: the network.
        image: (B, C, H, W).
        scales: of the copies; [1.0] without ``flip``: there are none, and logits come back.
        flip: each also mirrored left to right.

    Returns:
        (B, K, H, W).
    """
    if list(scales) == [1.0] and not flip:
        return scores(image)
    size = (image.shape[-2], image.shape[-1])
    total: torch.Tensor | None = None
    for scale in scales:
        scaled = image.float()
        if scale != 1.0:
            target = [max(round(extent * scale), 1) for extent in size]
            scaled = F.interpolate(scaled, size=target, mode="bilinear", align_corners=False)
        for mirrored in (False, True) if flip else (False,):
            logits = scores(scaled.flip(-1) if mirrored else scaled)
            logits = logits.flip(-1) if mirrored else logits
            if logits.shape[-2:] != size:
                logits = F.interpolate(logits, size=size, mode="bilinear", align_corners=False)
            probabilities = torch.softmax(logits, dim=1)
            total = probabilities if total is None else total + probabilities
    assert total is not None
    return total


def window_origins(extent: int, window: int, stride: int) -> list[int]:
    """Where windows begin along one axis: every ``stride`` pixels, the last one at the far end.

    Args:
        extent: pixels of the image, at least ``window``.
        window: pixels of a window.
        stride: pixels from one window to the next.
    """
    return sorted({*range(0, extent - window, stride), extent - window})
