"""task=doctor in the parent: the judgement over all ranks from their journals, and how it is shown. No torch."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from typing import TYPE_CHECKING, Any, Mapping

from exp import console
from exp.checks import check as checks
from exp.checks.check import FAILED, OK, SKIPPED, STYLES, WARNING, Answer, fail, read_journal, skip
from exp.checks.doctor import CHECKS, END, START, journal_of
from exp.console import flops
from exp.errors import EXIT_FAILED, EXIT_OK
from exp.runs.files import write_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

__all__ = ["begin", "end", "judge"]

_OTHER_NODES_S = 5.0
_LOG = "look at logs/rank<n>.log"


def begin(config: ExpConfig, folder: RunFolder) -> None:
    """Say what is examined; nothing of an earlier examination may be taken for this one's."""
    shutil.rmtree(folder.path / "doctor", ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        (folder.path / "doctor.json").unlink()
    processes = config.nproc * config.launcher.nnodes
    console.make_console().print(
        f"doctor: {processes} process{'es' if processes > 1 else ''} on {config.backend.name}, {config.precision}; "
        f"up to {config.task.timeout_s} s for each check\nrun folder: {console.shown(folder.path)}",
        soft_wrap=True,
    )


def end(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int:
    """Judge, print and write; returns the exit code."""
    report = judge(config, folder, outcome, started=folder.config.stat().st_mtime)
    file, findings, ranks = folder.path / "doctor.json", report["findings"], report["ranks"]
    table = [_line_of(rank) for rank in ranks]
    # First: the disk may be what is complained of.
    checks.show_table(table, [STYLES[rank["verdict"]] for rank in ranks])
    terminal = console.make_console()
    for finding in findings:
        terminal.print(f"\n{finding['status']}: {finding['check']}", style=STYLES[finding["status"]], end="")
        terminal.print(f"{_who(finding, len(ranks))}: {finding['finding']}", soft_wrap=True, markup=False)
        if finding["advice"]:
            terminal.print(f"  do: {finding['advice']}", soft_wrap=True, markup=False)
    verdict, failed = report["verdict"], sum(rank["verdict"] == FAILED for rank in ranks)
    work = f"{len(ranks)} ranks work together" if len(ranks) > 1 else "1 process works"
    summary = f"FAILED: {failed} of {len(ranks)} ranks" if verdict == FAILED else f"OK: {work}"
    summary += f" on {report['backend']}{', with warnings' * (verdict == WARNING)}, {report['wall_s']:.0f} s"
    terminal.print(
        f"\n{summary}; all figures in {console.shown(file)}", style=STYLES[verdict], soft_wrap=True, markup=False
    )
    write_json(file, report)
    shown = [f"{each['check']}{_who(each, len(ranks))}: {each['finding']}" for each in findings[:3]]
    answer = Answer(verdict, "; ".join(shown) or work, findings[0]["advice"] if findings else "", {"table": table})
    checks.finish(config, folder, answer, **{key: report[key] for key in ("process_group", "fallback", "wall_s")})
    return int(report["exit_code"])


def _who(finding: Mapping[str, Any], world_size: int) -> str:
    numbers = finding["ranks"]
    if len(numbers) == world_size > 1:
        return ", all ranks"
    return f", rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""


def judge(config: ExpConfig, folder: RunFolder, outcome: Outcome, started: float) -> dict[str, Any]:
    """The content of ``doctor.json``.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        outcome: how the launch ended.
        started: when it began, in seconds since the epoch.
    """
    ended, limit_s = time.time(), config.task.timeout_s
    ranks = _read(folder, config.nproc * config.launcher.nnodes, wait=config.launcher.nnodes > 1)
    for rank in ranks:
        if not rank["finished"]:
            name, answer = _how_it_ended(rank, outcome, limit_s, started, ended)
            rank["checks"][name] = {**answer.__dict__, "seconds": None}
            rank["stayed_in"] = name if answer.status == FAILED else None
        for name in CHECKS:
            rank["checks"].setdefault(name, {**skip("the rank ended before").__dict__, "seconds": None})
    _lay_blame(ranks, limit_s)
    _compare(ranks)
    findings = _findings(ranks)
    group: dict[str, Any] = next(
        (rank["checks"]["group"]["values"] for rank in ranks if rank["checks"]["group"]["values"]), {}
    )
    if outcome.unkillable:
        stuck = f"still running, stuck in the kernel: {', '.join(map(str, outcome.unkillable))}"
        findings.append({"ranks": [], "check": "teardown", "status": FAILED, "finding": stuck,
                         "advice": "reboot the node"})  # fmt: skip
    for rank in ranks:
        by_status = {check["status"]: name for name, check in reversed(rank["checks"].items())}
        rank["verdict"] = next((each for each in (FAILED, WARNING, SKIPPED) if each in by_status), OK)
        rank["first"] = by_status.get(rank["verdict"]) if rank["verdict"] != OK else None
        rank["checks"] = [{"name": name, **rank["checks"][name]} for name in CHECKS]
    verdict = checks.worst([OK, *(finding["status"] for finding in findings)])
    return {
        "verdict": verdict,
        "exit_code": (outcome.exit_code or EXIT_FAILED) if verdict == FAILED else EXIT_OK,
        "backend": config.backend.name,
        "simulated": config.backend.simulate,
        "world_size": len(ranks),
        "wall_s": round(ended - started, 1),
        "process_group": group.get("process_group"),
        "fallback": group.get("fallback"),
        "findings": findings,
        "ranks": ranks,
    }


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
    rank: dict[str, Any], outcome: Outcome, limit_s: float, started: float, ended: float
) -> tuple[str, Answer]:
    """What an unfinished rank was doing, and why it did not finish."""
    failure = next((each for each in outcome.failures if each.rank == rank["rank"]), None)
    running, why = rank["running"], None
    name, advice = "ranks", f"{_LOG}, logs/agent*.log and the node of the rank"
    if running is not None:
        name, advice = running["name"], f"{_LOG} for the stack; where it is only slow, raise task.timeout_s"
        killed = failure.message if failure is not None and failure.exit_code < 0 else None
        why = checks.why_ended(running, killed, limit_s, ended)
    elif rank["host"] is not None:
        name = next((each for each in CHECKS if each not in rank["checks"]), "limits")
    elif failure is not None:
        why = f"ended before its first check: {failure.message.splitlines()[0]}"
    elif not outcome.failures and outcome.detail is not None:
        why = f"never started: {outcome.detail.splitlines()[0]}"
    elif not outcome.failures or ended - started >= limit_s:  # else the launcher has ended those that still started
        why = f"never arrived: it left no record within {limit_s} s"
    return name, fail(why, advice) if why else skip("ended with the job, because another rank did not go on")


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
    known = [rate for rate in (rank["checks"]["burst"]["values"].get("flops") for rank in ranks) if rate]
    median = statistics.median(known) if len(known) > 1 else 0
    for rank in ranks:
        check, burst = rank["checks"]["packages"], rank["checks"]["burst"]
        own, rate = check["values"], burst["values"].get("flops")
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
        for name in CHECKS:
            for rank in ranks:
                check = rank["checks"][name]
                if check["status"] == status:
                    about = {key: check[key] for key in ("status", "finding", "advice")}
                    first = found.setdefault((name, *about.values()), {"ranks": [], "check": name, **about})
                    first["ranks"].append(rank["rank"])
    return list(found.values())


def _line_of(rank: dict[str, Any]) -> dict[str, Any]:
    """A line of the doctor's table."""
    shown = {CHECKS[check["name"]].column: check["values"].get("shown", "") for check in rank["checks"]}
    del shown[""]
    verdict = "not all checked" if rank["verdict"] == SKIPPED else rank["verdict"]
    verdict = f"{verdict}: {rank['first']}" if rank["verdict"] in (FAILED, WARNING) else verdict
    return {"rank": rank["rank"], "host": (rank["host"] or "-").split(".")[0], **shown, "verdict": verdict}
