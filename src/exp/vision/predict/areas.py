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
        pixel_area: square metres of a pixel; None: not known.
    """

    file: str
    counts: Sequence[int]
    pixel_area: float | None


def shares(counts: Sequence[int]) -> list[float]:
    """Each class's share of all pixels that have one."""
    known = max(sum(counts), 1)
    return [count / known for count in counts]


def areas_csv(areas: Sequence[Area], classes: Sequence[str]) -> bytes:
    """``file,class,pixels,share,square_metres``: a row for each class of each image."""
    rows = []
    for area in areas:
        metres = [_metres(count, area.pixel_area) for count in area.counts]
        rows += [[area.file, *row] for row in _rows(classes, area.counts, metres)]
    return _csv(["file", "class", "pixels", "share", "square_metres"], rows)


def total_csv(areas: Sequence[Area], classes: Sequence[str]) -> bytes:
    """``class,pixels,share,square_metres`` over all images; square metres only where all images tell theirs."""
    counts = [sum(area.counts[number] for area in areas) for number in range(len(classes))]
    metres: list[float | None] = [None] * len(classes)
    if all(area.pixel_area is not None for area in areas):
        metres = [
            sum(area.counts[number] * (area.pixel_area or 0.0) for area in areas) for number in range(len(classes))
        ]
    return _csv(["class", "pixels", "share", "square_metres"], _rows(classes, counts, metres))


def _metres(count: int, pixel_area: float | None) -> float | None:
    return None if pixel_area is None else count * pixel_area


def _rows(classes: Sequence[str], counts: Sequence[int], metres: Sequence[float | None]) -> list[list[object]]:
    return [
        [name, count, f"{share:.6f}", "" if area is None else f"{area:.2f}"]
        for name, count, share, area in zip(classes, counts, shares(counts), metres)
    ]


def _csv(header: list[str], rows: list[list[object]]) -> bytes:
    return csv_content([header, *rows])
