"""Learning curves: what ``metrics.jsonl`` of several runs tells, and a plot of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from exp.compare.scale import shortened
from exp.compare.style import finish, plain, spans_decades
from exp.draw.figure import figure_png, new_figure

if TYPE_CHECKING:
    from exp.compare.run import Run

__all__ = ["Curve", "curves_of", "learning_curves", "thinned"]

_STRONG = 5
_ALL_STRONG_UP_TO = 8


class Curve(NamedTuple):
    """One quantity of a run over its optimizer steps.

    Attributes:
        steps: ascending.
        values: finite, as many.
    """

    steps: list[float]
    values: list[float]


def curves_of(run: Run, metric: str | None) -> dict[str, Curve]:
    """The training loss as ``loss`` and the validation metric as ``val``, as far as the run has them."""
    curves = {"loss": Curve([], []), "val": Curve([], [])}
    for record in run.records():
        if record["split"] == "train":
            value = record.get("loss")
            if value is None:  # no reading of the sum: it is that of its parts
                parts = [part for name, part in record.items() if name.startswith("loss_") and part is not None]
                value = sum(parts) if parts else None
        elif record["split"] == "val" and metric is not None:
            value = record.get(metric)
        else:
            continue
        if isinstance(value, (int, float)) and math.isfinite(value):
            curve = curves["loss" if record["split"] == "train" else "val"]
            curve.steps.append(record["step"])
            curve.values.append(value)
    return {name: curve for name, curve in curves.items() if curve.steps}


def thinned(curve: Curve, most: int) -> Curve:
    """At most ``most`` points: of each stretch the least and the greatest, so that no spike is lost."""
    count = len(curve.steps)
    if count <= most:
        return curve
    kept = {0, count - 1}
    stretches = (most - 2) // 2
    for number in range(stretches):
        begin, end = 1 + number * (count - 2) // stretches, 1 + (number + 1) * (count - 2) // stretches
        part = range(begin, end)
        if part:
            kept |= {min(part, key=curve.values.__getitem__), max(part, key=curve.values.__getitem__)}
    order = sorted(kept)
    return Curve([curve.steps[place] for place in order], [curve.values[place] for place in order])


def learning_curves(runs: Sequence[Run], metric: str | None) -> bytes | None:
    """The validation metric of all runs over their steps, or their training loss where they have no validation.

    Args:
        runs: of one metric, the best first. Of more than eight the five best are strong and the others faint. Those
            without a result are dashed.
        metric: its name; None: there is none.

    Returns:
        The bytes of a PNG file; None where no run has a curve.
    """
    curves = {run: curves_of(run, metric) for run in runs}
    for kind, label in (("val", f"validation {metric}"), ("loss", "training loss")):
        drawn = [run for run in runs if kind in curves[run]]
        if drawn:
            return _draw({run: curves[run][kind] for run in drawn}, label, metric or "status", len(runs))
    return None


def _draw(curves: dict[Run, Curve], label: str, metric: str, total: int) -> bytes:
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(8, 4.6)
    axes = figure.add_subplot()
    strong = _STRONG if len(curves) > _ALL_STRONG_UP_TO else _ALL_STRONG_UP_TO
    for place, (run, curve) in enumerate(curves.items()):
        style: dict[str, Any] = {"linestyle": "-" if run.metric is not None else (0, (4, 2))}
        if len(curve.steps) <= 25:
            style.update(marker="o", markersize=3.5 if place < strong else 2)
        if place < strong:
            score = f"  {run.metric:.4g}" if run.metric is not None else f"  {run.status}"
            style.update(color=f"C{place}", linewidth=1.8 if place == 0 else 1.4, zorder=20 - place,
                         label=plain(shortened(run.name, 32) + score))  # fmt: skip
        else:
            style.update(color="0.55", linewidth=0.8, alpha=0.5, zorder=2)
        axes.plot(curve.steps, curve.values, **style)
    axes.set_xlabel("optimizer steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(plain(label))
    if spans_decades([value for curve in curves.values() for value in curve.values]):
        axes.set_yscale("log")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=9, frameon=False,
                title=plain(f"best {strong}: run, {metric}" if len(curves) > strong else f"run, {metric}"))  # fmt: skip
    missing = f", {total - len(curves)} without a curve" if total > len(curves) else ""
    finish(axes, f"{label}, {len(curves)} run{'s' if len(curves) != 1 else ''}{missing}")
    return figure_png(figure)
