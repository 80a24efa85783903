"""Which bands of a file a model gets, and in which order: by number, or by the names that files give their bands."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Sequence

import numpy as np

from exp.data.places import shortened
from exp.errors import DataError

__all__ = ["BandChoice", "Plan", "color_names", "colors_in", "is_measured_band", "order_of_colors", "plain_name"]

_CHANNELS = {1: ("gray",), 2: ("gray", "alpha"), 3: ("red", "green", "blue"), 4: ("red", "green", "blue", "alpha")}
# By the bands of Sentinel-2, whose red is the fourth; of other sensors only the plain words are certain.
_COLORS = ({"red", "r", "b4", "b04"}, {"green", "g", "b3", "b03"}, {"blue", "b", "b2", "b02"})


class Plan(NamedTuple):
    """What is read of one file.

    Attributes:
        indexes: of the bands that the model gets, from 0, in its order.
        alpha: index of the band that is transparency, and none of those; None: there is none.
        names: of the bands that the model gets; the number stands for one without a name.
    """

    indexes: list[int]
    alpha: int | None
    names: list[str]


class BandChoice:
    """The bands of ``data.bands``; picklable.

    Attributes:
        expected: measured bands (without transparency) that the files of the training split have; None: not known yet.
            Numbers would mean other bands in a file that has more or fewer.

    Args:
        wanted: numbers from 1 or names, in the order of the model.
        given_names: of all measured bands, where files do not tell them (``data.band_names``).
        alpha: see :func:`exp.vision.data.values.split_alpha`.
    """

    def __init__(
        self, wanted: Sequence[int | str], given_names: Sequence[str] | None = None, alpha: bool | None = None
    ) -> None:
        self.wanted = list(wanted)
        self.given_names = given_names
        self.alpha = alpha
        self.expected: int | None = None

    def measured(self, count: int, marked: bool) -> int:
        """How many of a file's bands are no transparency."""
        is_alpha = marked if self.alpha is None else self.alpha
        return count - 1 if is_alpha and count > 1 else count

    def plan(self, count: int, names: Sequence[str], marked: bool, path: str | os.PathLike[str]) -> Plan:
        """The bands of one file.

        Args:
            count: of its bands.
            names: of each; empty where the file gives none.
            marked: whether it marks the last one as transparency.
            path: for messages.

        Raises:
            DataError: it has no such band, another number of bands than the files that numbers were meant for, or
                another number than ``given_names``.
        """
        measured = self.measured(count, marked)
        if self.given_names is not None:
            if len(self.given_names) not in (measured, count):
                raise DataError(
                    f"{path} has {measured} bands, but data.band_names names {len(self.given_names)}; name each of them"
                )
            names = [*self.given_names, *["alpha"] * (count - len(self.given_names))]
        elif self.expected not in (None, measured) and any(isinstance(band, int) for band in self.wanted):
            raise DataError(
                f"{path} has {measured} bands, but the training images {self.expected}: the numbers in data.bands="
                f"{self.wanted} would mean others here; keep such files apart, or choose bands by name"
            )
        names = [name or str(number) for number, name in enumerate(names if any(names) else [""] * count, 1)]
        indexes = [self._index(band, names, path) for band in self.wanted]
        alpha = count - 1 if measured < count and count - 1 not in indexes else None
        return Plan(indexes, alpha, [names[index] for index in indexes])

    def _index(self, band: int | str, names: Sequence[str], path: str | os.PathLike[str]) -> int:
        if isinstance(band, int) and 1 <= band <= len(names):
            return band - 1
        if not isinstance(band, int):
            if names == [str(number) for number in range(1, len(names) + 1)]:
                raise DataError(
                    f"{path} gives its {len(names)} bands no names, but data.bands asks for {band}; choose by number, "
                    "from 1, or name all of its bands with data.band_names"
                )
            for like in (str.casefold, plain_name, _first_word):
                found = [index for index, name in enumerate(names) if like(name) == like(band)]
                if len(found) > 1:
                    raise DataError(f"{path} has {len(found)} bands named {band}; choose by number with data.bands")
                if found:
                    return found[0]
        known = shortened(names, 20)
        raise DataError(f"{path} has no band {band}, which data.bands asks for; it has {len(names)}: {known}")


def plain_name(name: str) -> str:
    """A band's name without case and leading zeros: ``B04``, ``b4`` and ``B4`` are one, ``B8A`` is another."""
    text = name.strip().casefold()
    match = re.fullmatch(r"(?:band[ _-]?|b)0*(\d+)(a?)", text)
    return f"b{match.group(1)}{match.group(2)}" if match else text


def _first_word(name: str) -> str:
    """What stands before the first comma, space or bracket, as in ``B4, central wavelength 665 nm``."""
    return plain_name(re.split(r"[\s,;:(]", name.strip(), maxsplit=1)[0])


def color_names(count: int) -> tuple[str, ...]:
    """What the channels of a picture are called that is no TIFF."""
    return _CHANNELS.get(count, ("",) * count)


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
    plain = [name.strip().casefold().split(",")[0].split(" ")[0] for name in names]
    places = [[index for index, name in enumerate(plain) if name in words] for words in _COLORS]
    return [each[0] if len(each) == 1 else None for each in places]


def order_of_colors(names: Sequence[str]) -> list[int] | None:
    """In which order the bands of a file are red, green, blue.

    Args:
        names: of its bands: three colors, and transparency perhaps.

    Returns:
        Indexes from 0; None: they are so already, or their names do not tell.
    """
    colors = [index for index in colors_in(names[:3]) if index is not None]
    if len(names) not in (3, 4) or len(colors) < 3 or colors == [0, 1, 2]:
        return None
    return [*colors, *range(3, len(names))]
