"""Which rank failed first, and how to say it."""

from __future__ import annotations

import math
import re
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from exp.errors import EXIT_FAILED, EXIT_UNAVAILABLE, REFUSED
from exp.launcher.outcome import Outcome, RankFailure
from exp.launcher.processes import signal_name
from exp.runfolder import read_json

if TYPE_CHECKING:
    from exp.runfolder import RunFolder

__all__ = [
    "LOST",
    "collect_failures",
    "describe_end",
    "describe_failure",
    "exit_code_of",
    "in_order",
    "is_of_peer",
    "tail_of",
    "waited_in_vain",
]

LOST = "RankLost"
"""Type of the failure of a rank that has left no word of its own."""

_WORD_PATIENCE_S = 5.0
_AGENT_PATIENCE_S = 2  # less than what torch's agent waits before it kills a worker that ignores SIGTERM
_HINTS = {
    "SIGKILL": "out of memory, or kill -9",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "a crash in native code",
    "SIGBUS": "a crash in native code, or /dev/shm is full",
}
_OF_PEER = (
    "closed by peer", "reset by peer", "broken pipe", "socket closed", "connection refused", "connectfullmesh",
    "remote process", "timed out waiting", "/gloo/",
)  # fmt: skip


def is_of_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone or does not answer, rather than what is wrong in this one.

    It does where a collective operation or a store raised it, or, from the backward pass, which has no frame of theirs,
    where it speaks of a connection.
    """
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    if any(word in str(error).lower() for word in _OF_PEER):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/torch/distributed/" in frames[-1].filename


def waited_in_vain(error: Mapping[str, Any]) -> bool:
    """Whether an error, as its file has it, is that of a rank for which another one has not come in time."""
    return bool(error["of_peer"]) and re.search("time.?out|timed out", error["message"], re.IGNORECASE) is not None


def describe_end(code: int) -> tuple[str, str]:
    """Type and message for a rank that ended without an error of its own.

    Args:
        code: of its process; negative for a signal.
    """
    if code > 0:
        return "SystemExit", f"exited with code {code} without an error; see agent*.log"
    name = signal_name(-code)
    hint = f" ({_HINTS[name]})" if name in _HINTS else ""
    return name, f"killed by {name}{hint}"


def collect_failures(
    folder: RunFolder,
    exits: Sequence[dict[str, Any]],
    host: str,
    unplaced: Sequence[dict[str, Any]] = (),
    world_size: int = 0,
    local_world_size: int = 1,
) -> list[RankFailure]:
    """What the ranks, or their monitors for them, wrote, and how other processes ended; the cause first.

    A monitor (:mod:`exp.launcher.monitor`) writes nothing of a worker that we have ended. Of a rank without a file only
    its exit is known, which may be the agent's doing: it ends the others by SIGTERM, or by SIGKILL seconds after the
    first error.

    Args:
        folder: has an error file of each rank that failed, as far as it or its monitor could still write one.
        exits: from the agent: ``rank, local_rank, exit_code, time`` of each process that failed.
        host: of this node.
        unplaced: errors for which there was no space in the folder.
        world_size: ranks in all, whose words are waited for; 0: all that there are to be are there.
        local_world_size: of each node.

    Returns:
        Failures by rank, none twice, in the order of :func:`in_order`.
    """
    deadline = time.monotonic() + _WORD_PATIENCE_S
    while True:
        found = _collect(folder, exits, host, unplaced)
        known = {failure.rank for failure in found}
        silent = [rank for rank in range(world_size) if rank not in known]
        if not silent or not all(failure.of_peer for failure in found):
            return found
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    if not found:
        return []
    # They have left no word, and others have lost them.
    lost = [
        RankFailure(
            rank, rank % local_world_size, f"node {rank // local_world_size}", LOST,
            "gone without a word: killed, or its node is", EXIT_FAILED, time.time(), str(folder.log_file(rank)),
        )
        for rank in silent
    ]  # fmt: skip
    return [*lost, *found]


def _collect(
    folder: RunFolder, exits: Sequence[dict[str, Any]], host: str, unplaced: Sequence[dict[str, Any]]
) -> list[RankFailure]:
    failures: dict[int, RankFailure] = {}
    for error in [*map(read_json, sorted(folder.logs.glob("rank*.error.json"))), *unplaced]:
        if error is not None:
            failures[error["rank"]] = RankFailure(log=str(folder.log_file(error["rank"])), **error)
    killed: list[RankFailure] = []
    for end in exits:
        rank, code = end["rank"], end["exit_code"]
        if rank in failures:
            continue
        kind, message = describe_end(code)
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
    return in_order([*causes, *failures.values()])


def in_order(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """The cause first: clocks of nodes differ, and on a busy one the word of a rank that was killed comes late.

    What a rank may suffer from another comes last: its error is that it has lost a peer. SIGKILL comes from without,
    never from another rank's failure. What is left, errors and crashes, has its own time.
    """
    return sorted(failures, key=lambda f: (f.of_peer, f.exit_code != -signal.SIGKILL, f.time))


def exit_code_of(failure: RankFailure) -> int:
    """The command line's exit code for a rank's failure: what a process ended with means nothing here."""
    return failure.exit_code if failure.own else EXIT_FAILED


def describe_failure(outcome: Outcome) -> str:
    """The first failing rank and its error on the first line; what else there is to know below it."""
    lines: list[str] = []
    if outcome.interrupted_by is not None:
        lines.append(f"interrupted by {outcome.interrupted_by}")
    elif outcome.failures:
        first, others = outcome.failures[0], outcome.failures[1:]
        head, *details = first.message.splitlines() or [""]
        named = first.own or f"{first.type}: " in head or head.startswith("killed by")
        own = "" if named else f"{first.type}: "
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
