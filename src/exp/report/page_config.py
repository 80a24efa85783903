"""How the runs were configured: what differs, what does not, and the command lines."""

from __future__ import annotations

import shlex
from html import escape
from typing import TYPE_CHECKING, Any, Sequence

from exp.report.keys import column, differing, unlike, value_text

if TYPE_CHECKING:
    from exp.report.run import Run

__all__ = ["command_lines", "configuration"]

_COLUMNS = 8  # runs that are each given a column of their own
_DISTINCT = 12
_LONGEST = 300  # characters of a value


def configuration(runs: Sequence[Run]) -> str:
    """The keys that tell the runs apart; behind folds the others that differ, and those that are the same in all.

    Args:
        runs: the best first.
    """
    chosen, unequal = differing(runs), unlike(runs)
    further = [key for key in unequal if key not in (*chosen, "output_dir") and not _is_shown(runs, key, chosen)]
    differ = set(unequal)
    same = [key for key in dict.fromkeys(key for run in runs for key in run.config) if key not in differ]
    parts = []
    if chosen:
        parts.append(_table(runs, chosen))
    elif len(runs) > 1:
        parts.append("<p>The runs differ in no key that bears on the outcome.</p>")
    if further:
        what = "1 more key that differs" if len(further) == 1 else f"{len(further)} more keys that differ"
        title = f"{what}, as a consequence or without bearing on the outcome"
        parts.append(_folded(title, _table(runs, further)))
    if same:
        rows = [f"<tr><td>{escape(key)}</td><td>{_value(runs[0].config.get(key))}</td></tr>" for key in same]
        title = f"{len(same)} keys that are the same in all runs" if len(runs) > 1 else f"{len(same)} keys"
        table = f'<div class="scroll"><table class="keys"><tbody>{"".join(rows)}</tbody></table></div>'
        parts.append(_folded(title, table))
    return "\n".join(parts)


def command_lines(runs: Sequence[Run]) -> str:
    """What to type to repeat each run, behind a fold."""
    lines = []
    for run in runs:
        if run.overrides:
            kept = [override for override in run.overrides if not override.startswith("output_dir=")]
            command = " ".join(["python -m exp", *map(shlex.quote, kept)])
            lines.append(f"<li>{escape(run.name)}<br><code>{escape(command)}</code></li>")
    if not lines:
        return ""
    return _folded("Command lines", f'<ul class="commands">{"".join(lines)}</ul>')


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _table(runs: Sequence[Run], keys: Sequence[str]) -> str:
    """The value of each key in each run, or, of many runs, in how many of them."""
    beside = len(runs) <= _COLUMNS
    titles = [escape(run.name) for run in runs] if beside else ["values, and in how many runs"]
    head = "".join(f'<th scope="col">{title}</th>' for title in ["key", *titles])
    rows = []
    for key in keys:
        # A key that a run does not have is not the same as null.
        texts = ["" if value is None and key not in run.config else _value(value)
                 for run, value in zip(runs, column(runs, key))]  # fmt: skip
        cells = "".join(f"<td>{text}</td>" for text in texts) if beside else f"<td>{_tally(runs, key, texts)}</td>"
        rows.append(f"<tr><td>{escape(key)}</td>{cells}</tr>")
    return (
        f'<div class="scroll"><table class="keys"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _is_shown(runs: Sequence[Run], key: str, chosen: Sequence[str]) -> bool:
    """Whether a key only names the choice of a config group, as ``backend.name`` does beside ``backend``."""
    group = "experiment" if key == "name" else key.partition(".")[0]
    return group in chosen and column(runs, key) == column(runs, group)


def _value(value: Any) -> str:
    text = value_text(value)
    return escape(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def _tally(runs: Sequence[Run], key: str, texts: Sequence[str]) -> str:
    """Each distinct value and how often it occurs; of many numbers their range."""
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    values = column(runs, key)
    if len(counts) > _DISTINCT and all(isinstance(value, (int, float)) for value in values):
        return f"{len(counts)} values from {_value(min(values))} to {_value(max(values))}"
    shown = [f'<span class="value">{text or "(none)"} <i>&times; {count}</i></span>' for text, count in counts.items()]
    more = f" and {len(shown) - _DISTINCT} more" if len(shown) > _DISTINCT else ""
    return " ".join(shown[:_DISTINCT]) + more
