"""task=doctor in the parent: reads the journals of the ranks, says who failed and why, and writes ``doctor.json``."""

from __future__ import annotations

import itertools
import shutil
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp import console
from exp.checks.check import (
    FAILED,
    OK,
    SKIPPED,
    WARNING,
    CheckResult,
    Journal,
    crash_reason,
    fail,
    ok,
    report_result,
    skip,
)
from exp.checks.doctor import CHECKS, END, START, journal_of
from exp.console import format_flops
from exp.runs.files import write_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

_WAIT_FOR_NODES_S = 5.0
_LOG = "look at logs/rank<n>.log"


@dataclass
class _RankResults:
    """One rank, as its journal describes it.

    Attributes:
        rank: number of the rank.
        host: its host; None: it has no journal.
        checks: results by name of the check, in their order; :func:`_collect_results` adds those
            that the rank did not reach.
        running: journal line of the check that started but did not finish; None: there is none.
        missing_ranks: ranks for which it waited until the timeout; None: it did not finish its checks.
    """

    rank: int
    host: str | None = None
    checks: dict[str, CheckResult] = field(default_factory=dict)
    running: Mapping[str, Any] | None = None
    missing_ranks: list[int] | None = None

    @property
    def verdict(self) -> tuple[str, str]:
        """The worst status, and the first check with that status; ``skipped`` counts as worse than ``ok``."""
        first_of = {result.status: name for name, result in reversed(list(self.checks.items()))}
        worst = next((status for status in (FAILED, WARNING, SKIPPED) if status in first_of), None)
        return (OK, "") if worst is None else (worst, first_of[worst])


def begin(config: ExpConfig, folder: RunFolder) -> None:
    """Delete the results of an earlier doctor run in this folder, and print what will be checked."""
    shutil.rmtree(folder.path / "doctor", ignore_errors=True)
    (folder.path / "doctor.json").unlink(missing_ok=True)
    console.make_console().print(
        f"doctor: {config.nproc * config.launcher.nnodes} x {config.backend.name}, {config.precision}; up to "
        f"{config.task.timeout_s} s for each check\nrun folder: {console.display_path(folder.path)}", soft_wrap=True
    )  # fmt: skip


def end(config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int:
    """Evaluate the checks, print the result and write ``doctor.json``; returns the exit code.

    ``findings`` in ``doctor.json`` are the failures, then the warnings, each in the order of the checks. ``ranks`` of a
    finding are all that have the same text.
    """
    started = folder.config.stat().st_mtime
    ranks = _collect_results(config, folder, outcome, started)
    by_text: dict[tuple[str, ...], list[int]] = {}
    for status, name, rank in itertools.product((FAILED, WARNING), CHECKS, ranks):
        result = rank.checks[name]
        if result.status == status:
            by_text.setdefault((name, status, result.finding, result.advice), []).append(rank.rank)
    titles = ("check", "status", "finding", "advice", "ranks")
    findings = [dict(zip(titles, (*texts, numbers))) for texts, numbers in by_text.items()]
    printed = []
    for (name, status, text, advice), numbers in by_text.items():
        who = f"{name}, rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
        printed.append(CheckResult(status, f"{who}: {text}", advice))
    wall_s = round(time.time() - started, 1)
    works = f"{len(ranks)} ranks work together" if len(ranks) > 1 else "1 process works"
    first = printed[0] if printed else ok(works)
    text = "; ".join(result.finding for result in printed[:3]) or works
    overall = CheckResult(first.status, text, first.advice, {"table": list(map(_row_of, ranks))})
    if overall.status != FAILED:
        printed.append(ok(f"{works} on {config.backend.name}, {wall_s:.0f} s"))
    code = report_result(config, folder, overall, printed, wall_s=wall_s)
    as_json = [{**asdict(rank), "verdict": rank.verdict[0], "checks": [{"name": name, **asdict(rank.checks[name])}
                for name in CHECKS]} for rank in ranks]  # fmt: skip
    write_json(folder.path / "doctor.json", {"verdict": overall.status, "findings": findings, "ranks": as_json})
    return (outcome.exit_code or code) if overall.status == FAILED else code


def _collect_results(config: ExpConfig, folder: RunFolder, outcome: Outcome, started: float) -> list[_RankResults]:
    """All ranks, with a result of each check; each failure is reported for the rank that caused it.

    If a rank hangs or dies in a joint check, the failures of the other ranks in that check become skips. A rank for
    which others waited until the timeout fails, even if it arrived later.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        outcome: how the launch ended.
        started: when it began, in seconds since the epoch.
    """
    ended, limit_s = time.time(), config.task.timeout_s
    culprits: dict[str, list[int]] = {}  # ranks that hung or died, by the check in which they did
    mixed, world_size = config.launcher.mixed, config.nproc * config.launcher.nnodes
    if mixed:
        world_size = len(list(journal_of(folder, 0).parent.glob("rank*.jsonl")))
    ranks = _read_journals(folder, world_size, wait=config.launcher.nnodes > 1)
    for rank in ranks:
        if rank.missing_ranks is None:
            name, result = _unfinished_result(rank, outcome, limit_s, started, ended)
            rank.checks[name] = result
            if result.status == FAILED:
                culprits.setdefault(name, []).append(rank.rank)
        rank.checks = {name: rank.checks.get(name) or skip("the rank ended before") for name in CHECKS}
    for (name, blamed), rank in itertools.product(culprits.items(), ranks):
        if CHECKS[name].joint and rank.rank not in blamed and rank.checks[name].status == FAILED:
            rank.checks[name] = skip(f"failed because of rank {blamed[0]}: {rank.checks[name].finding}")
    for number in {absent for rank in ranks for absent in rank.missing_ranks or ()}:
        if ranks[number].verdict[0] != FAILED:
            finding = f"arrived too late: other ranks waited {limit_s} s for it"
            advice = f"{_LOG}, and at its node; if it is only slow, raise task.timeout_s"
            ranks[number].checks["ranks"] = fail(finding, advice)
    if not mixed:  # vendors have packages and speeds of their own
        _compare_ranks(ranks)
    return ranks


def _read_journals(folder: RunFolder, world_size: int, wait: bool) -> list[_RankResults]:
    """Read the journals; with ``wait``, give ranks of other nodes some seconds to finish theirs."""
    deadline = time.monotonic() + (_WAIT_FOR_NODES_S if wait else 0)
    while True:
        ranks = []
        for number in range(world_size):
            finished, running = Journal.read(journal_of(folder, number))
            lines = {line.pop("name"): line for line in finished}
            host, absent = lines.pop(START, {}).get("host"), lines.pop(END, {}).get("absent")
            checks = {name: CheckResult(**line["check"]) for name, line in lines.items()}
            ranks.append(_RankResults(number, host, checks, running, absent))
        if all(rank.missing_ranks is not None for rank in ranks) or time.monotonic() > deadline:
            return ranks
        time.sleep(0.2)


def _unfinished_result(
    rank: _RankResults, outcome: Outcome, limit_s: float, started: float, ended: float
) -> tuple[str, CheckResult]:
    """The check in which an unfinished rank ended, and a result with the reason."""
    failure = next((failure for failure in outcome.failures if failure.rank == rank.rank), None)
    reason, advice = None, f"{_LOG}, logs/agent*.log and the node of the rank"
    name = "ranks" if rank.host is None else next((check for check in CHECKS if check not in rank.checks), END)
    if rank.running is not None:
        name, advice = rank.running["name"], f"{_LOG} for the stack; if it is only slow, raise task.timeout_s"
        killed = failure.headline if failure is not None and failure.exit_code < 0 else None
        reason = crash_reason(rank.running, killed, ended, limit_s)
    elif rank.host is None and failure is not None:
        reason = f"ended before its first check: {failure.headline}"
    elif rank.host is None and (not outcome.failures or ended - started >= limit_s):  # else it was ended at its start
        reason = f"never arrived: {(outcome.detail or f'it left no record within {limit_s} s').splitlines()[0]}"
    return name, fail(reason, advice) if reason else skip("ended with the job, because another rank stopped")


def _compare_ranks(ranks: Sequence[_RankResults]) -> None:
    """Warn of ranks whose package versions differ from rank 0's, and of cards far slower than the median."""
    reference = ranks[0].checks["packages"].values
    rates = [rank.checks["burst"].values.get("flops") for rank in ranks]
    median = statistics.median(list(filter(None, rates)) or [0])
    for rank, rate in zip(ranks, rates):
        versions, burst = rank.checks["packages"], rank.checks["burst"]
        names = sorted({*versions.values, *reference}) if versions.values and reference else ()
        texts = [f"{name} {versions.values.get(name)} (rank 0: {reference.get(name)})" for name in names
                 if versions.values.get(name) != reference.get(name)]  # fmt: skip
        if texts and versions.status == OK:
            versions.status, versions.finding = WARNING, ", ".join(texts)
            versions.advice = "install the same versions on all nodes"
        if rate and rate < burst.values["least"] * median:
            burst.status, burst.advice = WARNING, "check whether another process uses the card, or heat throttles it"
            burst.finding = f"{format_flops(rate)}FLOP/s, {rate / median:.0%} of the median card's"


def _row_of(rank: _RankResults) -> dict[str, Any]:
    """A row of the doctor's table."""
    columns = {check.column: name for name, check in CHECKS.items() if check.column}
    cells = {column: rank.checks[name].values.get("shown", "") for column, name in columns.items()}
    status, name = rank.verdict
    verdict = f"{status}: {name}" if status in (FAILED, WARNING) else "not all checked" if name else OK
    return {"rank": rank.rank, "host": (rank.host or "-").split(".")[0], **cells, "verdict": verdict}
