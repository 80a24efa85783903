"""From scores of crops to labels of images of any size: the same for validation, evaluation and prediction.

An image is seen whole, or in overlapping windows whose scores are averaged. Scores of a whole image would be K numbers
for each pixel, gigabytes for a satellite scene. So they exist only for the rows that one row of windows covers, and for
no more columns at a time than ``band_bytes`` allow; pixels that no later window covers become labels.
"""

from __future__ import annotations

from typing import Callable, Iterator, Protocol, Sequence

import torch
import torch.nn.functional as F

from exp.errors import ConfigError

__all__ = ["Image", "InMemory", "Scores", "Tiling", "augmented", "cells", "window_origins"]

_WINDOWS_AT_ONCE = 8

Scores = Callable[[torch.Tensor], torch.Tensor]
"""(B, C, h, w), 0..255 -> logits (B, K, h, w), on the model's device."""


class Image(Protocol):
    """What is cut into windows.

    Attributes:
        height: pixels.
        width: pixels.
    """

    height: int
    width: int

    def crop(self, top: int, left: int, height: int, width: int) -> torch.Tensor:
        """That part: (C, height, width), uint8 or float32, 0..255."""


class Tiling:
    """How images are predicted.

    Attributes:
        band_bytes: the most that the scores of a band of rows take, and those of windows seen together.

    Args:
        kind: ``slide`` or ``whole``.
        window: side of a window in pixels.
        overlap: share of it that the next one covers again.
        scales: test-time augmentation: every window is predicted at each of these scales.
        flip: also mirrored left to right.

    Raises:
        ConfigError: ``kind`` is neither.
    """

    band_bytes = 2**28

    def __init__(
        self, kind: str, window: int = 1, overlap: float = 0.0, scales: Sequence[float] = (1.0,), flip: bool = False
    ) -> None:
        if kind not in ("slide", "whole"):
            raise ConfigError(f"model.inference={kind} is not one of slide, whole")
        self.kind = kind
        self.window = window
        self.stride = max(round(window * (1.0 - overlap)), 1)
        self.scales = list(scales)
        self.flip = flip

    def window_of(self, height: int, width: int) -> tuple[int, int]:
        """The size of the windows in which an image of this size is seen."""
        return (height, width) if self.kind == "whole" else (min(height, self.window), min(width, self.window))

    def labels(
        self,
        scores: Scores,
        num_classes: int,
        image: torch.Tensor,
        sizes: Sequence[tuple[int, int]] | None,
        fill: int,
    ) -> torch.Tensor:
        """The likeliest class of every pixel; labels of an image do not depend on what it is batched with.

        Args:
            scores: the network.
            num_classes: scores for each pixel (K), at most 255.
            image: (B, C, H, W).
            sizes: (height, width) of each image without its padding; None: there is none.
            fill: the label of the padding.

        Returns:
            (B, H, W), uint8.
        """
        labels = torch.full((image.shape[0], *image.shape[-2:]), fill, dtype=torch.uint8, device=image.device)
        for row, (height, width) in enumerate(sizes or [tuple(image.shape[-2:])] * image.shape[0]):
            for top, part in self.rows(scores, num_classes, InMemory(image[row, :, :height, :width])):
                labels[row, top : top + len(part), :width] = part
        return labels

    def rows(self, scores: Scores, num_classes: int, image: Image) -> Iterator[tuple[int, torch.Tensor]]:
        """The likeliest class of every pixel of one image, from top to bottom.

        Args:
            scores: the network.
            num_classes: see :meth:`labels`.
            image: is read window by window.

        Yields:
            The number of the first of some rows, and their labels, uint8 (rows, width); each row once.
        """
        height, width = self.window_of(image.height, image.width)
        upper = window_origins(image.height, height, self.stride)
        lefts = window_origins(image.width, width, self.stride)
        columns = max(self.band_bytes // (4 * num_classes * height), width)
        at_once = max(min(_WINDOWS_AT_ONCE, self.band_bytes // (4 * num_classes * height * width)), 1)
        strips = [(begin, min(begin + columns, image.width)) for begin in range(0, image.width, columns)]
        kept: list[torch.Tensor | None] = [None] * len(strips)  # sums in the rows that the next windows cover, too
        for top, following in zip(upper, [*upper[1:], image.height]):
            final, labels = following - top, []
            for number, (begin, end) in enumerate(strips):
                # Windows that touch two strips are computed for both.
                mine = [left for left in lefts if left < end and left + width > begin]
                total: torch.Tensor | None = None  # (K, height, columns)
                for first in range(0, len(mine), at_once):
                    chunk = mine[first : first + at_once]
                    windows = torch.stack([image.crop(top, left, height, width) for left in chunk])
                    found = augmented(scores, windows, self.scales, self.flip).float()
                    if total is None:
                        total = found.new_zeros((found.shape[1], height, end - begin))
                        before, kept[number] = kept[number], None
                        if before is not None:
                            total[:, : before.shape[1]] = before
                            del before
                    for row, left in enumerate(chunk):
                        here, there = max(left, begin), min(left + width, end)
                        total[:, :, here - begin : there - begin] += found[row, :, :, here - left : there - left]
                assert total is not None
                # All classes of a pixel have been added up equally often: that cannot change which is the likeliest.
                labels.append(total[:, :final].argmax(dim=0).to(torch.uint8))
                kept[number] = total[:, final:].clone()
            yield top, torch.cat(labels, dim=1)


class InMemory:
    """An image (C, H, W) in memory; see :class:`Image`."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.pixels = pixels
        self.height, self.width = pixels.shape[-2:]

    def crop(self, top: int, left: int, height: int, width: int) -> torch.Tensor:
        """See :class:`Image`."""
        return self.pixels[:, top : top + height, left : left + width]


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


def cells(count: int, window: int) -> list[tuple[slice, slice]]:
    """Cut ``count`` patches along one axis into cells of like length, each seen with an eighth of a window around it.

    For features, which are not averaged where windows overlap: patches at the edge of a window have seen less.

    Args:
        count: patches.
        window: patches of a window, at most.

    Returns:
        Each cell, and the window that sees it.
    """
    if count <= window:
        return [(slice(0, count), slice(0, count))]
    margin = window // 8
    number = -(-count // (window - 2 * margin))
    borders = [count * step // number for step in range(number + 1)]
    return [
        (slice(begin, end), slice(max(begin - margin, 0), min(end + margin, count)))
        for begin, end in zip(borders[:-1], borders[1:])
    ]
