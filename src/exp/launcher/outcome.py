"""The outcome of a launch: which rank failed first, on which node, and how to report it."""

from __future__ import annotations

import contextlib
import re
import signal
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Mapping, NamedTuple

from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_UNAVAILABLE, REFUSED
from exp.launcher.processes import is_alive
from exp.launcher.rank import this_host
from exp.runs import status
from exp.runs.files import read_json, write_json
from exp.runs.status import Stage, signal_name

if TYPE_CHECKING:
    from exp.runs.folder import RunFolder
    from exp.runs.status import Beat

__all__ = [
    "TERM_PATIENCE_S", "End", "Failures", "Outcome", "RankFailure", "describe_failure", "failure_of", "is_of_peer",
    "log_file", "outcome_file", "tail_of", "unfinished", "waited_in_vain",
]  # fmt: skip

TERM_PATIENCE_S = 3
"""Seconds between SIGTERM and SIGKILL from torch's agent."""

_OTHER_NODES_S = 10.0
_LOST = "RankLost"
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


@dataclass
class RankFailure:
    """How one rank failed; its error file has the same fields."""

    rank: int
    local_rank: int
    type: str
    """Class name of the error."""
    message: str
    """The first line says what is wrong."""
    exit_code: int = EXIT_FAILED
    """Exit code of the process; negative for a signal."""
    host: str = field(default_factory=this_host)
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    log: str = ""
    """Path of the rank's log."""
    pid: int | None = None
    of_peer: bool = False
    """This rank lost another rank, or waited for it in vain; the other rank is the cause."""
    own: bool = False
    """Whether the error is one of exp's own; then its exit code becomes that of the command."""


@dataclass
class Outcome:
    """The outcome of a launch."""

    exit_code: int = EXIT_OK
    """Of the command."""
    restarts: int = 0
    failures: list[RankFailure] = field(default_factory=list)
    """The first to fail comes first."""
    interrupted_by: str | None = None
    """Name of the signal that ended the run."""
    preempted: dict[str, Any] | None = None
    """If the run was preempted: ``step``, the optimizer step of the saved state (null: nothing to save), and, under
    torchrun, ``signals``, the names of the signals that this node received."""
    reported: bool = False
    """Whether the process that ran the run has printed and recorded the outcome."""
    recorded: bool = False
    """Whether ``result.json`` is final: the process that ran the run has written it, or left it on purpose."""
    left: bool = False
    """Whether the run still goes on, without anybody waiting for it here."""
    begun: bool = True
    """False if a sweep was interrupted before this job began."""
    detail: str | None = None
    """What went wrong, if it was not the failure of a rank."""
    unkillable: list[int] = field(default_factory=list)
    """Ids of processes that survived SIGKILL."""

    @classmethod
    def of(cls, failures: list[RankFailure], detail: str | None = None) -> Outcome:
        """The outcome of a failed launch. Its exit code is that of exp's own errors, otherwise 1."""
        own = failures[0].exit_code if failures and failures[0].own else EXIT_FAILED
        return cls(own, failures=failures, detail=detail)

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        """The outcome that a job has written to a file; None if there is no file."""
        content = read_json(path)
        if content is None:
            return None
        content["failures"] = [RankFailure(**failure) for failure in content["failures"]]
        return cls(**content)


def outcome_file(folder: RunFolder, job: str) -> Path:
    """File for the :class:`Outcome` of a job; the first node of a Slurm job or the process of a sweep's job writes it.

    Args:
        folder: the run folder.
        job: Slurm's job id, or the process id.
    """
    return folder.logs / f"outcome-{job}.json"


def log_file(folder: RunFolder) -> Path:
    """File for stdout and stderr of a sweep's job on this machine."""
    return folder.logs / "output.log"


def is_of_peer(error: BaseException) -> bool:
    """Whether an error means that another rank is gone or does not answer, so that this rank is not the cause.

    True if a collective operation or a store raised it. An error of the backward pass has no such frame, so a message
    about a connection counts, too.
    """
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    if any(word in str(error).lower() for word in _OF_PEER):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/torch/distributed/" in frames[-1].filename


def waited_in_vain(error: Mapping[str, Any]) -> bool:
    """Whether the error in an error file is a time-out while the rank waited for another rank."""
    return bool(error["of_peer"]) and re.search("time.?out|timed out", error["message"], re.IGNORECASE) is not None


def failure_of(beat: Beat, local_rank: int, code: int | None) -> RankFailure:
    """The failure of a rank whose process ended without an error file.

    Args:
        beat: the rank's last heartbeat.
        local_rank: its rank on this node.
        code: exit code of its process; negative for a signal; None: not known.
    """
    kind, message = "SystemExit", f"exited with code {code} without an error; see agent*.log"
    if not code:
        how = "" if code == 0 else ", or was killed,"
        kind, message = _LOST, f"exited with code 0{how} before its time, in step {beat.step}"
    elif code < 0:
        kind = signal_name(-code)
        message = f"killed by {kind}" + (f" ({_HINTS[kind]})" if kind in _HINTS else "")
    return RankFailure(beat.rank, local_rank, kind, message, code or EXIT_FAILED, pid=beat.pid)


def unfinished(scratch: str, alive: bool = True) -> list[tuple[int, Beat]]:
    """The workers of this node that have begun and have not reported stage ``DONE``, with their last heartbeats.

    Args:
        scratch: the private folder of the job on this node.
        alive: True for workers whose process runs, False for workers whose process is gone.

    Returns:
        Pairs of local rank and heartbeat.
    """
    return [
        (local_rank, beat)
        for local_rank, beat in enumerate(status.read(scratch))
        if beat.pid and beat.stage != Stage.DONE and is_alive(beat.pid) is alive
    ]


class End(NamedTuple):
    """How the process of a rank ended; torch's ``ProcessFailure`` has the same attributes."""

    local_rank: int
    pid: int
    exitcode: int
    timestamp: float


class Failures:
    """The failures of one launch: an error file for each rank, and which of them came first.

    A rank writes its own file. If it cannot, torch's agent or the launcher writes it: they wait for its process.

    Args:
        folder: the run folder.
        scratch: the private folder of the job on this node; takes error files when the run folder has no space left.
    """

    def __init__(self, folder: RunFolder, scratch: str | None = None) -> None:
        self.folder = folder
        self.scratch = scratch

    def forget(self) -> None:
        """Remove the error files of an earlier launch."""
        for stale in self.folder.logs.glob("rank*.error.json"):
            stale.unlink(missing_ok=True)

    def write(self, failure: RankFailure) -> None:
        """Write the error file of a rank, unless its process has written one."""
        path = self.folder.error_file(failure.rank)
        places = [path, *([] if self.scratch is None else [Path(self.scratch, path.name)])]
        for known in map(read_json, places):
            if known is not None and known["pid"] == failure.pid and (known["type"] != _LOST or failure.type == _LOST):
                return
        for place in places:
            with contextlib.suppress(OSError):
                if place.parent.is_dir():
                    write_json(place, asdict(failure))
                    return

    def write_lost(self, why: str | None = None, code: int | None = None) -> bool:
        """Write error files for the workers that are gone before their end.

        Args:
            why: the reason, for all of them; None: derived from ``code``.
            code: exit code of the processes; None: not known.

        Returns:
            Whether there are such workers.
        """
        assert self.scratch is not None
        gone = unfinished(self.scratch, alive=False)
        for local_rank, beat in gone:
            failure = failure_of(beat, local_rank, code)
            self.write(failure if why is None else replace(failure, type="AgentLost", message=why))
        return bool(gone)

    def judge(self, ends: Mapping[int, Any], of_peer: bool = False) -> bool:
        """Whether all workers of this node reached their end; write error files for those that did not.

        A worker that exits with code 0 before its last heartbeat (stage ``DONE``) has failed: something in it called
        ``exit``. A worker that dies after it, in its device's clean-up, has succeeded: everything is written; its log
        records how it died.

        Args:
            ends: an :class:`End` by rank, of the processes that failed, and of those that the agent then ended, by
                SIGTERM and seconds later by SIGKILL.
            of_peer: the workers were ended because another rank had failed.
        """
        assert self.scratch is not None
        beats = status.read(self.scratch)
        if not ends or not beats:  # without heartbeats the folder is gone, because the parent has died
            return not self.write_lost(code=0) and not ends
        come = not unfinished(self.scratch, alive=False) and all(beats[end.local_rank].pid for end in ends.values())
        first = min(end.timestamp for end in ends.values())
        causes = {
            rank: end
            for rank, end in ends.items()
            if end.exitcode != -signal.SIGTERM and end.timestamp < first + TERM_PATIENCE_S
        }
        for rank, end in (causes or ends).items():  # without causes, the SIGTERM came from outside the job
            beat = beats[end.local_rank]._replace(pid=end.pid, rank=rank)  # there may be no heartbeat yet
            failure = failure_of(beat, end.local_rank, end.exitcode)
            if not come:
                self.write(replace(failure, time=end.timestamp, of_peer=of_peer))
            elif end.exitcode:
                with contextlib.suppress(OSError), self.folder.log_file(rank).open("a", encoding="utf-8") as log:
                    log.write(f"{failure.message}, in the clean-up of its device; what it had to write was written\n")
        return come

    def collect(self, world_size: int = 0, local_world_size: int = 1) -> list[RankFailure]:
        """Read the error files of the ranks; wait for those of other nodes.

        Args:
            world_size: number of ranks whose files are waited for; 0: do not wait.
            local_world_size: ranks per node.

        Returns:
            One failure per rank, the cause first (:func:`_in_order`).
        """
        folder, deadline = self.folder, time.monotonic() + _OTHER_NODES_S
        scratch = [] if self.scratch is None else Path(self.scratch).glob("rank*.error.json")
        unplaced = [read_json(path) for path in scratch]
        while True:
            # Opened, not tested for existence: an NFS client may report a new file as missing for a while.
            every = map(folder.error_file, range(world_size))
            placed = map(read_json, every if world_size else sorted(folder.logs.glob("rank*.error.json")))
            known = {error["rank"]: error for error in [*placed, *unplaced] if error is not None}
            found = _in_order(
                RankFailure(**{**error, "log": str(folder.log_file(rank))}) for rank, error in known.items()
            )
            is_clear = not all(failure.of_peer or failure.type == _LOST for failure in found)
            if world_size == 0 or is_clear or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if not found or not all(failure.of_peer for failure in found):
            return found
        lost = [
            RankFailure(
                rank, rank % local_world_size, _LOST, "ended without an error: it was killed, or its node failed",
                host=f"node {rank // local_world_size}", log=str(folder.log_file(rank)),
            )
            for rank in range(world_size) if rank not in known
        ]  # fmt: skip
        return [*lost, *found]


def _in_order(failures: Iterable[RankFailure]) -> list[RankFailure]:
    """Sort failures so that the most likely cause comes first.

    Time alone does not tell: clocks of nodes differ, and on a busy node the error file of a killed rank comes late. The
    order is: killed by SIGKILL, which is never a consequence of another rank's failure; errors and crashes, by time;
    ranks that are gone without a known reason, since their agent may have ended them; ranks that lost another rank.
    """
    return sorted(failures, key=lambda f: (f.of_peer, f.type == _LOST, f.exit_code != -signal.SIGKILL, f.time))


def describe_failure(outcome: Outcome) -> str:
    """Text for the user: the first failing rank and its error on the first line, details below."""
    lines: list[str] = []
    if outcome.interrupted_by is not None:
        lines.append(f"interrupted by {outcome.interrupted_by}")
    elif outcome.failures:
        first, others = outcome.failures[0], outcome.failures[1:]
        head, *details = first.message.splitlines() or [""]
        named = first.own or f"{first.type}: " in head or head.startswith("killed by")
        kind = "" if named else f"{first.type}: "
        lines += [f"rank {first.rank} (local_rank {first.local_rank}, {first.host}) failed: {kind}{head}", *details]
        if others:
            lines.append(f"  failed after it: {', '.join(f'rank {failure.rank}' for failure in others)}")
        if outcome.exit_code == EXIT_UNAVAILABLE:
            lines += tail_of(Path(first.log))[1:]  # the log itself is removed with the run folder
        elif Path(first.log).is_file() and outcome.exit_code not in REFUSED:
            lines.append(f"  log: {first.log}")
    else:
        detail = outcome.detail or "no rank left an error"
        lines.append(detail if outcome.reported else f"the run ended without a result: {detail}")
    if outcome.unkillable:
        lines.append(f"  still running, stuck in the kernel: {', '.join(map(str, outcome.unkillable))}")
    return "\n".join(lines)


def tail_of(log: Path, lines: int = 12) -> list[str]:
    """The path and the last lines of a log, for an error's details.

    Args:
        log: the file; it may be missing.
        lines: maximum number of lines; empty lines are left out.
    """
    if not log.is_file():
        return [f"  there is no log at {log}"]
    written = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return [f"  log: {log}", *(f"  | {line}" for line in written[-lines:])]
