"""A confusion matrix as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import numpy as np
from matplotlib.ticker import EngFormatter

from exp.draw.figure import as_it_is, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["confusion_figure"]

_NUMBERS_UP_TO = 25  # classes; more leave no room for numbers


def confusion_figure(counts: np.ndarray, classes: Sequence[str], title: str) -> Figure:
    """Rows are the truth, columns the prediction; colors are shares of the truth, numbers are counts.

    Args:
        counts: (K, K), whole numbers.
        classes: their names.
        title: above the figure.
    """
    count, numbers = len(classes), len(classes) <= _NUMBERS_UP_TO
    letters = 9 if numbers else 6
    side = max(count * (0.52 if numbers else 0.24), 2.5) + max(map(len, classes)) * letters * 0.6 / 72 + 1.0
    figure = new_figure(side, side)
    axes = figure.add_subplot()
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set(xlabel="prediction", ylabel="truth", xticks=range(count), yticks=range(count))
    axes.set_title(title, fontsize=11)
    axes.set_xticklabels(classes, rotation=60, ha="right", rotation_mode="anchor", fontsize=letters)
    axes.set_yticklabels(classes, fontsize=letters)
    for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        as_it_is(tick)
    shortly = EngFormatter(places=0, sep="")  # 12345 as 12k
    for row, column in zip(*np.nonzero(counts)) if numbers else ():
        color = "white" if shares[row, column] > 0.55 else "0.15"
        text = shortly(counts[row, column])
        axes.text(column, row, text, ha="center", va="center", color=color, fontsize=9 if counts.max() < 1000 else 7)
    return figure
