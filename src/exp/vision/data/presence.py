"""Which classes the masks of a data set have pixels of: a class without one is not learned, or not measured."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import cv2
import numpy as np

from exp.errors import DataError
from exp.vision.data.reader import spread_over

if TYPE_CHECKING:
    from exp.vision.data.labels import ColourMasks, IndexMasks
    from exp.vision.data.segmentation import SegmentationDataset

__all__ = ["Presence", "values_in"]

_MASKS, _PIXELS = 16, 2**26  # of each part, that are looked at before a training
_CALLED = {"train": "training", "val": "validation", "test": "test"}


def values_in(labels: np.ndarray) -> list[int]:
    """The values that labels hold, ascending.

    Args:
        labels: uint8, of any shape.
    """
    counts = cv2.calcHist([np.ascontiguousarray(labels).reshape(-1, 1)], [0], None, [256], [0, 256])
    found: list[int] = np.flatnonzero(counts.reshape(-1)).tolist()
    return found


class Presence:
    """Says which classes lack pixels: of a few masks before a training, of all that were read when it is done.

    Args:
        classes: names.
        masks: reads them, and knows which values do not count.

    Attributes:
        say: tells the user a line.
    """

    def __init__(self, classes: Sequence[str], masks: IndexMasks | ColourMasks) -> None:
        self.classes = list(classes)
        self.masks = masks
        self.say: Callable[[str], object] = logging.getLogger(__name__).warning
        self._told: set[str] = set()

    def look(self, parts: Mapping[str, SegmentationDataset]) -> None:
        """Look at some masks of each part, spread over it; warns of what cannot be meant.

        Of a few masks of many only that is said which is no chance: a single class, and pixels that are left out.

        Raises:
            DataError: no mask of a part has a pixel that counts.
        """
        for part, data in parts.items():
            read, found = self._some(data)
            if not read:
                continue
            whole = read == len(data)
            met = [name for number, name in enumerate(self.classes) if number in found]
            where = f"the {read} {_CALLED[part]} masks" if whole else f"{read} of {len(data)} {_CALLED[part]} masks"
            if not met:
                text = f"no pixel of {where} has a class: {self.masks.left_out()}"
                if whole:
                    raise DataError(text)
                self.say(f"warning: {text}")
            elif part == "train" and (whole or (len(met) == 1 < len(self.classes) and self.masks.hint(found))):
                self._warn([name for name in self.classes if name not in met], where, found, "cannot be learned")

    def _some(self, data: SegmentationDataset) -> tuple[int, list[int]]:
        """How many masks were read, and the values that they hold."""
        read, pixels, found = 0, 0, set()
        for path in spread_over([mask for _, mask in data.samples], _MASKS):
            try:
                labels = self.masks.read(path).values
            except DataError:
                continue  # told when it is its turn, if it is not left out
            read, pixels = read + 1, pixels + labels.size
            found.update(values_in(labels))
            if pixels >= _PIXELS:
                break
        return read, sorted(found)

    def record(
        self, sizes: Mapping[str, int], tested_on: str, gathered: Sequence[Mapping[str, Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """What the masks have shown that were read; nothing of a part that was not.

        Args:
            sizes: samples of each part.
            tested_on: the part that is measured on.
            gathered: of each rank: what the datasets of all parts have met.

        Returns:
            ``classes_without_training_pixels`` and ``classes_not_measured``, as far as there are such.
        """
        told = {}
        for part, title, means in (
            ("train", "classes_without_training_pixels", "cannot be learned"),
            (tested_on, "classes_not_measured", "no figure tells of it"),
        ):
            read = {number for rank in gathered for number in rank[part]["read"]}
            found = sorted({value for rank in gathered for value in rank[part]["values"]})
            lacking = [name for number, name in enumerate(self.classes) if number not in found]
            if read and lacking:
                told[title] = lacking
                share = "the" if len(read) == sizes[part] else f"{len(read)} of"
                self._warn(lacking, f"{share} {sizes[part]} {_CALLED[part]} masks", found, means)
        return told

    def _warn(self, lacking: Sequence[str], where: str, found: Sequence[int], means: str) -> None:
        """Once for what it means, however often it is found."""
        if lacking and means not in self._told:
            self._told.add(means)
            names = ("class " if len(lacking) == 1 else "classes ") + ", ".join(lacking)
            self.say(f"warning: no pixel of {names} in {where}: {means}{self.masks.hint(found)}")
