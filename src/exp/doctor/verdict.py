"""The judgement over all ranks, made by the parent from their records. Imports no torch."""

from __future__ import annotations

import shutil
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from exp.doctor.facts import flops, size
from exp.doctor.record import CHECKS, FAILED, OK, SKIPPED, WARNING, Check, record_file
from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.runfolder import read_json

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runfolder import RunFolder

__all__ = ["assemble", "clear", "finding_of", "value_of"]

_SLOW = 0.25
_OTHER_NODES_S = 5.0
_NO_SPACE = 2**16
_ANOTHER = "another rank did not go on"


def clear(folder: RunFolder) -> None:
    """Remove what an earlier examination has left in the folder; no rank of this one can have started yet."""
    shutil.rmtree(folder.path / "doctor", ignore_errors=True)
    if (folder.path / "doctor.json").exists():
        (folder.path / "doctor.json").unlink()


def assemble(config: ExpConfig, folder: RunFolder, outcome: Outcome, started: float) -> dict[str, Any]:
    """The content of ``doctor.json``.

    Args:
        config: the frozen configuration.
        folder: the run folder.
        outcome: how the launch ended.
        started: when it began, in seconds since the epoch.
    """
    ended = time.time()
    world_size = config.nproc * config.launcher.nnodes
    records = _read(folder, world_size, wait=config.launcher.nnodes > 1)
    ranks = [_Rank(rank, records.get(rank), config, outcome, (started, ended)).judged() for rank in range(world_size)]
    _mark_consequences(ranks)
    _blame_missing(ranks, config.task.timeout_s)
    _compare_packages(ranks)
    _compare_rates(ranks)
    findings = _grouped(ranks)
    if outcome.unkillable:
        pids = ", ".join(map(str, outcome.unkillable))
        stuck = f"still running, stuck in the kernel: {pids}"
        findings.append(finding_of([], "teardown", FAILED, stuck, "reboot the node"))
    free = shutil.disk_usage(folder.path).free
    if len(records) < world_size and free < _NO_SPACE:
        finding = f"no space for the records of the ranks: {size(free)} free for {folder.path}"
        findings.insert(0, finding_of([], "output", FAILED, finding, "make space, or set output_dir to another disk"))
    statuses = {finding["status"] for finding in findings}
    verdict = FAILED if FAILED in statuses else WARNING if WARNING in statuses else OK
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


def _read(folder: RunFolder, world_size: int, wait: bool) -> dict[int, dict[str, Any]]:
    """The records by rank. Ranks of other nodes may still be writing when those of this one have ended."""
    deadline = time.monotonic() + (_OTHER_NODES_S if wait else 0)
    while True:
        records = {}
        for rank in range(world_size):
            try:
                record = read_json(record_file(folder, rank))
            except RunError:
                record = None  # not one that we wrote
            if record is not None:
                records[rank] = record
        if len(records) == world_size and all(record["finished"] for record in records.values()):
            return records
        if time.monotonic() > deadline:
            return records
        time.sleep(0.2)


class _Rank:
    """One rank's record, completed by what is known of its end."""

    def __init__(
        self,
        rank: int,
        record: dict[str, Any] | None,
        config: ExpConfig,
        outcome: Outcome,
        launch: tuple[float, float],
    ) -> None:
        self.rank = rank
        self.record = record or {
            "rank": rank,
            "host": None,
            "running": None,
            "finished": False,
            "absent": [],
            "checks": [],
        }
        self.timeout_s = config.task.timeout_s
        self.left_record = record is not None
        self.failure = next((failure for failure in outcome.failures if failure.rank == rank), None)
        self.detail = None if outcome.failures else outcome.detail
        self.others_failed = bool(outcome.failures)
        self.started, self.ended = launch

    def judged(self) -> dict[str, Any]:
        """The record, with every check there, the verdict, and the check that the rank hung or died in, or None."""
        checks = {check["name"]: check for check in self.record["checks"]}
        stayed_in = None
        if not self.record["finished"]:
            end = self._how_it_ended()
            checks[end.name] = asdict(end)
            stayed_in = end.name if end.status == FAILED else None
            for name in CHECKS:
                checks.setdefault(name, asdict(Check(name, SKIPPED, f"the rank ended before: {end.finding}")))
        for name in CHECKS:
            checks.setdefault(name, asdict(Check(name, SKIPPED, "not reached")))
        ordered = [checks[name] for name in CHECKS]
        return {**self.record, **_verdict(ordered), "stayed_in": stayed_in, "checks": ordered}

    def _how_it_ended(self) -> Check:
        """What an unfinished rank was doing, and why it did not finish."""
        log = "look at logs/rank<n>.log"
        if not self.left_record:
            if self.failure is None and self.others_failed and self.ended - self.started < self.timeout_s:
                # The launcher ends all as soon as one has died, also those that are still being started.
                return Check("ranks", SKIPPED, f"ended with the job before its first check, because {_ANOTHER}")
            why = f"never arrived: it left no record within {self.timeout_s} s"
            if self.failure is not None:
                why = f"ended before its first check: {self.failure.message.splitlines()[0]}"
            elif self.detail is not None:
                why = f"never started: {self.detail.splitlines()[0]}"
            return Check("ranks", FAILED, why, f"{log}, logs/agent*.log and the node of the rank")
        running = self.record["running"]
        name = running["name"] if running else self._next_check()
        if self.failure is not None and self.failure.exit_code < 0:
            return Check(name, FAILED, f"{self.failure.message} in '{name}'", log)
        seconds = self.ended - running["since"] if running else 0.0
        if seconds >= self.timeout_s:
            return Check(
                name,
                FAILED,
                f"hung in '{name}': no end within {self.timeout_s} s",
                "the stack at that moment is in logs/rank<n>.log; where it is only slow, raise task.timeout_s",
                seconds=round(seconds, 1),
            )
        return Check(name, SKIPPED, f"ended with the job, because {_ANOTHER}")

    def _next_check(self) -> str:
        done = {check["name"] for check in self.record["checks"]}
        return next((name for name in CHECKS if name not in done), CHECKS[-1])


def _mark_consequences(ranks: list[dict[str, Any]]) -> None:
    """Where one rank hangs or dies in a common check, the others time out there: that is not their failure."""
    for name in ("group", "all_reduce", "ddp", "teardown"):
        culprits = [rank["rank"] for rank in ranks if rank["stayed_in"] == name]
        for rank in ranks:
            check = _check(rank, name)
            if culprits and rank["stayed_in"] is None and check["status"] == FAILED:
                check.update(
                    status=SKIPPED, finding=f"broke off with rank {culprits[0]}: {check['finding']}", advice=None
                )
                rank.update(_verdict(rank["checks"]))


def _blame_missing(ranks: list[dict[str, Any]], timeout_s: int) -> None:
    """A rank that others waited for in vain has failed, even if it came in the end."""
    for number in {absent for rank in ranks for absent in rank["absent"]}:
        if ranks[number]["verdict"] != FAILED:
            finding = f"came too late: others had waited {timeout_s} s for it"
            advice = "look at logs/rank<n>.log, and at its node; if it is only slow, raise task.timeout_s"
            _change(ranks[number], "ranks", FAILED, finding, advice)


def _compare_packages(ranks: list[dict[str, Any]]) -> None:
    """Ranks with other versions than rank 0: they may run, and compute something else."""
    versions = {rank["rank"]: _check(rank, "packages")["values"] for rank in ranks}
    reference = versions[0]
    for rank in ranks:
        own = versions[rank["rank"]]
        differ = sorted(name for name in {*own, *reference} if own.get(name) != reference.get(name))
        if own and reference and differ and _check(rank, "packages")["status"] == OK:
            shown = ", ".join(f"{name} {own.get(name)} (rank 0: {reference.get(name)})" for name in differ)
            _change(rank, "packages", WARNING, shown, "install the same versions on all nodes")


def _compare_rates(ranks: list[dict[str, Any]]) -> None:
    """A card that is far slower than the others is broken, throttled, or at work for somebody else."""
    rates = {rank["rank"]: value_of(rank, "burst", "flops") for rank in ranks}
    known = [rate for rate in rates.values() if rate]
    if len(known) < 2:
        return
    median = statistics.median(known)
    for rank in ranks:
        rate = rates[rank["rank"]]
        if rate and rate < _SLOW * median:
            share = f"{flops(rate)}FLOP/s, {rate / median:.0%} of the median card's"
            advice = "see whether another process uses the card, or it is throttled by heat"
            _change(rank, "burst", WARNING, share, advice)


def _change(rank: dict[str, Any], name: str, status: str, finding: str, advice: str) -> None:
    """Replace what a rank thought of itself."""
    _check(rank, name).update(status=status, finding=finding, advice=advice)
    rank.update(_verdict(rank["checks"]))


def _verdict(checks: list[dict[str, Any]]) -> dict[str, str | None]:
    """The worst status, and the first check that has it."""
    for status in (FAILED, WARNING, SKIPPED):
        first = next((check["name"] for check in checks if check["status"] == status), None)
        if first is not None:
            return {"verdict": status, "first": first}
    return {"verdict": OK, "first": None}


def _check(rank: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(check for check in rank["checks"] if check["name"] == name)
    return found


def _of_any(ranks: list[dict[str, Any]], check: str, key: str) -> Any:
    return next((value for value in (value_of(rank, check, key) for rank in ranks) if value is not None), None)


def _grouped(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Failures, then warnings, in the order of the checks; what several ranks have found in the same words is one."""
    found: dict[tuple[str, str, str, str], list[int]] = {}
    for status in (FAILED, WARNING):
        for name in CHECKS:
            for rank in ranks:
                check = _check(rank, name)
                if check["status"] == status:
                    key = (name, status, check["finding"], check["advice"] or "")
                    found.setdefault(key, []).append(rank["rank"])
    return [finding_of(numbers, *key) for key, numbers in found.items()]


def finding_of(ranks: list[int], check: str, status: str, finding: str, advice: str) -> dict[str, Any]:
    """One of ``findings`` in ``doctor.json``."""
    return {"ranks": ranks, "check": check, "status": status, "finding": finding, "advice": advice}
