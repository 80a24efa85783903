"""Images of several kinds of sensors in one training: how often each kind is drawn, and what its values are like."""

from __future__ import annotations

import functools
import os
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from exp.errors import DataError
from exp.vision.data.mmrs1m import modality_in

__all__ = ["Modalities", "ModalityDraw"]


class ModalityDraw:
    """Which sample takes each place of an epoch, so that every epoch has the same share of each modality.

    A function of (seed, epoch, place) alone, like augmentation: runs are the same for any number of devices and
    workers, and after resuming. Of each modality all samples come once before one comes again.

    Args:
        groups: the modality of each sample.
        weights: shares by modality; those of modalities that are not there are given to the others.
        seed: of the order.

    Raises:
        DataError: a modality that is there has no weight.
    """

    def __init__(self, groups: Sequence[str], weights: Mapping[str, float], seed: int) -> None:
        names = sorted(set(groups))
        lacking = [name for name in names if not weights.get(name)]
        if lacking:
            raise DataError(
                f"data.modality_weights has no share for {', '.join(lacking)}, of which there are training images; "
                "give it one, or leave it out with data.modality or data.datasets"
            )
        places = np.asarray(groups)
        self._members = [np.flatnonzero(places == name) for name in names]
        total = sum(weights[name] for name in names)
        ends = np.rint(np.cumsum([weights[name] for name in names]) / total * len(groups)).astype(int)
        self._ends = ends.tolist()
        self._seed = seed
        self.shares = {name: weights[name] / total for name in names}

    def __call__(self, place: int, epoch: int) -> int:
        """The number of the sample at a place of an epoch."""
        group = int(np.searchsorted(self._ends, place, side="right"))
        begin = self._ends[group - 1] if group else 0
        members = self._members[group]
        turn, rank = divmod(epoch * (self._ends[group] - begin) + place - begin, len(members))
        return int(members[_order(self._seed, group, turn, len(members))[rank]])


@functools.lru_cache(maxsize=16)
def _order(seed: int, group: int, turn: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, group, turn)).permutation(count)


class _Values(NamedTuple):
    """Mean and standard deviation of each channel, 0..255; float32 (C,) or (1,)."""

    mean: np.ndarray
    std: np.ndarray


class Modalities:
    """Mean and standard deviation of each modality, where they are others than the model's; picklable.

    The model takes its own mean off all images: those of another modality are mapped beforehand, so that it comes out
    as if that modality's had been taken.

    Args:
        only: the modality of all images (``data.modality``); None: the names of their data sets tell.
        statistics: ``{modality: {"mean": [...], "std": [...]}}``, 0..255.
    """

    def __init__(self, only: str | None = None, statistics: Mapping[str, Mapping[str, Sequence[float]]] | None = None):
        self.only = only
        self.take(statistics or {})
        self.model: _Values | None = None

    def take(self, statistics: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        """Use these statistics."""
        self._values = {
            name: _Values(np.asarray(each["mean"], np.float32), np.asarray(each["std"], np.float32))
            for name, each in statistics.items()
        }

    def state(self) -> dict[str, Any]:
        """The statistics as plain values."""
        return {name: {"mean": each.mean.tolist(), "std": each.std.tolist()} for name, each in self._values.items()}

    def of(self, path: str | os.PathLike[str]) -> str:
        """The modality of an image."""
        return self.only or modality_in(path)

    def fill_for(self, path: str | os.PathLike[str], fill: np.ndarray | None) -> np.ndarray | None:
        """What values without data become before :meth:`mapped`: the mean of the image's modality."""
        values = self._values.get(self.of(path)) if self._values else None
        return fill if values is None or fill is None else np.broadcast_to(values.mean, fill.shape)

    def mapped(self, image: np.ndarray, path: str | os.PathLike[str]) -> np.ndarray:
        """An image (H, W, C), 0..255, of which the model's normalisation makes what its modality's would: float32.

        Images of modalities without statistics of their own come back as they are.
        """
        values = self._values.get(self.of(path)) if self._values else None
        if values is None or self.model is None:
            return image
        factor = self.model.std / values.std
        return image.astype(np.float32) * factor + (self.model.mean - values.mean * factor)

    def meet(self, mean: np.ndarray, std: np.ndarray) -> None:
        """Know the model's mean and standard deviation, float (C,)."""
        self.model = _Values(mean.astype(np.float32), std.astype(np.float32))
