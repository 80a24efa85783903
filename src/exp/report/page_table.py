"""The table of results, as HTML that can be read and printed without scripts."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Sequence

from exp.report.keys import apart, column, differing, short_names, value_text
from exp.report.paper import paper_tables
from exp.report.paper_formats import cells_of, heads_of
from exp.report.runs import greater_is_better
from exp.report.table import number_text, ranks, units_of

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = ["device_text", "results_table"]

_TALL = 25  # rows; more scroll below their header, so that the curves stay near
_HEADINGS = ("run", "validation", "status", "seconds", "samples/s", "device")
_VALUE = 60  # characters of a value of the configuration


def results_table(runs: Sequence[Run], metric: str | None, identifiers: dict[Run, int]) -> str:
    """A row for each run; before them, where there are seeds or published figures, the table that a paper prints.

    Args:
        runs: of one metric, the best first.
        metric: its name; None: they have none.
        identifiers: the number of each run in the page's data.
    """
    keys = differing(runs)
    values = {key: column(runs, key) for key in keys}
    metrics = [name for name in dict.fromkeys([metric, *(name for run in runs for name in run.metrics)]) if name]
    headings = apart(metrics, _HEADINGS, "metrics.")
    titles = short_names(keys, {*_HEADINGS, *headings.values()})
    numeric = {key: all(isinstance(value, (int, float)) for value in each) for key, each in values.items()}
    rates = any(run.number("samples_per_second") for run in runs)
    rank = ranks(runs)
    head = [_header("", "number" if metric else "", title="rank"), _header("run", "run")]
    head += [_header(titles[key], "number" if numeric[key] else "text", title=key) for key in keys]
    descending = metric is not None and greater_is_better(runs)
    units = units_of(runs)
    ranked = any(run.selected_by is not None for run in runs)
    first = "descending" if descending else ""
    head += (
        [_header("validation", "number", f"{metric} on validation, by which runs are ranked", first)] if ranked else []
    )
    for name in metrics:
        title = f"{headings[name]} ({units[name]})" if name in units else headings[name]
        head.append(_header(title, "number", first=first if name == metric else ""))
    head += [_header("status", "text"), _header("seconds", "number", title="wall-clock time of the run")]
    head += [_header("samples/s", "number")] if rates else []
    head.append(_header("device", "text"))
    rows = []
    for number, run in enumerate(runs):
        cells = [_cell("" if rank[run] is None else str(rank[run]), rank[run] if rank[run] is not None else "", "n")]
        cells.append(_name_cell(run, identifiers[run]))
        for key in keys:
            text = value_text(values[key][number])
            short = text if len(text) <= _VALUE else f"{text[: _VALUE - 1]}…"
            cells.append(_cell(short, text, "n plain" if numeric[key] else "plain", text if short != text else ""))
        if ranked:
            cells.append(_score_cell(run.selected_by, "n plain"))
        for name in metrics:
            score = run.metric if name == metric and run.metric is not None else run.metrics.get(name)
            cells.append(_score_cell(score, "n score" if name == metric else "n plain"))
        cells.append(_status_cell(run))
        for key in ["wall_s", "samples_per_second"] if rates else ["wall_s"]:
            value = run.number(key)
            text = "" if value is None else f"{value:,.1f}" if abs(value) < 10 else f"{value:,.0f}"
            cells.append(_cell(text, "" if value is None else repr(float(value)), "n plain"))
        device = device_text(run)
        cells.append(_cell(device, device, "plain"))
        best = ' class="best"' if rank[run] == 1 and len(runs) > 1 else ""
        rows.append(f'<tr{best} data-run="{identifiers[run]}">{"".join(cells)}</tr>')
    tall = " tall" if len(runs) > _TALL else ""
    return (
        f'{_as_papers_print_it(runs)}<div class="scroll{tall}"><table class="results">'
        f"<thead><tr>{''.join(head)}</tr></thead>\n"
        f"<tbody>{chr(10).join(rows)}</tbody></table></div>"
    )


def _as_papers_print_it(runs: Sequence[Run]) -> str:
    """Means over seeds beside published figures; nothing where it would say what the rows of the runs say."""
    parts = []
    for table in paper_tables(runs):
        if not (table.averaged or table.published):
            continue
        labels = len(table.keys)
        head = "".join(f'<th scope="col"{" class=n" if number >= labels else ""}>{escape(text)}</th>'
                       for number, text in enumerate(heads_of(table)))  # fmt: skip
        rows = [
            "".join(f'<td{" class=n" if number >= labels else ""}>{escape(text)}</td>'
                    for number, text in enumerate(cells_of(table, row)))
            for row in table.rows
        ]  # fmt: skip
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        notes = f'<p class="note">{escape("; ".join(table.notes))}.</p>'
        tall = " tall" if len(rows) > _TALL else ""
        parts.append(
            f'<div class="scroll{tall}"><table class="paper"><thead><tr>{head}</tr></thead>\n'
            f"<tbody>{body}</tbody></table></div>{notes}\n<h3>Every run</h3>\n"
        )
    return "".join(parts)


def device_text(run: Run) -> str:
    """``4 x cpu (Some Processor)``: the world size, the backend and the devices' name, as far as they are known."""
    result = run.result or {}
    text = str(result.get("backend") or run.config.get("backend.name") or "")
    size = result.get("world_size")
    if isinstance(size, int) and size > 1:
        text = f"{size} x {text}"
    devices = result.get("devices")
    known = [device for device in devices if isinstance(device, dict)] if isinstance(devices, list) else []
    names = list(dict.fromkeys(str(device["name"]) for device in known if device.get("name")))
    notes = ["simulated"] if result.get("simulated") else names[:2]
    return f"{text} ({', '.join(notes)})" if notes else text


def _header(text: str, kind: str, title: str = "", first: str = "") -> str:
    classes = {"number": ' class="n"', "run": ' class="run"'}.get(kind, "")
    hint = f' title="{escape(title)}"' if title and title != text else ""
    order = f' data-first="{first}"' if first else ""
    label = escape(text) or "#"
    return f'<th scope="col"{classes}{hint}{order}>' + (
        f'<button type="button">{label}</button></th>' if kind else "</th>"
    )


def _cell(text: str, sort: Any, classes: str, title: str = "") -> str:
    hint = f' title="{escape(title)}"' if title else ""
    return f'<td class="{classes}" data-sort="{escape(str(sort))}"{hint}>{escape(text)}</td>'


def _score_cell(score: float | None, classes: str) -> str:
    exact = "" if score is None else repr(score)
    return _cell("" if score is None else number_text(score), exact, classes, exact)


def _name_cell(run: Run, identifier: int) -> str:
    name = escape(run.name)
    return (
        f'<td class="run" data-sort="{name}"><button type="button" data-run="{identifier}" aria-pressed="false" '
        f'title="{escape(str(run.folder))}"><span class="swatch"></span>{name}</button></td>'
    )


def _status_cell(run: Run) -> str:
    status = escape(run.status)
    notes = []
    if run.error is not None:
        notes.append(f'<br><span class="error">{escape(run.error)}</span>')
    if run.number("restarts"):
        notes.append(f"<br>restarts: {run.number('restarts'):.0f}")
    if not notes:
        return f'<td class="plain status-{_word(run.status)}" data-sort="{status}">{status}</td>'
    return f'<td class="plain wrap status-{_word(run.status)}" data-sort="{status}">{status}{"".join(notes)}</td>'


def _word(text: str) -> str:
    """What may stand in a class name: the status comes from a file."""
    return "".join(letter for letter in text if letter.isalpha())
