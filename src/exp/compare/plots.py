"""Plots of a sweep: the metric over each key, keys against one another, and the learning curves."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from exp.compare.curves import learning_curves
from exp.compare.keys import column, differing, is_seed, short_names
from exp.compare.parallel import heat_map, parallel_coordinates
from exp.compare.runs import by_metric, greater_is_better
from exp.compare.scale import Scale
from exp.compare.style import counted, finish, plain, spans_decades
from exp.draw.figure import figure_png, new_figure

if TYPE_CHECKING:
    from exp.compare.run import Run

__all__ = ["comparison_pictures"]

_KEYS = 12  # more than that many are for the parallel coordinates
_CATEGORIES = 40
_BOX_FROM = 5  # points of a category


def comparison_pictures(runs: Sequence[Run]) -> dict[str | None, dict[str, bytes]]:
    """Draw what can be seen by comparing the runs.

    For each metric: ``<metric>_over_<key>.png`` for every key that differs; ``<metric>_parallel.png`` for two or more
    of them; ``<metric>_map.png`` for exactly two, seeds aside; ``<metric>_curves.png``. Runs without a metric are drawn
    as crosses, and their number is in the title.

    Args:
        runs: any number; what one run gives is its learning curve.

    Returns:
        By metric, the bytes of PNG files by their names.
    """
    with warnings.catch_warnings():
        # Names may be in any script; what the typeface lacks is an empty box, and nothing to warn of once per letter.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        return {metric: _pictures_of(group, metric) for metric, group in by_metric(runs).items()}


def _pictures_of(runs: Sequence[Run], metric: str | None) -> dict[str, bytes]:
    pictures = {}
    prefix = _file_name(metric or "loss")
    keys = differing(runs)
    titles = short_names(keys)
    if metric is not None and any(run.metric is not None for run in runs):
        if len(keys) >= 2:
            pictures[f"{prefix}_parallel.png"] = parallel_coordinates(runs, metric, keys)
        pair = [key for key in keys if not is_seed(key)]  # seeds are averaged over, and no axis
        map_png = heat_map(runs, metric, pair) if len(pair) == 2 else None
        if map_png is not None:
            pictures[f"{prefix}_map.png"] = map_png
        for key in keys[:_KEYS]:
            picture = _metric_over(runs, metric, key, titles[key])
            if picture is not None:
                pictures[f"{prefix}_over_{_file_name(titles[key])}.png"] = picture
    curves = learning_curves(runs, metric)
    if curves is not None:
        pictures[f"{prefix}_curves.png"] = curves
    return pictures


def _metric_over(runs: Sequence[Run], metric: str, key: str, title: str) -> bytes | None:
    """The metric over one key: numbers along a line, anything else in rows; None: too many categories."""
    values = column(runs, key)
    scale = Scale(values, categorical=is_seed(key))
    points = [(scale.position(value), run.metric) for value, run in zip(values, runs) if run.metric is not None]
    crosses = [scale.position(value) for value, run in zip(values, runs) if run.metric is None]
    if len(scale.categories) > _CATEGORIES:
        return None
    if scale.numeric:
        figure = new_figure(6.6, 3.8)
        axes = figure.add_subplot()
        _draw_line(axes, points, greater_is_better(runs))
        _draw_crosses(axes, crosses, along_x=True)
        scale.apply(axes, "x")
        axes.set_xlabel(plain(title))
        axes.set_ylabel(plain(metric))
    else:
        figure = new_figure(6.6, max(0.34 * len(scale.categories) + 1.3, 2.2))
        axes = figure.add_subplot()
        _draw_rows(axes, points, len(scale.categories))
        _draw_crosses(axes, crosses, along_x=False)
        scale.apply(axes, "y")
        axes.set_ylim(len(scale.categories) - 0.4, -0.6)
        axes.set_xlabel(plain(metric))
        axes.set_ylabel(plain(title))
    if spans_decades([value for _, value in points]):
        (axes.set_yscale if scale.numeric else axes.set_xscale)("log")
    finish(axes, f"{metric} over {title}{counted(runs)}")
    return figure_png(figure)


def _draw_line(axes: Any, points: Sequence[tuple[float, float]], greater_is_better: bool) -> None:
    at: dict[float, list[float]] = {}
    for place, value in points:
        at.setdefault(place, []).append(value)
    means = [(place, sum(values) / len(values)) for place, values in sorted(at.items())]
    several = len(points) > len(at)
    # A line through the points of a random search would be scribble: their values hardly ever repeat.
    if len(at) <= 12 or len(points) >= 2 * len(at):
        axes.plot(*zip(*means), color="tab:blue", linewidth=1.4, label="mean" if several else None)
    axes.plot(*zip(*points), linestyle="none", marker="o", markersize=5, color="tab:blue",
              alpha=0.55 if several else 0.9, markeredgewidth=0)  # fmt: skip
    best = (max if greater_is_better else min)(points, key=lambda point: point[1])
    axes.plot(*([part] for part in best), linestyle="none", marker="*", markersize=13, color="tab:red",
              label=f"best: {best[1]:.4g}")  # fmt: skip
    axes.margins(x=0.08, y=0.15)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9, frameon=False)


def _draw_rows(axes: Any, points: Sequence[tuple[float, float]], count: int) -> None:
    for row in range(count):
        values = sorted(value for place, value in points if place == row)
        if not values:
            continue
        if len(values) >= _BOX_FROM:
            low, middle, high = np.percentile(values, (25, 50, 75))
            axes.plot([values[0], values[-1]], [row, row], color="0.75", linewidth=1.0, zorder=1)
            axes.barh(row, high - low, left=low, height=0.6, facecolor="white", edgecolor="0.6", zorder=1)
            axes.plot([middle, middle], [row - 0.3, row + 0.3], color="tab:blue", linewidth=1.6)
        elif len(values) > 1:
            mean = sum(values) / len(values)
            axes.plot([mean, mean], [row - 0.3, row + 0.3], color="tab:blue", linewidth=1.6)
        # Points beside one another instead of above: one that hides another looks like a single run.
        spread = [row + 0.22 * (number % 3 - 1) * (len(values) > 3) for number in range(len(values))]
        axes.plot(values, spread, linestyle="none", marker="o", markersize=5, color="tab:blue", alpha=0.6,
                  markeredgewidth=0)  # fmt: skip
    axes.margins(x=0.08)


def _draw_crosses(axes: Any, places: Sequence[float], along_x: bool) -> None:
    """Runs without a metric, on the rim: they have a place among the keys, but none among the metrics."""
    if not places:
        return
    rim = [0.03] * len(places)
    where = (places, rim) if along_x else (rim, places)
    transform = axes.get_xaxis_transform() if along_x else axes.get_yaxis_transform()
    axes.plot(*where, linestyle="none", marker="x", markersize=7, color="0.35", transform=transform)


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("._") or "key"
