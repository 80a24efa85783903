"""Which channels of a file a model gets, in which order: by number, by the names that files give them, or all.

A last channel that the file marks as transparency is no band: it tells where there is no data. ``data.bands``
may name it all the same.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np

from exp.data.places import shortened
from exp.errors import DataError

if TYPE_CHECKING:
    from exp.vision.data.config import ImageDataConfig

__all__ = ["COLORS", "Bands", "Plan", "color_names", "colors_in", "is_measured_band"]

COLORS = ("red", "green", "blue", "alpha")
_CHANNELS = {1: ("gray",), 2: ("gray", "alpha"), 3: COLORS[:3], 4: COLORS}
# By the bands of Sentinel-2, whose red is the fourth; of other sensors only the plain words are certain.
_WORDS = ({"red", "r", "b4"}, {"green", "g", "b3"}, {"blue", "b", "b2"})


class Plan(NamedTuple):
    """What is read of one file.

    Attributes:
        indexes: of the bands that the model gets, from 0, in its order.
        alpha: index of the band that is transparency, and none of those; None: there is none.
        names: of the bands that ``data.bands`` chooses; the number stands for one without a name.
        measured: how many bands of the file are no transparency.
    """

    indexes: list[int]
    alpha: int | None
    names: list[str]
    measured: int


class Bands:
    """Plans what is read of each file; picklable.

    Attributes:
        expected: measured bands (without transparency) that the files of the training split have; None: not known yet.
            Numbers would mean other bands in a file that has more or fewer.

    Args:
        config: keys of ``data``: ``bands``; without them all, as they come, to be ``channels``.
    """

    def __init__(self, config: ImageDataConfig) -> None:
        self.wanted = list(config.bands) if config.bands else None
        self.channels = config.channels if self.wanted is None else len(self.wanted)
        self.expected: int | None = None

    def plan(self, count: int, names: Sequence[str], marked: bool, path: str | os.PathLike[str]) -> Plan:
        """The bands of one file.

        Args:
            count: of its bands.
            names: of each; empty where the file gives none.
            marked: whether it marks the last one as transparency.
            path: for messages.

        Raises:
            DataError: it has no such band, or another number of bands than the files that numbers were meant for.
        """
        measured = count - (marked and count > 1)
        if self.wanted is None:
            return Plan(list(range(measured)), measured if measured < count else None, [], measured)
        if self.expected not in (None, measured) and any(isinstance(band, int) for band in self.wanted):
            raise DataError(
                f"{path} has {measured} bands, but the training images {self.expected}: the numbers in data.bands="
                f"{self.wanted} would mean others here; keep such files apart, or choose bands by name"
            )
        names = [name or str(number) for number, name in enumerate(names or [""] * count, 1)]
        indexes = [_index(band, names, path) for band in self.wanted]
        alpha = measured if measured < count and measured not in indexes else None
        return Plan(indexes, alpha, [names[index] for index in indexes], measured)


def _index(band: int | str, names: Sequence[str], path: str | os.PathLike[str]) -> int:
    known: list[Any] = [*range(1, len(names) + 1)] if isinstance(band, int) else [_plain(name) for name in names]
    wanted = band if isinstance(band, int) else _plain(str(band))
    found = [index for index, each in enumerate(known) if each == wanted]
    if len(found) != 1:
        raise DataError(
            f"{path} has {len(found) or 'no'} band{'s' * (len(found) > 1)} {band}, which data.bands asks for; it has "
            f"{len(names)}: {shortened(names, 20)}; choose one by its number"
        )
    return found[0]


def _plain(name: str) -> str:
    """A band's name up to the first comma or bracket, without case and leading zeros.

    ``B04``, ``b4``, ``Band 4`` and ``B4, central wavelength 665 nm`` are one, ``B8A`` is another.
    """
    text = re.split(r"[,;:(]", name)[0].strip().casefold()
    return re.sub(r"^(?:band[ _-]?|b)0*(\d+a?)$", r"b\1", text)


def color_names(count: int) -> tuple[str, ...]:
    """What the channels of a picture are called that is no TIFF."""
    return _CHANNELS.get(count, ())


def is_measured_band(last: np.ndarray) -> bool:
    """Whether most values of a channel that is marked as alpha are neither transparent nor opaque.

    GDAL itself marks the fourth band of 8 bits as alpha where nobody says what it is.

    Args:
        last: the channel, of any shape.
    """
    return bool(last.size) and bool(np.count_nonzero((last > 0) & (last < last.max())) > last.size / 2)


def colors_in(names: Sequence[str]) -> list[int | None]:
    """Where red, green and blue are among the bands; None where one is not, or not for certain.

    Args:
        names: of the bands: words, or ``B04``, ``B03``, ``B02`` as Sentinel-2 has them.
    """
    plain = [_plain(name).split(" ")[0] for name in names]
    places = [[index for index, name in enumerate(plain) if name in words] for words in _WORDS]
    return [each[0] if len(each) == 1 else None for each in places]
