"""How the runs were configured: what differs, what does not, and the command lines."""

from __future__ import annotations

import shlex
from html import escape
from typing import TYPE_CHECKING, Any, Sequence

from exp.compare.keys import column, differing, unlike, value_text

if TYPE_CHECKING:
    from exp.compare.run import Run

__all__ = ["command_lines", "configuration"]

_COLUMNS = 8  # runs that are each given a column of their own
_DISTINCT = 12
_LONGEST = 300  # characters of a value


def configuration(runs: Sequence[Run]) -> str:
    """The keys whose values differ; behind a fold those that are the same in all runs.

    Args:
        runs: the best first.
    """
    chosen = differing(runs)
    consequences = [
        key for key in unlike(runs) if key not in (*chosen, "output_dir") and not _is_shown(runs, key, chosen)
    ]
    parts = []
    if chosen:
        parts.append(_table(runs, chosen, consequences))
        if consequences:
            parts.append('<p class="note">In grey: what differs as a consequence of the keys above it.</p>')
    elif len(runs) > 1:
        parts.append("<p>All runs have the same configuration.</p>")
    same = [key for key in dict.fromkeys(key for run in runs for key in run.config) if key not in set(unlike(runs))]
    if same:
        rows = [f"<tr><td>{escape(key)}</td><td>{_value(runs[0].config.get(key))}</td></tr>" for key in same]
        title = f"{len(same)} keys that are the same in all runs" if len(runs) > 1 else f"{len(same)} keys"
        parts.append(
            f'<details><summary>{title}</summary><div class="scroll"><table class="keys"><tbody>'
            f"{''.join(rows)}</tbody></table></div></details>"
        )
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
    return f'<details><summary>Command lines</summary><ul class="commands">{"".join(lines)}</ul></details>'


def _table(runs: Sequence[Run], chosen: Sequence[str], consequences: Sequence[str]) -> str:
    beside = len(runs) <= _COLUMNS
    columns = [escape(run.name) for run in runs] if beside else ["values, and in how many runs"]
    head = "".join(f'<th scope="col">{title}</th>' for title in ["key", *columns])
    rows = []
    for key in [*chosen, *consequences]:
        values = column(runs, key)
        cells = "".join(f"<td>{_value(value)}</td>" for value in values) if beside else f"<td>{_tally(values)}</td>"
        kind = "" if key in chosen else ' class="consequence"'
        rows.append(f"<tr{kind}><td>{escape(key)}</td>{cells}</tr>")
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


def _tally(values: Sequence[Any]) -> str:
    """Each distinct value and how often it occurs; of many numbers their range."""
    counts: dict[str, int] = {}
    for value in values:
        text = _value(value)
        counts[text] = counts.get(text, 0) + 1
    if len(counts) > _DISTINCT and all(isinstance(value, (int, float)) for value in values):
        return f"{len(counts)} values from {_value(min(values))} to {_value(max(values))}"
    shown = [f'<span class="value">{text} <i>&times; {count}</i></span>' for text, count in counts.items()]
    more = f" and {len(shown) - _DISTINCT} more" if len(shown) > _DISTINCT else ""
    return " ".join(shown[:_DISTINCT]) + more
