"""How a training went: loss, validation metric and learning rate over the steps, from ``metrics.jsonl``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import pandas as pd

from exp.draw.figure import as_it_is, label, new_figure, title_and_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["training_curves"]

_SMOOTHED_FROM = 60  # readings of the loss


def training_curves(records: Sequence[dict[str, Any]], metric: str, greater_is_better: bool, title: str) -> Figure:
    """Three panels above one another.

    Args:
        records: the lines of ``metrics.jsonl``: each has ``split``, ``step`` and values by name.
        metric: the validation metric to show.
        greater_is_better: which of its values is marked as the best.
        title: above the figure.
    """
    frame = pd.DataFrame(list(records), columns=None if records else ["split", "step"]).set_index("step")
    train, val = (frame[frame["split"] == split] for split in ("train", "val"))
    figure = new_figure(8, 7)
    loss, score, rate = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 3, 1.6]})
    _draw_losses(loss, train)
    _draw_score(score, _readings(val, metric), metric, greater_is_better)
    rate.plot(_readings(train, "lr"), color="tab:green", linewidth=1.2)
    rate.set_ylabel("lr")  # its panel is low
    rate.set_xlabel("optimizer steps")
    rate.set_ylim(bottom=0.0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    for axes in (loss, score, rate):
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    title_and_legend(loss, title)
    title_and_legend(score, "")
    figure.align_ylabels()
    return figure


def _readings(frame: pd.DataFrame, name: str) -> pd.Series[float]:
    """One quantity by step."""
    return frame[name].dropna().astype(float) if name in frame else pd.Series(dtype=float)


def _draw_losses(axes: Any, train: pd.DataFrame) -> None:
    """The sum strongly, its parts (``loss_*``) faintly; with many readings also a running mean."""
    parts = train.filter(regex="^loss_").dropna(axis="columns", how="all").sort_index(axis="columns")
    total = _readings(train, "loss")
    if total.empty:  # no reading of the sum: it is that of the parts
        total = parts.sum(axis="columns", min_count=1).dropna()
    several, many = parts.shape[1] > 1, len(total) >= _SMOOTHED_FROM
    for number, name in enumerate(parts if several else [], 1):
        axes.plot(_readings(parts, name), color=f"C{number}", linewidth=0.9, alpha=0.8, label=label(name[5:]))
    strength = {"linewidth": 0.8, "alpha": 0.35} if many else {"linewidth": 1.4}
    axes.plot(total, color="tab:blue", marker="o" if len(total) <= 25 else None, markersize=3,
              label="loss" if several and not many else None, **strength)  # fmt: skip
    if many:
        mean = total.ewm(alpha=20 / len(total)).mean()
        axes.plot(mean, color="tab:blue", linewidth=1.6, label="loss (running mean)")
    axes.set_ylabel("training loss")
    if total.min() > 0 and total.max() > 20 * total.min():
        axes.set_yscale("log")


def _draw_score(axes: Any, values: pd.Series[float], metric: str, greater_is_better: bool) -> None:
    axes.plot(values, color="tab:orange", linewidth=1.4, marker="o", markersize=3.5)
    as_it_is(axes.set_ylabel(f"validation {metric}"))
    finite = values[values.abs() < float("inf")]
    if finite.empty:
        axes.text(0.5, 0.5, "no validation", transform=axes.transAxes, ha="center", va="center", color="0.5")
        return
    step = finite.idxmax() if greater_is_better else finite.idxmin()
    best = f"best: {finite[step]:.4g} at step {step}"
    axes.plot(step, finite[step], "*", markersize=13, color="tab:red", label=best)
    axes.margins(y=0.15)
