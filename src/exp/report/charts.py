"""What the page's charts are drawn from, and the places in the page where its script draws them."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from exp.report.curves import Curve, History, history_of, thinned
from exp.report.keys import column, differing, is_seed, short_names, value_text
from exp.report.runs import greater_is_better
from exp.report.scale import scale_of
from exp.report.table import number_text

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = ["Section", "chart_data", "charts", "section_of", "settings_of"]

_POINTS = 400  # of a curve of the loss or of the metric
_FURTHER_POINTS = 60_000  # of all other curves together
_CLOCK = 50  # points that tell how epochs or seconds go with the steps
_STRONG = 8  # lines in colour
_SETTINGS = 5  # keys that are named where there is little room
_KEYS = 12  # that are each given a chart of the metric over them
_CATEGORIES = 40  # of a key that is given one
_CELLS = 24  # along each side of a map
_FILLED = 0.3  # share of a map's cells below which it is no map
_NAMES = {"lr": "learning rate", "grad_norm": "gradient norm", "samples_per_second": "samples/s"}


class Section(NamedTuple):
    """The runs of one metric.

    Attributes:
        metric: its name; None: the runs have none.
        runs: the best first.
        histories: the curves of each.
    """

    metric: str | None
    runs: Sequence[Run]
    histories: dict[Run, History]

    @property
    def ranked(self) -> bool:
        """Whether there are figures on validation, which are drawn over the settings then."""
        return any(run.selected_by is not None for run in self.runs)

    @property
    def title(self) -> str | None:
        """Of the figure that is drawn over the settings."""
        return f"{self.metric} on validation" if self.ranked else self.metric

    def score(self, run: Run) -> float | None:
        """What is drawn over the settings."""
        return run.selected_by if self.ranked else run.metric


def section_of(metric: str | None, runs: Sequence[Run]) -> Section:
    """Read the curves of runs of one metric, the best of which come first."""
    return Section(metric, runs, {run: history_of(run) for run in runs})


def settings_of(runs: Sequence[Run]) -> dict[Run, str]:
    """What is peculiar to each run, as on the command line; empty where nothing is."""
    keys = differing(runs)
    titles = short_names(keys)
    columns = [[f"{titles[key]}={value_text(value)}" for value in column(runs, key)] for key in keys[:_SETTINGS]]
    texts = [[text if len(text) <= 60 else f"{text[:59]}…" for text in each] for each in columns]
    return {run: " ".join(each[number] for each in texts) for number, run in enumerate(runs)}


def charts(section: Section, place: int) -> str:
    """Headings, controls and empty figures; the script fills them.

    Args:
        section: the runs.
        place: of the section among those that :func:`chart_data` is given.
    """
    main = [kind for kind in _kinds(section) if kind in _main(section.metric)]
    further = [kind for kind in _kinds(section) if kind not in main]
    parts = []
    if main or further:
        parts.append(
            "<h3>Learning curves <small>drag to zoom, double-click to undo; click a line, its name or its row to pick"
            f'</small></h3>\n<div class="controls" data-section="{place}"></div><div class="charts">'
            f"{''.join(_figure(place, _identity(kind), _title(kind), log=True) for kind in main)}</div>"
        )
        if further:
            figures = "".join(_figure(place, _identity(kind), _title(kind), log=True) for kind in further)
            summary = escape(", ".join(map(_title, further)))
            parts.append(f'<details><summary>{summary}</summary><div class="charts">{figures}</div></details>')
        parts.append(
            f'<div class="legend" data-section="{place}"></div>'
            '<noscript><p class="note">Charts need scripts, which are switched off here.</p></noscript>'
        )
    keys, metric = differing(section.runs), section.title
    if metric is not None and keys and any(section.score(run) is not None for run in section.runs):
        titles = short_names(keys)
        figures = _figure(place, "parallel", f"{metric}, all keys", wide=True) if len(keys) > 1 else ""
        pair = _map_keys(section.runs)
        if pair:
            figures += _figure(place, "map", f"mean {metric} by {titles[pair[0]]} and {titles[pair[1]]}")
        for number, key in enumerate(keys[:_KEYS]):
            if len(scale_of(key, column(section.runs, key)).categories) <= _CATEGORIES:
                figures += _figure(place, f"over {number}", f"{metric} over {titles[key]}", log=True)
        missing = sum(section.score(run) is None for run in section.runs)
        note = f" <small>{missing} of {len(section.runs)} runs have no result: crosses</small>" if missing else ""
        parts.append(f'<h3>{escape(metric)} by setting{note}</h3>\n<div class="charts">{figures}</div>')
    return "\n".join(parts)


def chart_data(sections: Sequence[Section], numbers: dict[Run, int]) -> dict[str, Any]:
    """What the script draws from, as JSON can hold it.

    Args:
        sections: in their order on the page.
        numbers: of each run, its place in ``runs`` of what is returned.
    """
    drawn: list[dict[str, Any]] = []
    described = []
    for section in sections:
        runs, keys = section.runs, differing(section.runs)
        titles = short_names(keys)
        scales = [scale_of(key, column(runs, key)) for key in keys]
        described.append(
            {"metric": section.title, "greater": greater_is_better(runs), "runs": [numbers[run] for run in runs],
             "keys": [{"name": titles[key], "seed": is_seed(key), "kind": scale.kind, "categories": scale.categories}
                      for key, scale in zip(keys, scales)],
             "map": [keys.index(key) for key in _map_keys(runs)]}
        )  # fmt: skip
        settings, kinds = settings_of(runs), len(_kinds(section))
        for place, run in enumerate(runs):
            history = section.histories[run]
            score = f"{section.metric} {number_text(run.metric)}" if run.metric is not None else run.status
            clocks = {"epoch": history.epochs, "time": history.seconds}
            drawn.append(
                {"id": numbers[run], "name": run.name, "settings": settings[run], "score": score, "place": place,
                 "metric": section.score(run), "at": [scale.places[place] for scale in scales],
                 "clocks": {name: _rounded(clock, _CLOCK) for name, clock in clocks.items() if clock is not None},
                 "curves": {_identity(kind): _rounded(curve, _points(kind, section, kinds))
                            for kind, curve in history.curves.items()}}
            )  # fmt: skip
    return {"strong": _STRONG, "sections": described, "runs": drawn}


def _main(metric: str | None) -> tuple[tuple[str, str], ...]:
    return (("val", str(metric)), ("train", "loss"))


def _kinds(section: Section) -> list[tuple[str, str]]:
    """What there are curves of: the metric, the loss, then the others as they are recorded."""
    found = dict.fromkeys(kind for history in section.histories.values() for kind in history.curves)
    return sorted(found, key=lambda kind: (kind != ("val", section.metric), kind != ("train", "loss")))


def _points(kind: tuple[str, str], section: Section, kinds: int) -> int:
    if kind in _main(section.metric):
        return _POINTS
    return min(max(_FURTHER_POINTS // (len(section.runs) * kinds), 30), _POINTS)


def _rounded(curve: Curve, points: int) -> list[list[float]]:
    steps, values = thinned(curve, points)
    return [list(steps), [float(f"{value:.5g}") for value in values]]


def _identity(kind: tuple[str, str]) -> str:
    return " ".join(kind)


def _title(kind: tuple[str, str]) -> str:
    split, name = kind
    if split == "val":
        return f"validation {name}"
    return f"training {name}" if name.startswith("loss") else _NAMES.get(name, name.replace("_", " "))


def _figure(place: int, chart: str, title: str, log: bool = False, wide: bool = False) -> str:
    box = '<label><input type="checkbox"> log scale</label>' if log else ""
    return (
        f'<figure class="chart{" wide" if wide else ""}" data-section="{place}" data-chart="{escape(chart)}">'
        f'<figcaption><b>{escape(title)}</b>{box}</figcaption><div class="plot"></div></figure>'
    )


def _map_keys(runs: Sequence[Run]) -> list[str]:
    """The two keys of a map, seeds aside; none where their values hardly ever meet, as in a random search."""
    keys = differing(runs)
    pair = [key for key in keys if not is_seed(key)]
    if len(pair) != 2:
        return []
    values = [list(map(value_text, column(runs, key))) for key in pair]
    sides = [len(set(each)) for each in values]
    filled = len(set(zip(*values))) >= _FILLED * sides[0] * sides[1]
    return pair if filled and min(sides) > 1 and max(sides) <= _CELLS else []
