"""Which installed fonts have the characters that the default typeface, DejaVu Sans, has not."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib import font_manager
from matplotlib.ft2font import FT2Font

__all__ = ["Face", "default_face", "faces_for", "undrawable"]

# cm* have other characters at the places of some letters; the others show boxes and private signs.
_NO_TEXT = ("Last Resort", "STIXNonUnicode", "STIXSize", "cm")

_undrawable: set[str] = set()


class Face(NamedTuple):
    """One font file.

    Attributes:
        family: by which matplotlib knows it.
        path: of the file.
    """

    family: str
    path: str


def default_face(bold: bool = False) -> Face:
    """DejaVu Sans, which comes with matplotlib, so that every machine draws the same."""
    file = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return Face("DejaVu Sans", str(Path(mpl.get_data_path()) / "fonts" / "ttf" / file))


@lru_cache(maxsize=4096)
def faces_for(text: str) -> tuple[Face, ...]:
    """Fonts beside the default one that ``text`` needs.

    Args:
        text: any.

    Returns:
        Few installed fonts that together have what the default typeface lacks, the one that has most of it first; empty
        where it lacks nothing. Characters that no font has are among :func:`undrawable` from then on.
    """
    lacking = {letter for letter in text if _is_visible(letter)}
    lacking -= _characters(default_face().path)
    found = []
    while lacking:
        best = max(_installed(), key=lambda face: len(lacking & _characters(face.path)), default=None)
        if best is None or not lacking & _characters(best.path):
            _undrawable.update(lacking)
            break
        found.append(best)
        lacking -= _characters(best.path)
    return tuple(found)


def undrawable() -> set[str]:
    """The characters that this process was to draw, and for which no font is installed."""
    return set(_undrawable)


def _is_visible(letter: str) -> bool:
    return not letter.isspace() and unicodedata.category(letter) not in ("Cc", "Cf")


@lru_cache(maxsize=1)
def _installed() -> list[Face]:
    """Fonts for text, upright ones of common weight first, and among these those without serifs, like the default."""
    entries = [entry for entry in font_manager.fontManager.ttflist if not entry.name.startswith(_NO_TEXT)]
    entries.sort(key=lambda each: (each.style != "normal", str(each.weight) not in ("400", "normal", "regular"),
                                   "Serif" in each.name, each.name, each.fname))  # fmt: skip
    return [Face(entry.name, entry.fname) for entry in entries]


@lru_cache(maxsize=None)
def _characters(path: str) -> frozenset[str]:
    try:
        font = FT2Font(path)
        return frozenset(map(chr, font.get_charmap())) if font.scalable else frozenset()
    except (OSError, RuntimeError):  # removed since matplotlib has looked, or broken
        return frozenset()
