"""Mean and standard deviation of each band: given, or measured once over the training split and kept."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from exp.config.trained import run_folder_of
from exp.errors import DataError
from exp.runfolder import write_json
from exp.vision.data.kept import STATISTICS, read_statistics
from exp.vision.data.statistics import Share, Statistics, measure

if TYPE_CHECKING:
    from exp.session import Session
    from exp.vision.data.reader import ImageReader

__all__ = ["Normalisation", "earlier_folders", "keep", "limits_of", "share_of", "table_of"]

logger = logging.getLogger(__name__)

TRAIN = "train"


class Normalisation:
    """What the values of each band have taken off them, and are divided by.

    Attributes:
        mean: of each band (C), in the units of the files; None: as the model has it.
        std: likewise.
        names: of the bands, as the first training image tells them; empty: not known.
        scaled: whether the range of values becomes 0..255, as that of all values that are not of 8 bits.

    Args:
        reader: of the data.
        mean: numbers, ``train`` or None.
        std: likewise.
    """

    def __init__(
        self, reader: ImageReader, mean: Sequence[float] | str | None, std: Sequence[float] | str | None
    ) -> None:
        self.reader = reader
        self.is_measured = TRAIN in (mean, std)
        self.mean = None if mean is None or isinstance(mean, str) else [float(each) for each in mean]
        self.std = None if std is None or isinstance(std, str) else [float(each) for each in std]
        self.names: list[str] = []
        self.scaled = True

    def look(self) -> None:
        """Learn from the first training image which bands there are.

        Raises:
            DataError: it cannot be read, or has no such bands.
        """
        if self.reader.bands is None and self.mean is None and not self.is_measured:
            return
        example = self.reader.example()
        self.names, self.scaled = example.names, not example.bytes or self.reader.stretch is not None

    @property
    def waits(self) -> bool:
        """Whether something is to be measured over all training images."""
        return self.is_measured or (self.reader.stretch is not None and self.reader.is_measured)

    def settle(self, share: Share | None = None, folders: Sequence[Path | None] = ()) -> dict[str, Any] | None:
        """Measure what is to be measured and has not been; a collective where ``share`` says so.

        Args:
            share: of the images, of this process.
            folders: of runs that may have measured it; the first that has is believed.

        Returns:
            What was measured now (:func:`table_of`); None: nothing was.

        Raises:
            DataError: an image cannot be used.
        """
        reader = self.reader
        if not self.waits:
            return None
        known = next(filter(None, map(_kept_in, folders)), None)
        if known is not None:
            self.take(known)
            return None
        share = share or Share()
        if reader.stretch is not None and reader.is_measured:
            reader.value_range = measure(reader, reader.examples, reader.stretch, share=share).stretched()
        if not self.is_measured:
            return {"value_range": limits_of(reader.value_range)}
        clipped = reader.value_range if self.scaled and not reader.by_image else None
        table = table_of(measure(reader, reader.examples, clipped=clipped, share=share), self)
        constant = [name for name, std in zip(table["bands"], table["std"]) if std <= 0.0]
        if constant:
            raise DataError(
                f"data.std=train: band {', '.join(constant)} of the training images holds one value everywhere, which "
                "nothing can be divided by; leave it out of data.bands"
            )
        self.take(table)
        logger.info("data.mean=%s, data.std=%s: of the training split", self.mean, self.std)
        return table

    def take(self, known: Mapping[str, Any]) -> None:
        """Be as a run had it.

        Args:
            known: ``mean``, ``std`` and ``value_range``, as far as there are some.
        """
        if known.get("value_range") is not None and self.reader.is_measured:
            self.reader.value_range = known["value_range"]
        self.is_measured = False
        if known.get("mean") is not None:
            self.mean, self.std = list(known["mean"]), list(known["std"])

    def in_bytes(self) -> tuple[list[float], list[float]] | None:
        """Mean and standard deviation of values as the model gets them, 0..255; None: as the model has it.

        Raises:
            DataError: they are more or fewer than the bands.
        """
        if self.mean is None or self.std is None:
            return None
        channels = self.reader.channels
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise DataError(
                    f"data.{key} has {len(values)} numbers, but there are {channels} bands; give one for each"
                )
        mean, std = (np.broadcast_to(np.asarray(values, np.float64), (channels,)) for values in (self.mean, self.std))
        limits = self.reader.value_range
        if self.scaled and limits is not None and not self.reader.by_image:
            low, high = (np.asarray(limit, np.float64) for limit in limits)
            mean, std = (mean - low) * 255.0 / (high - low), std * 255.0 / (high - low)
        return mean.tolist(), std.tolist()


def share_of(session: Session, workers: int, skip_errors: bool) -> Share:
    """This rank's share of the images."""
    import torch

    distributed = session.distributed

    def summed(array: np.ndarray) -> np.ndarray:
        total: np.ndarray = distributed.sum(torch.from_numpy(array)).numpy()
        return total

    return Share(session.info.rank, session.info.world_size, distributed.gather, summed, workers, skip_errors)


def table_of(found: Statistics, normalisation: Normalisation, percentiles: Sequence[float] = ()) -> dict[str, Any]:
    """Statistics as plain values, a list with a number for each band under each name.

    Raises:
        DataError: some files are of 8 bits and others are not: their values do not mean the same.
    """
    reader = normalisation.reader
    if "uint8" in found.kinds and len(found.kinds) > 1:
        other = next(kind for kind in found.kinds if kind != "uint8")
        raise DataError(
            f"{found.kinds['uint8']} holds uint8 values, and {found.kinds[other]} {other}: statistics of both together "
            "mean nothing; keep such files apart, or set data.stretch_scope=image"
        )
    names = normalisation.names or [str(band) for band in range(1, reader.channels + 1)]
    table: dict[str, Any] = {
        "images": found.images,
        "bands": names,
        "mean": found.mean.tolist(),
        "std": found.std.tolist(),
        "min": found.low.tolist(),
        "max": found.high.tolist(),
        "values": [int(count) for count in found.count],
        "without_data": [int(count) for count in found.missing],
        "value_range": limits_of(None if reader.by_image else reader.value_range),
        "units": "0..255, each image stretched by itself" if reader.by_image else "of the files",
    }
    if percentiles:
        table["percentiles"] = {f"{percent:g}": found.percentile(percent) for percent in percentiles}
    return table


def limits_of(value_range: Any) -> list[Any] | None:
    """A range as plain values: [low, high], numbers or a list for each."""
    return None if value_range is None else [_plain(limit) for limit in value_range]


def _plain(limit: Any) -> Any:
    return [float(each) for each in limit] if isinstance(limit, (list, tuple, np.ndarray)) else float(limit)


def _kept_in(folder: Path | None) -> Mapping[str, Any] | None:
    if folder is None or not (folder / STATISTICS).is_file():
        return None
    return read_statistics("resume", folder)


def keep(session: Session, table: Mapping[str, Any]) -> None:
    """Rank 0 writes what was measured to the run folder, once the run has started."""
    session.when_started(lambda: write_json(session.folder.path / STATISTICS, dict(table)))


def earlier_folders(session: Session) -> list[Path | None]:
    """Of the run that a training goes on from."""
    resume = session.config.resume
    if resume is None:
        return []
    return [session.folder.path] if resume == "auto" else [run_folder_of(str(resume))]
