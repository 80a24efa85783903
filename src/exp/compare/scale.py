"""How the values of a swept key, or of a metric, lie along an axis."""

from __future__ import annotations

import math
from typing import Any, Sequence

from exp.compare.keys import value_text
from exp.compare.run import natural
from exp.compare.style import plain

__all__ = ["Scale", "is_logarithmic", "shortened"]

_TICKS = 9  # values that are each given a tick of their own


class Scale:
    """Numbers on a linear or a logarithmic axis, anything else side by side.

    Args:
        values: of the key in each run; None is a value as any other (``null``).
        categorical: also where they are numbers, as for seeds, of which none is between two others.

    Attributes:
        categories: the distinct values as text, in the order in which they are shown; empty for numbers.
        log: whether the axis is logarithmic.
    """

    def __init__(self, values: Sequence[Any], categorical: bool = False) -> None:
        distinct = list({value_text(value): value for value in values}.values())
        self.numeric = not categorical and all(map(_is_number, distinct))
        numbers = sorted(value for value in distinct if _is_number(value))
        others = sorted((value_text(value) for value in distinct if not _is_number(value)), key=natural)
        self.categories = [] if self.numeric else [*map(value_text, numbers), *others]
        self.log = self.numeric and is_logarithmic(numbers)
        self._numbers = numbers

    def position(self, value: Any) -> float:
        """Where the value lies: itself, or the place of its category from 0."""
        return float(value) if self.numeric else float(self.categories.index(value_text(value)))

    def share(self, value: Any) -> float:
        """Where the value lies between the least (0) and the greatest (1), or the first and the last category."""
        if self.numeric:
            low, high, at = self._numbers[0], self._numbers[-1], value
            if self.log:
                low, high, at = math.log(low), math.log(high), math.log(at)
        else:
            low, high, at = 0, len(self.categories) - 1, self.position(value)
        return 0.5 if high == low else (at - low) / (high - low)

    def ticks(self) -> list[Any]:
        """The values that are worth a label: all where they are few, else some from the least to the greatest."""
        if not self.numeric:
            return list(self.categories)
        if len(self._numbers) <= _TICKS:
            return list(self._numbers)
        low, high = self._numbers[0], self._numbers[-1]
        if self.log:
            return [low * (high / low) ** (part / 4) for part in range(5)]
        return [low + (high - low) * part / 4 for part in range(5)]

    def apply(self, axes: Any, which: str) -> None:
        """Have the ``x`` or the ``y`` axis of matplotlib's axes scaled and labelled like this."""
        from matplotlib.ticker import NullFormatter, NullLocator

        axis = getattr(axes, f"{which}axis")
        if not self.numeric:
            axis.set_ticks(list(range(len(self.categories))))
            axis.set_ticklabels([plain(shortened(text)) for text in self.categories])
            return
        if self.log:
            getattr(axes, f"set_{which}scale")("log")
            axis.set_minor_formatter(NullFormatter())
        if len(self._numbers) <= _TICKS:
            axis.set_minor_locator(NullLocator())
            axis.set_ticks(self._numbers)
            axis.set_ticklabels([value_text(number) for number in self._numbers])


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


def shortened(text: str, width: int = 28) -> str:
    """``text``, or its beginning and its end with an ellipsis between them."""
    return text if len(text) <= width else f"{text[: width // 3]}…{text[-(width - width // 3 - 1) :]}"


def _unevenness(gaps: Sequence[float]) -> float:
    mean = sum(gaps) / len(gaps)
    return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
