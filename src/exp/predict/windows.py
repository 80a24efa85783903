"""Class maps of images of any size: overlapping windows whose scores fade into one another, in bounded memory.

Scores of a whole image would be K numbers for each pixel, gigabytes for a satellite scene. Here they exist only for the
rows that one row of windows covers, and for no more columns than ``Tiling.band_bytes`` allow; what no later window can
change becomes labels, one byte for each pixel.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Protocol, Sequence

import numpy as np
import torch

__all__ = ["Image", "Tiling", "fade", "label_map", "spans"]

Scores = Callable[[torch.Tensor], torch.Tensor]
"""(B, C, h, w), 0..255, on the CPU -> scores (B, K, h, w), float, on the model's device."""


class Image(Protocol):
    """What is cut into windows.

    Attributes:
        height: pixels.
        width: pixels.
    """

    height: int
    width: int

    def read(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """That part: (height, width, C), uint8 or float32, 0..255."""


class Tiling(NamedTuple):
    """How an image is cut.

    Attributes:
        window: side of a window in pixels.
        overlap: share of it that the next one covers again, from 0 to below 1.
        at_once: windows that the model sees together, at most.
        band_bytes: the most that the scores of a band of rows take, and those of windows seen together.
    """

    window: int
    overlap: float
    at_once: int = 8
    band_bytes: int = 2**28


class _Strip(NamedTuple):
    """The columns ``begin`` to ``end`` of the image, and where the windows that touch them begin."""

    begin: int
    end: int
    lefts: Sequence[int]


def spans(extent: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along one axis: evenly, the first at 0, the last at the far end.

    Args:
        extent: pixels of the image.
        window: pixels of a window.
        overlap: the least share of a window that the next one covers again.
    """
    if extent <= window:
        return [0]
    stride = max(int(window * (1.0 - overlap)), 1)
    count = -(-(extent - window) // stride)  # steps between windows
    return [round(step * (extent - window) / count) for step in range(count + 1)]


def fade(length: int) -> np.ndarray:
    """Weights along one axis of a window: high in the middle, low at both ends, never 0; float32 (length,).

    A squared sine: where two windows overlap by half, the two weights of each pixel add up to the same everywhere.
    """
    phase = (np.arange(length) + 0.5) / length * np.pi
    return np.maximum(np.sin(phase) ** 2, 1e-3).astype(np.float32)


def label_map(image: Image, scores: Scores, num_classes: int, tiling: Tiling, labels: np.ndarray) -> None:
    """The likeliest class of every pixel.

    Args:
        image: is read window by window.
        scores: the model.
        num_classes: scores for each pixel (K), at most 255.
        tiling: how to cut; an image that fits into one window is seen whole.
        labels: takes the result, uint8 (height, width): an array, or a file mapped into memory.
    """
    height, width = min(tiling.window, image.height), min(tiling.window, image.width)
    starts = spans(image.height, height, tiling.overlap)
    lefts = spans(image.width, width, tiling.overlap)
    columns = max(tiling.band_bytes // (4 * num_classes * height), width)
    at_once = max(min(tiling.at_once, tiling.band_bytes // (4 * num_classes * height * width)), 1)
    for strip in _strips(image.width, width, lefts, columns):
        _label_strip(image, scores, (height, width), starts, strip, at_once, labels)


def _strips(extent: int, window: int, lefts: Sequence[int], columns: int) -> list[_Strip]:
    """Strips of at most ``columns`` columns; windows that touch two of them are computed for both."""
    strips = []
    for begin in range(0, extent, columns):
        end = min(begin + columns, extent)
        strips.append(_Strip(begin, end, [left for left in lefts if left < end and left + window > begin]))
    return strips


def _label_strip(
    image: Image,
    scores: Scores,
    size: tuple[int, int],
    starts: Sequence[int],
    strip: _Strip,
    at_once: int,
    labels: np.ndarray,
) -> None:
    """Rows of windows from top to bottom; the sums slide down with them."""
    height, width = size
    weight = torch.from_numpy(np.outer(fade(height), fade(width)))
    total: torch.Tensor | None = None  # (K, height, columns): weighted sums over the rows of the current windows
    for number, top in enumerate(starts):
        for first in range(0, len(strip.lefts), at_once):
            lefts = strip.lefts[first : first + at_once]
            stack = np.stack([image.read(top, left, height, width).transpose(2, 0, 1) for left in lefts])
            found = scores(torch.from_numpy(stack))
            if total is None:
                total = found.new_zeros((found.shape[1], height, strip.end - strip.begin), dtype=torch.float32)
                weight = weight.to(found.device)
            for row, left in enumerate(lefts):
                begin, end = max(left, strip.begin), min(left + width, strip.end)
                inside = slice(begin - left, end - left)
                total[:, :, begin - strip.begin : end - strip.begin] += found[row, :, :, inside] * weight[:, inside]
        assert total is not None
        final = (starts[number + 1] if number + 1 < len(starts) else image.height) - top
        # The sum of a pixel's weights is the same for all classes: it cannot change which one is the likeliest.
        rows = total[:, :final].argmax(dim=0).to(torch.uint8).cpu().numpy()
        labels[top : top + final, strip.begin : strip.end] = rows
        kept = height - final
        if kept and number + 1 < len(starts):
            total[:, :kept] = total[:, final:].clone()
            total[:, kept:] = 0.0
        else:
            total.zero_()
