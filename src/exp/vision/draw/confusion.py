"""A confusion matrix as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

import numpy as np

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
    count = len(classes)
    cell = 0.52 if count <= _NUMBERS_UP_TO else 0.24
    letters = 9 if count <= _NUMBERS_UP_TO else 6
    room = max(len(name) for name in classes) * letters * 0.6 / 72 + 1.0
    figure = new_figure(max(count * cell, 2.5) + room, max(count * cell, 2.5) + room)
    axes = figure.add_subplot()
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    shares = counts / totals
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    axes.set_xticks(range(count))
    axes.set_xticklabels(classes, rotation=60, ha="right", rotation_mode="anchor", fontsize=letters)
    axes.set_yticks(range(count))
    axes.set_yticklabels(classes, fontsize=letters)
    for tick in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        as_it_is(tick)
    axes.set_xlabel("prediction")
    axes.set_ylabel("truth")
    axes.set_title(title, fontsize=11)
    axes.set_xticks(np.arange(count + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(count + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="minor", length=0)
    if count <= _NUMBERS_UP_TO:
        size = 9 if counts.max() < 1000 else 7
        for row, column in zip(*np.nonzero(counts)):
            color = "white" if shares[row, column] > 0.55 else "0.15"
            text = _short(int(counts[row, column]))
            axes.text(column, row, text, ha="center", va="center", color=color, fontsize=size)
    return figure


def _short(number: int) -> str:
    """``12345`` as ``12k``: it must fit into a cell."""
    for size, letter in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if number >= size:
            return f"{number / (1000 if letter == 'k' else size):.3g}{letter}"
    return str(number)
