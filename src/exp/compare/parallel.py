"""Several keys at once: parallel coordinates, and a map of two keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from exp.compare.keys import column, short_names, value_text
from exp.compare.runs import greater_is_better
from exp.compare.scale import Scale, shortened
from exp.compare.style import colors_of, counted, plain, spans_decades
from exp.draw.figure import figure_png, new_figure

if TYPE_CHECKING:
    from exp.compare.run import Run

__all__ = ["heat_map", "parallel_coordinates"]

_AXES = 10
_LABELS = 20  # of an axis
_CELLS = 24  # along each side of a map
_FILLED = 0.3  # share of a map's cells below which it is no map


def parallel_coordinates(runs: Sequence[Run], metric: str, keys: Sequence[str]) -> bytes:
    """An axis for each key and one for the metric, a line for each run; the best on top, in the strongest colour.

    Args:
        runs: of one metric; those without its value are grey, and end in a cross below its axis.
        metric: its name.
        keys: the keys; of more than ten the first are drawn.

    Returns:
        The bytes of a PNG file.
    """
    drawn, titles = list(keys[:_AXES]), short_names(keys)
    scales = {key: Scale(column(runs, key)) for key in drawn}
    greater = greater_is_better(runs)
    known = [run.metric for run in runs if run.metric is not None]
    scores = Scale(known)
    scores.log = spans_decades(known)
    colors = colors_of(known, greater)
    figure = new_figure(max(1.35 * (len(drawn) + 1) + 1.2, 6.6), 4.2)
    axes = figure.add_subplot()
    places = {key: [scale.share(value) for value in column(runs, key)] for key, scale in scales.items()}
    # The worst first, so that the best lie on top; the metric's axis has the best at its top, whichever that is.
    order = sorted(range(len(runs)), key=lambda number: _badness(runs[number], greater), reverse=True)
    across = list(range(len(drawn) + 1))
    for depth, number in enumerate(order):
        score = runs[number].metric
        heights = [places[key][number] for key in drawn]
        if score is None:
            axes.plot(across, [*heights, -0.12], color="0.6", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
            axes.plot([across[-1]], [-0.12], marker="x", color="0.35", markersize=7, zorder=3, clip_on=False)
            continue
        top = scores.share(score) if greater else 1.0 - scores.share(score)
        best = number == order[-1]
        axes.plot(across, [*heights, top], color=colors.to_rgba(score), linewidth=2.6 if best else 1.3,
                  alpha=1.0 if best or len(runs) <= 20 else 0.75, zorder=2 + depth / len(order))  # fmt: skip
    for place, key in enumerate(drawn):
        _draw_axis(axes, place, [(scales[key].share(tick) if scales[key].numeric else _place(scales[key], tick),
                                  _label(tick)) for tick in scales[key].ticks()])  # fmt: skip
    axes.set_xticks(across)
    axes.set_xticklabels(
        [plain(text) for text in (*(shortened(titles[key], 18) for key in drawn), metric)], fontsize=10
    )
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0, pad=4)
    axes.set_yticks([])
    axes.set_xlim(-0.35, across[-1] + 0.04)
    low = -0.15 if len(known) < len(runs) else -0.03
    axes.set_ylim(low, 1.04)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(colors, cax=axes.inset_axes((1.0, -low / (1.04 - low), 0.02, 1.0 / (1.04 - low))))
    bar.outline.set_visible(False)
    if not greater:
        bar.ax.invert_yaxis()
    left_out = f" (first {len(drawn)} of {len(keys)} keys)" if len(drawn) < len(keys) else ""
    axes.set_title(plain(f"{metric}, best on top{counted(runs)}{left_out}"), fontsize=11, pad=14)
    return figure_png(figure)


def heat_map(runs: Sequence[Run], metric: str, keys: Sequence[str]) -> bytes | None:
    """The mean of the metric for each pair of values of two keys.

    Args:
        runs: of one metric; pairs none of whose runs has its value are crosses.
        metric: its name.
        keys: two: of the columns and of the rows.

    Returns:
        The bytes of a PNG file; None where pairs hardly ever meet, as in a random search.
    """
    titles = short_names(keys)
    values = [column(runs, key) for key in keys]
    labels = [_sorted_texts(each) for each in values]
    columns, rows = map(len, labels)
    cells: dict[tuple[int, int], list[float]] = {}
    for run, one, other in zip(runs, *values):
        cell = (labels[1].index(value_text(other)), labels[0].index(value_text(one)))
        cells.setdefault(cell, []).extend([] if run.metric is None else [run.metric])
    if max(columns, rows) > _CELLS or min(columns, rows) < 2 or len(cells) < _FILLED * columns * rows:
        return None
    means = np.full((rows, columns), np.nan)
    for cell, scores in cells.items():
        if scores:
            means[cell] = np.mean(scores)
    known = means[np.isfinite(means)].tolist()
    colors = colors_of(known, greater_is_better(runs))
    figure = new_figure(max(0.8 * columns + 2.6, 6.6), max(0.5 * rows + 1.6, 3))
    axes = figure.add_subplot()
    axes.imshow(np.where(np.isfinite(means), means, np.nan), cmap=colors.cmap, norm=colors.norm, aspect="auto")
    for (row, place), scores in cells.items():
        if not scores:
            axes.plot([place], [row], marker="x", color="0.35", markersize=9)
        elif columns <= 12:
            red, green, blue, _ = colors.to_rgba(means[row, place])
            dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.55
            count = f" ({len(scores)})" if len(runs) > len(cells) else ""
            axes.text(place, row, f"{means[row, place]:.4g}{count}", ha="center", va="center", fontsize=9,
                      color="white" if dark else "0.1")  # fmt: skip
    axes.set_xticks(range(columns))
    long = max(map(len, labels[0])) > 9
    axes.set_xticklabels([plain(shortened(text, 20)) for text in labels[0]], rotation=30 if long else 0,
                         ha="right" if long else "center")  # fmt: skip
    axes.set_yticks(range(rows))
    axes.set_yticklabels([plain(shortened(text, 20)) for text in labels[1]])
    axes.set_xlabel(plain(titles[keys[0]]))
    axes.set_ylabel(plain(titles[keys[1]]))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    figure.colorbar(colors, ax=axes, pad=0.03).outline.set_visible(False)
    what = f"mean {metric} (and of how many)" if len(runs) > len(cells) else metric
    axes.set_title(plain(f"{what}{counted(runs)}"), fontsize=11)
    return figure_png(figure)


def _draw_axis(axes: Any, place: int, ticks: Sequence[tuple[float, str]]) -> None:
    """A vertical line with labels to its left, on white so that lines do not make them unreadable."""
    axes.plot([place, place], [0, 1], color="0.25", linewidth=1.0, zorder=4)
    size = 9 if len(ticks) <= 10 else 7
    for height, text in ticks:
        axes.plot([place - 0.02, place + 0.02], [height, height], color="0.25", linewidth=1.0, zorder=4)
        box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8}
        axes.text(place - 0.04, height, text, ha="right", va="center", fontsize=size, zorder=5, bbox=box)


def _place(scale: Scale, category: str) -> float:
    count = len(scale.categories)
    return scale.categories.index(category) / (count - 1) if count > 1 else 0.5


def _label(tick: Any) -> str:
    return f"{tick:.3g}" if isinstance(tick, float) else plain(shortened(str(tick), 16))


def _badness(run: Run, greater: bool) -> float:
    if run.metric is None:
        return float("inf")
    return -run.metric if greater else run.metric


def _sorted_texts(values: Sequence[Any]) -> list[str]:
    """The distinct values as text: numbers by their size, others by their names."""
    scale = Scale(values)
    return scale.categories or [value_text(value) for value in sorted(set(values))]
