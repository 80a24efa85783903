"""How the values of a key lie along an axis: as numbers, linear or logarithmic, or side by side."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Sequence

from exp.report.keys import is_seed, value_text
from exp.report.run import is_number, natural

__all__ = ["Scale", "is_logarithmic", "scale_of"]


class Scale(NamedTuple):
    """The axis of a key, and where each run lies on it.

    Attributes:
        kind: ``value``, ``log`` or ``category``: ECharts' types of an axis.
        categories: of ``category`` the distinct values as text, in the order in which they are shown; else empty.
        places: of each run the number itself, or the place of its category from 0.
    """

    kind: str
    categories: list[str]
    places: list[float]


def scale_of(key: str, values: Sequence[Any]) -> Scale:
    """The axis that suits a key.

    Args:
        key: dotted. Of seeds none is between two others: they are categories, also where they are numbers.
        values: of the key in each run; None is a value as any other (``null``).
    """
    distinct = list({value_text(value): value for value in values}.values())
    numbers = sorted(value for value in distinct if is_number(value))
    if len(numbers) == len(distinct) and not is_seed(key):
        return Scale("log" if is_logarithmic(numbers) else "value", [], list(values))
    others = sorted((value_text(value) for value in distinct if not is_number(value)), key=natural)
    categories = [*map(value_text, numbers), *others]
    return Scale("category", categories, [categories.index(value_text(value)) for value in values])


def is_logarithmic(numbers: Sequence[float]) -> bool:
    """Whether numbers are spread more evenly by their ratios than by their differences.

    Args:
        numbers: sorted and distinct. True for 1e-4, 1e-3, 1e-2 and for 64, 128, 256, 512, not for 96, 192, 336, 720.
    """
    if len(numbers) < 2 or numbers[0] <= 0 or not math.isfinite(numbers[-1]):
        return False
    span = numbers[-1] / numbers[0]
    ratios = [math.log(high / low) for low, high in zip(numbers, numbers[1:])]
    even = max(ratios) / min(ratios) if len(ratios) > 1 else math.inf
    if even < 1.01 or (even < 1.25 and span >= 8):  # 1, 2, 4; 1, 3, 10
        return True
    differences = [high - low for low, high in zip(numbers, numbers[1:])]
    return span >= 100 and _unevenness(ratios) <= _unevenness(differences)


def _unevenness(gaps: Sequence[float]) -> float:
    mean = sum(gaps) / len(gaps)
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2
