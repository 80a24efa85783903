"""Which rank failed first, and how to say it."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from exp.errors import EXIT_FAILED, EXIT_UNAVAILABLE, REFUSED
from exp.launcher.base import Outcome, RankFailure
from exp.launcher.processes import signal_name
from exp.runfolder import read_json

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = ["collect_failures", "describe_failure", "exit_code_of", "tail_of"]

_AGENT_PATIENCE_S = 2  # less than what torch's agent waits before it kills a worker that ignores SIGTERM
_HINTS = {
    "SIGKILL": "out of memory, or kill -9",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "a crash in native code",
    "SIGBUS": "a crash in native code, or /dev/shm is full",
}


def collect_failures(
    folder: RunFolder, exits: Sequence[dict[str, Any]], host: str, unplaced: Sequence[dict[str, Any]] = ()
) -> list[RankFailure]:
    """What the ranks wrote and how their processes ended, the first to fail first.

    A rank that died of a signal comes before the errors that its death caused in others. But not one that the agent
    ended because another had failed: it did that by SIGTERM, or by SIGKILL some seconds after the first error.

    Args:
        folder: has an error file of each rank that could still write one.
        exits: from the agent: ``rank, local_rank, exit_code, time`` of each process that failed.
        host: of this node.
        unplaced: errors for which there was no space in the folder.

    Returns:
        Failures by rank, none twice.
    """
    failures: dict[int, RankFailure] = {}
    for error in [*map(read_json, sorted(folder.logs.glob("rank*.error.json"))), *unplaced]:
        failures[error["rank"]] = RankFailure(log=str(folder.log_file(error["rank"])), **error)
    killed: list[RankFailure] = []
    for end in exits:
        rank, code = end["rank"], end["exit_code"]
        if rank in failures:
            continue
        if code < 0:
            name = signal_name(-code)
            hint = f" ({_HINTS[name]})" if name in _HINTS else ""
            kind, message = name, f"killed by {name}{hint}"
        else:
            kind, message = "SystemExit", f"exited with code {code} without an error; see agent*.log"
        failure = RankFailure(
            rank, end["local_rank"], host, kind, message, code, end["time"], str(folder.log_file(rank)), 0
        )
        if code < 0:
            killed.append(failure)
        else:
            failures[rank] = failure
    first_error = min((failure.time for failure in failures.values()), default=math.inf)
    causes = [f for f in killed if f.exit_code != -signal.SIGTERM and f.time <= first_error + _AGENT_PATIENCE_S]
    if not causes and not failures:
        causes = killed  # somebody else's SIGTERM
    return [*sorted(causes, key=lambda f: f.time), *sorted(failures.values(), key=lambda f: f.time)]


def exit_code_of(failure: RankFailure) -> int:
    """The command line's exit code for a rank's failure."""
    return failure.exit_code if failure.exit_code > 0 else EXIT_FAILED


def describe_failure(outcome: Outcome) -> str:
    """The first failing rank and its error on the first line; what else there is to know below it."""
    lines: list[str] = []
    if outcome.interrupted_by is not None:
        lines.append(f"interrupted by {outcome.interrupted_by}")
    elif outcome.failures:
        first, others = outcome.failures[0], outcome.failures[1:]
        head, *details = first.message.splitlines() or [""]
        own = f"{first.type}: " if first.type not in _OWN and not head.startswith("killed by") else ""
        where = f"rank {first.rank} (local_rank {first.local_rank}, {first.host}) failed: "
        lines += [f"{where}{own}{head}", *details]
        if others:
            lines.append(f"  failed after it: {', '.join(f'rank {failure.rank}' for failure in others)}")
        if outcome.exit_code == EXIT_UNAVAILABLE:
            lines += tail_of(Path(first.log))[1:]  # the log itself goes with the folder
        elif Path(first.log).is_file() and outcome.exit_code not in REFUSED:
            lines.append(f"  log: {first.log}")
    else:
        detail = outcome.detail or "no rank left an error"
        lines.append(detail if outcome.reported else f"the run ended without a result: {detail}")
    if outcome.unkillable:
        lines.append(f"  still running, stuck in the kernel: {', '.join(map(str, outcome.unkillable))}")
    return "\n".join(lines)


def tail_of(log: Path, lines: int = 12) -> list[str]:
    """The name and the last lines of a log, for an error's details.

    Args:
        log: may be missing.
        lines: at most so many that are not empty.
    """
    if not log.is_file():
        return [f"  there is no log at {log}"]
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return [f"  log: {log}", *(f"  | {line}" for line in said[-lines:])]


# Errors of ours speak for themselves.
_OWN = ("ConfigError", "DataError", "UnavailableError", "RunError", "PlacementError", "CheckpointError")
