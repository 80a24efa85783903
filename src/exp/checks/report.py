"""Before and after the launch of ``task=doctor``: a line, a table, ``doctor.json`` and ``result.json``; no torch."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Callable

from exp import console
from exp.checks.check import FAILED, OK, SKIPPED, WARNING
from exp.checks.training_memory import training_memory
from exp.checks.verdict import assemble, value_of
from exp.console import flops, size
from exp.errors import RunError
from exp.result import blank_result
from exp.runfolder import write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runfolder import RunFolder

__all__ = ["STYLES", "begin", "end"]

STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "dim"}
_MOST_RANKS = 12
_GAP = 2
_CARD = 12  # characters of a card's number and name that are worth having


def begin(config: ExpConfig, folder: RunFolder) -> None:
    """Say what is examined; nothing of an earlier examination may be taken for this one's."""
    shutil.rmtree(folder.path / "doctor", ignore_errors=True)
    with suppress(FileNotFoundError):
        (folder.path / "doctor.json").unlink()
    processes = config.nproc * config.launcher.nnodes
    console.make_console().print(
        f"doctor: {processes} process{'es' if processes > 1 else ''} on {config.backend.name}, {config.precision}; "
        f"up to {config.task.timeout_s} s for each check\nrun folder: {console.shown(folder.path)}",
        soft_wrap=True,
    )


def end(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int:
    """Judge, write and print; then advise, which may take a while and changes no verdict.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        outcome: how the launch ended.

    Returns:
        The exit code.
    """
    report = assemble(config, folder, outcome, started=folder.config.stat().st_mtime)
    report["training"] = None
    ranks, file = report["ranks"], folder.path / "doctor.json"
    result = blank_result(config)
    result.update(
        status="failed" if report["verdict"] == FAILED else "completed",
        devices=[{key: value_of(rank, "device", key) for key in ("name", "index", "host")} for rank in ranks],
        device_type=next((str(value_of(rank, "device", "device")).split(":")[0] for rank in ranks), None),
        **{key: report[key] for key in ("process_group", "fallback", "wall_s")},
        restarts=outcome.restarts,
        batch_size=None,  # there is none
        global_batch_size=None,
    )
    if report["verdict"] == FAILED:
        first = report["findings"][0]
        message = f"{first['check']}: {first['finding']}; {first['advice']}"
        result["error"] = {"rank": next(iter(first["ranks"]), None), "type": RunError.__name__, "message": message}
    terminal, unwritten = console.make_console(), None
    try:
        write_json(file, report)
        folder.write_result(result)
    except OSError as error:  # the disk that the doctor complains of; the table must still be seen
        unwritten = error.strerror
    _print(terminal, report, console.shown(file) if unwritten is None else "no file")
    if unwritten is not None:
        console.error(f"cannot write {file}: {unwritten}; make space, or set output_dir")
        return int(report["exit_code"])
    training = report["training"] = training_memory(report, config, folder)
    if training is not None:
        kind = f"[{STYLES[WARNING]}]{WARNING}: training[/]: " if training["fits"] is False else ""
        _print_advice(terminal, kind, training["text"], training["advice"])
        write_json(file, report)
    return int(report["exit_code"])


def _print(terminal: Console, report: dict[str, Any], where: str) -> None:
    from rich.markup import escape

    ranks, world_size = report["ranks"], report["world_size"]
    terminal.print()
    terminal.print(_table(ranks, terminal.width))
    for finding in report["findings"]:
        terminal.print()
        head = f"[{STYLES[finding['status']]}]{finding['status']}: {finding['check']}[/]"
        head += f"{_who(finding['ranks'], world_size)}: "
        _print_advice(terminal, head, finding["finding"], finding["advice"])
    failed = sum(rank["verdict"] == FAILED for rank in ranks)
    work = f"{world_size} processes work together" if world_size > 1 else "1 process works"
    summary = {
        FAILED: f"FAILED: {failed} of {world_size} rank{'s' if world_size > 1 else ''} on {report['backend']}",
        WARNING: f"OK: {work} on {report['backend']}, with warnings",
        OK: f"OK: {work} on {report['backend']}",
    }[report["verdict"]]
    terminal.print()
    terminal.print(
        f"[{STYLES[report['verdict']]}]{summary}, {report['wall_s']:.0f} s[/]; all figures in {escape(where)}",
        soft_wrap=True,
    )


def _print_advice(terminal: Console, head: str, finding: str, advice: str | None) -> None:
    from rich.markup import escape

    terminal.print(f"{head}{escape(finding)}", soft_wrap=True)
    if advice:
        terminal.print(f"  do: {escape(advice)}", soft_wrap=True)


def _table(ranks: list[dict[str, Any]], width: int) -> Table:
    """One line per rank. Where it does not fit, whole columns are left out, and the names of cards cut."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    columns = {title: [title, *map(cell, ranks)] for title, cell in _COLUMNS.items()}
    widths = {title: max(map(len, cells)) for title, cells in columns.items()}
    if not any(columns["util"][1:]):
        del columns["util"], widths["util"]

    def room() -> int:
        return width - sum(widths.values()) + widths["card"] - _GAP * (len(widths) - 1)

    one_host = len({rank["host"] for rank in ranks}) == 1
    for title in (*["host"] * one_host, "group", "ddp", "reduce"):
        if room() < min(widths["card"], _CARD):
            del columns[title], widths[title]
    most = max(room(), len("card"))
    columns["card"] = [text if len(text) <= most else f"{text[: most - 1]}…" for text in columns["card"]]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for title in columns:
        table.add_column(title, justify="left" if title in _LEFT else "right", no_wrap=True)
    for rank, *cells, verdict in zip(ranks, *(cells[1:] for cells in columns.values())):
        table.add_row(*map(escape, cells), f"[{STYLES[rank['verdict']]}]{escape(verdict)}[/]")
    return table


def _who(ranks: list[int], world_size: int) -> str:
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
    name, identity, number = (value_of(rank, "device", key) for key in ("name", "identity", "card"))
    if name is None:
        return "-"
    short = f"#{number}" if number is not None else identity
    return f"{short} {name}" if short else str(name)


def _figure(check: str, key: str, form: Callable[[Any], str]) -> Callable[[dict[str, Any]], str]:
    def cell(rank: dict[str, Any]) -> str:
        value = value_of(rank, check, key)
        return "" if value is None else form(value)

    return cell


def _ddp(rank: dict[str, Any]) -> str:
    status: str = next(found["status"] for found in rank["checks"] if found["name"] == "ddp")
    return "-" if status == SKIPPED else status


_LEFT = ("host", "card", "ddp", "verdict")
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "rank": lambda rank: str(rank["rank"]),
    "host": lambda rank: (rank["host"] or "-").split(".")[0],
    "card": _card,
    "free": _figure("memory", "free", size),
    "group": _figure("group", "seconds", "{:.1f} s".format),
    "reduce": _figure("all_reduce", "seconds", lambda value: f"{value * 1e3:.3g} ms"),
    "ddp": _ddp,
    "FLOP/s": _figure("burst", "flops", flops),
    "util": _figure("utilisation", "utilisation_percent", "{:.0f} %".format),
    "verdict": _verdict,
}
