"""How much of an image each class covers, as tables."""

from __future__ import annotations

from typing import NamedTuple, Sequence

from exp.csvfile import csv_content

__all__ = ["Area", "areas_csv", "shares", "total_csv"]


class Area(NamedTuple):
    """What one image holds.

    Attributes:
        file: its path.
        counts: pixels of each class (K whole numbers).
        metres: square metres of each class (K); None: not known.
    """

    file: str
    counts: Sequence[int]
    metres: Sequence[float] | None


def shares(counts: Sequence[int]) -> list[float]:
    """Each class's share of all pixels that have one."""
    known = max(sum(counts), 1)
    return [count / known for count in counts]


def areas_csv(areas: Sequence[Area], classes: Sequence[str]) -> bytes:
    """``file,class,pixels,share,square_metres``: a row for each class of each image."""
    rows = []
    for area in areas:
        rows += [[area.file, *row] for row in _rows(classes, area.counts, area.metres)]
    return _csv(["file", "class", "pixels", "share", "square_metres"], rows)


def total_csv(areas: Sequence[Area], classes: Sequence[str]) -> bytes:
    """``class,pixels,share,square_metres`` over all images; square metres only where all images tell theirs."""
    counts = [sum(area.counts[number] for area in areas) for number in range(len(classes))]
    told = [area.metres for area in areas if area.metres is not None]
    metres = None if len(told) < len(areas) else [sum(each[number] for each in told) for number in range(len(classes))]
    return _csv(["class", "pixels", "share", "square_metres"], _rows(classes, counts, metres))


def _rows(classes: Sequence[str], counts: Sequence[int], metres: Sequence[float] | None) -> list[list[object]]:
    told = [""] * len(classes) if metres is None else [f"{area:.2f}" for area in metres]
    return [
        [name, count, f"{share:.6f}", area] for name, count, share, area in zip(classes, counts, shares(counts), told)
    ]


def _csv(header: list[str], rows: list[list[object]]) -> bytes:
    return csv_content([header, *rows])
