"""task=doctor in the parent: the judgement over all ranks from their journals, and how it is shown; no torch."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from exp import console
from exp.checks.check import FAILED, OK, SKIPPED, STYLES, WARNING, Answer, fail, read_journal, skip, worst
from exp.checks.doctor import CHECKS, END, START, journal_of
from exp.console import flops, size
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.runs.files import write_json
from exp.runs.record import blank_result

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

__all__ = ["begin", "end", "judge", "value_of"]

_OTHER_NODES_S = 5.0
_ANOTHER = "another rank did not go on"
_LOG = "look at logs/rank<n>.log"


def begin(config: ExpConfig, folder: RunFolder) -> None:
    """Say what is examined; nothing of an earlier examination may be taken for this one's."""
    shutil.rmtree(folder.path / "doctor", ignore_errors=True)
    (folder.path / "doctor.json").unlink() if (folder.path / "doctor.json").exists() else None
    processes = config.nproc * config.launcher.nnodes
    console.make_console().print(
        f"doctor: {processes} process{'es' if processes > 1 else ''} on {config.backend.name}, {config.precision}; "
        f"up to {config.task.timeout_s} s for each check\nrun folder: {console.shown(folder.path)}",
        soft_wrap=True,
    )


def end(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int:
    """Judge, print and write; returns the exit code."""
    report = judge(config, folder, outcome, started=folder.config.stat().st_mtime)
    file = folder.path / "doctor.json"
    _print(report, console.shown(file))  # first: the disk may be what the doctor complains of
    result = blank_result(config)
    result.update({key: report[key] for key in ("process_group", "fallback", "wall_s")})
    result["status"] = "failed" if report["verdict"] == FAILED else "completed"
    for first in (each for each in reversed(report["findings"]) if each["status"] == FAILED):
        message = f"{first['check']}: {first['finding']}; {first['advice']}"
        result["error"] = {"rank": next(iter(first["ranks"]), None), "type": RunError.__name__, "message": message}
    write_json(file, report)
    folder.write_result(result)
    return int(report["exit_code"])


def judge(config: ExpConfig, folder: RunFolder, outcome: Outcome, started: float) -> dict[str, Any]:
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
    for rank in ranks:
        if not rank["finished"]:
            name, answer = _how_it_ended(rank, outcome, config.task.timeout_s, started, ended)
            rank["checks"][name] = {**asdict(answer), "seconds": None}
            rank["stayed_in"] = name if answer.status == FAILED else None
        for name in CHECKS:
            rank["checks"].setdefault(name, {**asdict(skip("the rank ended before")), "seconds": None})
    _lay_blame(ranks, config.task.timeout_s)
    _compare(ranks)
    for rank in ranks:
        rank["checks"] = [{"name": name, **rank["checks"][name]} for name in CHECKS]
        worst_first = ((status, check["name"]) for status in (FAILED, WARNING, SKIPPED) for check in rank["checks"]
                       if check["status"] == status)  # fmt: skip
        rank["verdict"], rank["first"] = next(worst_first, (OK, None))
    findings = _findings(ranks)
    if outcome.unkillable:
        stuck = f"still running, stuck in the kernel: {', '.join(map(str, outcome.unkillable))}"
        findings.append({"ranks": [], "check": "teardown", "status": FAILED, "finding": stuck,
                         "advice": "reboot the node"})  # fmt: skip
    verdict = worst([OK, *(finding["status"] for finding in findings)])
    groups = [(value_of(rank, "group", "process_group"), value_of(rank, "group", "fallback")) for rank in ranks]
    group, fallback = next((each for each in groups if each[0] is not None), (None, None))
    return {
        "verdict": verdict,
        "exit_code": (outcome.exit_code or EXIT_FAILED) if verdict == FAILED else EXIT_OK,
        "backend": config.backend.name,
        "simulated": config.backend.simulate,
        "world_size": world_size,
        "wall_s": round(ended - started, 1),
        "process_group": group,
        "fallback": fallback,
        "findings": findings,
        "ranks": ranks,
    }


def value_of(rank: dict[str, Any], check: str, key: str) -> Any:
    """A figure of one check of one rank, or None."""
    return next((found["values"].get(key) for found in rank["checks"] if found["name"] == check), None)


def _read(folder: RunFolder, world_size: int, wait: bool) -> list[dict[str, Any]]:
    """What the journals say: ``host`` is None where a rank has left nothing; ``checks`` by name, as far as they were
    made. Ranks of other nodes may still be writing when those of this one have ended.
    """
    deadline = time.monotonic() + (_OTHER_NODES_S if wait else 0)
    while True:
        ranks: list[dict[str, Any]] = []
        for number in range(world_size):
            ended, running = read_journal(journal_of(folder, number))
            checks = {line.pop("name"): line for line in ended}
            start, last = checks.pop(START, {}), checks.pop(END, None)
            ranks.append({"rank": number, "host": start.get("host"), "running": running, "finished": last is not None,
                          "absent": (last or {}).get("absent", []), "stayed_in": None, "checks": checks})  # fmt: skip
        if all(rank["finished"] for rank in ranks) or time.monotonic() > deadline:
            return ranks
        time.sleep(0.2)


def _how_it_ended(
    rank: dict[str, Any], outcome: Outcome, timeout_s: float, started: float, ended: float
) -> tuple[str, Answer]:
    """What an unfinished rank was doing, and why it did not finish."""
    failure = next((each for each in outcome.failures if each.rank == rank["rank"]), None)
    running = rank["running"]
    if rank["host"] is None:
        if failure is None and outcome.failures and ended - started < timeout_s:
            # The launcher ends all as soon as one has died, also those that are still being started.
            return "ranks", skip(f"ended with the job before its first check, because {_ANOTHER}")
        why = f"never arrived: it left no record within {timeout_s} s"
        if failure is not None:
            why = f"ended before its first check: {failure.message.splitlines()[0]}"
        elif outcome.detail is not None and not outcome.failures:
            why = f"never started: {outcome.detail.splitlines()[0]}"
        return "ranks", fail(why, f"{_LOG}, logs/agent*.log and the node of the rank")
    name = running["name"] if running else next((each for each in CHECKS if each not in rank["checks"]), "limits")
    if failure is not None and failure.exit_code < 0:
        return name, fail(f"{failure.message} in '{name}'", _LOG)
    if running and ended - running["since"] >= timeout_s:
        advice = "the stack at that moment is in logs/rank<n>.log; where it is only slow, raise task.timeout_s"
        return name, fail(f"hung in '{name}': no end within {timeout_s} s", advice)
    return name, skip(f"ended with the job, because {_ANOTHER}")


def _lay_blame(ranks: list[dict[str, Any]], timeout_s: float) -> None:
    """On the rank that hangs or dies in a joint check, not on those that time out there with it; and on a rank that
    others waited for in vain, even if it came in the end.
    """
    for name in (name for name, check in CHECKS.items() if check.joint):
        culprits = [rank["rank"] for rank in ranks if rank["stayed_in"] == name]
        for rank in ranks:
            check = rank["checks"][name]
            if culprits and rank["stayed_in"] is None and check["status"] == FAILED:
                broken = f"broke off with rank {culprits[0]}: {check['finding']}"
                check.update(status=SKIPPED, finding=broken, advice="")
    for number in {absent for rank in ranks for absent in rank["absent"]}:
        if all(check["status"] != FAILED for check in ranks[number]["checks"].values()):
            finding = f"came too late: others had waited {timeout_s} s for it"
            advice = f"{_LOG}, and at its node; if it is only slow, raise task.timeout_s"
            ranks[number]["checks"]["ranks"].update(status=FAILED, finding=finding, advice=advice)


def _compare(ranks: list[dict[str, Any]]) -> None:
    """Warn of ranks with other versions than rank 0, and of a card that is far slower than the others."""
    reference = ranks[0]["checks"]["packages"]["values"]
    rates = [rank["checks"]["burst"]["values"].get("flops") for rank in ranks]
    known = [rate for rate in rates if rate]
    median = statistics.median(known) if len(known) > 1 else 0
    for rank, rate in zip(ranks, rates):
        check, burst = rank["checks"]["packages"], rank["checks"]["burst"]
        own = check["values"]
        differ = sorted(name for name in {*own, *reference} if own.get(name) != reference.get(name))
        if own and reference and differ and check["status"] == OK:
            shown = ", ".join(f"{name} {own.get(name)} (rank 0: {reference.get(name)})" for name in differ)
            check.update(status=WARNING, finding=shown, advice="install the same versions on all nodes")
        if rate and rate < burst["values"]["least"] * median:
            share = f"{flops(rate)}FLOP/s, {rate / median:.0%} of the median card's"
            advice = "see whether another process uses the card, or it is throttled by heat"
            burst.update(status=WARNING, finding=share, advice=advice)


def _findings(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failures, then warnings, in the order of the checks; what several ranks have found in the same words is one."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for status in (FAILED, WARNING):
        for place, name in enumerate(CHECKS):
            for rank in ranks:
                check = rank["checks"][place]
                if check["status"] == status:
                    about = {key: check[key] for key in ("status", "finding", "advice")}
                    first = found.setdefault((name, *about.values()), {"ranks": [], "check": name, **about})
                    first["ranks"].append(rank["rank"])
    return list(found.values())


def _print(report: dict[str, Any], where: str) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    terminal, world_size, verdict = console.make_console(), report["world_size"], report["verdict"]
    rows = [_cells(rank) for rank in report["ranks"]]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    titles = [title for title in rows[0] if any(row[title] for row in rows)]
    for title in titles:
        left = title in ("host", "card", "ddp", "verdict")
        table.add_column(title, justify="left" if left else "right", no_wrap=title != "card")
    for rank, cells in zip(report["ranks"], rows):
        texts = [Text(cell or "", no_wrap=True, overflow="ellipsis") for cell in map(cells.get, titles)]
        texts[-1].stylize(STYLES[rank["verdict"]])
        table.add_row(*texts)
    terminal.print()
    terminal.print(table)
    for finding in report["findings"]:
        numbers = finding["ranks"]
        who = f", rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""
        who = ", all ranks" if len(numbers) == world_size > 1 else who
        head = f"[{STYLES[finding['status']]}]{finding['status']}: {finding['check']}[/]{who}: "
        terminal.print(f"\n{head}{escape(finding['finding'])}", soft_wrap=True)
        if finding["advice"]:
            terminal.print(f"  do: {escape(finding['advice'])}", soft_wrap=True)
    failed = sum(rank["verdict"] == FAILED for rank in report["ranks"])
    work = f"OK: {world_size} processes work together" if world_size > 1 else "OK: 1 process works"
    work = f"FAILED: {failed} of {world_size} rank{'s' * (world_size > 1)}" if verdict == FAILED else work
    summary = f"{work} on {report['backend']}{', with warnings' * (verdict == WARNING)}, {report['wall_s']:.0f} s"
    terminal.print(f"\n[{STYLES[verdict]}]{summary}[/]; all figures in {escape(where)}", soft_wrap=True)


def _cells(rank: dict[str, Any]) -> dict[str, str]:
    def figure(check: str, key: str, form: Any) -> str:
        value = value_of(rank, check, key)
        return "" if value is None else str(form(value))

    name, identity, number = (value_of(rank, "device", key) for key in ("name", "identity", "card"))
    short = f"#{number}" if number is not None else identity
    ddp = next(found["status"] for found in rank["checks"] if found["name"] == "ddp")
    verdict = rank["verdict"] if rank["first"] is None else f"{rank['verdict']}: {rank['first']}"
    return {
        "rank": str(rank["rank"]),
        "host": (rank["host"] or "-").split(".")[0],
        "card": "-" if name is None else f"{short} {name}" if short else str(name),
        "free": figure("memory", "free", size),
        "group": figure("group", "seconds", "{:.1f} s".format),
        "reduce": figure("all_reduce", "seconds", lambda value: f"{value * 1e3:.3g} ms"),
        "ddp": "-" if ddp == SKIPPED else ddp,
        "FLOP/s": figure("burst", "flops", flops),
        "util": figure("utilisation", "utilisation_percent", "{:.0f} %".format),
        "verdict": "not all checked" if rank["verdict"] == SKIPPED else verdict,
    }
