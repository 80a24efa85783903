"""task=doctor in the parent: the judgement over all ranks from their journals, and how it is shown; no torch."""

from __future__ import annotations

import shutil
import statistics
import time
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Callable

from exp import console
from exp.checks.bench import END, START, journal_of
from exp.checks.check import FAILED, OK, SKIPPED, WARNING, Answer, fail, read_journal, skip, worst
from exp.checks.doctor import CHECKS
from exp.checks.training_memory import training_memory
from exp.console import flops, size
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.result import blank_result
from exp.runfolder import write_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runfolder import RunFolder

__all__ = ["STYLES", "begin", "end", "value_of"]

STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red", SKIPPED: "dim"}
_SLOW = 0.25
_OTHER_NODES_S = 5.0
_NO_SPACE = 2**16
_ANOTHER = "another rank did not go on"
_LOG = "look at logs/rank<n>.log"
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
    report = _assemble(config, folder, outcome, started=folder.config.stat().st_mtime)
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
        first = next(finding for finding in report["findings"] if finding["status"] == FAILED)
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
    training = None
    if report["verdict"] != FAILED:
        training = training_memory(config, folder, [value_of(rank, "memory", "free") for rank in ranks])
    if training is not None:
        report["training"] = training
        kind = f"[{STYLES[WARNING]}]{WARNING}: training[/]: " if training["fits"] is False else ""
        _print_advice(terminal, kind, training["text"], training["advice"])
        write_json(file, report)
    return int(report["exit_code"])


def _assemble(config: ExpConfig, folder: RunFolder, outcome: Outcome, started: float) -> dict[str, Any]:
    """The content of ``doctor.json``.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        outcome: how the launch ended.
        started: when it began, in seconds since the epoch.
    """
    ended = time.time()
    world_size = config.nproc * config.launcher.nnodes
    ranks = _read(folder, world_size, wait=config.launcher.nnodes > 1)
    arrived = sum(rank["host"] is not None for rank in ranks)
    for rank in ranks:
        _complete(rank, outcome, config.task.timeout_s, started, ended)
    _mark_consequences(ranks)
    _blame_missing(ranks, config.task.timeout_s)
    _compare_packages(ranks)
    _compare_rates(ranks)
    for rank in ranks:
        rank["checks"] = [{"name": name, **rank["checks"][name]} for name in CHECKS]
        worst_first = ((status, check["name"]) for status in (FAILED, WARNING, SKIPPED) for check in rank["checks"]
                       if check["status"] == status)  # fmt: skip
        rank["verdict"], rank["first"] = next(worst_first, (OK, None))
    findings = _findings(ranks)
    if outcome.unkillable:
        stuck = f"still running, stuck in the kernel: {', '.join(map(str, outcome.unkillable))}"
        findings.append(_finding([], "teardown", FAILED, stuck, "reboot the node"))
    free = shutil.disk_usage(folder.path).free
    if arrived < world_size and free < _NO_SPACE:
        full = f"no space for the records of the ranks: {size(free)} free for {folder.path}"
        findings.insert(0, _finding([], "output", FAILED, full, "make space, or set output_dir to another disk"))
    verdict = worst([OK, *(finding["status"] for finding in findings)])
    return {
        "verdict": verdict,
        "exit_code": (outcome.exit_code or EXIT_FAILED) if verdict == FAILED else EXIT_OK,
        "backend": config.backend.name,
        "simulated": config.backend.simulate,
        "world_size": world_size,
        "nodes": config.launcher.nnodes,
        "timeout_s": config.task.timeout_s,
        "wall_s": round(ended - started, 1),
        "process_group": _of_any(ranks, "group", "process_group"),
        "fallback": _of_any(ranks, "group", "fallback"),
        "findings": findings,
        "ranks": ranks,
    }


def value_of(rank: dict[str, Any], check: str, key: str) -> Any:
    """A figure of one check of one rank, or None."""
    return next((found["values"].get(key) for found in rank["checks"] if found["name"] == check), None)


def _read(folder: RunFolder, world_size: int, wait: bool) -> list[dict[str, Any]]:
    """What the journals say. Ranks of other nodes may still be writing when those of this one have ended."""
    deadline = time.monotonic() + (_OTHER_NODES_S if wait else 0)
    while True:
        ranks = [_record(folder, rank) for rank in range(world_size)]
        if all(rank["finished"] for rank in ranks) or time.monotonic() > deadline:
            return ranks
        time.sleep(0.2)


def _record(folder: RunFolder, number: int) -> dict[str, Any]:
    """One rank: ``host`` is None where it has left nothing; ``checks`` by name, as far as they were made."""
    ended, running = read_journal(journal_of(folder, number))
    checks = {line.pop("name"): line for line in ended}
    about = checks.pop(START, {})
    end = checks.pop(END, {})
    return {
        "rank": number,
        "host": None,
        **about,
        "running": running,
        "finished": bool(end),
        "absent": end.get("absent", []),
        "stayed_in": None,
        "checks": checks,
    }


def _complete(rank: dict[str, Any], outcome: Outcome, timeout_s: float, started: float, ended: float) -> None:
    """Give a rank an answer to every check, and ``stayed_in``: the check that it hung or died in."""
    left = "not reached"
    if not rank["finished"]:
        name, seconds, end = _how_it_ended(rank, outcome, timeout_s, started, ended)
        rank["checks"][name] = {**asdict(end), "seconds": seconds}
        rank["stayed_in"] = name if end.status == FAILED else None
        left = f"the rank ended before: {end.finding}"
    for name in CHECKS:
        rank["checks"].setdefault(name, {**asdict(skip(left)), "seconds": 0.0})


def _how_it_ended(
    rank: dict[str, Any], outcome: Outcome, timeout_s: float, started: float, ended: float
) -> tuple[str, float, Answer]:
    """What an unfinished rank was doing, for how long, and why it did not finish."""
    failure = next((each for each in outcome.failures if each.rank == rank["rank"]), None)
    if rank["host"] is None:
        if failure is None and outcome.failures and ended - started < timeout_s:
            # The launcher ends all as soon as one has died, also those that are still being started.
            return "ranks", 0.0, skip(f"ended with the job before its first check, because {_ANOTHER}")
        why = f"never arrived: it left no record within {timeout_s} s"
        if failure is not None:
            why = f"ended before its first check: {failure.message.splitlines()[0]}"
        elif outcome.detail is not None and not outcome.failures:
            why = f"never started: {outcome.detail.splitlines()[0]}"
        return "ranks", 0.0, fail(why, f"{_LOG}, logs/agent*.log and the node of the rank")
    running = rank["running"]
    name = running["name"] if running else next((each for each in CHECKS if each not in rank["checks"]), "limits")
    if failure is not None and failure.exit_code < 0:
        return name, 0.0, fail(f"{failure.message} in '{name}'", _LOG)
    seconds = ended - running["since"] if running else 0.0
    if seconds >= timeout_s:
        hung = f"hung in '{name}': no end within {timeout_s} s"
        advice = "the stack at that moment is in logs/rank<n>.log; where it is only slow, raise task.timeout_s"
        return name, round(seconds, 1), fail(hung, advice)
    return name, 0.0, skip(f"ended with the job, because {_ANOTHER}")


def _mark_consequences(ranks: list[dict[str, Any]]) -> None:
    """Where one rank hangs or dies in a joint check, the others time out there: that is not their failure."""
    for name in (name for name, check in CHECKS.items() if check.joint):
        culprits = [rank["rank"] for rank in ranks if rank["stayed_in"] == name]
        for rank in ranks:
            check = rank["checks"][name]
            if culprits and rank["stayed_in"] is None and check["status"] == FAILED:
                broken = f"broke off with rank {culprits[0]}: {check['finding']}"
                check.update(status=SKIPPED, finding=broken, advice="")


def _blame_missing(ranks: list[dict[str, Any]], timeout_s: float) -> None:
    """A rank that others waited for in vain has failed, even if it came in the end."""
    for number in {absent for rank in ranks for absent in rank["absent"]}:
        if all(check["status"] != FAILED for check in ranks[number]["checks"].values()):
            finding = f"came too late: others had waited {timeout_s} s for it"
            advice = f"{_LOG}, and at its node; if it is only slow, raise task.timeout_s"
            ranks[number]["checks"]["ranks"].update(status=FAILED, finding=finding, advice=advice)


def _compare_packages(ranks: list[dict[str, Any]]) -> None:
    """Ranks with other versions than rank 0: they may run, and compute something else."""
    reference = ranks[0]["checks"]["packages"]["values"]
    for rank in ranks:
        check = rank["checks"]["packages"]
        own = check["values"]
        differ = sorted(name for name in {*own, *reference} if own.get(name) != reference.get(name))
        if own and reference and differ and check["status"] == OK:
            shown = ", ".join(f"{name} {own.get(name)} (rank 0: {reference.get(name)})" for name in differ)
            check.update(status=WARNING, finding=shown, advice="install the same versions on all nodes")


def _compare_rates(ranks: list[dict[str, Any]]) -> None:
    """A card that is far slower than the others is broken, throttled, or at work for somebody else."""
    rates = [(rank["checks"]["burst"], rank["checks"]["burst"]["values"].get("flops")) for rank in ranks]
    known = [rate for _, rate in rates if rate]
    median = statistics.median(known) if len(known) > 1 else 0
    for check, rate in rates:
        if rate and rate < _SLOW * median:
            share = f"{flops(rate)}FLOP/s, {rate / median:.0%} of the median card's"
            advice = "see whether another process uses the card, or it is throttled by heat"
            check.update(status=WARNING, finding=share, advice=advice)


def _of_any(ranks: list[dict[str, Any]], check: str, key: str) -> Any:
    return next((value for value in (value_of(rank, check, key) for rank in ranks) if value is not None), None)


def _findings(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failures, then warnings, in the order of the checks; what several ranks have found in the same words is one."""
    found: dict[tuple[str, ...], list[int]] = {}
    for status in (FAILED, WARNING):
        for place in range(len(CHECKS)):
            for rank in ranks:
                check = rank["checks"][place]
                if check["status"] == status:
                    key = (check["name"], status, check["finding"], check["advice"])
                    found.setdefault(key, []).append(rank["rank"])
    return [_finding(numbers, *key) for key, numbers in found.items()]


def _finding(ranks: list[int], check: str, status: str, finding: str, advice: str) -> dict[str, Any]:
    return {"ranks": ranks, "check": check, "status": status, "finding": finding, "advice": advice}


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
