"""What the doctor prints: one line per rank, what is wrong and what to do, and the verdict. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exp.doctor.facts import flops, size
from exp.doctor.record import FAILED, OK, SKIPPED, WARNING
from exp.doctor.verdict import value_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_report", "print_training"]

_STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "dim"}
_MOST_RANKS = 12
_CARD = 12  # characters of a card's number and name that are worth having
_LEAST = ("group", "ddp", "reduce")


def print_report(terminal: Console, report: dict[str, Any], where: str) -> None:
    """Print ``doctor.json``.

    Args:
        terminal: to print on.
        report: from :func:`exp.doctor.verdict.assemble`.
        where: the path of ``doctor.json``, as shown to the user.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    ranks = report["ranks"]
    columns, gap = _layout(ranks, terminal.width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for title, (width, justify, _) in columns.items():
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis", width=width)
    for number, rank in enumerate(ranks):
        style = _STYLES[rank["verdict"]]
        cells = [escape(cells[number]) for _, _, cells in columns.values()]
        table.add_row(*cells[:-1], f"[{style}]{cells[-1]}[/]")
    terminal.print()
    terminal.print(table)
    for finding in report["findings"]:
        style = _STYLES[finding["status"]]
        who = _ranks(finding["ranks"], report["world_size"])
        terminal.print()
        terminal.print(
            f"[{style}]{finding['status']}: {finding['check']}[/]{who}: {escape(finding['finding'])}", soft_wrap=True
        )
        terminal.print(f"  do: {escape(finding['advice'])}", soft_wrap=True)
    terminal.print()
    style = _STYLES[report["verdict"]]
    terminal.print(f"[{style}]{_summary(report)}[/]; all figures in {escape(where)}", soft_wrap=True)


def print_training(terminal: Console, training: dict[str, Any]) -> None:
    """Print the advice on memory (:func:`exp.doctor.training_memory.training_memory`)."""
    from rich.markup import escape

    kind = f"[{_STYLES[WARNING]}]{WARNING}: training[/]: " if training["fits"] is False else ""
    terminal.print(f"{kind}{escape(training['text'])}", soft_wrap=True)
    if training["advice"]:
        terminal.print(f"  do: {escape(training['advice'])}", soft_wrap=True)


def _layout(ranks: list[dict[str, Any]], width: int) -> tuple[dict[str, tuple[int, Any, list[str]]], int]:
    """What fits: the verdict is never cut, the name of the card first, and then whole columns are left out.

    Returns:
        By title the width, the alignment and the cells of each column; and the gap between two columns.
    """
    columns = {}
    for title, justify, cell in _COLUMNS:
        cells = [cell(rank) for rank in ranks]
        if title not in _ON_DEMAND or any(cells):
            columns[title] = (max(len(title), *map(len, cells)), justify, cells)

    def room(gap: int) -> int:
        return width - sum(columns[title][0] for title in columns if title != "card") - gap * (len(columns) - 1)

    gap = 2 if room(2) >= min(columns["card"][0], _CARD) else 1
    hosts = {rank["host"] for rank in ranks}
    for title in ("host", *_LEAST) if len(hosts) == 1 else _LEAST:
        if room(gap) >= min(columns["card"][0], _CARD):
            break
        del columns[title]
    wanted, justify, cells = columns["card"]
    columns["card"] = (max(min(wanted, room(gap)), len("card")), justify, cells)
    return columns, gap


def _summary(report: dict[str, Any]) -> str:
    world_size, seconds = report["world_size"], f"{report['wall_s']:.0f} s"
    if report["verdict"] == FAILED:
        failed = sum(rank["verdict"] == FAILED for rank in report["ranks"])
        return f"FAILED: {failed} of {world_size} rank{'s' if world_size > 1 else ''} on {report['backend']}, {seconds}"
    work = f"{world_size} processes work together" if world_size > 1 else "1 process works"
    return f"OK: {work} on {report['backend']}{', with warnings' if report['verdict'] == WARNING else ''}, {seconds}"


def _ranks(ranks: list[int], world_size: int) -> str:
    if not ranks:
        return ""
    if len(ranks) == world_size > 1:
        return ", all ranks"
    shown = ", ".join(map(str, ranks[:_MOST_RANKS])) + (" ..." if len(ranks) > _MOST_RANKS else "")
    return f", rank{'s' if len(ranks) > 1 else ''} {shown}"


def _verdict(rank: dict[str, Any]) -> str:
    verdict: str = rank["verdict"]
    if verdict == SKIPPED:
        return "not all checked"
    return verdict if verdict == OK else f"{verdict}: {rank['first']}"


def _card(rank: dict[str, Any]) -> str:
    name, identity = value_of(rank, "device", "name"), value_of(rank, "device", "identity")
    if name is None:
        return "-"
    number = value_of(rank, "device", "card")
    short = f"#{number}" if number is not None else identity
    return f"{short} {name}" if short else str(name)


def _figure(check: str, key: str, form: Any) -> Any:
    def cell(rank: dict[str, Any]) -> str:
        value = value_of(rank, check, key)
        return "" if value is None else str(form(value))

    return cell


def _status(check: str) -> Any:
    def cell(rank: dict[str, Any]) -> str:
        status: str = next(found["status"] for found in rank["checks"] if found["name"] == check)
        return "-" if status == SKIPPED else status

    return cell


_ON_DEMAND = ("util",)
_COLUMNS: list[tuple[str, Any, Any]] = [
    ("rank", "right", lambda rank: str(rank["rank"])),
    ("host", "left", lambda rank: (rank["host"] or "-").split(".")[0]),
    ("card", "left", _card),
    ("free", "right", _figure("memory", "free", size)),
    ("group", "right", _figure("group", "seconds", lambda value: f"{value:.1f} s")),
    ("reduce", "right", _figure("all_reduce", "seconds", lambda value: f"{value * 1e3:.3g} ms")),
    ("ddp", "left", _status("ddp")),
    ("FLOP/s", "right", _figure("burst", "flops", flops)),
    ("util", "right", _figure("utilisation", "utilisation_percent", lambda value: f"{value:.0f} %")),
    ("verdict", "left", _verdict),
]
