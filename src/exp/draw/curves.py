"""How a training went: loss, validation metric and learning rate over the steps, from ``metrics.jsonl``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Sequence

from exp.draw.figure import as_it_is, label, new_figure, title_and_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["training_curves"]

_SMOOTHED_FROM = 60  # readings of the loss
_GRID = {"color": "0.9", "linewidth": 0.6}


def training_curves(records: Sequence[dict[str, Any]], metric: str, greater_is_better: bool, title: str) -> Figure:
    """Three panels above one another.

    Args:
        records: the lines of ``metrics.jsonl``: each has ``split``, ``step`` and values by name.
        metric: the validation metric to show.
        greater_is_better: which of its values is marked as the best.
        title: above the figure.
    """
    train = [record for record in records if record["split"] == "train"]
    val = [record for record in records if record["split"] == "val" and record.get(metric) is not None]
    figure = new_figure(8, 7)
    loss, score, rate = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 3, 1.6]})
    _draw_losses(loss, train)
    _draw_score(score, val, metric, greater_is_better)
    rate.plot(*_series(train, "lr"), color="tab:green", linewidth=1.2)
    rate.set_ylabel("lr")  # its panel is low
    rate.set_xlabel("optimizer steps")
    rate.set_ylim(bottom=0.0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    for axes in (loss, score, rate):
        axes.grid(**_GRID)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    title_and_legend(loss, title)
    title_and_legend(score, "")
    figure.align_ylabels()
    return figure


def _series(records: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    known = [record for record in records if record.get(name) is not None]
    return [record["step"] for record in known], [record[name] for record in known]


def _draw_losses(axes: Any, train: Sequence[dict[str, Any]]) -> None:
    """The sum strongly, its parts (``loss_*``) faintly; with many readings also a running mean."""
    parts = sorted({name for record in train for name in record if name.startswith("loss_")})
    steps, total = _series(train, "loss")
    if not total:  # no reading of the sum: it is that of the parts
        with_parts = [record for record in train if any(name in record for name in parts)]
        steps = [record["step"] for record in with_parts]
        total = [sum(record.get(name) or 0.0 for name in parts) for record in with_parts]
    many = len(total) >= _SMOOTHED_FROM
    marker = "o" if len(total) <= 25 else None
    for number, name in enumerate(parts if len(parts) > 1 else []):
        axes.plot(
            *_series(train, name), color=f"C{number + 1}", linewidth=0.9, alpha=0.8, label=label(name[len("loss_") :])
        )
    axes.plot(steps, total, color="tab:blue", linewidth=0.8 if many else 1.4, alpha=0.35 if many else 1.0,
              marker=marker, markersize=3, label="loss" if len(parts) > 1 and not many else None)  # fmt: skip
    if many:
        axes.plot(steps, _running_mean(total), color="tab:blue", linewidth=1.6, label="loss (running mean)")
    axes.set_ylabel("training loss")
    positive = [value for value in total if value > 0]
    if len(positive) == len(total) > 0 and max(positive) > 20 * min(positive):
        axes.set_yscale("log")


def _draw_score(axes: Any, val: Sequence[dict[str, Any]], metric: str, greater_is_better: bool) -> None:
    steps, values = _series(val, metric)
    axes.plot(steps, values, color="tab:orange", linewidth=1.4, marker="o", markersize=3.5)
    as_it_is(axes.set_ylabel(f"validation {metric}"))
    finite = [pair for pair in zip(values, steps) if math.isfinite(pair[0])]
    if not finite:
        axes.text(0.5, 0.5, "no validation", transform=axes.transAxes, ha="center", va="center", color="0.5")
        return
    best, step = max(finite) if greater_is_better else min(finite)
    axes.plot(
        [step],
        [best],
        marker="*",
        markersize=13,
        color="tab:red",
        linestyle="none",
        label=f"best: {best:.4g} at step {step}",
    )
    axes.margins(y=0.15)


def _running_mean(values: Sequence[float]) -> list[float]:
    """Exponential, over about a twentieth of all readings, corrected for its beginning."""
    decay = 1.0 - 20.0 / max(len(values), 21)
    mean, weight, result = 0.0, 0.0, []
    for value in values:
        mean, weight = decay * mean + (1.0 - decay) * value, decay * weight + (1.0 - decay)
        result.append(mean / weight)
    return result
