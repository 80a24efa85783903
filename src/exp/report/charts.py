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

__all__ = ["Chart", "charts_of", "curves_of", "settings_of", "thinned"]

_POINTS = 400  # of a curve
_ALL_POINTS = 120_000  # of all further curves together
_BARS = 30  # configurations
_SETTINGS = 5  # keys that are named where there is little room
_KEYS = 12  # that are each given a chart; also values that lie side by side
_COLORS = ("#3b6fd8", "#e0742c", "#2a9d5c", "#c8408f", "#8a5cd6", "#b08d12", "#17a2b3", "#c94a3f")  # of the best
_FAINT = "#9a9fa6"
_NAMES = {"lr": "learning rate", "grad_norm": "gradient norm", "samples_per_second": "samples/s"}
_NOT_VALUES = ("split", "step", "epoch", "units")  # of a record: say what the other values are of


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
    bars = [_bars(groups[:_BARS], labels, title, ranked)] if len(groups) > 1 else []
    return bars + charts + _over_keys(groups, labels, title, ranked)


def settings_of(groups: Sequence[Group]) -> list[str]:
    """What is peculiar to each group, as on the command line; its runs' names, too, where that does not tell it."""
    several = any(len(group.runs) > 1 for group in groups)
    keys = [key for key in differing([run for group in groups for run in group.runs]) if not (several and is_seed(key))]
    titles = short_names(keys)
    texts = [
        " ".join(f"{titles[key]}={_short(value_text(column(group.runs, key)[0]), 60)}" for key in keys[:_SETTINGS])
        for group in groups
    ]
    return [text if text and texts.count(text) == 1 else f"{text} {group.names}".strip()
            for text, group in zip(texts, groups)]  # fmt: skip


def curves_of(run: Run) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """What ``metrics.jsonl`` has numbers of, by split and name, as in ``("val", "mse")``, ``("train", "grad_norm")``.

    ``("train", "loss")`` is the sum of the losses. What is no finite number is left out.

    Returns:
        Points, of optimizer step and value.
    """
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for record in run.records():
        values = {name: value for name, value in record.items() if name not in _NOT_VALUES and is_number(value)}
        parts = [value for name, value in values.items() if name.startswith("loss_")]
        if parts and record.get("loss") is None:  # no reading of the sum: it is that of its parts
            values["loss"] = sum(parts)
        for name, value in values.items() if record["split"] in ("train", "val") else ():
            curves.setdefault((record["split"], name), []).append((record["step"], value))
    return curves


def thinned(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """About ``most`` points: of each stretch the least and the greatest, so that no spike is lost."""
    if len(points) <= most:
        return points
    kept, length = {0, len(points) - 1}, -(-2 * len(points) // (most - 2))
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        kept |= {least(stretch, key=lambda place: points[place][1]) for least in (min, max)}
    return [points[place] for place in sorted(kept)]


def _curves(groups: Sequence[Group], labels: Sequence[str], metric: str | None) -> list[Chart]:
    """A line for each run; the validation metric and the loss first, the rest behind a fold."""
    histories = [[curves_of(run) for run in group.runs] for group in groups]
    main = [("val", str(metric)), ("train", "loss")]
    kinds = dict.fromkeys(kind for group in histories for curves in group for kind in curves)
    few = min(max(_ALL_POINTS // max(sum(map(len, histories)) * len(kinds), 1), 30), _POINTS)
    charts = []
    for kind in sorted(kinds, key=lambda kind: main.index(kind) if kind in main else len(main)):
        series = []
        for place, (group, label) in enumerate(zip(histories, labels)):
            look = {"color": _color(place), "lineStyle": {"width": 1.6 if place < len(_COLORS) else 1}}
            for points in (
                thinned(curves[kind], _POINTS if kind in main else few) for curves in group if kind in curves
            ):
                data = [(step, _rounded(value)) for step, value in points]
                series.append(_series("line", name=label, data=data, showSymbol=len(data) <= 25,
                                      tooltip={"show": place < len(_COLORS)}, **look))  # fmt: skip
        scale = _scale([value for each in series for _, value in each["data"]])
        legend = {"show": len(groups) > 1, "selector": len(groups) > len(_COLORS)}
        split, name = kind
        what = "validation " if split == "val" else "training " if name.startswith("loss") else ""
        title = what + _NAMES.get(name, name.replace("_", " ") if split == "train" else name)
        option = _option("curves", legend=legend, yAxis={"type": scale}, series=series)
        charts.append(Chart(title, option, folded=kind not in main, is_curves=True))
    return charts


def _bars(groups: Sequence[Group], labels: Sequence[str], title: str, ranked: bool) -> Chart:
    """Each configuration: its mean, its standard deviation, and its runs as points."""
    bars, points = [], []
    for place, (group, label) in enumerate(zip(groups, labels)):
        mean = group.score if ranked else group.reported
        box: list[Any] = ["-"] * 5
        if mean is not None:
            # A box plot whose box is the mean alone: a line from mean - deviation to mean + deviation.
            low, high = mean.value - (mean.std or 0), mean.value + (mean.std or 0)
            box = [_rounded(each) for each in (low, mean.value, mean.value, mean.value, high)]
        look = {"color": _color(place), "borderColor": _color(place), "opacity": 0.8}
        bars.append({"value": box, "name": f"{label}: {mean_text(mean)}", "itemStyle": look})
        points += [_point(run, score, [_rounded(score), place], place) for run, score in _scores(group, ranked)]
    series = [_series("boxplot", data=bars), _series("scatter", data=points)]
    option = _option("bars", yAxis={"data": list(labels[: len(groups)])}, series=series)
    spread = ", mean ± standard deviation over seeds" if any(group.n > 1 for group in groups) else ""
    which = f", the best {len(groups)} of {len(labels)}" if len(groups) < len(labels) else ""
    return Chart(f"{title}{spread}{which}", option, len(groups))


def _over_keys(groups: Sequence[Group], labels: Sequence[str], title: str, ranked: bool) -> list[Chart]:
    """The metric over each key that differs, a point for each run."""
    runs = [run for group in groups for run in group.runs]
    charts = []
    for key, name in list(short_names(differing(runs)).items())[:_KEYS]:
        distinct = sorted({meaning(value): value for value in column(runs, key)}.values(), key=by_size)
        axis: dict[str, Any] = {"name": name, "type": "category", "data": list(map(_tick, distinct))}
        if len(distinct) > _KEYS:  # side by side there is no room
            if not all(map(is_number, distinct)):
                continue
            axis = {"name": name, "type": _scale(distinct)}
        points = []
        for place, (group, label) in enumerate(zip(groups, labels)):
            for run, score in _scores(group, ranked):
                (value,) = column([run], key)
                where = [_tick(value) if "data" in axis else value, _rounded(score)]
                points.append(_point(run, score, where, place, f"{label}, run "))
        option = _option("over", xAxis=axis, series=[_series("scatter", data=points)])
        charts.append(Chart(f"{title} over {name}", option))
    return charts


def _scores(group: Group, ranked: bool) -> list[tuple[Run, float]]:
    scores = [(run, run.selected_by if ranked else run.metric) for run in group.runs]
    return [(run, score) for run, score in scores if score is not None]


def _point(run: Run, score: float, where: list[Any], place: int, label: str = "") -> dict[str, Any]:
    look = {"color": _color(place), "opacity": 0.8}
    return {"value": where, "name": f"{label}{run.name}: {number_text(score)}", "itemStyle": look}


def _tick(value: Any) -> str:
    return _short(value_text(value), 24)


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
