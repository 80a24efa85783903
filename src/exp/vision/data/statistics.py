"""Mean, standard deviation and percentiles of each band over many images, and the normalization of a data set.

Computed as a stream, in bounded memory. Moments are float64; those of blocks, images and chunks of images are joined in
a fixed order, so that the result does not depend on the number of processes and threads. Percentiles come from a
histogram: with a bin for each value of integers of at most 16 bits, else with bins as wide as 1/512 of the value (the
upper 18 bits of a float32).
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np
import torch

from exp.engine.building import build_data, make_result
from exp.engine.distributed import Distributed
from exp.errors import ConfigError, DataError
from exp.runs.files import write_json
from exp.vision.data.decode import read_raw
from exp.vision.data.values import ImageReader, per_band

if TYPE_CHECKING:
    from exp.session import Session
    from exp.vision.data.config import ImageDataConfig

__all__ = ["STATISTICS", "Normalization", "Statistics", "limits_of", "write_statistics"]

STATISTICS = "statistics.json"
"""The file that ``task=stats`` and trainings write to the run folder."""
_CHUNK = 32  # images whose moments are joined before they are sent to other ranks
_BLOCK = 2**20  # values of a band that are processed at a time
_LOWEST, _WHOLE = -(2**15), 2**15 + 2**16  # integers from the smallest of int16 to the largest of uint16: first, count
_SHIFT = 14  # lower bits of a float32 that a bin ignores

logger = logging.getLogger(__name__)


class Statistics:
    """Accumulates values of each band (C).

    Attributes:
        images: number of images.
        moments: float64 (6, C): number of values with data, mean, sum of squared differences from the mean, number of
            values without data, smallest and largest value.
        counts: how often each value of :func:`_values` occurs, int64 (C, values); None: no percentiles.

    Args:
        channels: bands (C).
        counted: whether to count values, for percentiles.
    """

    def __init__(self, channels: int, counted: bool) -> None:
        self.images = 0
        self.moments = np.zeros((6, channels))
        self.counts = np.zeros((channels, len(_values())), np.int64) if counted else None
        self._lock = threading.Lock()

    def of_image(self, values: np.ndarray, invalid: np.ndarray | None, limits: Any) -> np.ndarray:
        """Count the values of one image, and return its moments (6, C). Thread-safe.

        Args:
            values: of the image, (H, W, C).
            invalid: True where a value has no data, bool (H, W, C); None: all have data.
            limits: (low, high), a list over bands each, to which values are clipped for the moments; None: no clipping.
        """
        rows = max(_BLOCK // max(values.shape[1], 1), 1)
        blocks = []
        for top in range(0, values.shape[0], rows):
            moments = np.zeros((6, values.shape[2]))
            moments[4], moments[5] = np.inf, -np.inf
            for band, moment in enumerate(moments.T):
                part = values[top : top + rows, :, band]
                known = part.reshape(-1) if invalid is None else part[~invalid[top : top + rows, :, band]]
                moment[3] = part.size - known.size
                if known.size:
                    self._count(band, known)
                    real = known.astype(np.float64)
                    if limits is not None:
                        np.clip(real, limits[0][band], limits[1][band], out=real)
                    moment[[0, 1, 2, 4, 5]] = real.size, real.mean(), real.var() * real.size, real.min(), real.max()
            blocks.append(moments)
        return joined(blocks)

    def _count(self, band: int, values: np.ndarray) -> None:
        if self.counts is None:
            return
        if values.dtype.kind in "iu" and values.dtype.itemsize <= 2:
            keys = values.astype(np.int64) - _LOWEST
        else:
            keys = (values.astype(np.float32).view(np.uint32) >> _SHIFT).astype(np.int64) + _WHOLE
        lowest = int(keys.min())
        found = np.bincount(keys - lowest)
        with self._lock:
            self.counts[band, lowest : lowest + len(found)] += found

    @property
    def std(self) -> np.ndarray:
        """Population standard deviation, float64 (C,)."""
        spread: np.ndarray = np.sqrt(self.moments[2] / np.maximum(self.moments[0], 1.0))
        return spread

    def percentile(self, percent: float) -> list[float]:
        """The percentile of each band; ``percent`` is from 0 to 100."""
        assert self.counts is not None
        order = np.argsort(_values(), kind="stable")
        values = _values()[order]
        below = np.cumsum(self.counts[:, order], axis=1)
        ranks = percent / 100.0 * (below[:, -1] - 1)  # from 0, as numpy.percentile counts
        return [float(values[np.searchsorted(row, rank, "right")]) for row, rank in zip(below, ranks)]


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the moments of several parts, (6, C) each; the order of the parts changes rounding only."""
    each = np.stack(parts)
    total = each.sum(axis=0)
    total[1] = (each[:, 0] * each[:, 1]).sum(axis=0) / np.maximum(total[0], 1.0)
    total[2] += (each[:, 0] * np.square(each[:, 1] - total[1])).sum(axis=0)
    total[4], total[5] = each[:, 4].min(axis=0), each[:, 5].max(axis=0)
    return total


@functools.lru_cache(maxsize=1)
def _values() -> np.ndarray:
    """The values that are counted: integers, then the center of each bin; float64."""
    bins = (np.arange(2 ** (32 - _SHIFT), dtype=np.uint32) << _SHIFT) + np.uint32(2 ** (_SHIFT - 1))
    with np.errstate(invalid="ignore"):  # the last bins are those of NaN
        return np.concatenate([np.arange(_LOWEST, _LOWEST + _WHOLE), bins.view(np.float32).astype(np.float64)])


class Normalization:
    """Mean and standard deviation of each band: given, or measured once over the training split and saved with weights.

    Attributes:
        mean: of each band (C), in the units of the files; None: the model's own.
        std: standard deviation, likewise.
        names: of the bands that ``data.bands`` chooses, in the first training image; empty: not known.
        scaled: whether ``data.value_range`` is mapped to 0..255: True unless files are 8-bit.

    Args:
        reader: reads the image files.
        paths: of the training images.
        config: keys of ``data``.

    Raises:
        DataError: ``data.mean`` or ``data.std`` is not valid.
    """

    def __init__(self, reader: ImageReader, paths: Sequence[str], config: ImageDataConfig) -> None:
        self.reader, self.paths, self.config = reader, paths, config
        self.names: list[str] = []
        self.scaled = True
        self._looked = False
        self.mean: list[float] | None = None
        self.std: list[float] | None = None
        self.is_measured = config.mean == "train" and config.std in (None, "train")
        if not self.is_measured and (config.mean, config.std) != (None, None):
            self.mean, self.std = (per_band(each, reader.channels) for each in (config.mean, config.std))
            if self.mean is None or self.std is None or min(self.std) <= 0.0:
                raise DataError(
                    f"data.mean={config.mean} and data.std={config.std}: both must have a number for each of "
                    f"{reader.channels} bands, deviations above 0; or data.mean must be train, without data.std"
                )

    def measure(self, counted: bool, clipped: Any = None, distributed: Distributed | None = None) -> Statistics:
        """Measure the values of all training images. Every rank must call this; each reads a share of the images.

        Args:
            counted: whether to count values, for percentiles.
            clipped: (low, high) to which values are clipped first, numbers or lists over bands; None: no clipping.
            distributed: the ranks; None: there is one.

        Raises:
            DataError: an image cannot be used, or a band has no data.
        """
        distributed = distributed or Distributed()
        found = Statistics(self.reader.channels, counted)
        limits = None if clipped is None else [per_band(each, self.reader.channels) for each in clipped]

        def one(path: str) -> np.ndarray | DataError:
            try:
                values, invalid, _ = self.reader.measured(read_raw(path), path)
            except DataError as error:
                return error
            return found.of_image(values, invalid, limits)

        chunks: dict[int, tuple[np.ndarray, int]] = {}
        error: DataError | None = None
        with ThreadPoolExecutor(max(self.config.num_workers, 1)) as pool:
            for start in range(distributed.rank * _CHUNK, len(self.paths), distributed.world_size * _CHUNK):
                made = list(pool.map(one, self.paths[start : start + _CHUNK]))
                images = [each for each in made if isinstance(each, np.ndarray)]
                if len(images) < len(made) and self.config.on_error != "skip":
                    error = next(each for each in made if isinstance(each, DataError))
                    break
                if images:
                    chunks[start] = joined(images), len(images)
        # Errors are gathered, too: if one rank raised alone, the others would wait for its share forever.
        for wrong, part in distributed.gather((error, chunks)):
            if wrong is not None:
                raise wrong
            chunks.update(part)
        if found.counts is not None:
            found.counts = distributed.sum(torch.from_numpy(found.counts)).numpy()
        if chunks:
            found.moments = joined([chunks[start][0] for start in sorted(chunks)])
        found.images = sum(number for _, number in chunks.values())
        if not found.moments[0].all():
            raise DataError(
                f"the {found.images} training images have {found.moments[0].tolist()} values, by band; see data.bands, "
                "and the value that the files say stands for no data"
            )
        return found

    def look(self) -> None:
        """Read the bands of the first training image, once. If ``data.bands`` has numbers, other files must have as
        many bands from now on.

        Raises:
            DataError: the image cannot be read, or lacks a band of ``data.bands``.
        """
        bands = self.reader.bands
        if self._looked or (bands.wanted is None and self.mean is None and not self.is_measured):
            return
        self._looked = True
        raw = read_raw(self.paths[0])
        if bands.wanted is not None:
            plan = bands.plan(raw.pixels.shape[2], raw.names, raw.alpha, self.paths[0])
            bands.expected, self.names = plan.measured, plan.names
        self.scaled = raw.pixels.dtype != np.uint8

    def settle(self, distributed: Distributed | None = None, earlier: Path | None = None) -> dict[str, Any] | None:
        """Measure mean and standard deviation if ``data.mean=train``. Every rank must call this.

        Args:
            distributed: the ranks.
            earlier: folder of a run whose ``statistics.json``, if there is one, is used instead.

        Returns:
            The new statistics (:meth:`table`); None: nothing was measured.

        Raises:
            DataError: an image cannot be used, or a band is constant.
        """
        if not self.is_measured:
            return None
        if earlier is not None and (earlier / STATISTICS).is_file():
            self._take(json.loads((earlier / STATISTICS).read_text(encoding="utf-8")))
            return None
        table = self.table((), distributed)
        if min(table["std"]) <= 0.0:
            raise DataError(
                f"data.mean=train: the deviations of the bands {table['bands']} of the training images are "
                f"{table['std']}, and nothing can be divided by 0; leave that band out of data.bands"
            )
        self._take(table)
        return table

    def table(self, percentiles: Sequence[float], distributed: Distributed | None = None) -> dict[str, Any]:
        """Measure, and return the statistics as plain values: for each name a list over bands.

        Args:
            percentiles: from 0 to 100; empty: none.
            distributed: the ranks; None: there is one.
        """
        value_range = self.reader.value_range
        found = self.measure(bool(percentiles), value_range if self.scaled else None, distributed)
        table: dict[str, Any] = {
            "images": found.images,
            "bands": self.names or [str(band) for band in range(1, self.reader.channels + 1)],
            "mean": found.moments[1].tolist(),
            "std": found.std.tolist(),
            "min": found.moments[4].tolist(),
            "max": found.moments[5].tolist(),
            "values": [int(count) for count in found.moments[0]],
            "without_data": [int(count) for count in found.moments[3]],
            "value_range": limits_of(value_range),
        }
        if percentiles:
            table["percentiles"] = {f"{percent:g}": found.percentile(percent) for percent in percentiles}
        return table

    def _take(self, known: Mapping[str, Any]) -> None:
        """Take ``mean`` and ``std`` of another run, if it has them, instead of measuring."""
        self.is_measured = False
        if known.get("mean") is not None:
            self.mean, self.std = (per_band(known[key], self.reader.channels) for key in ("mean", "std"))

    def in_bytes(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation of each band of the model's input, 0..255; None: the model's own."""
        if self.mean is None or self.std is None:
            return None
        mean, std = np.asarray(self.mean, np.float64), np.asarray(self.std, np.float64)
        if self.scaled and self.reader.value_range is not None:
            low, high = (np.asarray(limit, np.float64) for limit in self.reader.value_range)
            mean, std = (mean - low) * 255.0 / (high - low), std * 255.0 / (high - low)
        return mean.tolist(), std.tolist()

    # -- with the weights ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is saved with weights: number of channels, range of values, and what else is set."""
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
        """Entries for ``result.json``, without those that are not set."""
        bands = self.reader.bands.wanted and (self.names or self.reader.bands.wanted)
        record = {"value_range": limits_of(self.reader.value_range), "bands": bands, "mean": self.mean, "std": self.std}
        return {key: value for key, value in record.items() if value is not None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Read files like those that the weights were trained on; other keys are logged as warnings.

        Args:
            state: :meth:`state` of the training data; empty for published weights.

        Raises:
            DataError: the weights have another number of channels; or they were trained with the model's own mean and
                standard deviation, and ``data.mean`` is set.
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
        self._take(state)
        if ours:
            reader.modalities.load(state.get("modality_statistics") or {})
        if given["value_range"] is None:
            reader.value_range = limits_of(state.get("value_range"))


def limits_of(value_range: Any) -> list[Any] | None:
    """A range of values as plain values: [low, high], numbers or lists over bands; None stays None."""
    return None if value_range is None else [np.asarray(limit, np.float64).tolist() for limit in value_range]


def write_statistics(session: Session) -> dict[str, Any]:
    """Measure the training split; each rank reads a share of the images, rank 0 prints and writes ``statistics.json``.

    Values are in the units of the files, clipped to ``data.value_range`` if it is set.

    Raises:
        ConfigError: the data are not images.
        DataError: an image cannot be used.
    """
    config = session.config
    data: Any = build_data(session)
    if not isinstance(getattr(data, "normalization", None), Normalization):
        raise ConfigError(f"task=stats measures images, and data {config.data._target_} has none")
    data.normalization.look()
    session.begin()
    table = data.normalization.table(list(config.task.percentiles), session.distributed)
    if session.distributed.is_main:
        write_json(session.folder.path / STATISTICS, table)
    for line in lines_of(table):
        session.say(line)
    means = {f"mean_{name}": value for name, value in zip(table["bands"], table["mean"])}
    return make_result(
        session, {"images": table["images"], **means}, None, files=[STATISTICS], measured_on="train", published=None
    )


def lines_of(table: Mapping[str, Any]) -> list[str]:
    """The table as text: a line for each band."""
    import pandas as pd  # slow to load

    shown = pd.DataFrame({"band": table["bands"], **{key: table[key] for key in ("mean", "std", "min", "max")}})
    for name, values in table["percentiles"].items():
        shown[f"{name} %"] = values
    both = zip(table["without_data"], table["values"])
    shown["no data"] = [f"{100 * lacking / (lacking + there):.2f} %" for lacking, there in both]
    clipped = "" if table["value_range"] is None else f", clipped to {table['value_range']}"
    head = f"{table['images']} training images, values of the files{clipped}"
    return [head, *shown.to_string(index=False, float_format="{:.6g}".format).splitlines()]
