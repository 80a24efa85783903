"""Tables of runs: CSV and JSON for programs; terminal, HTML, LaTeX and Markdown for people.

Finds the keys in which runs differ, groups runs over seeds, and ranks groups by their metric on validation. Runs form a
group if their frozen configurations are equal except for the seed and keys that do not affect the computation
(``output_dir``, ``launcher.*``). A :class:`Table` for people has cells of plain text; each output format escapes them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from html import escape
from typing import TYPE_CHECKING, Any, Hashable, Iterable, Mapping, NamedTuple, Sequence

from exp.console import format_metric, printable
from exp.report.runs import COLUMNS, NUMBERS, is_number, natural, titled
from exp.runs.files import csv_content, to_json, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table as RichTable

    from exp.report.runs import Run

__all__ = [
    "Group", "Mean", "Table", "as_counts", "as_html", "as_latex", "as_markdown", "as_rich", "by_size", "column",
    "differing", "greater_is_better", "in_order", "is_seed", "keys_of", "mean_text", "meaning", "rankings",
    "results_tables", "run_rows", "run_table", "seed_rows", "short_names", "value_text", "write_rows",
]  # fmt: skip

_GROUPS = ("experiment", "task", "backend", "launcher", "wrapper", "data", "model", "optim", "schedule", "logger")
# Keys that do not affect the computation.
_SILENT = re.compile(
    r"(?:output_dir|overwrite|plots|report_placement|resume|resume_changed_data|run)$"
    r"|reference|(?:launcher|hydra|logger|record|sweep)\."
)
_JSON_ONLY = ("folder", "folders", "metric_name", "metric", "metric_mean", "metric_std")
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    # After the row end "\\", LaTeX would read these two as its arguments.
    "[": "{[}", "*": "{*}", **{sign: f"\\{sign}" for sign in "{}$&#_%"},
}  # fmt: skip
_NUMBER = re.compile(r"(-|[-+]?\d[\d.,e+-]*( ± \S+)?( \(\d+( of \d+)?\))?( [KMG]?i?B)?)?")
"""Cells of a numeric column: ``12``, ``0.41 ± 0.02 (2 of 3)``, ``33 MiB``, ``-``, or empty."""
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#&$])")


def differing(runs: Sequence[Run]) -> list[str]:
    """The keys in which the runs differ; first those that overrides name, in the order of the overrides.

    Left out are keys that differ only as a consequence of another one: keys of a config group that differs (for
    ``backend`` all of ``backend.*``), keys that refer to another key (``model.lookback`` to ``data.lookback``), and a
    batch size per device with an equal global batch size. Keys that do not affect the computation, such as
    ``output_dir`` and ``launcher.*``, are left out, too.

    Args:
        runs: any number of runs.

    Returns:
        Dotted keys, and names of config groups (``backend``, ``experiment``, ...). :func:`column` returns their values.
    """
    words = [override.lstrip("+~") for run in runs for override in run.overrides]
    named = dict.fromkeys(re.split("[=@]", word)[0].replace("/", ".") for word in words)
    groups = [group for group in _GROUPS if _differ(column(runs, group))]
    unequal = [key for key in dict.fromkeys(key for run in runs for key in run.config)
               if not _SILENT.match(key) and _differ(column(runs, key))]  # fmt: skip
    kept: dict[str, list[Any]] = {}
    for key in named:  # the key itself, or, for a node, the keys below it
        below = [key] if key in groups else [one for one in unequal if one == key or one.startswith(f"{key}.")]
        kept.update((one, column(runs, one)) for one in below)
    for key in groups + unequal:  # keys that no override names
        values = column(runs, key)
        if key not in kept and key != "batch_size" and not _follows(values, key, kept):
            kept[key] = values
    if "batch_size" in kept and "global_batch_size" not in named:
        kept.pop("global_batch_size", None)  # one of them is derived from the other
    return list(kept)


def keys_of(groups: Sequence[Group]) -> list[str]:
    """The keys in which the groups differ (:func:`differing`), without seeds if a group has several."""
    averaged = any(len(group.runs) > 1 for group in groups)
    keys = differing([run for group in groups for run in group.runs])
    return [key for key in keys if not (averaged and is_seed(key))]


def column(runs: Sequence[Run], key: str) -> list[Any]:
    """The value of ``key`` in each run; None for a run without this key.

    Args:
        runs: any number of runs.
        key: dotted key, or the name of a config group, whose value is the chosen option.
    """
    name = f"record.chosen.{key}" if key in _GROUPS else key
    return [run.config.get(name) for run in runs]


def is_seed(key: str) -> bool:
    """Whether a key is a seed: ``seed``, or any key that ends with ``.seed``."""
    return key.rpartition(".")[2] == "seed"


def meaning(value: Any) -> str:
    """A config value as text, equal for values with the same meaning: 1 and 1.0, but not 1 and true."""
    return json.dumps(float(value) if is_number(value) else value, sort_keys=True, default=str)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """A short name for each key: its last part if that is unique, else the key."""
    counts = Counter(key.rpartition(".")[2] for key in keys)
    return {key: key.rpartition(".")[2] if counts[key.rpartition(".")[2]] == 1 else key for key in keys}


def value_text(value: Any) -> str:
    """A config value as text, as on the command line; floats have six digits."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None or isinstance(value, (bool, list, tuple, dict)):
        return json.dumps(value, default=str)
    return str(value)


def by_size(value: Any) -> tuple[bool, float, list[Any]]:
    """A sort key: numbers first, by size; then other values, in natural order (2 before 10)."""
    return (False, value, []) if is_number(value) else (True, 0.0, natural(value_text(value)))


def _follows(values: list[Any], key: str, kept: dict[str, list[Any]]) -> bool:
    """Whether the values of a key follow from another one: from the choice of a config group, or from an equal key."""
    known = list(map(meaning, values))
    for cause in {"experiment", key.partition(".")[0]} & set(kept) - {key}:
        choices = list(map(meaning, kept[cause]))
        if len(set(zip(choices, known))) == len(set(choices)):  # equal choices always have equal values
            return True
    return any(known == list(map(meaning, each)) for each in kept.values())


def _differ(values: Sequence[Any]) -> bool:
    return len(set(map(meaning, values))) > 1


class Mean(NamedTuple):
    """A metric over seeds."""

    value: float
    std: float | None
    """Sample standard deviation, with n - 1 in its denominator; None for a single seed."""


class Group:
    """Runs of one configuration with several seeds, or a single run.

    Args:
        runs: at least one run.
        metric_name: metric that ranks the runs; None: they have no metric.

    Attributes:
        counted: the runs that means include: completed runs which, if the group has a metric, have a value of it.
        left_out: counts of the other runs, by status: ``2 failed, 1 unfinished``; empty: none.
        n: number of seeds with a run that counts.
        n_text: number of seeds as text: ``3``; or ``2 of 3`` if a seed has no run that counts.
        names: the names of the runs, separated by spaces.
        score: mean of the metric on validation, which ranks the groups; see :meth:`mean`.
        reported: mean of the metric on test.
    """

    def __init__(self, runs: Sequence[Run], metric_name: str | None) -> None:
        self.runs, self.metric_name = runs, metric_name
        completed = [run for run in runs if run.status == "completed"]
        self.counted = [run for run in completed if run.metric is not None or metric_name is None]
        others = [run.status for run in runs if run not in self.counted]
        self.left_out = as_counts("without a metric" if status == "completed" else status for status in others)
        by_seed: dict[Hashable, list[Run]] = {}
        for run in self.counted:
            by_seed.setdefault(_seeds(run), []).append(run)
        self._by_seed = list(by_seed.values())
        self.n, seeds = len(by_seed), len(set(map(_seeds, runs)))
        self.n_text = str(seeds) if self.n == seeds else f"{self.n} of {seeds}"
        self.names = " ".join(run.name for run in runs)
        self.score, self.reported = self.mean("selected_by"), self.mean("metric")

    def mean(self, title: str) -> Mean | None:
        """The mean of a number over the seeds; if a seed was run several times, the mean of its runs counts once.

        Args:
            title: of the number (:attr:`exp.report.runs.Run.numbers`).

        Returns:
            None if no run counts, or one of them has no value: a mean over fewer seeds than the row states would
            mislead.
        """
        found: list[list[Any]] = [[run.numbers.get(title) for run in each] for each in self._by_seed]
        if not found or any(None in each for each in found):
            return None
        values = [statistics.mean(each) for each in found]
        return Mean(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)


def rankings(runs: Sequence[Run], over_seeds: bool) -> dict[str | None, list[Group]]:
    """Group the runs, and rank the groups separately for each metric, because metrics cannot be compared.

    Args:
        runs: any number of runs.
        over_seeds: group runs that differ only in the seed; runs whose seeds are all equal are not grouped, because
            they repeat the same run.

    Returns:
        The groups by metric: first those with a validation metric, the best first; then those without one, such as
        evaluations; last those without any value. A run that ended before it recorded its metric is placed with runs
        of the same experiment and task; if there are none, under the key None, which is last.
    """
    kinds = {_kind(run): run.metric_name for run in runs if run.metric_name is not None}
    members: dict[str | None, list[Run]] = {}
    for run in runs:
        members.setdefault(run.metric_name or kinds.get(_kind(run)), []).append(run)
    found = {}
    for metric in sorted(members, key=lambda name: name is None):
        sign = -1.0 if greater_is_better(members[metric]) else 1.0
        alike: dict[Hashable, list[Run]] = {}
        for run in members[metric]:
            alike.setdefault(_settings(run) if over_seeds else run, []).append(run)
        groups = []
        for each in alike.values():
            several = len({_seeds(run) for run in each}) > 1
            groups += [Group(each, metric)] if several else [Group([run], metric) for run in each]
        # The best first, then groups without a validation metric, last groups without any value.
        found[metric] = sorted(groups, key=lambda each: (not each.reported, not each.score,
                                                         sign * each.score.value if each.score else 0.0))  # fmt: skip
    return found


def in_order(ranking: dict[str | None, list[Group]]) -> list[tuple[int | None, Group]]:
    """The groups of all metrics, each with its rank among those of its metric, from 1; None: it has no score.

    Groups without a value of their metric are last.
    """
    ranked = [(group.score and place, group) for each in ranking.values() for place, group in enumerate(each, 1)]
    return sorted(ranked, key=lambda pair: pair[1].reported is None)


def greater_is_better(runs: Sequence[Run]) -> bool:
    """Whether larger values of the metric are better; all runs have the same metric."""
    return any(run.result.get("greater_is_better") for run in runs)


def as_counts(words: Iterable[str]) -> str:
    """Counts of equal words, in order of their first occurrence: ``2 failed, 1 unfinished``."""
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def mean_text(mean: Mean | None) -> str:
    """A mean as text: ``0.3541 ± 0.0012``; for a single seed only the value; empty for None."""
    if mean is None:
        return ""
    text = format_metric(mean.value)
    return text if mean.std is None else f"{text} ± {format_metric(mean.std, mean.value)}"


def _kind(run: Run) -> tuple[object, object]:
    return run.config.get("name"), run.config.get("task.name")


def _is_seed_of(run: Run, key: str) -> bool:
    """Whether a key is a seed, or refers to one: ``data.shuffle: ${seed}``."""
    return is_seed(key) or is_seed(str(run.config.get(f"record.follows.{key}", "")))


def _settings(run: Run) -> Hashable:
    """A hashable value, equal for runs that differ only in the seed; unique if the configuration cannot be read."""
    if not run.config:
        return run.folder
    # A missing key counts as null, as in differing().
    return frozenset(
        (key, meaning(value))
        for key, value in run.config.items()
        if value is not None and not _SILENT.match(key) and not _is_seed_of(run, key)
    )


def _seeds(run: Run) -> Hashable:
    """A hashable value, equal for runs with the same seeds."""
    return frozenset((key, meaning(value)) for key, value in run.config.items() if _is_seed_of(run, key))


def write_rows(runs: Sequence[Run], folder: Path) -> None:
    """Write ``sweep.csv`` and ``sweep.json`` with one row per run, the best first, and ``sweep_seeds.csv``.

    Columns: ``rank`` (among the runs of the same metric), ``run``, all keys that differ, ``status``, ``selected_by``
    (the metric on validation, which ranks the runs), all metrics by name, ``steps``, ``wall_s``,
    ``samples_per_second``, ``error`` (its first line). Missing values are empty in CSV and null in JSON. CSV has six
    digits; JSON has all digits, and also the columns ``folder``, ``metric_name`` and ``metric``.

    If a metric has the same name as another column, its column is ``metrics.<name>`` (``metrics.error``), the path in
    ``result.json``; a configuration key becomes ``config.<key>`` (``config.metric``).

    ``sweep_seeds.csv`` has one row per configuration (:func:`seed_rows`). It is a separate file, because programs would
    count the means as further runs.

    Args:
        runs: at least one run.
        folder: output folder.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = run_rows(runs)
    content = to_json(rows, indent=2, default=str)  # YAML values may be dates, which JSON does not have
    write_atomically(folder / "sweep.json", f"{content}\n".encode())
    write_atomically(folder / "sweep.csv", _csv(rows))
    write_atomically(folder / "sweep_seeds.csv", _csv(seed_rows(runs)))


def run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The rows of ``sweep.json``, one dict per run, the best first (:func:`write_rows`)."""
    metrics, keys = _metric_titles(runs), differing(runs)
    return [
        {
            "rank": rank,
            "run": run.name,
            "folder": str(run.folder),
            **{titled("config", key): column([run], key)[0] for key in keys},
            "status": run.status,
            "selected_by": run.numbers.get("selected_by"),
            "metric_name": run.metric_name,
            **{title: run.numbers.get(title) for title in ("metric", *metrics, *NUMBERS)},
            "error": run.error,
        }
        for rank, group in in_order(rankings(runs, over_seeds=False))
        for run in group.runs
    ]


def seed_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One dict per configuration, over its seeds; the best mean first.

    Keys: ``rank`` (by the mean, among groups of the same metric), ``runs`` (names), ``folders``, all keys that differ
    except the seed, ``n`` (number of seeds that count), ``left_out`` (counts of other runs by status), ``metric_name``,
    ``selected_by_mean`` and ``selected_by_std`` (on validation, which ranks), ``metric_mean`` and ``metric_std`` (on
    test), the same two for each metric by the names of :func:`run_rows`, and for ``wall_s``. ``_std`` is the sample
    standard deviation (n - 1); None for a single seed.
    """
    metrics, keys = _metric_titles(runs), [key for key in differing(runs) if not is_seed(key)]
    rows = []
    for rank, group in in_order(rankings(runs, over_seeds=True)):
        row: dict[str, Any] = {"rank": rank, "runs": group.names, "folders": [str(run.folder) for run in group.runs]}
        row.update((titled("config", key), column(group.runs, key)[0]) for key in keys)
        row.update(n=group.n, left_out=group.left_out, metric_name=group.metric_name)
        for title in ("selected_by", "metric", *metrics, "wall_s"):
            row[f"{title}_mean"], row[f"{title}_std"] = group.mean(title) or (None, None)
        rows.append(row)
    return rows


def _csv(rows: Sequence[dict[str, Any]]) -> bytes:
    """Rows as CSV, with a header, without the columns that only the JSON file has."""
    names = [name for name in rows[0] if name not in _JSON_ONLY]
    return csv_content(
        [names, *(["" if row[name] is None else value_text(row[name]) for name in names] for row in rows)]
    )


def _metric_titles(runs: Sequence[Run]) -> list[str]:
    """The column titles of all metrics; metrics that rank runs come first."""
    ranking = [titled("metrics", name) for name in rankings(runs, over_seeds=False) if name is not None]
    return list(dict.fromkeys([*ranking, *(title for run in runs for title in run.numbers if title not in COLUMNS)]))


class Table(NamedTuple):
    """A table for people.

    Attributes:
        heads: titles of the columns.
        rows: cells, row by row.
        numbers: for each column whether it is numeric; numeric columns are right-aligned.
        notes: notes below the table, each a sentence without a period.
        styles: style of each row: ``best``, ``failed``, ``other``, a style of rich, or empty text. An empty sequence:
            no styles.
    """

    heads: list[str]
    rows: list[list[str]]
    numbers: list[bool]
    notes: Sequence[str] = ()
    styles: Sequence[str] = ()

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], styles: Sequence[str] = (), notes: Sequence[str] = ()) -> Table:
        """Make a table of dicts with the same keys; empty columns are left out."""
        columns = {head: ["" if row[head] is None else value_text(row[head]) for row in rows] for head in rows[0]}
        columns = {head: cells for head, cells in columns.items() if any(cells)}
        numbers = [all(map(_NUMBER.fullmatch, cells)) for cells in columns.values()]
        return cls(list(columns), [list(row) for row in zip(*columns.values())], numbers, notes, styles)


def run_table(runs: Sequence[Run]) -> Table:
    """The rows of ``sweep.csv`` as a table for the page, without empty columns.

    Args:
        runs: at least one run, all with the same metric.
    """
    rows = run_rows(runs)
    styles = {"completed": "", "failed": "failed"}
    looks = ["best" if row["rank"] == 1 and len(rows) > 1 else styles.get(row["status"], "other") for row in rows]
    shown = [{title: value for title, value in row.items() if title not in _JSON_ONLY} for row in rows]
    return Table.of(shown, looks, _unit_notes(runs, _metric_titles(runs)))


def results_tables(runs: Sequence[Run], paper: bool = False) -> list[Table]:
    """One table per metric, with one row per configuration: mean over seeds, and reference values if there are any.

    The best configuration is first and has a star. Rows show the metric on validation, and the status of runs that do
    not count.

    Args:
        runs: any number of runs.
        paper: tables for a paper: always with the choice of data, and sorted by the keys; without star, validation
            metric and duration, and without runs that have no metric.
    """
    ranking = rankings(runs, over_seeds=True)
    return [_results(groups, metric, paper) for metric, groups in ranking.items() if metric is not None or not paper]


def _results(groups: list[Group], metric: str | None, paper: bool) -> Table:
    runs = [run for group in groups for run in group.runs]
    averaged = any(len(group.runs) > 1 for group in groups)
    keys = list(dict.fromkeys(["data"] * paper + keys_of(groups)))
    titles = short_names(keys)
    values = {group: [column(group.runs, key)[0] for key in keys] for group in groups}
    best = groups[0] if len(groups) > 1 and groups[0].score and not paper else None
    if paper:
        groups = sorted(groups, key=lambda group: list(map(by_size, values[group])))
    named = not paper or len(set(map(value_text, values.values()))) < len(groups)  # show names if keys are not unique
    known = {group: (group.counted or group.runs)[0].result.get("reference") or {} for group in groups}
    figures = {group: {} if each.get("differs") else each for group, each in known.items()}
    referenced = [name for name in _metric_titles(runs) if any(is_number(each.get(name)) for each in figures.values())]
    metrics = [name for name in dict.fromkeys([metric and titled("metrics", metric), *referenced]) if name is not None]
    rows = []
    for group in groups:
        row: dict[str, Any] = {"": "*" if group is best else "", "runs" if averaged else "run": group.names * named}
        for key, value in zip(keys, values[group]):
            row[titles[key] if titles[key] not in metrics else key] = value_text(value)
        row["validation"] = "" if paper else mean_text(group.score)
        for name in metrics:
            mean, theirs = group.mean(name), figures[group].get(name)
            row[name] = f"{mean_text(mean) or '-'}{f' ({group.n_text})' * averaged}"
            if name in referenced:
                row[f"{name}, reference"] = theirs
                apart = "" if mean is None or theirs is None else format_metric(mean.value - theirs, mean.value)
                row[f"{name}, difference"] = f"+{apart}".replace("+-", "-") if apart else ""
        rows.append({**row, "seconds": "" if paper else _outcome(group)})
    notes = _unit_notes(runs, metrics)
    notes += [f"{metric}: {'larger' if greater_is_better(runs) else 'smaller'} is better"] * (metric is not None)
    notes += ["starred: the best on validation"] if best else []
    notes += ["mean ± sample standard deviation (n - 1) over n seeds"] if averaged else []
    left = as_counts(run.status for group in groups for run in group.runs if run not in group.counted)
    notes += [f"left out of the figures: {left}"] if left and paper else []
    notes += dict.fromkeys(f"reference: {each['source']}" for each in figures.values() if each.get("source"))
    notes += ["difference: measured here - reference"] if referenced else []
    unlike = dict.fromkeys(", ".join(map(str, each["differs"])) for each in known.values() if each.get("differs"))
    notes += [f"reference metrics are of another experiment, and not shown, where {each}" for each in unlike if paper]
    styles = [] if paper else ["best" if group is best else "other" * bool(group.left_out) for group in groups]
    return Table.of(rows, styles, [" ".join(note.split()) for note in notes])


def as_rich(table: Table) -> RichTable:
    """The table for the terminal, with the notes below; cells that are too wide for it go on in further lines."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    looks = {"best": "bold green", "failed": "red", "other": "dim"}
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption_justify="left")
    for head, number in zip(table.heads, table.numbers):
        # As Text, because rich would read brackets in a name as markup.
        drawn.add_column(Text(printable(head)), justify="right" if number else "left", overflow="fold")
    for style, row in zip(table.styles or [""] * len(table.rows), table.rows):
        drawn.add_row(*(Text(printable(cell)) for cell in row), style=looks.get(style, style))
    drawn.caption = Text(printable("\n".join(table.notes))) if table.notes else None
    return drawn


def as_html(table: Table, classes: str) -> str:
    """The table as HTML, without its notes."""

    def line(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(table.numbers, cells)
        return "".join(f"<{tag}{' class=n' * number}>{escape(cell)}</{tag}>" for number, cell in pairs)

    styles = table.styles or [""] * len(table.rows)
    body = "\n".join(f'<tr class="{style}">{line("td", row)}</tr>' for style, row in zip(styles, table.rows))
    head = f"<thead><tr>{line('th', table.heads)}</tr></thead>"
    return f'<div class="scroll"><table class="{classes}">{head}\n<tbody>{body}</tbody></table></div>'


def as_markdown(tables: Sequence[Table]) -> str:
    """The tables in GitHub's Markdown, each with its notes below it."""
    parts = []
    for table in tables:
        lines = [[_in_markdown(cell) for cell in row] for row in [table.heads, *table.rows]]
        lines.insert(1, ["---:" if number else "---" for number in table.numbers])
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        parts += ["\n".join(f"- {_in_markdown(note)}" for note in table.notes)] if table.notes else []
    return "\n\n".join(parts) + "\n"


def as_latex(tables: Sequence[Table]) -> str:
    """Each table as a booktabs ``tabular``, to be put into a ``table`` environment with a caption.

    Text is escaped. Notes, which the caption should mention, are LaTeX comments.
    """
    lines = ["% Needs \\usepackage{booktabs} and \\usepackage[T1]{fontenc}."]
    for table in tables:
        lines += [f"% {note}." for note in table.notes]
        kinds = "".join("r" if number else "l" for number in table.numbers)
        lines += [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", _in_latex(table.heads), r"\midrule"]
        lines += [*(_in_latex(row, kinds) for row in table.rows), r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"


def _outcome(group: Group) -> str:
    """Mean duration in seconds; or, if runs do not count or have errors, their status and the first error."""
    errors = [run.error for run in group.runs if run.error is not None]
    if group.left_out or errors:
        return ": ".join(filter(None, [group.left_out, *errors[:1]]))
    seconds = group.mean("wall_s")
    return "" if seconds is None else f"{seconds.value:,.0f}"


def _unit_notes(runs: Sequence[Run], metrics: Sequence[str]) -> list[str]:
    """Notes on the units of metrics, for metrics whose unit is recorded and the same in all runs."""
    units: dict[str, list[str]] = {}
    for name in metrics:
        found = {str((run.result.get("metric_units") or {}).get(name, "")) for run in runs} - {""}
        if len(found) == 1:
            units.setdefault(found.pop(), []).append(name)
    return [f"{', '.join(names)}: of {unit} values" for unit, names in units.items()]


def _in_markdown(text: str) -> str:
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def _in_latex(cells: Sequence[str], kinds: str = "") -> str:
    """A row in LaTeX; numbers are in math mode, for correct minus signs and powers of ten."""
    found = []
    for kind, cell in zip(kinds or "l" * len(cells), cells):
        value, bracket, rest = cell.partition(" (")
        if kind == "r" and re.search(r"\d", value):
            value = re.sub(r"e(-?)\+?0*(\d+)", r" \\times 10^{\1\2}", value).replace("±", r"\pm")
            found.append(f"${value}${bracket}{rest}")
        else:
            found.append("".join(_LATEX.get(letter, letter) for letter in " ".join(cell.split())))
    return " & ".join(found).strip() + r" \\"
