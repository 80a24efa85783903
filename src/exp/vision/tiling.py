"""Labels of images of any size from scores of windows; used by validation, evaluation and prediction.

An image is predicted whole, or in overlapping windows whose scores are averaged. The scores of a whole satellite scene,
K numbers per pixel, would take gigabytes. So scores are kept only for the rows of one row of windows, and for no more
columns at a time than ``band_bytes`` allows; pixels that no later window covers become labels.

Features of images (:mod:`exp.vision.features`) have the cut of windows alone from here (:func:`cells`): each patch is
taken from one window, as it is. An average over windows would be a vector that the backbone gives for no image; a
mirrored or scaled copy has other patches; the CLS token belongs to a window, not to a pixel; and features are kept, not
labels of them, so that bands of rows would save no memory.
"""

from __future__ import annotations

from typing import Callable, Iterator, Protocol, Sequence

import torch
import torch.nn.functional as F

from exp.errors import ConfigError

__all__ = ["Image", "InMemory", "Scores", "Tiling", "augmented", "cells", "window_origins"]

_WINDOWS_AT_ONCE = 8

# (B, C, h, w), 0..255 -> logits (B, K, h, w), on the model's device.
Scores = Callable[[torch.Tensor], torch.Tensor]


class Image(Protocol):
    """An image that can be cut into windows.

    Attributes:
        height: in pixels.
        width: in pixels.
    """

    height: int
    width: int

    def crop(self, top: int, left: int, height: int, width: int) -> torch.Tensor:
        """A part of the image: (C, height, width), uint8 or float32, 0..255."""


class Tiling:
    """Predicts images in windows, with test-time augmentation.

    Attributes:
        band_bytes: most bytes of the scores of a band of rows, and of those of windows in one batch.

    Args:
        kind: ``slide`` or ``whole``.
        window: side of a window in pixels.
        overlap: share of a window that the next window covers, too, from 0 to 1.
        scales: test-time augmentation: every window is predicted at each of these scales.
        flip: test-time augmentation: every window is also predicted mirrored left to right.

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
        """The (height, width) of the windows for an image of this size."""
        return (height, width) if self.kind == "whole" else (min(height, self.window), min(width, self.window))

    def labels(
        self,
        scores: Scores,
        num_classes: int,
        image: torch.Tensor,
        sizes: Sequence[tuple[int, int]] | None,
        fill: int,
    ) -> torch.Tensor:
        """The most probable class of every pixel; the labels of an image do not depend on the rest of the batch.

        Args:
            scores: the network.
            num_classes: scores for each pixel (K), at most 255.
            image: (B, C, H, W).
            sizes: (height, width) of each image without its padding; None: no image is padded.
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
        """The most probable class of every pixel of one image, from top to bottom.

        Args:
            scores: the network.
            num_classes: see :meth:`labels`.
            image: the image, which is read window by window.

        Yields:
            The number of the first row of a band, and the band's labels, uint8 (rows, width); each row once.
        """
        height, width = self.window_of(image.height, image.width)
        upper = window_origins(image.height, height, self.stride)
        lefts = window_origins(image.width, width, self.stride)
        columns = max(self.band_bytes // (4 * num_classes * height), width)
        at_once = max(min(_WINDOWS_AT_ONCE, self.band_bytes // (4 * num_classes * height * width)), 1)
        strips = [(begin, min(begin + columns, image.width)) for begin in range(0, image.width, columns)]
        kept: list[torch.Tensor | None] = [None] * len(strips)  # sums of the rows that the next windows cover, too
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
                # Sums, not means: all classes of a pixel have equally many terms, so the largest is the same.
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
    """The sum of probabilities over scaled and mirrored copies, at the resolution of the image.

    Args:
        scores: the network.
        image: (B, C, H, W).
        scales: of the copies. With [1.0] and without ``flip`` there are no copies, and logits are returned.
        flip: whether each copy is also mirrored left to right.

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
    """The first pixels of windows along one axis: every ``stride`` pixels, and one window that ends at the last pixel.

    Args:
        extent: pixels of the image, at least ``window``.
        window: pixels of a window.
        stride: pixels from one window to the next.
    """
    return sorted({*range(0, extent - window, stride), extent - window})


def cells(count: int, window: int) -> list[tuple[slice, slice]]:
    """Cut the patches along one axis into cells of similar length, each within a window with a margin around the cell.

    For features, which are not averaged where windows overlap: patches at the edge of a window lack context, so a
    margin of an eighth of a window is not used.

    Args:
        count: number of patches.
        window: most patches of a window.

    Returns:
        (cell, its window) each.
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
