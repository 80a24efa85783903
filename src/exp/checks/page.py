"""``qualify.md``: the page, to be read in an issue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterator, Mapping, Sequence

from exp.checks.check import FAILED, SKIPPED, WARNING
from exp.checks.operator_table import left_by
from exp.console import flops, size
from exp.runfolder import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_page"]

_MARKS = {FAILED: "**failed**", WARNING: "*warning*"}


def write_page(path: Path, record: Mapping[str, Any]) -> None:
    """Write the page of ``qualify.json``.

    Args:
        path: of the page.
        record: what ``qualify.json`` has.
    """
    write_atomically(path, ("\n".join(_lines(record)) + "\n").encode())


def _lines(record: Mapping[str, Any]) -> Iterator[str]:
    rows: Mapping[str, Any] = record["rows"]
    made_up = " (simulated: speeds say nothing)" if record["simulated"] else ""
    left = sum(row["status"] == SKIPPED for row in rows.values())
    missing = f", {left} of {len(rows)} rows skipped" if left else ""
    yield f"# {record['nproc']} x {record['backend']}{made_up}: {record['verdict']}{missing}"
    yield ""
    yield from _machine(record)
    yield from _table(("row", "", "s", "found", "what to do"), [
        (name, _MARKS.get(row["status"], row["status"]), "" if row["seconds"] is None else f"{row['seconds']:.0f}",
         row["finding"], row["advice"]) for name, row in rows.items()])  # fmt: skip
    yield from _section("Operators that are not equal", ("precision, experiment", "operator", "", "relative", "left",
                        "call", "said"), _operators(rows))  # fmt: skip
    yield from _section("Cards", ("rank", "card", "FLOP/s", "free memory"), _cards(rows.get("doctor")))
    known = rows.get("doctor", {}).get("values", {}).get("operators")
    yield from [f"Operators, says the doctor: {known}", ""] if known else []
    yield from _section("Collectives: what each card's link carries, per second", ("", "KiB", "card's own", "time",
                        "through the CPU"), _collectives(rows))  # fmt: skip
    yield from _section("Speed", ("experiment", "cards", "batch per card", "step", "samples/s", "efficiency", "memory"),
                        _speed(rows))  # fmt: skip
    yield "Each row's command and all figures are in qualify.json, its logs in rows/."


def _machine(record: Mapping[str, Any]) -> Iterator[str]:
    found = record["environment"]
    packages = {**found["packages"], **found["backend_packages"]}
    yield f"- exp {found['exp']} ({found['git_revision'] or 'no git checkout'}), Python {found['python']}"
    yield f"- {found['platform']}, {found['cpu_count']} cores"
    yield "- " + ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
    variables = ", ".join(f"{name}={value}" for name, value in found["variables"].items())
    yield f"- variables: {variables or 'none that matter'}"
    for card in record["monitor"]:
        used = f", {size(card['memory_used'])} used" if card.get("memory_used") is not None else ""
        total = f", {size(card['memory_total'])}" if card.get("memory_total") is not None else ""
        yield f"- card {card.get('index')}: {card.get('name') or 'unnamed'}{total}{used}"
    yield ""


def _operators(rows: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for row in _of_kind(rows, "operators"):
        for found in row["values"].get("operators", ()):
            if found["status"] == "equal" or found["said"] == "random":
                continue
            left = found["left"]
            status = found["status"] + ", portable kernel" * found["portable"]
            yield (f"{row['precision']}, {row['experiment']}", found["name"], status,
                   "" if found["relative"] is None else f"{found['relative']:.1e}",
                   "unknown" if left is None else left_by(left) if left[0] else "",
                   found["detail"] or "", found["said"] or "")  # fmt: skip


def _cards(row: Mapping[str, Any] | None) -> Iterator[Sequence[str]]:
    values = {} if row is None else row["values"]
    for rank, card in enumerate(values.get("cards", ())):
        rate, free = values["flops"][rank], values["free"][rank]
        yield str(rank), str(card), flops(rate) if rate else "", size(free) if free else ""


def _collectives(rows: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    staged = {(line["name"], line["kib"]): line for line in _lines_of(rows, "collectives-staged")}
    for line in _lines_of(rows, "collectives"):
        other = staged.get((line["name"], line["kib"]))
        yield (line["name"], str(line["kib"]), size(line["bus_bytes_per_second"]), f"{line['seconds'] * 1e3:.3g} ms",
               size(other["bus_bytes_per_second"]) if other else "")  # fmt: skip


def _lines_of(rows: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = rows.get(name, {}).get("values", {}).get("lines", ())
    return found


def _speed(rows: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for row in _of_kind(rows, "speed"):
        values = row["values"]
        if not values:
            continue
        memory = max((each for each in values["memory_by_rank"] if each), default=None)
        efficiency = values.get("efficiency")
        yield (row["experiment"], str(row["nproc"]), str(values["batch_size"]),
               f"{values['step_seconds'] * 1e3:.4g} ms",
               f"{values['samples_per_second']:.4g}", "" if efficiency is None else f"{efficiency:.0%}",
               size(memory) if memory else "unknown")  # fmt: skip


def _of_kind(rows: Mapping[str, Any], kind: str) -> Iterator[Mapping[str, Any]]:
    return (row for row in rows.values() if row["kind"] == kind and row["status"] != SKIPPED)


def _section(title: str, columns: Sequence[str], cells: Iterator[Sequence[str]]) -> Iterator[str]:
    found = list(cells)
    if found:
        yield f"## {title}"
        yield ""
        yield from _table(columns, found)


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + " --- |" * len(columns)
    for row in cells:
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""
