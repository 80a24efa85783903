"""Mean, standard deviation and percentiles of each band over many images: exact, streaming, in bounded memory.

Moments are float64 throughout. Those of blocks of an image are joined by the formulas of Chan, Golub and LeVeque
(1979), images in their order, so that the result does not depend on how many processes and threads have worked on it.
Percentiles come from counts: of every value where values are whole numbers of at most 16 bits, else of bins as wide as
1/512 of the value (the upper 18 bits of a float32), with a straight line inside.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import numpy as np

from exp.errors import DataError
from exp.vision.data.decode import read_raw

if TYPE_CHECKING:
    from exp.vision.data.reader import ImageReader

__all__ = ["Share", "Statistics", "measure"]

_CHUNK = 32  # images whose moments are joined before they are sent to others
_BLOCK = 2**20  # values of a band at a time
_LOWEST = -(2**15)
_WHOLE = 2**16 - _LOWEST  # whole numbers from the least of int16 to the largest of uint16
_SHIFT = 14
_BINS = 2 ** (32 - _SHIFT)

Sum = Callable[[np.ndarray], np.ndarray]
"""Adds up an int64 array over all ranks."""


class Share(NamedTuple):
    """Which of the images this process looks at, and how it hears of the others.

    Attributes:
        rank: of this process.
        world_size: processes.
        gather: gives a list of what every process has handed in.
        sum: adds up int64 arrays over all processes.
        workers: threads.
        skip_errors: whether images that cannot be used are left out.
    """

    rank: int = 0
    world_size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    sum: Sum = lambda array: array
    workers: int = 1
    skip_errors: bool = False


class Statistics:
    """Of each band (C): what training images hold, in the units of their files.

    Attributes:
        images: how many.
        count: values with data, float64 (C,) as all of these.
        missing: values without.
        mean: of the values.
        std: of the values, divided by their number.
        low: the least value.
        high: the largest.
        kinds: dtypes, each with a file that has it.
    """

    def __init__(self, moments: np.ndarray, images: int, kinds: dict[str, str], counts: _Counts | None) -> None:
        self.images = images
        self.kinds = kinds
        self.count, self.mean, squares, self.missing, self.low, self.high = moments
        self.std = np.sqrt(squares / np.maximum(self.count, 1.0))
        self._counts = counts

    def percentile(self, percent: float) -> list[float]:
        """The value of each band that so many percent of the values do not exceed.

        Raises:
            ValueError: no values have been counted.
        """
        if self._counts is None:
            raise ValueError("percentiles need counts")
        return [self._counts.percentile(band, percent) for band in range(len(self.count))]

    def stretched(self) -> tuple[list[float], list[float]]:
        """The percentiles that were asked for, as (lows, highs).

        Raises:
            DataError: a band holds nearly nothing else than one value.
        """
        assert self._counts is not None
        low, high = (self.percentile(percent) for percent in self._counts.wanted)
        for band, (least, largest) in enumerate(zip(low, high), 1):
            if not least < largest:
                raise DataError(
                    f"data.stretch={list(self._counts.wanted)}: band {band} of the training images holds {least:g} "
                    "nearly everywhere; take percentiles further apart, or leave the band out of data.bands"
                )
        return low, high


def measure(
    reader: ImageReader,
    paths: Sequence[str],
    percentiles: Sequence[float] | None = None,
    clipped: Any = None,
    share: Share | None = None,
) -> Statistics:
    """Look at every image once; a collective where ``share`` says so.

    Args:
        reader: which bands, and what holds no data. Where it stretches each image by itself, what comes of that is
            measured, 0..255; else what files hold.
        paths: of the images.
        percentiles: count values for them; None: do not.
        clipped: (low, high), see :data:`exp.vision.data.values.ValueRange`, to which values are clipped before; None:
            they are not.
        share: which of the images; None: all.

    Raises:
        DataError: an image cannot be used, or a band holds no data.
    """
    share = share or Share()
    counts = None if percentiles is None else _Counts(reader.channels, percentiles)
    kinds: dict[str, str] = {}
    chunks: dict[int, tuple[np.ndarray, int]] = {}
    error: str | None = None
    starts = range(share.rank * _CHUNK, len(paths), share.world_size * _CHUNK)

    def one(path: str) -> np.ndarray | None:
        try:
            values, invalid, kind = _values_of(reader, path)
        except DataError:
            if share.skip_errors:
                return None
            raise
        kinds.setdefault(kind, path)
        return _of_image(values, invalid, clipped, counts)

    try:
        with ThreadPoolExecutor(max(share.workers, 1)) as pool:
            for start in starts:
                found = [each for each in pool.map(one, paths[start : start + _CHUNK]) if each is not None]
                chunks[start] = (_joined(found, reader.channels), len(found))
    except DataError as wrong:
        error = str(wrong)
    # Said on all ranks at once: one that waits for another's share would wait for ever.
    gathered = share.gather((error, chunks, kinds))
    errors = [text for text, _, _ in gathered if text is not None]
    if errors:
        raise DataError(errors[0])
    every = {start: chunk for _, part, _ in gathered for start, chunk in part.items()}
    for _, _, part in gathered:
        for kind, path in part.items():
            kinds.setdefault(kind, path)
    if counts is not None:
        counts.whole, counts.real = share.sum(counts.whole), share.sum(counts.real)
    moments = _joined([every[start][0] for start in sorted(every)], reader.channels)
    images = sum(number for _, number in every.values())
    empty = [str(band) for band, count in enumerate(moments[0], 1) if count == 0]
    if empty:
        raise DataError(
            f"band {', '.join(empty)} of the {images} training images holds no data anywhere; see data.bands, and the "
            "value that the files say stands for no data"
        )
    return Statistics(moments, images, kinds, counts)


def _values_of(reader: ImageReader, path: str) -> tuple[np.ndarray, np.ndarray | None, str]:
    raw = read_raw(path)
    values, invalid, _ = reader.measured(raw, path)
    if reader.by_image:
        limits = reader.stretched_by_itself(values, invalid)
        return reader.finished(values, invalid, limits, path), invalid, "stretched"
    return values, invalid, values.dtype.name


def _of_image(values: np.ndarray, invalid: np.ndarray | None, clipped: Any, counts: _Counts | None) -> np.ndarray:
    """Moments of one image, see :func:`_joined`."""
    channels = values.shape[2]
    limits = None if clipped is None else [np.broadcast_to(limit, (channels,)) for limit in clipped]
    rows = max(_BLOCK // max(values.shape[1], 1), 1)
    blocks = []
    for top in range(0, values.shape[0], rows):
        block = np.zeros((6, channels))
        block[4], block[5] = np.inf, -np.inf
        for band in range(channels):
            part = values[top : top + rows, :, band]
            known = part.reshape(-1) if invalid is None else part[~invalid[top : top + rows, :, band]]
            block[3, band] = part.size - known.size
            if not known.size:
                continue
            if counts is not None:
                counts.add(band, known)
            real = known.astype(np.float64)
            if limits is not None:
                np.clip(real, limits[0][band], limits[1][band], out=real)
            mean = real.mean()
            block[:3, band] = known.size, mean, np.square(real - mean).sum()
            block[4:, band] = real.min(), real.max()
        blocks.append(block)
    return _joined(blocks, channels)


def _joined(parts: Sequence[np.ndarray], channels: int) -> np.ndarray:
    """Moments of all values together, in the order of the parts.

    Args:
        parts: float64 (6, C) each: number of values, mean, sum of squared differences from it, values without data,
            least and largest value.
        channels: C.
    """
    total = np.zeros((6, channels))
    total[4], total[5] = np.inf, -np.inf
    for part in parts:
        count = total[0] + part[0]
        share = part[0] / np.maximum(count, 1.0)
        difference = part[1] - total[1]
        total[2] += part[2] + np.square(difference) * total[0] * share
        total[1] += difference * share
        total[0] = count
        total[3] += part[3]
        total[4], total[5] = np.minimum(total[4], part[4]), np.maximum(total[5], part[5])
    return total


class _Counts:
    """How often each value occurs in each band.

    Attributes:
        whole: of whole numbers, int64 (C, ...).
        real: of all others, by bins, int64 (C, ...).
    """

    def __init__(self, channels: int, wanted: Sequence[float]) -> None:
        self.wanted = list(wanted)
        self.whole = np.zeros((channels, _WHOLE), np.int64)
        self.real = np.zeros((channels, _BINS), np.int64)
        self._lock = threading.Lock()

    def add(self, band: int, values: np.ndarray) -> None:
        """Count values (n,) with data."""
        if values.dtype.kind in "iu" and values.dtype.itemsize <= 2:
            lowest = int(values.min())
            found = np.bincount(values.astype(np.int64) - lowest)
            with self._lock:
                self.whole[band, lowest - _LOWEST : lowest - _LOWEST + len(found)] += found
            return
        keys = _sorted_keys(values.astype(np.float32))
        lowest = int(keys.min())
        found = np.bincount(keys - lowest)
        with self._lock:
            self.real[band, lowest : lowest + len(found)] += found

    def percentile(self, band: int, percent: float) -> float:
        """The value that so many percent of the values do not exceed."""
        whole, real = np.flatnonzero(self.whole[band]), np.flatnonzero(self.real[band])
        edges = _value_of_key(np.stack([real, real + 1]))
        numbers = (whole + _LOWEST).astype(np.float64)
        low, high = np.concatenate([numbers, edges[0]]), np.concatenate([numbers, edges[1]])
        counts = np.concatenate([self.whole[band][whole], self.real[band][real]])
        order = np.argsort(low, kind="stable")
        low, high, counts = low[order], high[order], counts[order]
        below = np.cumsum(counts)
        rank = percent / 100.0 * (below[-1] - 1)  # from 0, as numpy.percentile counts
        index = int(np.searchsorted(below, rank, side="right"))
        inside = (rank - (below[index] - counts[index]) + 0.5) / counts[index]
        return float(low[index] + (high[index] - low[index]) * min(max(inside, 0.0), 1.0))


def _sorted_keys(values: np.ndarray) -> np.ndarray:
    """Numbers of bins that are in the order of the values, float32 (n,) -> int64 (n,)."""
    bits = values.view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(2**31))
    return (ordered >> _SHIFT).astype(np.int64)


def _value_of_key(keys: np.ndarray) -> np.ndarray:
    """The least value of each bin, float64."""
    ordered = (keys.astype(np.uint64) << np.uint64(_SHIFT)).clip(0, 2**32 - 1).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered & np.uint32(2**31 - 1), ~ordered)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)
