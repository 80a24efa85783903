"""Mean, standard deviation and percentiles of each band over many images, and what becomes of values by them.

Exact, streaming, in bounded memory. Moments are float64 throughout. Those of blocks of an image are joined by the
formulas of Chan, Golub and LeVeque (1979), images in their order, so that the result does not depend on how many
processes and threads have worked on it. Percentiles come from counts: of every value where values are whole numbers of
at most 16 bits, else of bins as wide as 1/512 of the value (the upper 18 bits of a float32), with a straight line
inside.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

import numpy as np
import torch

from exp.errors import DataError
from exp.vision.data.decode import read_raw
from exp.vision.data.preflight import STATISTICS, read_statistics
from exp.vision.data.values import ImageReader

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.vision.data.config import ImageDataConfig

__all__ = ["STATISTICS", "Normalization", "Statistics", "limits_of", "spread_over"]

_CHUNK = 32  # images whose moments are joined before they are sent to others
_BLOCK = 2**20  # values of a band at a time
_LOWEST = -(2**15)
_WHOLE = 2**16 - _LOWEST  # whole numbers from the least of int16 to the largest of uint16
_SHIFT = 14
_BINS = 2 ** (32 - _SHIFT)

logger = logging.getLogger(__name__)


class Statistics:
    """Accumulates values of each band (C).

    Attributes:
        images: how many.
        moments: float64 (6, C): number of values with data, mean, sum of squared differences from it, values without
            data, least and largest value.
        counts: how often each value occurs, int64 (C, whole numbers and then bins); None: no percentiles are wanted.
    """

    def __init__(self, channels: int, counted: bool = False) -> None:
        self.images = 0
        self.moments = np.zeros((6, channels))
        self.moments[4], self.moments[5] = np.inf, -np.inf
        self.counts = np.zeros((channels, _WHOLE + _BINS), np.int64) if counted else None
        self._lock = threading.Lock()

    def join(self, parts: Iterable[np.ndarray]) -> None:
        """Add moments, in their order."""
        total = self.moments
        for part in parts:
            count = total[0] + part[0]
            share = part[0] / np.maximum(count, 1.0)
            difference = part[1] - total[1]
            total[2] += part[2] + np.square(difference) * total[0] * share
            total[1] += difference * share
            total[0] = count
            total[3] += part[3]
            total[4], total[5] = np.minimum(total[4], part[4]), np.maximum(total[5], part[5])

    def of_image(self, values: np.ndarray, invalid: np.ndarray | None, clipped: Any) -> np.ndarray:
        """Count the values of one image (H, W, C), and give its moments, which :meth:`join` takes; in any thread."""
        channels = values.shape[2]
        limits = None if clipped is None else [np.broadcast_to(limit, (channels,)) for limit in clipped]
        rows = max(_BLOCK // max(values.shape[1], 1), 1)
        image = Statistics(channels)
        for top in range(0, values.shape[0], rows):
            block = Statistics(channels).moments
            for band in range(channels):
                part = values[top : top + rows, :, band]
                known = part.reshape(-1) if invalid is None else part[~invalid[top : top + rows, :, band]]
                block[3, band] = part.size - known.size
                if not known.size:
                    continue
                self._count(band, known)
                real = known.astype(np.float64)
                if limits is not None:
                    np.clip(real, limits[0][band], limits[1][band], out=real)
                mean = real.mean()
                block[:3, band] = known.size, mean, np.square(real - mean).sum()
                block[4:, band] = real.min(), real.max()
            image.join([block])
        return image.moments

    def _count(self, band: int, values: np.ndarray) -> None:
        if self.counts is None:
            return
        if values.dtype.kind in "iu" and values.dtype.itemsize <= 2:
            keys = values.astype(np.int64) - _LOWEST
        else:  # numbers of bins that are in the order of the values
            bits = values.astype(np.float32).view(np.uint32)
            ordered = np.where(bits >> 31, ~bits, bits | np.uint32(2**31))
            keys = (ordered >> _SHIFT).astype(np.int64) + _WHOLE
        lowest = int(keys.min())
        found = np.bincount(keys - lowest)
        with self._lock:
            self.counts[band, lowest : lowest + len(found)] += found

    @property
    def std(self) -> np.ndarray:
        """Of the values, divided by their number; float64 (C,)."""
        spread: np.ndarray = np.sqrt(self.moments[2] / np.maximum(self.moments[0], 1.0))
        return spread

    def percentile(self, percent: float) -> list[float]:
        """The value of each band that so many percent of the values do not exceed."""
        assert self.counts is not None
        return [_percentile(counts, percent) for counts in self.counts]


def _percentile(counts: np.ndarray, percent: float) -> float:
    keys = np.flatnonzero(counts)
    whole, bins = keys[keys < _WHOLE], keys[keys >= _WHOLE] - _WHOLE
    edges = _value_of_bin(np.stack([bins, bins + 1]))
    numbers = (whole + _LOWEST).astype(np.float64)
    low, high = np.concatenate([numbers, edges[0]]), np.concatenate([numbers, edges[1]])
    order = np.argsort(low, kind="stable")
    low, high, found = low[order], high[order], counts[keys][order]
    below = np.cumsum(found)
    rank = percent / 100.0 * (below[-1] - 1)  # from 0, as numpy.percentile counts
    index = int(np.searchsorted(below, rank, side="right"))
    inside = (rank - (below[index] - found[index]) + 0.5) / found[index]
    return float(low[index] + (high[index] - low[index]) * min(max(inside, 0.0), 1.0))


def _value_of_bin(bins: np.ndarray) -> np.ndarray:
    """The least value of each bin, float64."""
    ordered = (bins.astype(np.uint64) << np.uint64(_SHIFT)).clip(0, 2**32 - 1).astype(np.uint32)
    bits = np.where(ordered >> 31, ordered & np.uint32(2**31 - 1), ~ordered)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


class Normalization:
    """What becomes 0 and 255 of the values of each band, and what is then subtracted and divided by: given, or measured
    once over the training split, and kept with the weights.

    Attributes:
        mean: of each band (C), in the units of the files; None: as the model has it.
        std: likewise.
        names: of the bands that ``data.bands`` chooses, by the first training image; empty: not known.
        scaled: whether the range of values becomes 0..255, as that of all values that are not of 8 bits.

    Args:
        reader: of the data.
        paths: of the training images.
        config: keys of ``data``.

    Raises:
        DataError: a mean or a deviation is none.
    """

    def __init__(self, reader: ImageReader, paths: Sequence[str], config: ImageDataConfig) -> None:
        self.reader, self.paths, self.config = reader, paths, config
        self.names: list[str] = []
        self.scaled = True
        self._looked = False
        self.mean: list[float] | None = None
        self.std: list[float] | None = None
        mean, std = config.mean, config.std
        self.is_measured = mean == std == "train"
        if not self.is_measured and (mean is not None or std is not None):
            try:
                self.mean, self.std = (np.broadcast_to(each, reader.channels).tolist() for each in (mean, std))
                is_scale = bool(np.isfinite(self.mean).all() and np.less(0.0, self.std).all())
            except (TypeError, ValueError):
                is_scale = False
            if not is_scale:
                raise DataError(
                    f"data.mean={mean} and data.std={std}: both must have a number for each of {reader.channels} "
                    f"bands, deviations above 0, or be train, or the path of a {STATISTICS}"
                )

    def measure(self, counted: bool, clipped: Any = None, distributed: Distributed | None = None) -> Statistics:
        """Look at every training image once, at the values of its file; a collective where there are several ranks.

        Args:
            counted: whether percentiles are wanted.
            clipped: (low, high), see :data:`exp.vision.data.values.ValueRange`, to which values are clipped before;
                None: they are not.
            distributed: the ranks, of which each looks at its share; None: there is one.

        Raises:
            DataError: an image cannot be used, or a band holds no data.
        """
        found = Statistics(self.reader.channels, counted)
        rank, ranks = (0, 1) if distributed is None else (distributed.rank, distributed.world_size)

        def one(path: str) -> np.ndarray | None:
            try:
                values, invalid, _ = self.reader.measured(read_raw(path), path)
            except DataError:
                if self.config.on_error == "skip":
                    return None
                raise
            return found.of_image(values, invalid, clipped)

        chunks: dict[int, tuple[np.ndarray, int]] = {}
        error: DataError | None = None
        try:
            with ThreadPoolExecutor(max(self.config.num_workers, 1)) as pool:
                for start in range(rank * _CHUNK, len(self.paths), ranks * _CHUNK):
                    images = [each for each in pool.map(one, self.paths[start : start + _CHUNK]) if each is not None]
                    chunk = Statistics(self.reader.channels)
                    chunk.join(images)
                    chunks[start] = chunk.moments, len(images)
        except DataError as wrong:
            error = wrong
        if distributed is not None:
            # All ranks hear of an error at once: one that waits for another's share would wait for ever.
            gathered = distributed.gather((error, chunks))
            error = next((each for each, _ in gathered if each is not None), None)
            chunks = {start: chunk for _, part in gathered for start, chunk in part.items()}
            if error is None and found.counts is not None:
                found.counts = distributed.sum(torch.from_numpy(found.counts)).numpy()
        if error is not None:
            raise error
        found.join(chunks[start][0] for start in sorted(chunks))
        found.images = sum(number for _, number in chunks.values())
        empty = [str(band) for band, count in enumerate(found.moments[0], 1) if count == 0]
        if empty:
            raise DataError(
                f"band {', '.join(empty)} of the {found.images} training images holds no data anywhere; see "
                "data.bands, and the value that the files say stands for no data"
            )
        return found

    def look(self) -> None:
        """See by the first training image which bands there are, once; their numbers mean files like it from now on.

        Raises:
            DataError: it cannot be read, or has no such bands.
        """
        bands = self.reader.bands
        if self._looked or (bands.wanted is None and self.mean is None and not self.is_measured):
            return
        self._looked = True
        raw = read_raw(self.paths[0])
        if bands.wanted is not None:
            plan = bands.plan(raw.pixels.shape[2], raw.names, raw.alpha, self.paths[0])
            bands.expected, self.names = plan.measured, plan.names
        self.scaled = raw.pixels.dtype != np.uint8 or self.reader.stretch is not None

    @property
    def lacks_range(self) -> bool:
        """Whether the percentiles of ``data.stretch`` are still to be measured."""
        return self.reader.stretch is not None and self.reader.value_range is None

    def find_range(self, distributed: Distributed | None = None) -> None:
        """Measure what becomes 0 and 255, where that is to be measured and has not been.

        Raises:
            DataError: an image cannot be used, or values are the same nearly everywhere.
        """
        stretch = self.reader.stretch
        if stretch is None or not self.lacks_range:
            return
        found = self.measure(counted=True, distributed=distributed)
        low, high = (found.percentile(percent) for percent in stretch)
        for band, (least, largest) in enumerate(zip(low, high), 1):
            if not least < largest:
                raise DataError(
                    f"data.stretch={list(stretch)}: band {band} of the training images holds {least:g} nearly "
                    "everywhere; take percentiles further apart, or leave the band out of data.bands"
                )
        self.reader.value_range = low, high

    def settle(self, distributed: Distributed | None = None, earlier: Path | None = None) -> dict[str, Any] | None:
        """Measure what is to be measured and has not been; a collective.

        Args:
            distributed: the ranks.
            earlier: folder of a run that may have measured it, and is believed.

        Returns:
            What was measured now (:meth:`table`); None: nothing was.

        Raises:
            DataError: an image cannot be used.
        """
        if not self.is_measured and not self.lacks_range:
            return None
        if earlier is not None and (earlier / STATISTICS).is_file():
            self._take(read_statistics("resume", earlier))
            return None
        self.find_range(distributed)
        if not self.is_measured:
            return {"value_range": limits_of(self.reader.value_range)}
        table = self.table((), distributed)
        constant = [name for name, std in zip(table["bands"], table["std"]) if std <= 0.0]
        if constant:
            raise DataError(
                f"data.std=train: band {', '.join(constant)} of the training images holds one value everywhere, which "
                "nothing can be divided by; leave it out of data.bands"
            )
        self._take(table)
        logger.info("data.mean=%s, data.std=%s: of the training split", self.mean, self.std)
        return table

    def table(self, percentiles: Sequence[float], distributed: Distributed | None = None) -> dict[str, Any]:
        """Statistics of the training images as plain values: a list with a number for each band under each name."""
        reader = self.reader
        self.find_range(distributed)
        limits = reader.value_range if self.scaled else None
        found = self.measure(bool(percentiles), limits, distributed)
        table: dict[str, Any] = {
            "images": found.images,
            "bands": self.names or [str(band) for band in range(1, reader.channels + 1)],
            "mean": found.moments[1].tolist(),
            "std": found.std.tolist(),
            "min": found.moments[4].tolist(),
            "max": found.moments[5].tolist(),
            "values": [int(count) for count in found.moments[0]],
            "without_data": [int(count) for count in found.moments[3]],
            "value_range": limits_of(reader.value_range),
            "units": "of the files",
        }
        if percentiles:
            table["percentiles"] = {f"{percent:g}": found.percentile(percent) for percent in percentiles}
        return table

    def _take(self, known: Mapping[str, Any]) -> None:
        """Be as a run had it: ``mean``, ``std`` and ``value_range``, as far as there are some."""
        if known.get("value_range") is not None and self.lacks_range:
            self.reader.value_range = known["value_range"]
        self.is_measured = False
        if known.get("mean") is not None:
            self.mean, self.std = (
                np.broadcast_to(known[key], self.reader.channels).tolist() for key in ("mean", "std")
            )

    def in_bytes(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation of values as the model gets them, 0..255; None: as the model has it."""
        if self.mean is None or self.std is None:
            return None
        mean, std = np.asarray(self.mean, np.float64), np.asarray(self.std, np.float64)
        limits = self.reader.value_range
        if self.scaled and limits is not None:
            low, high = (np.asarray(limit, np.float64) for limit in limits)
            mean, std = (mean - low) * 255.0 / (high - low), std * 255.0 / (high - low)
        return mean.tolist(), std.tolist()

    # -- with the weights ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What of it belongs to weights; only what there is, but for the number of channels and the range."""
        reader, bands = self.reader, self.reader.bands
        state: dict[str, Any] = {"channels": reader.channels, "value_range": limits_of(reader.value_range)}
        if bands.wanted is not None:
            state.update(bands=bands.wanted, band_names=self.names, band_count=bands.expected)
        if self.mean is not None:
            state.update(mean=self.mean, std=self.std, scaled=self.scaled)
        if reader.modalities.state():
            state["modality_statistics"] = reader.modalities.state()
        return state

    def record(self) -> dict[str, Any]:
        """What of it ``result.json`` has; only what there is."""
        bands = self.reader.bands.wanted and (self.names or self.reader.bands.wanted)
        record = {"value_range": limits_of(self.reader.value_range), "bands": bands, "mean": self.mean, "std": self.std}
        return {key: value for key, value in record.items() if value is not None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Read files as those that weights were trained on; a warning tells of other bands.

        Args:
            state: :meth:`state` of the data that the weights were trained on; empty for weights of others.

        Raises:
            DataError: the weights had other channels, or the mean and standard deviation of the model, and others are
                given.
        """
        reader, bands, ours = self.reader, self.reader.bands, "channels" in state
        self._looked = True
        if state.get("channels", reader.channels) != reader.channels:
            raise DataError(
                f"the weights were trained with data.channels={state['channels']}, but it is {reader.channels} here; "
                f"set data.channels={state['channels']}"
            )
        if ours and state.get("mean") is None and (self.mean is not None or self.is_measured):
            raise DataError(
                "the weights were trained with the mean and standard deviation of the model, but data.mean is set "
                "here; leave it out (data.mean=null data.std=null)"
            )
        given = {"bands": bands.wanted, "mean": self.mean, "value_range": limits_of(reader.value_range)}
        for key, value in given.items():
            if ours and state.get(key) != value and (value is not None or key == "bands"):
                logger.warning("data.%s=%s, but the weights were trained with %s", key, value, state.get(key))
        if bands.wanted == state.get("bands"):
            bands.expected, self.names = state.get("band_count"), list(state.get("band_names") or ())
        self.scaled = bool(state.get("scaled", True))
        self._take({"mean": state.get("mean"), "std": state.get("std")})
        if ours:
            reader.modalities.load(state.get("modality_statistics") or {})
        if given["value_range"] is None:
            reader.value_range = limits_of(state.get("value_range"))


def spread_over(paths: Sequence[str], most: int) -> Sequence[str]:
    """At most so many of the paths, from the first to the last."""
    return [paths[number * len(paths) // most] for number in range(most)] if len(paths) > most else paths


def limits_of(value_range: Any) -> list[Any] | None:
    """A range as plain values: [low, high], numbers or a list for each."""
    return None if value_range is None else [np.asarray(limit, np.float64).tolist() for limit in value_range]
