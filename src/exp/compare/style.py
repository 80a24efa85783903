"""What the plots of a comparison have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

if TYPE_CHECKING:
    from exp.compare.run import Run

__all__ = ["GRID", "colors_of", "counted", "finish", "plain", "spans_decades"]

GRID = {"color": "0.9", "linewidth": 0.6}


def finish(axes: Any, title: str) -> None:
    """Grid, spines and title, as in the other plots of a run."""
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(plain(title), fontsize=11)


def plain(text: str) -> str:
    """Text that matplotlib draws as it is: dollars would begin a formula, and legends hide what begins with ``_``."""
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


def counted(runs: Sequence[Run]) -> str:
    """For the end of a title: how many runs, and how many of them have no metric."""
    missing = sum(run.metric is None for run in runs)
    text = f", {len(runs)} run{'s' if len(runs) != 1 else ''}"
    return f"{text}, {missing} without result (x)" if missing else text


def spans_decades(values: Sequence[float]) -> bool:
    """Whether some values are so far off that on a linear axis the others would all look equal."""
    return bool(values) and min(values) > 0 and max(values) > 100 * min(values)


def colors_of(values: Sequence[float], greater_is_better: bool) -> Any:
    """Matplotlib's mapping of a metric to colours: the best is dark, on white the strongest."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1)
    norm = LogNorm(low, high) if spans_decades(values) else Normalize(low, high)
    # Without the palest tenth, which is hardly seen on white.
    parts = [colormaps["viridis"](part / 255 * 0.92) for part in range(256)]
    return ScalarMappable(
        norm, LinearSegmentedColormap.from_list("metric", parts[::-1] if greater_is_better else parts)
    )
