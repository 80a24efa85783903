"""Which rank failed first, and why: each failing rank leaves an error file in the run folder, which all nodes see."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import EXIT_FAILED
from exp.runs.files import read_json, write_json
from exp.runs.heartbeat import Heartbeat, Stage, read, running_ranks
from exp.runs.scratch import ENDING_FLAG
from exp.runs.signals import signal_name

if TYPE_CHECKING:
    from exp.runs.folder import RunFolder

__all__ = ["AGENT_LOST", "TERM_PATIENCE_S", "Failures", "RankFailure", "describe_exit"]

TERM_PATIENCE_S = 3
"""Seconds between SIGTERM and SIGKILL from torch's agent."""

AGENT_LOST = "AgentLost"
"""Type of the failure of ranks whose common parent was killed: torch's agent, or the process that has forked them."""

_REMOTE_WAIT_S = 10.0
_RELIST_S = 5.0
_SIGNAL_HINTS = {
    "SIGKILL": "out of memory, or kill -9",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "a crash in native code",
    "SIGBUS": "a crash in native code, or /dev/shm is full",
}


@dataclass
class RankFailure:
    """How one rank failed; its error file has the same fields.

    Attributes:
        type: class name of the error.
        message: the first line says what is wrong; details follow.
        exit_code: exit code of the process; negative for a signal.
        time: seconds since the epoch.
        caused_by_peer: this rank lost another rank, or waited for it in vain; the other rank is the cause.
        is_exp_error: whether the error is one of exp's; then its exit code becomes that of the command.
        names_type: whether the message says by itself what kind of error it is.
    """

    rank: int
    local_rank: int
    type: str
    message: str
    exit_code: int = EXIT_FAILED
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)
    pid: int | None = None
    caused_by_peer: bool = False
    is_exp_error: bool = False
    names_type: bool = False

    @property
    def headline(self) -> str:
        """The first line of the message."""
        return (self.message.splitlines() or [""])[0]

    @property
    def details(self) -> list[str]:
        """The further lines of the message."""
        return self.message.splitlines()[1:]


def describe_exit(beat: Heartbeat, code: int) -> RankFailure:
    """The failure of a rank whose process ended before its work was done, and wrote no error file.

    Args:
        beat: the rank's last heartbeat.
        code: exit code of its process; negative for a signal.
    """
    kind = "SystemExit" if code >= 0 else signal_name(-code)
    when = f" in step {beat.step}" if beat.step else ""
    message = f"exited with code {code}{when}, without an error and before its work was done (os._exit?)"
    if code < 0:
        message = f"killed by {kind}" + (f" ({_SIGNAL_HINTS[kind]})" if kind in _SIGNAL_HINTS else "")
    return RankFailure(beat.rank, beat.local_rank, kind, message, code or EXIT_FAILED, pid=beat.pid, names_type=True)


class Failures:
    """The failures of one launch: an error file for each rank, and which of them came first.

    A rank writes its own file. If it cannot, its guard writes it (:func:`exp.worker.main.guard`).

    Args:
        folder: the run folder.
        scratch: the private folder of the job on this node; takes error files when the run folder has no space left.
    """

    def __init__(self, folder: RunFolder, scratch: str | None = None) -> None:
        self.folder = folder
        self.scratch = scratch
        self._errors: list[dict[str, Any]] = []
        self._changed, self._fresh_until = 0, 0.0

    def write(self, failure: RankFailure) -> None:
        """Write the error file of a rank, unless its process has written one.

        :data:`AGENT_LOST` replaces an error that a peer has caused.
        """
        path = self.folder.error_file(failure.rank)
        paths = [path, *([] if self.scratch is None else [Path(self.scratch, path.name)])]
        for error in filter(None, map(read_json, paths)):
            if error["pid"] == failure.pid and not (error["caused_by_peer"] and failure.type == AGENT_LOST):
                return
        for path in paths:
            with contextlib.suppress(OSError):
                if path.parent.is_dir():
                    write_json(path, asdict(failure))
                    return

    def read(self) -> list[dict[str, Any]]:
        """The error files in the run folder; a rank that starts again removes its own.

        The folder is listed only while it changes, since a file server answers a query for the time of change cheaply.
        Its clock may be coarse, so the folder is listed for some seconds after each change.
        """
        try:
            changed = self.folder.logs.stat().st_mtime_ns
        except OSError:
            return self._errors
        now = time.monotonic()
        if changed != self._changed:
            self._changed, self._fresh_until = changed, now + _RELIST_S
        if now < self._fresh_until:
            files = self.folder.logs.glob("rank*.error.json")
            self._errors = [error for error in map(read_json, files) if error is not None]
        return self._errors

    def record_lost(self, why: str) -> None:
        """Record, for all workers of this node that are gone and had not reached their end, why they are."""
        for beat in running_ranks(str(self.scratch), alive=False):
            self.write(replace(describe_exit(beat, EXIT_FAILED), type=AGENT_LOST, message=why))

    def record_end(self, rank: int, local_rank: int, code: int, pid: int | None = None) -> bool:
        """Record how the process of a worker ended, unless the launcher has ended it.

        Args:
            rank: of the worker.
            local_rank: of the worker.
            code: its exit code; negative for a signal.
            pid: process id of the worker; None: not known.

        Returns:
            Whether it had reached its end (stage ``DONE``), with a written result; what follows is its clean-up.
        """
        scratch = str(self.scratch)
        beats = read(scratch)
        if not beats:  # the folder is gone, because the launcher died
            return False
        beat = beats[local_rank % len(beats)]
        if beat.pid == 0 or (pid is not None and beat.pid != pid):  # the worker died before its first heartbeat
            beat = Heartbeat(pid or 0, rank, local_rank, 0, 0, 0, 0)
        if beat.stage == Stage.DONE:
            return True
        if not Path(scratch, ENDING_FLAG).exists():
            self.write(describe_exit(beat, code))
        return False

    def collect(self, world_size: int = 0, local_world_size: int = 1) -> list[RankFailure]:
        """Read the error files of the ranks; wait for those of other nodes.

        Args:
            world_size: number of ranks whose files to wait for; 0: do not wait.
            local_world_size: ranks per node.

        Returns:
            One failure per rank, the most likely cause first. Times alone do not show it: clocks of nodes differ, and
            on a busy node the error file of a killed rank comes late. The order is: killed by SIGKILL, which is never a
            consequence of another rank's failure; errors and crashes, by time; ranks that lost another rank.
        """
        folder, deadline = self.folder, time.monotonic() + _REMOTE_WAIT_S
        while True:
            # Opened, not tested for existence: an NFS client may report a new file as missing for a while.
            files = [*map(folder.error_file, range(world_size))] or [*folder.logs.glob("rank*.error.json")]
            if self.scratch is not None:
                files += Path(self.scratch).glob("rank*.error.json")
            errors = {error["rank"]: error for error in map(read_json, files) if error is not None}
            failures = [RankFailure(**error) for error in errors.values()]
            failures.sort(
                key=lambda failure: (failure.caused_by_peer, failure.exit_code != -signal.SIGKILL, failure.time)
            )
            if (
                world_size == 0
                or not all(failure.caused_by_peer for failure in failures)
                or time.monotonic() > deadline
            ):
                break
            time.sleep(0.1)
        if not failures or not failures[0].caused_by_peer:
            return failures
        why = "ended without an error: it was killed, or its node failed"
        lost = [rank for rank in range(world_size) if rank not in errors]
        hosts = {rank: f"node {rank // local_world_size}" for rank in lost}
        return [
            *(RankFailure(rank, rank % local_world_size, "RankLost", why, host=hosts[rank]) for rank in lost),
            *failures,
        ]
