"""The page's charts as ECharts' options, plain JSON: how they look is in ``charts.json``, their data come from here."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from exp.report.groups import Group, mean_text
from exp.report.keys import by_size, column, differing, is_seed, meaning, short_names, value_text
from exp.report.runs import is_number
from exp.runs.record import number_text

if TYPE_CHECKING:
    from exp.report.runs import Run

__all__ = ["Chart", "Curve", "charts_of", "curves_of", "settings_of", "thinned"]

_POINTS = 400  # of a curve
_ALL_POINTS = 120_000  # of all further curves together
_BARS = 30  # configurations
_SETTINGS = 5  # keys that are named where there is little room
_KEYS = 12  # that are each given a chart; also values that lie side by side
_COLORS = ("#3b6fd8", "#e0742c", "#2a9d5c", "#c8408f", "#8a5cd6", "#b08d12", "#17a2b3", "#c94a3f")  # of the best
_FAINT = "#9a9fa6"
_NAMES = {"lr": "learning rate", "grad_norm": "gradient norm", "samples_per_second": "samples/s"}
_NOT_VALUES = ("split", "step", "epoch", "units")  # of a record: say what the other values are of


class Curve(NamedTuple):
    """One quantity of a run over its optimizer steps.

    Attributes:
        steps: ascending.
        values: finite, as many.
    """

    steps: list[float]
    values: list[float]


class Chart(NamedTuple):
    """One chart of the page.

    Attributes:
        title: above it.
        option: ECharts'.
        rows: lines of text that it needs room for; 0: it has the usual height.
        folded: whether it is shown on demand only.
        is_curves: whether it has curves, which can be smoothed.
    """

    title: str
    option: dict[str, Any]
    rows: int = 0
    folded: bool = False
    is_curves: bool = False


def charts_of(groups: Sequence[Group], metric: str | None) -> list[Chart]:
    """How the configurations compare, learning curves, and the metric over each key that differs.

    The eight best configurations have a color each, the same in all charts; runs that differ in the seed share it.

    Args:
        groups: over seeds, of one metric, the best first.
        metric: its name; None: they have none.
    """
    labels = settings_of(groups)
    charts = _curves(groups, labels, metric)
    if metric is None or not any(group.reported for group in groups):
        return charts
    # As ranks, by validation where there is any.
    ranked = any(group.score for group in groups)
    title = f"{metric} on validation" if ranked else metric
    scores = {run: run.selected_by if ranked else run.metric for group in groups for run in group.runs}
    bars = [_bars(groups[:_BARS], labels, title, ranked, scores)] if len(groups) > 1 else []
    return bars + charts + _over_keys(groups, labels, title, scores)


def settings_of(groups: Sequence[Group]) -> list[str]:
    """What is peculiar to each group, as on the command line; its runs' names, too, where that does not tell it."""
    several = any(len(group.runs) > 1 for group in groups)
    keys = [key for key in differing([run for group in groups for run in group.runs]) if not (several and is_seed(key))]
    titles, firsts = short_names(keys), [group.runs[0] for group in groups]
    columns = [
        [f"{titles[key]}={_short(value_text(value), 60)}" for value in column(firsts, key)] for key in keys[:_SETTINGS]
    ]
    texts = [" ".join(row) for row in zip(*columns)] or [""] * len(groups)
    return [text if text and texts.count(text) == 1 else f"{text} {group.names}".strip()
            for text, group in zip(texts, groups)]  # fmt: skip


def curves_of(run: Run) -> dict[tuple[str, str], Curve]:
    """What ``metrics.jsonl`` has numbers of, by split and name, as in ``("val", "mse")``, ``("train", "grad_norm")``.

    ``("train", "loss")`` is the sum of the losses. What is no finite number is left out.
    """
    curves: dict[tuple[str, str], Curve] = {}
    for record in run.records():
        values = {name: value for name, value in record.items() if name not in _NOT_VALUES and is_number(value)}
        parts = [value for name, value in values.items() if name.startswith("loss_")]
        if parts and record.get("loss") is None:  # no reading of the sum: it is that of its parts
            values["loss"] = sum(parts)
        for name, value in values.items() if record["split"] in ("train", "val") else ():
            curve = curves.setdefault((record["split"], name), Curve([], []))
            curve.steps.append(record["step"])
            curve.values.append(value)
    return curves


def thinned(curve: Curve, most: int) -> Curve:
    """At most ``most`` points: of each stretch the least and the greatest, so that no spike is lost."""
    count = len(curve.steps)
    if count <= most:
        return curve
    kept = {0, count - 1}
    stretches = (most - 2) // 2
    for number in range(stretches):
        part = range(1 + number * (count - 2) // stretches, 1 + (number + 1) * (count - 2) // stretches)
        kept |= {min(part, key=curve.values.__getitem__), max(part, key=curve.values.__getitem__)} if part else set()
    order = sorted(kept)
    return Curve([curve.steps[place] for place in order], [curve.values[place] for place in order])


def _curves(groups: Sequence[Group], labels: Sequence[str], metric: str | None) -> list[Chart]:
    """A line for each run; the validation metric and the loss first, the rest behind a fold."""
    histories = {run: curves_of(run) for group in groups for run in group.runs}
    main = [("val", str(metric)), ("train", "loss")]
    kinds = dict.fromkeys(kind for curves in histories.values() for kind in curves)
    points = min(max(_ALL_POINTS // max(len(histories) * len(kinds), 1), 30), _POINTS)
    charts = []
    for kind in sorted(kinds, key=lambda kind: main.index(kind) if kind in main else len(main)):
        series = []
        for place, (group, label) in enumerate(zip(groups, labels)):
            strong = place < len(_COLORS)
            for curve in (histories[run][kind] for run in group.runs if kind in histories[run]):
                steps, values = thinned(curve, _POINTS if kind in main else points)
                series.append(_series(
                    "line", name=label, data=list(zip(steps, map(_rounded, values))), color=_color(place),
                    showSymbol=len(steps) <= 25, tooltip={"show": strong}, lineStyle={"width": 1.6 if strong else 1},
                ))  # fmt: skip
        every = [value for each in series for _, value in each["data"]]
        legend = {"show": len(groups) > 1, "selector": len(groups) > len(_COLORS)}
        option = _option("curves", legend=legend, yAxis={"type": _scale(every)}, series=series)
        split, name = kind
        what = "training " if name.startswith("loss") else ""
        title = f"validation {name}" if split == "val" else what + _NAMES.get(name, name.replace("_", " "))
        charts.append(Chart(title, option, folded=kind not in main, is_curves=True))
    return charts


def _bars(
    groups: Sequence[Group], labels: Sequence[str], title: str, ranked: bool, scores: dict[Run, float | None]
) -> Chart:
    """Each configuration: its mean, its standard deviation, and its runs as points."""
    bars, points = [], []
    for place, (group, label) in enumerate(zip(groups, labels)):
        mean = group.score if ranked else group.reported
        style = {"color": _color(place), "borderColor": _color(place), "opacity": 0.8}
        box: list[Any] = ["-"] * 5
        if mean is not None:
            # A box plot whose box is the mean alone: a line from mean - deviation to mean + deviation.
            low, high = mean.value - (mean.std or 0), mean.value + (mean.std or 0)
            box = [_rounded(each) for each in (low, mean.value, mean.value, mean.value, high)]
        bars.append({"value": box, "name": f"{label}: {mean_text(mean)}", "itemStyle": style})
        points += [{"value": [_rounded(score), place], "name": f"{run.name}: {number_text(score)}", "itemStyle": style}
                   for run, score in ((run, scores[run]) for run in group.runs) if score is not None]  # fmt: skip
    series = [_series("boxplot", data=bars), _series("scatter", data=points)]
    option = _option("bars", yAxis={"data": list(labels[: len(groups)])}, series=series)
    spread = ", mean ± standard deviation over seeds" if any(group.n > 1 for group in groups) else ""
    which = f", the best {len(groups)} of {len(labels)}" if len(groups) < len(labels) else ""
    return Chart(f"{title}{spread}{which}", option, len(groups))


def _over_keys(
    groups: Sequence[Group], labels: Sequence[str], title: str, scores: dict[Run, float | None]
) -> list[Chart]:
    """The metric over each key that differs, a point for each run."""
    runs = [run for group in groups for run in group.runs]
    titles = short_names(differing(runs))
    charts = []
    for key, name in list(titles.items())[:_KEYS]:
        values = column(runs, key)
        distinct = sorted({meaning(value): value for value in values}.values(), key=by_size)
        texts = [_short(value_text(value), 24) for value in distinct]
        axis: dict[str, Any] = {"name": name, "type": "category", "data": texts}
        if len(distinct) > _KEYS:  # side by side there is no room
            if not all(map(is_number, distinct)):
                continue
            axis = {"name": name, "type": _scale(distinct)}
        points = []
        for place, (group, label) in enumerate(zip(groups, labels)):
            for run, (value,) in ((run, column([run], key)) for run in group.runs):
                score, text = scores[run], _short(value_text(value), 24)
                if score is not None:
                    where = [text if axis["type"] == "category" else value, _rounded(score)]
                    told = f"{label}, run {run.name}: {number_text(score)}"
                    points.append({"value": where, "name": told, "itemStyle": {"color": _color(place), "opacity": 0.8}})
        charts.append(
            Chart(f"{title} over {name}", _option("over", xAxis=axis, series=[_series("scatter", data=points)]))
        )
    return charts


@lru_cache(maxsize=1)
def _looks() -> Any:
    return json.loads((Path(__file__).parent / "charts.json").read_text(encoding="utf-8"))


def _option(kind: str, **parts: Any) -> dict[str, Any]:
    """An option of ECharts: what all charts have, what those of its kind have, and its own parts."""
    option = {**_looks()["all"], **_looks()[kind]}
    return {**option, **{key: {**option.get(key, {}), **part} if isinstance(part, dict) else part
                         for key, part in parts.items()}}  # fmt: skip


def _series(kind: str, **parts: Any) -> dict[str, Any]:
    return {"type": kind, **_looks()["series"][kind], **parts}


def _scale(values: Sequence[float]) -> str:
    """Logarithmic where values are positive and span more than two decades."""
    return "log" if values and min(values) > 0 and max(values) >= 100 * min(values) else "value"


def _color(place: int) -> str:
    return _COLORS[place] if place < len(_COLORS) else _FAINT


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"
