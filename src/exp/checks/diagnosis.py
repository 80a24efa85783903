"""task=doctor in the parent: the judgment over all ranks from their journals, and how it is shown. No torch."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp import console
from exp.checks.check import FAILED, OK, SKIPPED, WARNING, Answer, fail, finish, read_journal, skip, why_ended, worst
from exp.checks.doctor import CHECKS, END, START, journal_of
from exp.console import flops
from exp.runs.files import write_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

__all__ = ["begin", "end", "judge"]

_OTHER_NODES_S = 5.0
_KEYS = [each.name for each in fields(Answer)]
_LOG = "look at logs/rank<n>.log"


@dataclass
class _Rank:
    """What is known of a rank from its journal.

    Attributes:
        host: None where it has left nothing.
        checks: by name, in their order; those that it did not come to are added.
        running: what had only begun.
        absent: ranks that it waited for in vain; None: it did not come to its end.
        stayed_in: the check in which it hung or died.
    """

    rank: int
    host: str | None = None
    checks: dict[str, Answer] = field(default_factory=dict)
    running: Mapping[str, Any] | None = None
    absent: list[int] | None = None
    stayed_in: str | None = None

    @property
    def verdict(self) -> tuple[str, str]:
        """The worst status, and the first check that has it; what was not checked is worse than what is well."""
        found = {answer.status: name for name, answer in reversed(list(self.checks.items()))}
        return next(((status, found[status]) for status in (FAILED, WARNING, SKIPPED) if status in found), (OK, ""))


def begin(config: ExpConfig, folder: RunFolder) -> None:
    """Say what is examined; nothing of an earlier examination may be taken for this one's."""
    shutil.rmtree(folder.path / "doctor", ignore_errors=True)
    (folder.path / "doctor.json").unlink(missing_ok=True)
    processes = config.nproc * config.launcher.nnodes
    console.make_console().print(
        f"doctor: {processes} process{'es' if processes > 1 else ''} on {config.backend.name}, {config.precision}; "
        f"up to {config.task.timeout_s} s for each check\nrun folder: {console.shown(folder.path)}",
        soft_wrap=True,
    )


def end(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int:
    """Judge, print and write ``doctor.json``; returns the exit code."""
    started = folder.config.stat().st_mtime
    ranks, findings = judge(config, folder, outcome, started)
    verdicts = [rank.verdict[0] for rank in ranks]
    work = f"{len(ranks)} ranks work together" if len(ranks) > 1 else "1 process works"
    text = "; ".join(each["finding"] for each in map(_told, findings[:3])) or work
    verdict = worst([OK, *(finding["status"] for finding in findings)])
    group: Mapping[str, Any] = next((each for each in (rank.checks["group"].values for rank in ranks) if each), {})
    known = {"process_group": group.get("process_group"), "fallback": group.get("fallback"),
             "wall_s": round(time.time() - started, 1)}  # fmt: skip
    answer = Answer(verdict, text, findings[0]["advice"] if findings else "", {"table": list(map(_line_of, ranks))})
    said = [Answer(**_told(finding)) for finding in findings]
    if verdict != FAILED:
        said.append(Answer(OK, f"{work} on {config.backend.name}, {known['wall_s']:.0f} s"))
    code = finish(config, folder, answer, verdicts, said, **known)
    as_json = [{**asdict(rank), "verdict": rank.verdict[0], "checks": [{"name": name, **asdict(rank.checks[name])}
                for name in CHECKS]} for rank in ranks]  # fmt: skip
    write_json(folder.path / "doctor.json", {"verdict": verdict, "findings": findings, "ranks": as_json})
    return (outcome.exit_code or code) if verdict == FAILED else code


def judge(
    config: ExpConfig, folder: RunFolder, outcome: Outcome, started: float
) -> tuple[list[_Rank], list[dict[str, Any]]]:
    """What is known of each rank, and the findings over all.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        outcome: how the launch ended.
        started: when it began, in seconds since the epoch.

    Returns:
        The ranks; and failures, then warnings, each in the order of the checks: ``check``, ``status``, ``finding``,
        ``advice`` and the ``ranks`` that have found it in the same words.
    """
    ended, limit_s = time.time(), config.task.timeout_s
    ranks = _read(folder, config.nproc * config.launcher.nnodes, wait=config.launcher.nnodes > 1)
    for rank in ranks:
        if rank.absent is None:
            name, answer = _how_it_ended(rank, outcome, limit_s, started, ended)
            rank.checks[name] = answer
            rank.stayed_in = name if answer.status == FAILED else None
        rank.checks = {name: rank.checks.get(name) or skip("the rank ended before") for name in CHECKS}
    _lay_blame(ranks, limit_s)
    _compare(ranks)
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for status in (FAILED, WARNING):
        for name in CHECKS:
            for rank in ranks:
                each = rank.checks[name]
                if each.status == status:
                    about = {"check": name, "status": status, "finding": each.finding, "advice": each.advice}
                    found.setdefault(tuple(about.values()), {**about, "ranks": []})["ranks"].append(rank.rank)
    findings = list(found.values())
    if outcome.unkillable:
        stuck = f"still running, stuck in the kernel: {', '.join(map(str, outcome.unkillable))}"
        findings.append(
            {"check": "teardown", "status": FAILED, "finding": stuck, "advice": "reboot the node", "ranks": []}
        )
    return ranks, findings


def _read(folder: RunFolder, world_size: int, wait: bool) -> list[_Rank]:
    """Ranks of other nodes may still be writing when those of this one have ended."""
    deadline = time.monotonic() + (_OTHER_NODES_S if wait else 0)
    while True:
        ranks = []
        for number in range(world_size):
            ended, running = read_journal(journal_of(folder, number))
            found = {line.pop("name"): line for line in ended}
            host, absent = found.pop(START, {}).get("host"), found.pop(END, {}).get("absent")
            checks = {name: Answer(*(line[key] for key in _KEYS)) for name, line in found.items()}
            ranks.append(_Rank(number, host, checks, running, absent))
        if all(rank.absent is not None for rank in ranks) or time.monotonic() > deadline:
            return ranks
        time.sleep(0.2)


def _how_it_ended(rank: _Rank, outcome: Outcome, limit_s: float, started: float, ended: float) -> tuple[str, Answer]:
    """What an unfinished rank was doing, and why it did not finish."""
    failure = next((each for each in outcome.failures if each.rank == rank.rank), None)
    why, advice = None, f"{_LOG}, logs/agent*.log and the node of the rank"
    name = next((each for each in CHECKS if each not in rank.checks), END) if rank.host is not None else "ranks"
    if rank.running is not None:
        name, advice = rank.running["name"], f"{_LOG} for the stack; where it is only slow, raise task.timeout_s"
        killed = failure.message if failure is not None and failure.exit_code < 0 else None
        why = why_ended(rank.running, killed, limit_s, ended)
    elif rank.host is not None:
        pass
    elif failure is not None:
        why = f"ended before its first check: {failure.message.splitlines()[0]}"
    elif not outcome.failures and outcome.detail is not None:
        why = f"never started: {outcome.detail.splitlines()[0]}"
    elif not outcome.failures or ended - started >= limit_s:  # else the launcher has ended those that still started
        why = f"never arrived: it left no record within {limit_s} s"
    return name, fail(why, advice) if why else skip("ended with the job, because another rank did not go on")


def _lay_blame(ranks: Sequence[_Rank], timeout_s: float) -> None:
    """On the rank that hangs or dies in a joint check, not on those that time out there with it; and on a rank that
    others waited for in vain, even if it came in the end.
    """
    for name in (name for name, check in CHECKS.items() if check.joint):
        culprits = [rank.rank for rank in ranks if rank.stayed_in == name]
        for rank in ranks:
            if culprits and rank.stayed_in is None and rank.checks[name].status == FAILED:
                rank.checks[name] = skip(f"broke off with rank {culprits[0]}: {rank.checks[name].finding}")
    for number in {absent for rank in ranks for absent in rank.absent or ()}:
        if ranks[number].verdict[0] != FAILED:
            finding = f"came too late: others had waited {timeout_s} s for it"
            advice = f"{_LOG}, and at its node; if it is only slow, raise task.timeout_s"
            ranks[number].checks["ranks"] = fail(finding, advice)


def _compare(ranks: Sequence[_Rank]) -> None:
    """Warn of ranks with other versions than rank 0, and of a card that is far slower than the others."""
    reference = ranks[0].checks["packages"].values
    rates = [rank.checks["burst"].values.get("flops") for rank in ranks]
    median = statistics.median([rate for rate in rates if rate] or [0])
    for rank, rate in zip(ranks, rates):
        versions, burst = rank.checks["packages"], rank.checks["burst"]
        own = versions.values
        differ = sorted(name for name in {*own, *reference} if own.get(name) != reference.get(name))
        if own and reference and differ and versions.status == OK:
            versions.status, versions.advice = WARNING, "install the same versions on all nodes"
            versions.finding = ", ".join(f"{each} {own.get(each)} (rank 0: {reference.get(each)})" for each in differ)
        if rate and rate < burst.values["least"] * median:
            burst.status = WARNING
            burst.finding = f"{flops(rate)}FLOP/s, {rate / median:.0%} of the median card's"
            burst.advice = "see whether another process uses the card, or it is throttled by heat"


def _told(finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding as it is printed: with its check, and the ranks that have it."""
    numbers = finding["ranks"]
    who = f", rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""
    text = f"{finding['check']}{who}: {finding['finding']}"
    return {"status": finding["status"], "finding": text, "advice": finding["advice"]}


def _line_of(rank: _Rank) -> dict[str, Any]:
    """A line of the doctor's table."""
    shown = {check.column: rank.checks[name].values.get("shown", "") for name, check in CHECKS.items() if check.column}
    status, name = rank.verdict
    verdict = f"{status}: {name}" if status in (FAILED, WARNING) else "not all checked" if name else OK
    return {"rank": rank.rank, "host": (rank.host or "-").split(".")[0], **shown, "verdict": verdict}
