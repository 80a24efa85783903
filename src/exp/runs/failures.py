"""Which rank failed first, and why: each failing rank leaves an error file in the run folder, which all nodes see."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple

from exp.errors import EXIT_FAILED
from exp.runs.files import read_json, write_json
from exp.runs.status import Beat, read, signal_name, unfinished

if TYPE_CHECKING:
    from exp.runs.folder import RunFolder

__all__ = ["TERM_PATIENCE_S", "End", "Failures", "RankFailure", "failure_of"]

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


@dataclass
class RankFailure:
    """How one rank failed; its error file has the same fields.

    Attributes:
        type: class name of the error.
        message: the first line says what is wrong.
        exit_code: exit code of the process; negative for a signal.
        time: seconds since the epoch.
        of_peer: this rank lost another rank, or waited for it in vain; the other rank is the cause.
        own: whether the error is one of exp's own; then its exit code becomes that of the command.
    """

    rank: int
    local_rank: int
    type: str
    message: str
    exit_code: int = EXIT_FAILED
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)
    pid: int | None = None
    of_peer: bool = False
    own: bool = False


class End(NamedTuple):
    """How the process of a rank ended; torch's ``ProcessFailure`` has the same attributes."""

    local_rank: int
    pid: int
    exitcode: int
    timestamp: float


def failure_of(beat: Beat, code: int) -> RankFailure:
    """The failure of a rank whose process ended without an error file.

    Args:
        beat: the rank's last heartbeat.
        code: exit code of its process; negative for a signal; 0 also if it is not known.
    """
    kind, message = "SystemExit", f"exited with code {code} without an error; see agent*.log"
    if code == 0:
        kind, message = _LOST, f"exited with code 0, or was killed, before its time, in step {beat.step}"
    elif code < 0:
        kind = signal_name(-code)
        message = f"killed by {kind}" + (f" ({_HINTS[kind]})" if kind in _HINTS else "")
    return RankFailure(beat.rank, beat.local_rank, kind, message, code or EXIT_FAILED, pid=beat.pid)


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

    def told(self) -> list[dict[str, Any]]:
        """The error files in the run folder; a rank that starts again removes its own."""
        files = self.folder.logs.glob("rank*.error.json")
        return [error for error in map(read_json, files) if error is not None]

    def write_lost(self, why: str | None = None) -> bool:
        """Write error files for the workers that are gone before their end.

        Args:
            why: the reason, for all of them; None: not known.

        Returns:
            Whether there are such workers.
        """
        assert self.scratch is not None
        gone = unfinished(self.scratch, alive=False)
        for beat in gone:
            failure = failure_of(beat, 0)
            self.write(failure if why is None else replace(failure, type="AgentLost", message=why))
        return bool(gone)

    def judge(self, ends: Mapping[int, Any], of_peer: bool = False) -> bool:
        """Whether all workers of this node reached their end; write error files for those that did not.

        A worker that exits with code 0 before its last heartbeat (stage ``DONE``) has failed: something in it called
        ``exit``. A worker that dies after it, in its device's clean-up, has succeeded: everything is written.

        Args:
            ends: an :class:`End` by rank, of the processes that failed, and of those that the agent then ended, by
                SIGTERM and seconds later by SIGKILL.
            of_peer: the workers were ended because another rank had failed.
        """
        assert self.scratch is not None
        beats = read(self.scratch)
        if not ends or not beats:  # without heartbeats the folder is gone, because the parent has died
            return not self.write_lost() and not ends
        last = {rank: beats[end.local_rank % len(beats)] for rank, end in ends.items()}
        if not unfinished(self.scratch, alive=False) and all(beat.pid for beat in last.values()):
            return True
        first = min(end.timestamp for end in ends.values())
        causes = {
            rank: end
            for rank, end in ends.items()
            if end.exitcode != -signal.SIGTERM and end.timestamp < first + TERM_PATIENCE_S
        }
        for rank, end in (causes or ends).items():  # without causes, the SIGTERM came from outside the job
            # There may be no heartbeat yet.
            failure = failure_of(last[rank]._replace(pid=end.pid, rank=rank, local_rank=end.local_rank), end.exitcode)
            self.write(replace(failure, time=end.timestamp, of_peer=of_peer))
        return False

    def collect(self, world_size: int = 0, local_world_size: int = 1) -> list[RankFailure]:
        """Read the error files of the ranks; wait for those of other nodes.

        Args:
            world_size: number of ranks whose files are waited for; 0: do not wait.
            local_world_size: ranks per node.

        Returns:
            One failure per rank, the most likely cause first. Time alone does not tell: clocks of nodes differ, and on
            a busy node the error file of a killed rank comes late. The order is: killed by SIGKILL, which is never a
            consequence of another rank's failure; errors and crashes, by time; ranks that are gone without a known
            reason, since their agent may have ended them; ranks that lost another rank.
        """
        folder, deadline = self.folder, time.monotonic() + _OTHER_NODES_S
        while True:
            # Opened, not tested for existence: an NFS client may report a new file as missing for a while.
            files = [*map(folder.error_file, range(world_size))] or [*folder.logs.glob("rank*.error.json")]
            if self.scratch is not None:
                files += Path(self.scratch).glob("rank*.error.json")
            known = {error["rank"]: error for error in map(read_json, files) if error is not None}
            found = [RankFailure(**error) for error in known.values()]
            found.sort(key=lambda f: (f.of_peer, f.type == _LOST, f.exit_code != -signal.SIGKILL, f.time))
            is_clear = not all(failure.of_peer or failure.type == _LOST for failure in found)
            if world_size == 0 or is_clear or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if not found or not found[0].of_peer:
            return found
        why = "ended without an error: it was killed, or its node failed"
        lost = [rank for rank in range(world_size) if rank not in known]
        hosts = {rank: f"node {rank // local_world_size}" for rank in lost}
        return [*(RankFailure(rank, rank % local_world_size, _LOST, why, host=hosts[rank]) for rank in lost), *found]
