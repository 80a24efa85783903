"""Class maps of images of any size: overlapping windows whose scores fade into one another, in bounded memory.

Scores of a whole image would be K numbers for each pixel, gigabytes for a satellite scene. Here they exist for the rows
that one row of windows covers only, and for no more columns at a time than ``Tiling.band_bytes`` allow; from one row of
windows to the next remain those of the rows in which both overlap. What no later window can change becomes labels, one
byte for each pixel, and is handed on.
"""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Protocol, Sequence

import numpy as np
import torch

__all__ = ["Image", "Tiling", "fade", "label_rows", "spans"]

TakeScores = Callable[[int, int, torch.Tensor], None]
"""Called with top, left and scores (K, h, w), float32, of pixels that no later window covers: each pixel once."""

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


class _Columns(NamedTuple):
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


def label_rows(
    image: Image, scores: Scores, num_classes: int, tiling: Tiling, take_scores: TakeScores | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """The likeliest class of every pixel, from top to bottom.

    Args:
        image: is read window by window.
        scores: the model.
        num_classes: scores for each pixel (K), at most 255.
        tiling: how to cut; an image that fits into one window is seen whole.
        take_scores: gets the scores behind the labels, before these are yielded: weighted means over windows.

    Yields:
        The number of the first of some rows, and their labels, uint8 (rows, width); each row once.
    """
    height, width = min(tiling.window, image.height), min(tiling.window, image.width)
    starts = spans(image.height, height, tiling.overlap)
    lefts = spans(image.width, width, tiling.overlap)
    columns = max(tiling.band_bytes // (4 * num_classes * height), width)
    at_once = max(min(tiling.at_once, tiling.band_bytes // (4 * num_classes * height * width)), 1)
    strips = [_Strip(strip, (height, width), at_once) for strip in _columns(image.width, width, lefts, columns)]
    down, across = (_summed(*each) for each in ((image.height, height, starts), (image.width, width, lefts)))
    for top, following in zip(starts, [*starts[1:], image.height]):
        parts = []
        for strip in strips:
            weights = (down[top:following], across[strip.columns.begin : strip.columns.end])
            parts.append(strip.labels(image, scores, top, weights, take_scores))
        yield top, np.concatenate(parts, axis=1)


def _summed(extent: int, window: int, begins: Sequence[int]) -> np.ndarray:
    """Sums of the weights of all windows along one axis: float32 (extent,)."""
    total = np.zeros(extent, np.float32)
    for begin in begins:
        total[begin : begin + window] += fade(window)
    return total


def _columns(extent: int, window: int, lefts: Sequence[int], columns: int) -> list[_Columns]:
    """At most ``columns`` columns each; windows that touch two of them are computed for both."""
    strips = []
    for begin in range(0, extent, columns):
        end = min(begin + columns, extent)
        strips.append(_Columns(begin, end, [left for left in lefts if left < end and left + window > begin]))
    return strips


class _Strip:
    """Some columns of the image, and the weighted sums of their scores in the rows that are not final yet.

    Args:
        columns: which.
        size: of a window, (height, width).
        at_once: windows that the model sees together.
    """

    def __init__(self, columns: _Columns, size: tuple[int, int], at_once: int) -> None:
        self.columns = columns
        self.size = size
        self.at_once = at_once
        self.weight = torch.from_numpy(np.outer(fade(size[0]), fade(size[1])))
        self.kept: torch.Tensor | None = None  # (K, rows, columns) at the top of the next row of windows

    def labels(
        self,
        image: Image,
        scores: Scores,
        top: int,
        weights: tuple[np.ndarray, np.ndarray],
        take_scores: TakeScores | None,
    ) -> np.ndarray:
        """The rows from ``top`` on that no later window covers: uint8 (rows, columns).

        ``weights`` are the sums of all windows' weights for these rows and for the columns.
        """
        final = len(weights[0])
        (height, width), (begin, end, all_lefts) = self.size, self.columns
        total: torch.Tensor | None = None  # (K, height, columns)
        for first in range(0, len(all_lefts), self.at_once):
            lefts = all_lefts[first : first + self.at_once]
            stack = np.stack([image.read(top, left, height, width).transpose(2, 0, 1) for left in lefts])
            found = scores(torch.from_numpy(stack))
            if total is None:
                total = found.new_zeros((found.shape[1], height, end - begin), dtype=torch.float32)
                if self.kept is not None:
                    total[:, : self.kept.shape[1]] = self.kept
                    self.kept = None
                self.weight = self.weight.to(found.device)
            for row, left in enumerate(lefts):
                here, there = max(left, begin), min(left + width, end)
                inside = slice(here - left, there - left)
                total[:, :, here - begin : there - begin] += found[row, :, :, inside] * self.weight[:, inside]
        assert total is not None
        if take_scores is not None:
            take_scores(top, begin, total[:, :final] / torch.from_numpy(np.outer(*weights)).to(total.device))
        # The sum of a pixel's weights is the same for all classes: it cannot change which one is the likeliest.
        rows: np.ndarray = total[:, :final].argmax(dim=0).to(torch.uint8).cpu().numpy()
        if final < height:
            self.kept = total[:, final:].clone()
        return rows
