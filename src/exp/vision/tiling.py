"""Scores of images of any size from those of windows; used by validation, evaluation and prediction.

An image is predicted whole, or in overlapping windows whose scores are averaged. The scores of a whole satellite scene,
K numbers per pixel, would take gigabytes. So scores are kept only for the rows of one row of windows, and for no more
columns at a time than ``row_block_bytes`` allows; blocks that no later window covers are handed on.

At the border of a window a network lacks context. Where all windows weigh the same, scores jump there; weights that
fall to nearly 0 at the border (``blend="hann"``) let one window fade into the next.

Features of images (:mod:`exp.vision.features`) use the windows of this module alone (:func:`patch_windows`): each patch
is taken from one window, as it is. An average over windows would be a vector that the backbone gives for no image; a
mirrored or scaled copy has other patches; the CLS token belongs to a window, not to a pixel; and features are kept, not
labels of them, so that bands of rows would save no memory.
"""

from __future__ import annotations

from typing import Callable, Iterator, Protocol, Sequence

import torch
import torch.nn.functional as F

from exp.errors import ConfigError

__all__ = ["Image", "InMemoryImage", "LogitsFunction", "Tiling", "patch_windows", "tta_logits", "window_origins"]

_WINDOWS_AT_ONCE = 8

# (B, C, h, w), 0..255 -> logits (B, K, h, w), on the model's device.
LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


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


def most_probable(scores: torch.Tensor) -> torch.Tensor:
    """The class with the largest of its scores (K, h, w), K at most 255: uint8 (h, w)."""
    return scores.argmax(dim=0).to(torch.uint8)


class Tiling:
    """Predicts images in windows, with test-time augmentation.

    Attributes:
        row_block_bytes: most bytes of the scores of a band of rows, and of those of windows in one batch.

    Args:
        kind: ``slide`` or ``whole``.
        window: side of a window in pixels.
        overlap: share of a window that the next window covers, too, from 0 to 1.
        scales: test-time augmentation: every window is predicted at each of these scales.
        flip: test-time augmentation: every window is also predicted mirrored left to right.
        blend: weights of a window's pixels in the mean: ``hann`` falls to nearly 0 at its border; None: ``uniform``.

    Raises:
        ConfigError: ``kind`` or ``blend`` is none of these.
    """

    row_block_bytes = 2**28

    def __init__(
        self, kind: str, window: int = 1, overlap: float = 0.0, scales: Sequence[float] = (1.0,), flip: bool = False,
        blend: str | None = None,
    ) -> None:  # fmt: skip
        if kind not in ("slide", "whole"):
            raise ConfigError(f"model.inference={kind} is not one of slide, whole")
        if blend not in (None, "uniform", "hann"):
            raise ConfigError(f"model.blend={blend} is not one of uniform, hann")
        self.kind = kind
        self.window = window
        self.stride = max(round(window * (1.0 - overlap)), 1)
        self.scales = list(scales)
        self.flip = flip
        self.blend = blend

    def window_size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) of the windows for an image of this size."""
        return (height, width) if self.kind == "whole" else (min(height, self.window), min(width, self.window))

    def labels(
        self,
        network: LogitsFunction,
        num_classes: int,
        image: torch.Tensor,
        sizes: Sequence[tuple[int, int]] | None,
        fill: float,
        label_sizes: Sequence[tuple[int, int]] | None = None,
        choose: Callable[[torch.Tensor], torch.Tensor] = most_probable,
    ) -> torch.Tensor:
        """The label of every pixel, chosen from its scores; that of an image does not depend on the rest of the batch.

        Args:
            network: the network.
            num_classes: scores for each pixel (K).
            image: (B, C, H, W).
            sizes: (height, width) of each image without its padding; None: no image is padded.
            fill: the label of the padding.
            label_sizes: (height, width) of the labels of each image, see :meth:`blocks`; None: those of the image.
            choose: maps the scores of a block (K, h, w) to labels (h, w).

        Returns:
            (B, H, W), of the dtype of ``choose``; with ``label_sizes`` of the largest of these heights and widths.
        """
        sizes = sizes or [(image.shape[-2], image.shape[-1])] * image.shape[0]
        height, width = map(max, zip(*label_sizes)) if label_sizes else image.shape[-2:]
        rows: list[torch.Tensor] = []
        for pixels, (tall, wide), size in zip(image, sizes, label_sizes or sizes):
            row: torch.Tensor | None = None
            for top, left, scores in self.blocks(network, num_classes, InMemoryImage(pixels[:, :tall, :wide]), size):
                chosen = choose(scores)
                row = chosen.new_full((height, width), fill) if row is None else row
                row[top : top + chosen.shape[0], left : left + chosen.shape[1]] = chosen
            assert row is not None
            rows.append(row)
        return torch.stack(rows)

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """The probabilities of classes from scores of :meth:`blocks`: (K, h, w) each."""
        return torch.softmax(scores, dim=0) if _is_single(self.scales, self.flip) else scores / scores.sum(dim=0)

    def blocks(
        self, network: LogitsFunction, num_classes: int, image: Image, size: tuple[int, int] | None = None
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The scores of one image, block by block, from top to bottom.

        Args:
            network: the network.
            num_classes: see :meth:`labels`.
            image: the image, which is read window by window.
            size: (height, width) of the result; None: those of the image. The scores are interpolated to other sizes:
                a class that is chosen from them then has finer borders than labels that are resized.

        Yields:
            The first row and column of a block, and its scores (see :func:`tta_logits`), means over windows, float32
            (K, rows, columns); each pixel once.
        """
        extents = (image.height, image.width)
        down, across = map(_AxisResampler, extents, size or extents)
        height, width = self.window_size(*extents)
        upper = window_origins(image.height, height, self.stride)
        lefts = window_origins(image.width, width, self.stride)
        (weights_down, sums_down), (weights_across, sums_across) = (
            self._weights(upper, height), self._weights(lefts, width),
        )  # fmt: skip
        columns = max(self.row_block_bytes // (4 * num_classes * height), width)
        at_once = max(min(_WINDOWS_AT_ONCE, self.row_block_bytes // (4 * num_classes * height * width)), 1)
        strips = across.strips(columns)
        carry: list[torch.Tensor | None] = [None] * len(strips)  # sums of the rows that the next windows cover, too
        last_rows: list[torch.Tensor | None] = [None] * len(strips)  # the last row of the band before
        for top, following in zip(upper, [*upper[1:], image.height]):
            final = following - top
            result_rows = range(down.num_ready(top), down.num_ready(following))
            for number, (outputs, (begin, end)) in enumerate(strips):
                # Windows that touch two strips are computed for both.
                strip_lefts = [left for left in lefts if left < end and left + width > begin]
                total: torch.Tensor | None = None  # (K, height, columns)
                for first in range(0, len(strip_lefts), at_once):
                    chunk = strip_lefts[first : first + at_once]
                    windows = torch.stack([image.crop(top, left, height, width) for left in chunk])
                    window_scores = tta_logits(network, windows, self.scales, self.flip).float()
                    if total is None:
                        total = window_scores.new_zeros((window_scores.shape[1], height, end - begin))
                        before, carry[number] = carry[number], None
                        if before is not None:
                            total[:, : before.shape[1]] = before
                            del before
                    if self.blend == "hann":
                        window_scores = window_scores * torch.outer(weights_down, weights_across).to(window_scores)
                    for row, left in enumerate(chunk):
                        first_column, stop = max(left, begin), min(left + width, end)
                        scores = window_scores[row, :, :, first_column - left : stop - left]
                        total[:, :, first_column - begin : stop - begin] += scores
                assert total is not None
                carry[number] = total[:, final:].clone()
                band, start = total[:, :final], top
                band /= torch.outer(sums_down[top:following], sums_across[begin:end]).to(band)
                if not down.is_same:
                    previous, last_rows[number] = last_rows[number], band[:, -1:].clone()
                    start, band = (top, band) if previous is None else (top - 1, torch.cat([previous, band], dim=1))
                rows_at_once = max(self.row_block_bytes // (4 * num_classes * max(len(outputs), end - begin)), 1)
                for first in range(0, len(result_rows), rows_at_once):
                    part = result_rows[first : first + rows_at_once]
                    scores = across.interpolate(down.interpolate(band, part, start, 1), outputs, begin, 2)
                    yield part.start, outputs.start, scores

    def _weights(self, origins: Sequence[int], window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights along one axis: of the pixels of a window, and their sum over all windows for each pixel; float32."""
        weights = torch.ones(window, device="cpu")
        if self.blend == "hann" and len(origins) > 1:
            weights = torch.hann_window(window + 2, periodic=False, device="cpu")[1:-1]  # without its zeros
        sums = torch.zeros(origins[-1] + window, device="cpu")
        for origin in origins:
            sums[origin : origin + window] += weights
        return weights, sums


class _AxisResampler:
    """Bilinear interpolation along one axis, as ``torch.nn.functional.interpolate`` without ``align_corners``.

    Computed for any range of the output by itself, with the same result for every division into ranges.

    Args:
        extent: length of the input.
        length: length of the output.
    """

    def __init__(self, extent: int, length: int) -> None:
        self.extent, self.length, self.is_same = extent, length, extent == length
        numbers = torch.arange(length, dtype=torch.float64, device="cpu")
        position = ((numbers + 0.5) * extent / length - 0.5).clamp(min=0.0, max=extent - 1)
        self.lower, self.upper = position.floor().int(), position.ceil().int()
        self.share = (position - self.lower).float()

    def num_ready(self, end: int) -> int:
        """How many outputs need only the first ``end`` inputs."""
        return int((self.upper < end).sum())

    def strips(self, columns: int) -> list[tuple[range, tuple[int, int]]]:
        """Divide the outputs into ranges that need about ``columns`` inputs each: (outputs, inputs from and to)."""
        step = max(columns * self.length // self.extent, 1)
        outputs = [range(first, min(first + step, self.length)) for first in range(0, self.length, step)]
        return [(part, (int(self.lower[part[0]]), int(self.upper[part[-1]]) + 1)) for part in outputs]

    def interpolate(self, values: torch.Tensor, outputs: range, begin: int, dim: int) -> torch.Tensor:
        """Some outputs.

        Args:
            values: the inputs from ``begin`` on, at least those that ``outputs`` need.
            outputs: numbers of the outputs.
            begin: number of the first input in ``values``.
            dim: the axis in ``values``.
        """
        if self.is_same:
            return values.narrow(dim, outputs.start - begin, len(outputs))
        part = slice(outputs.start, outputs.stop)
        lower, upper = ((bound[part] - begin).to(values.device) for bound in (self.lower, self.upper))
        share = self.share[part].to(values.device).view([-1 if axis == dim else 1 for axis in range(values.dim())])
        first = values.index_select(dim, lower)
        return first + share * (values.index_select(dim, upper) - first)


class InMemoryImage:
    """An image (C, H, W) in memory; see :class:`Image`."""

    def __init__(self, pixels: torch.Tensor) -> None:
        self.pixels = pixels
        self.height, self.width = pixels.shape[-2:]

    def crop(self, top: int, left: int, height: int, width: int) -> torch.Tensor:
        """See :class:`Image`."""
        return self.pixels[:, top : top + height, left : left + width]


def tta_logits(network: LogitsFunction, image: torch.Tensor, scales: Sequence[float], flip: bool) -> torch.Tensor:
    """The mean of probabilities over scaled and mirrored copies, at the resolution of the image.

    One score (K = 1) is a value, not that of a class: the mean is that of the values.

    Args:
        network: the network.
        image: (B, C, H, W).
        scales: of the copies. With [1.0] and without ``flip`` there are no copies, and logits are returned.
        flip: whether each copy is also mirrored left to right.

    Returns:
        (B, K, H, W).
    """
    if _is_single(scales, flip):
        return network(image)
    size = (image.shape[-2], image.shape[-1])
    total: torch.Tensor | None = None
    for scale in scales:
        scaled = image.float()
        if scale != 1.0:
            target = [max(round(extent * scale), 1) for extent in size]
            scaled = F.interpolate(scaled, size=target, mode="bilinear", align_corners=False)
        for mirrored in (False, True) if flip else (False,):
            logits = network(scaled.flip(-1) if mirrored else scaled)
            logits = logits.flip(-1) if mirrored else logits
            if logits.shape[-2:] != size:
                logits = F.interpolate(logits, size=size, mode="bilinear", align_corners=False)
            probabilities = torch.softmax(logits, dim=1) if logits.shape[1] > 1 else logits
            total = probabilities if total is None else total + probabilities
    assert total is not None
    return total / (len(scales) * (1 + flip))


def _is_single(scales: Sequence[float], flip: bool) -> bool:
    return list(scales) == [1.0] and not flip


def window_origins(extent: int, window: int, stride: int) -> list[int]:
    """The first pixels of windows along one axis: every ``stride`` pixels, and one window that ends at the last pixel.

    Args:
        extent: pixels of the image, at least ``window``.
        window: pixels of a window.
        stride: pixels from one window to the next.
    """
    return sorted({*range(0, extent - window, stride), extent - window})


def patch_windows(count: int, window: int) -> list[tuple[slice, slice]]:
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
