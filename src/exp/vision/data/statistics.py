"""Mean, standard deviation and percentiles of each band over many images, and the normalization of a data set.

Moments are float64, of one image each; those of all images are joined in the order of the images, so that the result
does not depend on the number of processes and threads. Percentiles come from a histogram of float32 values with bins as
wide as 1/1024 of the value: whole numbers up to 2048 have a bin each.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np
import torch

from exp.distributed import Distributed
from exp.engine.build import build_data
from exp.engine.result import make_result
from exp.errors import ConfigError, DataError
from exp.runs.files import read_json, write_json
from exp.vision.data.bands import ImageReader, per_band
from exp.vision.data.decode import read_raw

if TYPE_CHECKING:
    from exp.session import Session
    from exp.vision.data.keys import ImageDataConfig

__all__ = ["STATISTICS", "Normalization", "write_statistics"]

STATISTICS = "statistics.json"  # the file that task=stats and trainings write to the run folder
_SHIFT = 13  # lower bits of a float32 that a bin of the histogram ignores

logger = logging.getLogger(__name__)


def _moments(values: np.ndarray, size: int, limits: Any) -> list[float]:
    """Statistics of one band of one image.

    Args:
        values: the values with data, (n,).
        size: number of pixels of the image.
        limits: (low, high), to which values are clipped; None: no clipping.

    Returns:
        Number of values with data, number without, mean, sum of squared differences from the mean, smallest and largest
        value.
    """
    if not len(values):
        return [0, size, 0, 0, np.inf, -np.inf]
    real = values.astype(np.float64) if limits is None else values.astype(np.float64).clip(*limits)
    return [real.size, size - real.size, real.mean(), real.var() * real.size, real.min(), real.max()]


def _count(values: np.ndarray, histogram: np.ndarray) -> None:
    if len(values):
        keys = (values.astype(np.float32).view(np.uint32) >> _SHIFT).astype(np.int64)
        first = keys.min()
        counts = np.bincount(keys - first)
        histogram[first : first + len(counts)] += counts


def _percentile(histogram: np.ndarray, percent: float) -> float:
    """The lower end of the bin that contains a percentile; ``percent`` is from 0 to 100."""
    ends = (np.arange(len(histogram), dtype=np.uint32) << _SHIFT).view(np.float32)
    order = np.argsort(ends, kind="stable")  # the bins of NaN come last, and are empty
    below = np.cumsum(histogram[order])
    rank = percent / 100.0 * (below[-1] - 1)  # from 0, as numpy.percentile counts
    return float(ends[order][np.searchsorted(below, rank, "right")])


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
        self._has_inspected = False
        self.mean: list[float] | None = None
        self.std: list[float] | None = None
        self.is_measured = config.mean == "train" and config.std in (None, "train")
        if not self.is_measured and (config.mean, config.std) != (None, None):
            self.mean, self.std = (per_band(values, reader.channels) for values in (config.mean, config.std))
            if self.mean is None or self.std is None or min(self.std) <= 0.0:
                raise DataError(
                    f"data.mean={config.mean} and data.std={config.std}: both must have a number for each of "
                    f"{reader.channels} bands, deviations above 0; or data.mean must be train, without data.std"
                )

    def inspect_bands(self) -> None:
        """Read the bands of the first training image, once. If ``data.bands`` has numbers, other files must have as
        many bands from now on.

        Raises:
            DataError: the image cannot be read, or lacks a band of ``data.bands``.
        """
        reader = self.reader
        if self._has_inspected or (reader.bands is None and self.mean is None and not self.is_measured):
            return
        self._has_inspected = True
        raw = read_raw(self.paths[0])
        if reader.bands is not None:
            selection = reader.select_bands(raw.pixels.shape[2], raw.names, raw.alpha, self.paths[0])
            reader.num_file_bands, self.names = selection.num_bands, selection.names
        self.scaled = raw.pixels.dtype != np.uint8

    def measure(
        self,
        percentiles: Sequence[float] = (),
        distributed: Distributed | None = None,
        sources: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Measure all training images. Every rank must call this; each reads a share of the images.

        Values are in the units of the files; if files are not 8-bit, they are clipped to ``data.value_range``.

        Args:
            percentiles: from 0 to 100, of values that are not clipped; empty: none.
            distributed: the ranks; None: there is one.
            sources: number of training images of each source, in their order; None: there is one.

        Returns:
            Plain values, for each name a list over bands; with several sources also ``sources``, the same of each.

        Raises:
            DataError: an image cannot be used, or a band has no data.
        """
        distributed, reader, paths = distributed or Distributed(), self.reader, self.paths
        counts = sources or {"": len(paths)}
        ends = np.cumsum([*counts.values()])
        limits: Any = [None] * reader.channels
        if self.scaled and reader.value_range is not None:
            limits = np.transpose([per_band(limit, reader.channels) or [] for limit in reader.value_range])
        moments = np.zeros((len(paths), 6, reader.channels))
        histograms = np.zeros((len(counts), reader.channels, 2 ** (32 - _SHIFT) if percentiles else 0), np.int64)
        errors: list[DataError] = []
        histogram_lock = Lock()

        def measure_image(number: int) -> None:
            try:
                if errors:
                    return  # the others would be read in vain
                values, invalid, _ = reader.select_channels(read_raw(paths[number]), paths[number])
            except DataError as error:
                if self.config.on_error != "skip":
                    errors.append(error)
                return
            valid = [values[..., band] if invalid is None else values[..., band][~invalid[..., band]]
                     for band in range(reader.channels)]  # fmt: skip
            size = values[..., 0].size
            moments[number] = np.transpose([_moments(band.ravel(), size, pair) for band, pair in zip(valid, limits)])
            with histogram_lock:
                source = int(np.searchsorted(ends, number, side="right"))
                for band, histogram in zip(valid, histograms[source] if percentiles else ()):
                    _count(band.ravel(), histogram)

        with ThreadPoolExecutor(max(self.config.num_workers, 1)) as pool:
            list(pool.map(measure_image, range(distributed.rank, len(paths), distributed.world_size)))
        # Errors are gathered, too: if one rank raised alone, the others would wait for its share forever.
        for wrong in distributed.gather(errors):
            for error in wrong:
                raise error
        images = distributed.sum(torch.from_numpy(moments)).numpy()  # exact: one rank has the numbers, others zeros
        histograms = distributed.sum(torch.from_numpy(histograms)).numpy() if percentiles else histograms
        table = self._table(images, histograms.sum(axis=0), percentiles)
        if len(counts) > 1:
            parts = zip(counts, np.split(images, ends[:-1]), histograms)
            table["sources"] = {name: self._table(part, histogram, percentiles) for name, part, histogram in parts}
        return table

    def _table(self, images: np.ndarray, histograms: np.ndarray, percentiles: Sequence[float]) -> dict[str, Any]:
        """The statistics of some images, from their moments (N, 6, C) and histograms (C, bins)."""
        images = images[images[:, :2].any(axis=(1, 2))]  # without images that were left out
        count = images[:, 0].sum(axis=0)
        if not count.all():
            raise DataError(
                f"the {len(images)} training images have {count.tolist()} values, by band; see data.bands, and the "
                "value that the files declare as no data"
            )
        mean = (images[:, 0] * images[:, 2]).sum(axis=0) / count
        squares = images[:, 3].sum(axis=0) + (images[:, 0] * np.square(images[:, 2] - mean)).sum(axis=0)
        table: dict[str, Any] = {
            "images": len(images),
            "bands": self.names or [str(band) for band in range(1, self.reader.channels + 1)],
            "mean": mean.tolist(),
            "std": np.sqrt(squares / count).tolist(),
            "min": images[:, 4].min(axis=0).tolist(),
            "max": images[:, 5].max(axis=0).tolist(),
            "values": count.astype(int).tolist(),
            "without_data": images[:, 1].sum(axis=0).astype(int).tolist(),
            "value_range": self.reader.value_range,
        }
        for percent in percentiles:
            table.setdefault("percentiles", {})[f"{percent:g}"] = [_percentile(row, percent) for row in histograms]
        return table

    def fit(self, distributed: Distributed | None = None, earlier: Path | None = None) -> dict[str, Any] | None:
        """Measure mean and standard deviation if ``data.mean=train``. Every rank must call this.

        Args:
            distributed: the ranks.
            earlier: folder of a run whose ``statistics.json``, if there is one, is used instead.

        Returns:
            The new statistics (:meth:`measure`); None: nothing was measured.

        Raises:
            DataError: an image cannot be used, or a band is constant.
        """
        if not self.is_measured:
            return None
        if earlier is not None and (earlier / STATISTICS).is_file():
            self._take(read_json(earlier / STATISTICS))
            return None
        table = self.measure((), distributed)
        if min(table["std"]) <= 0.0:
            raise DataError(
                f"data.mean=train: the deviations of the bands {table['bands']} of the training images are "
                f"{table['std']}, and nothing can be divided by 0; leave that band out of data.bands"
            )
        self._take(table)
        return table

    def _take(self, statistics: Mapping[str, Any]) -> None:
        """Take ``mean`` and ``std`` of another run, if it has them, instead of measuring."""
        self.is_measured = False
        if statistics.get("mean") is not None:
            self.mean, self.std = (per_band(statistics[key], self.reader.channels) for key in ("mean", "std"))

    def model_arguments(self) -> dict[str, Any]:
        """``band_names`` if they are known; ``pixel_mean`` and ``pixel_std`` of the model's input, 0..255, unless the
        model has its own.
        """
        arguments = {"band_names": list(self.names)} if self.names else {}
        if self.mean is None or self.std is None:
            return arguments
        mean, std = np.asarray(self.mean, np.float64), np.asarray(self.std, np.float64)
        if self.scaled and self.reader.value_range is not None:
            low, high = (np.asarray(limit, np.float64) for limit in self.reader.value_range)
            mean, std = (mean - low) * 255.0 / (high - low), std * 255.0 / (high - low)
        return {**arguments, "pixel_mean": mean.tolist(), "pixel_std": std.tolist()}

    # -- with the weights ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is saved with weights: number of channels, range of values, and what else is set."""
        reader = self.reader
        state: dict[str, Any] = {"channels": reader.channels, "value_range": reader.value_range}
        if reader.bands is not None:
            state.update(bands=reader.bands, band_names=self.names, band_count=reader.num_file_bands)
        if self.mean is not None:
            state.update(mean=self.mean, std=self.std, scaled=self.scaled)
        if reader.modalities.statistics:
            state["modality_statistics"] = reader.modalities.statistics
        return state

    def record(self) -> dict[str, Any]:
        """Entries for ``result.json``, without those that are not set."""
        bands = self.reader.bands and (self.names or self.reader.bands)
        record = {"value_range": self.reader.value_range, "bands": bands, "mean": self.mean, "std": self.std}
        return {key: value for key, value in record.items() if value is not None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Read files like those that the weights were trained on, with their mean and standard deviation; keys that
        differ are logged as warnings.

        Args:
            state: :meth:`state` of the training data; empty for published weights.

        Raises:
            DataError: the weights have another number of channels.
        """
        reader, is_training_state = self.reader, "channels" in state
        self._has_inspected = True
        if state.get("channels", reader.channels) != reader.channels:
            raise DataError(
                f"the weights were trained with data.channels={state['channels']}, but it is {reader.channels} here; "
                f"set data.channels={state['channels']}"
            )
        mean = "train" if self.is_measured else self.mean
        for key, value in {"bands": reader.bands, "mean": mean, "value_range": reader.value_range}.items():
            if is_training_state and state.get(key) != value and (value is not None or key == "bands"):
                logger.warning("data.%s=%s, but the weights were trained with %s", key, value, state.get(key))
        if reader.bands == state.get("bands"):
            reader.num_file_bands, self.names = state.get("band_count"), list(state.get("band_names") or ())
        self.scaled = bool(state.get("scaled", True))
        if is_training_state:
            self.mean = self.std = None
            reader.modalities.statistics = dict(state.get("modality_statistics") or {})
        self._take(state)
        if reader.value_range is None:
            reader.value_range = state.get("value_range")


def write_statistics(session: Session) -> dict[str, Any]:
    """Measure the training split (:meth:`Normalization.measure`); rank 0 prints and writes ``statistics.json``.

    Raises:
        ConfigError: the data are not images.
        DataError: an image cannot be used.
    """
    config = session.config
    data: Any = build_data(session)
    if not isinstance(getattr(data, "normalization", None), Normalization):
        raise ConfigError(f"task=stats measures images, and data {config.data._target_} has none")
    data.normalization.inspect_bands()
    session.start_run()
    percentiles = list(config.task.percentiles)
    sources = {source.name: source.index.splits["train"] for source in data.sources}
    counts = {name: len(samples) for name, samples in sources.items()}
    table = data.normalization.measure(percentiles, session.distributed, counts)
    if data.learns_classes:
        table["labels"] = count_labels(data, sources, session.distributed)
    if session.distributed.is_main:
        write_json(session.folder.path / STATISTICS, table)
    for name, part in {"": table, **table.get("sources", {})}.items():
        for line in lines_of(part):
            session.print(f"{name}: {line}" if name else line)
    for name, counts in table.get("labels", {}).items():
        total = max(sum(counts.values()), 1)
        shares = ", ".join(f"{cls} {count} ({count / total:.2%})" for cls, count in counts.items())
        session.print(f"{name}: {'pixels' if data.per_pixel else 'images'} of each class: {shares}")
    means = {f"mean_{name}": value for name, value in zip(table["bands"], table["mean"])}
    return make_result(
        session, {"images": table["images"], **means}, None, files=[STATISTICS], measured_on="train", published=None
    )


def count_labels(
    data: Any, sources: Mapping[str, Sequence[Any]], distributed: Distributed
) -> dict[str, dict[str, int]]:
    """The number of training pixels (of scenes: images) of each class, by source; ignored ones are left out.

    Args:
        data: an :class:`exp.vision.data.base.ImageData`.
        sources: samples by source.
        distributed: the ranks, which each read a share of the masks.

    Raises:
        DataError: a mask cannot be read.
    """
    counts = np.zeros((len(sources), len(data.classes)), np.int64)
    errors = []
    for row, samples in zip(counts, sources.values()):
        for _, label in samples[distributed.rank :: distributed.world_size]:
            if label is None:
                continue
            try:
                labels = data.train.masks.read(label).ravel() if data.per_pixel else np.array([label])
            except DataError as error:
                errors += [error] * (data.normalization.config.on_error != "skip")
                continue
            row += np.bincount(labels[(labels >= 0) & (labels < len(row))], minlength=len(row))
    for wrong in distributed.gather(errors):
        for first in wrong:
            raise first
    totals = distributed.sum(torch.from_numpy(counts)).tolist()
    return {name: dict(zip(data.classes, row)) for name, row in zip(sources, totals)}


def lines_of(table: Mapping[str, Any]) -> list[str]:
    """The table as text: a line for each band."""
    import pandas as pd  # slow to load

    frame = pd.DataFrame({"band": table["bands"], **{key: table[key] for key in ("mean", "std", "min", "max")}})
    for name, values in table.get("percentiles", {}).items():
        frame[f"{name} %"] = values
    counts = zip(table["without_data"], table["values"])
    frame["no data"] = [f"{100 * missing / (missing + present):.2f} %" for missing, present in counts]
    clipped = "" if table["value_range"] is None else f", clipped to {table['value_range']}"
    head = f"{table['images']} training images, values of the files{clipped}"
    return [head, *frame.to_string(index=False, float_format="{:.6g}".format).splitlines()]
