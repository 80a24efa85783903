"""``qualify.md``: the page, to be read in an issue."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

from exp.checks.check import FAILED, SKIPPED, WARNING
from exp.console import size

__all__ = ["page_of", "table_of"]

_MARKS = {FAILED: "**failed**", WARNING: "*warning*"}


def page_of(record: Mapping[str, Any]) -> str:
    """The page of the content of ``qualify.json``: the machine, a line for each row, and the table of each that has
    one. Of operators, those that are not equal.
    """
    rows: Mapping[str, Any] = record["rows"]
    made_up = " (simulated: speeds say nothing)" if record["simulated"] else ""
    left = sum(row["status"] == SKIPPED for row in rows.values())
    missing = f", {left} of {len(rows)} rows skipped" if left else ""
    lines = [f"# {record['nproc']} x {record['backend']}{made_up}: {record['verdict']}{missing}", ""]
    lines += [*_machine(record), ""]
    lines += table_of([
        {"row": name, "": _MARKS.get(row["status"], row["status"]), "s": "" if row["seconds"] is None else
         f"{row['seconds']:.0f}", "found": row["finding"], "what to do": row["advice"]} for name, row in rows.items()
    ])  # fmt: skip
    for name, row in rows.items():
        shown = [line for line in row["values"].get("table", ()) if line.get("status") != "equal"]
        if shown and row["status"] != SKIPPED:
            lines += [f"## {name}", "", *table_of(shown)]
    lines.append("Each row's command and all figures are in qualify.json, its logs in rows/.")
    return "\n".join(lines) + "\n"


def _machine(record: Mapping[str, Any]) -> Iterator[str]:
    found = record["environment"]
    packages = {**found["packages"], **found["backend_packages"]}
    yield f"- exp {found['exp']} ({found['git_revision'] or 'no git checkout'}), Python {found['python']}"
    yield f"- {found['platform']}, {found['cpu_count']} cores"
    yield "- " + ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
    variables = ", ".join(f"{name}={value}" for name, value in found["variables"].items())
    yield f"- variables: {variables or 'none that matter'}"
    for card in record["monitor"]:
        used, total = (f", {size(card[key])}" if card.get(key) else "" for key in ("memory_used", "memory_total"))
        yield f"- card {card.get('index')}: {card.get('name') or 'unnamed'}{total}{used and used + ' used'}"


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of equal keys as lines of Markdown, with an empty one at the end."""
    cells = [[_cell(value) for value in row.values()] for row in rows]
    heads = [[*rows[0]], ["---"] * len(rows[0])] if rows else []
    return [*(f"| {' | '.join(line)} |" for line in [*heads, *cells]), ""]


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.1e}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
