"""Which rank failed first, and how to say it."""

from __future__ import annotations

import contextlib
import re
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from exp.errors import EXIT_FAILED, EXIT_UNAVAILABLE, REFUSED
from exp.launcher.outcome import Outcome, RankFailure, error_record
from exp.launcher.processes import signal_name
from exp.runfolder import read_json, write_json

if TYPE_CHECKING:
    from exp.heartbeat import Beat
    from exp.runfolder import RunFolder

__all__ = [
    "LOST",
    "collect_failures",
    "describe_end",
    "describe_failure",
    "exit_code_of",
    "in_order",
    "is_of_peer",
    "leave_word",
    "tail_of",
    "waited_in_vain",
    "write_error",
]

LOST = "RankLost"
"""Type of the failure of a rank that has left no word of its own."""

_WORD_PATIENCE_S = 5.0
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


def leave_word(
    folder: RunFolder,
    scratch: str,
    beat: Beat,
    local_rank: int,
    code: int | None,
    restart: int = 0,
    when: float | None = None,
    of_peer: bool = False,
) -> None:
    """Write the error file of a rank that has ended and has left none.

    Args:
        folder: the run folder.
        scratch: the private folder of the job on this node.
        beat: the rank's last heartbeat.
        local_rank: its rank on this node.
        code: exit code of its process; negative for a signal; 0: it ended before its time; None: not known.
        restart: the attempt.
        when: seconds since the epoch; None: now.
        of_peer: something else made it end.
    """
    path = folder.error_file(beat.rank)
    if any((read_json(each) or {}).get("pid") == beat.pid for each in (path, Path(scratch, path.name))):
        return
    if code:
        kind, message = describe_end(code)
    else:
        how = "exited with code 0" if code == 0 else "exited with code 0, or was killed,"
        kind, message, code = "EndedEarly", f"{how} before its time, in step {beat.step}", EXIT_FAILED
    record = error_record(beat.rank, local_rank, beat.pid, kind, message, code, restart, of_peer=of_peer)
    write_error(path, {**record, "time": when or record["time"]}, scratch)


def write_error(path: Path, record: Mapping[str, Any], scratch: str | None) -> None:
    """Write an error file; where the run folder is full, or gone, into the private folder of the job on this node."""
    with contextlib.suppress(OSError):
        if path.parent.is_dir():
            write_json(path, record)
            return
    with contextlib.suppress(OSError):
        if scratch is not None:
            write_json(Path(scratch, path.name), record)


def collect_failures(
    folder: RunFolder, unplaced: Sequence[Any] = (), world_size: int = 0, local_world_size: int = 1
) -> list[RankFailure]:
    """Read the error files of the ranks, and wait for those of other nodes; the cause first.

    Args:
        folder: has an error file of each rank that failed: its own, or one that its agent wrote (:func:`leave_word`).
        unplaced: errors for which there was no space in the folder.
        world_size: ranks in all, whose words are waited for; 0: all that there are to be are there.
        local_world_size: of each node.

    Returns:
        Failures by rank, none twice, in the order of :func:`in_order`.
    """
    deadline = time.monotonic() + _WORD_PATIENCE_S
    while True:
        errors = [read_json(path) for path in sorted(folder.logs.glob("rank*.error.json"))]
        known = {error["rank"]: error for error in [*errors, *unplaced] if error is not None}
        found = in_order(RankFailure(log=str(folder.log_file(rank)), **error) for rank, error in known.items())
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
