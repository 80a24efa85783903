"""The table that a paper prints: a row for each configuration, its mean over seeds beside the published figure.

This is what the table says, cell by cell; :mod:`exp.report.paper_formats` writes it as LaTeX, Markdown and for the
terminal, :mod:`exp.report.page_table` as HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from exp.report.keys import column, differing, is_seed, meaning, short_names, value_text
from exp.report.run import natural, numbers_of
from exp.report.runs import greater_is_better
from exp.report.seeds import Mean, SeedGroup, groups_by_metric, is_averaged
from exp.report.table import units_of

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = ["Figure", "PaperRow", "PaperTable", "paper_tables"]

_DATA = "data.name"


class Figure(NamedTuple):
    """One metric of one row."""

    ours: Mean | None
    """None: no run of the row has it."""
    published: float | None
    """None: nothing is published for these data, or this is not the experiment that it was published for."""

    @property
    def difference(self) -> float | None:
        """Ours minus the published figure."""
        return None if self.ours is None or self.published is None else self.ours.value - self.published


@dataclass(frozen=True)
class PaperRow:
    """One configuration, whatever its seeds."""

    labels: list[str]
    """A text for each key of the table."""
    n: str
    """``3``, or ``2 of 3`` where not every seed has a run that counts."""
    figures: dict[str, Figure]
    """By metric."""


@dataclass(frozen=True)
class PaperTable:
    """The rows of one ranking metric.

    Attributes:
        keys: what the rows are told apart by, as titles of columns.
        metrics: those with a published figure, after the one that the runs are ranked by.
        published: of these, those that have one in some row.
        rows: sorted by their labels.
        averaged: whether there are means over seeds.
        notes: what a reader of the figures has to know, each a sentence without its full stop.
    """

    keys: list[str]
    metrics: list[str]
    published: list[str]
    rows: list[PaperRow]
    averaged: bool
    notes: list[str]

    def published_text(self, row: PaperRow, metric: str) -> str:
        """The published figure of a row, with as many decimals as any of its metric has; empty where there is none."""
        value = row.figures[metric].published
        known = [each.figures[metric].published for each in self.rows]
        decimals = max((len(f"{figure:g}".partition(".")[2]) for figure in known if figure is not None), default=0)
        return "" if value is None else f"{value:.{decimals}f}"

    def begins_block(self, number: int) -> bool:
        """Whether a row is the first with its first label, where that has several rows: papers draw a rule there."""
        firsts = [row.labels[:1] for row in self.rows]
        several = len(self.keys) > 1 and len({*map(tuple, firsts)}) < len(firsts)
        return several and number > 0 and firsts[number] != firsts[number - 1]


def paper_tables(runs: Sequence[Run]) -> list[PaperTable]:
    """A table for each metric by which runs are ranked.

    Args:
        runs: any number. Those that have no metric and are like none that has one are left out.
    """
    return [_table(groups, metric) for metric, groups in groups_by_metric(runs).items() if metric is not None]


def _table(groups: list[SeedGroup], metric: str) -> PaperTable:
    runs = [run for group in groups for run in group.runs]
    keys = _label_keys(runs)
    measured = dict.fromkeys(name for run in runs for name in run.metrics)
    titles = {
        **short_names(keys, {metric, *measured}),
        **({_DATA: "data"} if _DATA in keys and "data" not in keys else {}),
    }
    firsts = [group.runs[0] for group in groups]
    values = list(zip(*(column(firsts, key) for key in keys))) if keys else [() for _ in groups]
    labels = [[_label(value) for value in each] for each in values]
    places: list[Any] = [[_order(value) for value in each] for each in values]
    heads = [titles[key] for key in keys]
    if len({*map(tuple, labels)}) < len(labels):  # nothing tells them apart but the runs themselves
        heads = ["run", *heads]
        labels = [[group.names, *each] for group, each in zip(groups, labels)]
        places = [[_order(group.names), *place] for group, place in zip(groups, places)]
    found = [_published(group) for group in groups]
    published = [name for name in measured if any(name in figures for figures, _ in found)]
    metrics = list(dict.fromkeys([metric, *published]))
    rows = [
        PaperRow(each, group.n_text, {name: Figure(group.mean(name), figures.get(name)) for name in metrics})
        for group, each, (figures, _) in zip(groups, labels, found)
    ]
    averaged = is_averaged(groups)
    notes = _notes(groups, labels, found, metrics, averaged)
    order = sorted(range(len(rows)), key=lambda number: places[number])
    return PaperTable(heads, metrics, published, [rows[number] for number in order], averaged, notes)


def _label_keys(runs: Sequence[Run]) -> list[str]:
    """The keys that differ, besides the seed; and the data set, which a paper names also where there is only one.

    Where each experiment has data of its own, the data stand for the experiment.
    """
    keys = [key for key in differing(runs) if not is_seed(key)]
    data = [meaning(value) for value in column(runs, _DATA)]
    if {"data", _DATA} <= set(keys):  # the name tells, but for data of one name that are read in several ways
        pairs = set(zip(data, map(meaning, column(runs, "data"))))
        return [key for key in keys if key != "data" or len(pairs) > len({name for name, _ in pairs})]
    if None in data or {"data", _DATA} & set(keys):
        return keys
    if "experiment" in keys:
        pairs = set(zip(map(meaning, column(runs, "experiment")), data))
        if len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs}):
            return [_DATA if key == "experiment" else key for key in keys]
    return [_DATA, *keys]


def _published(group: SeedGroup) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures that a paper has for what the runs of a group did, and all that the runs say of them."""
    said = [(run.result or {}).get("published") for run in group.counted]
    if not said or not isinstance(said[0], dict) or any(each != said[0] for each in said):
        return {}, {}
    return ({} if said[0].get("differs") else numbers_of(said[0])), said[0]


def _notes(
    groups: Sequence[SeedGroup],
    labels: Sequence[Sequence[str]],
    found: Sequence[tuple[dict[str, float], dict[str, Any]]],
    metrics: Sequence[str],
    averaged: bool,
) -> list[str]:
    runs = [run for group in groups for run in group.runs]
    units = {name: unit for name, unit in units_of(runs).items() if name in metrics}
    notes = [f"{', '.join(name for name in units if units[name] == unit)}: of {unit} values"
             for unit in dict.fromkeys(units.values())]  # fmt: skip
    notes.append(f"{metrics[0]}: {'larger' if greater_is_better(runs) else 'smaller'} is better")
    if averaged:
        notes.append("mean ± sample standard deviation (n - 1 in its denominator) over seeds, their number in brackets")
    notes += [
        f"left out of the figures: {group.left_out}{' of ' if label else ''}{' '.join(label)}"
        for group, label in zip(groups, labels)
        if group.left_out
    ]
    sources: dict[str, dict[str, None]] = {}
    for group, (figures, said) in zip(groups, found):
        if figures and said.get("source"):
            experiment = str((group.counted[0].result or {}).get("experiment"))
            sources.setdefault(str(said["source"]), {})[experiment] = None
    for source, experiments in sources.items():
        whose = f" ({', '.join(experiments)})" if len(sources) > 1 else ""  # baselines have papers of their own
        notes.append(f"published{whose}: {source}")
    if any(figures for figures, _ in found):
        notes.append("difference: ours - published")
    unlike = dict.fromkeys(", ".join(map(str, said["differs"])) for _, said in found if said.get("differs"))
    notes += [f"published figures are of another experiment, and not shown, where {keys}" for keys in unlike]
    return [" ".join(note.split()) for note in notes]


def _label(value: Any) -> str:
    """A value as it stands in a table: things with a type, such as schedulers, as they are written in Python."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "type" in each for each in value):
        return ", ".join(
            f"{each['type']}({', '.join(f'{key}={_label(one)}' for key, one in each.items() if key != 'type')})"
            for each in value
        )
    return value_text(value)


def _order(value: Any) -> tuple[int, float, list[Any]]:
    """Numbers by their size, then anything else as people sort it."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
        return 0, value, []
    return 1, 0.0, natural(value_text(value))
