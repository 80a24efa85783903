"""Which rank failed first, and why: error files of ranks, hanging ranks, and how long each process waits for others.

A rank that fails leaves an error file in the run folder, which all nodes see; its guard writes it if the rank cannot. A
rank that hangs looks from outside like those that wait for it, so :class:`HangDetector` compares heartbeats. Errors are
data here; :class:`exp.errors.ExpError` formats them.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
import traceback
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.errors import EXIT_FAILED, ExpError
from exp.runs import heartbeat
from exp.runs.files import read_json, write_json
from exp.runs.heartbeat import Heartbeat, Stage, running_ranks
from exp.runs.job import ENDING_FLAG, signal_name
from exp.runs.lock import is_alive, proc_stat

if TYPE_CHECKING:
    from exp.runs.folder import RunFolder


class Patience:
    """How long processes wait at the end of a job; in seconds, unless noted.

    The order matters: the rank at fault must have left its error file before the ranks that waited for it are ended,
    and a rank has to finish its clean-up before the supervisor kills it.
    """

    HANG_SHARE = 0.9
    """A hanging rank is named after this share of the time-out of collectives: before the waiting ranks time out."""
    STACKS_S = 1.5
    """From the request for stacks of hanging workers to their reading."""
    PEER_LOST_S = 3.0
    """A rank that has lost another one stays for so long, so that the supervisor finds the missing one first."""
    TRACKERS_S = 2.0
    """A failed rank waits so long for its trackers; less than ``AFTER_ERROR_S``."""
    CLEAN_UP_FAILED_S = 3.0
    """Clean-up of the device after a failure; less than ``AFTER_ERROR_S``."""
    CLEAN_UP_S = 20.0
    """Clean-up of the device after success."""
    TERM_S = 3
    """Between SIGTERM and SIGKILL from torch's agent."""
    AFTER_SIGNAL_S = 3.0
    """After a signal to the launcher: time for the workers to report to the trackers."""
    AFTER_ERROR_S = 6.0
    """After an error, until the supervisor kills the job; torch's agent waits half a minute for ranks that ignore
    SIGTERM."""
    RESTART_S = 60.0
    """The same if the job may restart: the agent needs time to start the workers again."""
    OTHER_NODES_S = 10.0
    """For the error files of other nodes, if each error here was caused by another rank."""
    RELIST_S = 5.0
    """After each change the folder with the error files is listed for so long, since a file server's clock may be
    coarse."""


AGENT_LOST = "AgentLost"
"""Type of the failure of ranks whose common parent was killed: torch's agent, or the process that has forked them."""

_SIGNAL_HINTS = {
    "SIGKILL": "out of memory, or kill -9",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "a crash in native code",
    "SIGBUS": "a crash in native code, or /dev/shm is full",
}
_EXCHANGE = ("/torch/autograd/", "/torch/nn/parallel/", "/mmengine/model/wrappers/", "/exp/distributed.py")
"""Source files that wait for other ranks in native code."""
_CONNECTION = (
    "closed by peer", "reset by peer", "broken pipe", "socket closed", "connection refused", "connectfullmesh",
    "remote process", "timed out", "timeout", "/gloo/",
)  # fmt: skip
_TIMED_OUT = re.compile("time.?out|timed out", re.IGNORECASE)
NODE_VARIABLE = "EXP_NODE"
"""Environment variable with the name of the node, for jobs of which nodes have different backends."""
_SHOWN_FRAMES = 12
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/exp/distributed.py")
_UNTIMED = (Stage.FREE, Stage.DONE)
_STOPPED = {"T": "; it is stopped (SIGSTOP)", "D": "; it is stuck in the kernel"}


def is_caused_by_peer(error: BaseException, world_size: int) -> bool:
    """Whether an error means that another rank is gone or does not answer, so that this rank is not the cause.

    True if torch's collectives or stores raised it. If native code of the backward pass did, there is no such frame:
    then torch's message about a connection decides. An error of user code about its own connections is its own.
    """
    if world_size == 1 or not isinstance(error, (RuntimeError, OSError)):
        return False
    file = ([frame.filename for frame in traceback.extract_tb(error.__traceback__)] or [""])[-1]
    if "/torch/distributed/" in file:
        return True
    native = isinstance(error, RuntimeError) and any(part in file for part in _EXCHANGE)
    return native and any(word in str(error).lower() for word in _CONNECTION)


def is_time_out(error: BaseException) -> bool:
    """Whether torch's message says that a time limit has passed; torch has no type for that."""
    return bool(_TIMED_OUT.search(str(error)))


def node_name() -> str:
    """Name of this node in messages: the host; in a job with several vendors also the backend of the node."""
    return os.environ.get(NODE_VARIABLE, socket.gethostname())


@dataclass
class RankFailure:
    """How one rank failed; its error file has the same fields.

    Attributes:
        type: class name of the error.
        finding: what is wrong, in one line.
        advice: what to do; empty: the finding says it.
        details: further lines.
        key: of the configuration, if it is wrong.
        file: that is wrong.
        signal: name of the signal that ended the process.
        exit_code: exit code of the process; negative for a signal.
        time: seconds since the epoch.
        caused_by_peer: this rank lost another rank, or waited for it in vain; the other rank is the cause.
        timed_out: it waited for the other rank until a time-out.
        is_exp_error: whether the error is one of exp's; then its exit code becomes that of the command.
        names_type: whether the finding says by itself what kind of error it is.
    """

    rank: int
    local_rank: int
    type: str
    finding: str
    advice: str = ""
    details: list[str] = field(default_factory=list)
    key: str | None = None
    file: str | None = None
    signal: str | None = None
    exit_code: int = EXIT_FAILED
    host: str = field(default_factory=lambda: node_name())
    time: float = field(default_factory=time.time)
    pid: int | None = None
    caused_by_peer: bool = False
    timed_out: bool = False
    is_exp_error: bool = False
    names_type: bool = False

    @classmethod
    def of(cls, error: ExpError, rank: int, local_rank: int, **others: Any) -> RankFailure:
        """The failure of a rank by one of exp's errors; ``others``: further attributes."""
        file = None if error.file is None else os.fspath(error.file)
        return cls(
            rank, local_rank, type(error).__name__, error.finding, error.advice, error.details, error.key, file,
            error.signal, error.exit_code, is_exp_error=True, names_type=True, **others,
        )  # fmt: skip

    @property
    def error(self) -> ExpError:
        """The error as one of exp's, which formats it."""
        parts: Any = {name: getattr(self, name) for name in ("key", "file", "rank", "signal")}
        return ExpError(self.finding, self.advice, self.details, **parts)

    @property
    def headline(self) -> str:
        """Finding and advice."""
        return self.error.headline


def describe_exit(beat: Heartbeat, code: int) -> RankFailure:
    """The failure of a rank whose process ended before its work was done, and wrote no error file.

    Args:
        beat: the rank's last heartbeat.
        code: exit code of its process; negative for a signal.
    """
    name = signal_name(-code) if code < 0 else None
    when = f" in step {beat.step}" if beat.step else ""
    finding = f"exited with code {code}{when}, without an error and before its work was done (os._exit?)"
    if name is not None:
        finding = f"killed by {name}" + (f" ({_SIGNAL_HINTS[name]})" if name in _SIGNAL_HINTS else "")
    return RankFailure(
        beat.rank, beat.local_rank, name or "SystemExit", finding, signal=name, exit_code=code or EXIT_FAILED,
        pid=beat.pid, names_type=True,
    )  # fmt: skip


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
            self._changed, self._fresh_until = changed, now + Patience.RELIST_S
        if now < self._fresh_until:
            files = self.folder.logs.glob("rank*.error.json")
            self._errors = [error for error in map(read_json, files) if error is not None]
        return self._errors

    def record_lost(self, why: str) -> None:
        """Record, for all workers of this node that are gone and had not reached their end, why they are."""
        for beat in running_ranks(str(self.scratch), alive=False):
            self.write(replace(describe_exit(beat, EXIT_FAILED), type=AGENT_LOST, finding=why))

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
        beats = heartbeat.read(scratch)
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
            local_world_size: ranks per node; 0: nodes have different numbers.

        Returns:
            One failure per rank, the most likely cause first. Times alone do not show it: clocks of nodes differ, and
            on a busy node the error file of a killed rank comes late. The order is: killed by SIGKILL, which is never a
            consequence of another rank's failure; errors and crashes, by time; ranks that lost another rank.
        """
        folder, deadline = self.folder, time.monotonic() + Patience.OTHER_NODES_S
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
        size = local_world_size or world_size
        hosts = {rank: f"node {rank // size}" if local_world_size else "another node" for rank in lost}
        return [
            *(RankFailure(rank, rank % size, "RankLost", why, host=hosts[rank]) for rank in lost),
            *failures,
        ]


@dataclass
class HangDetector:
    """Watches the heartbeats of the workers of one node, or of one worker.

    Time in which this process does not run is not counted: on a sleeping laptop the workers do not run, either.

    Attributes:
        failures: error files of the run; the detectors of several nodes agree in its folder on the rank that hangs.
        scratch: folder with the heartbeats of the workers.
        nnodes: number of detectors in the job: nodes, or ranks if each detector watches one worker.
        timeout_s: time-out of collectives in seconds; 0.9 of it is the limit for checkpoints and for the first time in
            a stage.
        step_timeout_s: limit for one stage of a step, in seconds; None: that for checkpoints; 0: never end a run.
    """

    failures: Failures
    scratch: str
    nnodes: int
    timeout_s: float
    step_timeout_s: float | None
    _stalled: list[tuple[Heartbeat, float]] = field(default_factory=list)
    _polled_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = self.failures.folder
        self._report_file = self.folder.logs / f"stuck-{socket.gethostname()}-{os.getpid()}.json"

    def poll(self, errors: Sequence[Mapping[str, Any]]) -> int | None:
        """Look for a rank that hangs; called a few times per second.

        Args:
            errors: content of the error files in the run folder.

        Returns:
            The process id of the rank that hangs, if it is one of this node; its error file is written. Otherwise None.
        """
        now = time.monotonic()
        elapsed_s, self._polled_at = min(now - self._polled_at, 1.0), now
        beats = heartbeat.read(self.scratch)
        if not beats or any(beat.pid == 0 for beat in beats):
            return None
        previous = self._stalled if len(self._stalled) == len(beats) else [(beat, 0.0) for beat in beats]
        self._stalled = [
            (beat, stalled_s + elapsed_s if beat == last else 0.0) for beat, (last, stalled_s) in zip(beats, previous)
        ]
        collectives_timed_out = bool(errors) and all(error["caused_by_peer"] and error["timed_out"] for error in errors)
        failed = {error["rank"] for error in errors} if collectives_timed_out else set()
        active = [
            (beat, stalled_s)
            for beat, stalled_s in self._stalled
            if beat.stage != Stage.DONE and beat.rank not in failed
        ]
        if any(not is_alive(beat.pid) for beat, _ in active):
            return None  # the others have lost this rank, and torch's agent ends them
        if collectives_timed_out:
            return self._agree_on_hung_rank(active, only_busy=True)
        if self.step_timeout_s == 0 or not active or any(stalled_s <= self._limit(beat) for beat, stalled_s in active):
            self.close()
            return None
        return self._agree_on_hung_rank(active)

    def close(self) -> None:
        """Remove this node's view from the run folder: the job is over, or its ranks make progress again."""
        self._report_file.unlink(missing_ok=True)

    def _limit(self, beat: Heartbeat) -> float:
        """Seconds that a rank may stay in the stage of its last heartbeat.

        From outside, a compilation or a file system that stalls looks like a hang. The others wait for this rank as
        long as collectives may take, so by default only the last tenth of that is taken from it; if nobody waits,
        nothing.
        """
        alone = self.nnodes * len(self._stalled) == 1
        most = float("inf") if alone else Patience.HANG_SHARE * self.timeout_s
        if beat.stage in _UNTIMED:
            return float("inf")
        if self.step_timeout_s is None or beat.stage == Stage.CHECKPOINT or beat.times <= 1:
            return most
        return self.step_timeout_s

    def _agree_on_hung_rank(self, active: list[tuple[Heartbeat, float]], only_busy: bool = False) -> int | None:
        """Agree with the other nodes on the rank that hangs; return its process id if it is one of this node.

        Args:
            active: heartbeats of the ranks that have neither ended nor failed, and seconds since they last changed.
            only_busy: some ranks timed out in a collective, so the rank that hangs is not waiting in one.
        """
        report = read_json(self._report_file)
        if report is None:
            stacks = _stacks(self.scratch, [beat for beat, _ in active])
            report = [_describe(beat, stalled_s, stacks[beat.pid]) for beat, stalled_s in active]
            for entry in report:
                stack = entry.pop("stack") or "(none: it does not answer)"
                with self.folder.log_file(entry["rank"]).open("a", encoding="utf-8") as log:
                    log.write(f"rank {entry['rank']}: {entry['finding']}; its stack:\n{stack}\n")
            write_json(self._report_file, report)
        reports = [read_json(path) for path in self.folder.logs.glob("stuck-*.json")]
        if len(reports) < self.nnodes:
            return None  # ranks of another node still make progress, or are in a stage with a longer limit
        suspects = [
            entry
            for node_report in reports
            for entry in node_report or []
            if not (only_busy and entry["in_collective"])
        ]
        first = min(suspects, key=lambda entry: list(entry["blame_key"]), default=None)
        if first is None or first not in report:
            return None  # the node of that rank reports it
        about = {name: first[name] for name in ("rank", "local_rank", "finding", "details", "pid")}
        hung = RankFailure(type="RankHung", **about)
        self.failures.write(hung)
        self._stalled = []
        self.close()
        return int(first["pid"])


def _describe(beat: Heartbeat, stalled_s: float, stack: str) -> dict[str, Any]:
    """One rank in a node's view; the rank with the smallest ``blame_key`` over all nodes is the one that hangs."""
    stopped = _STOPPED.get("".join(proc_stat(beat.pid)[:1]), "")
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    in_collective = any(mark in frame for frame in frames[:6] for mark in _WAITING)
    where = "outside of steps" if beat.stage in _UNTIMED else Stage(beat.stage).name.lower().replace("_", " ")
    finding = f"no progress for {stalled_s:.0f} s in step {beat.step}, {where}{stopped}"
    return {
        "in_collective": in_collective and not stopped,
        "blame_key": [not stopped, beat.step, beat.stage, in_collective, beat.times, beat.rank],
        "rank": beat.rank,
        "local_rank": beat.local_rank,
        "pid": beat.pid,
        "finding": finding,
        "details": [line.strip() for line in frames[:_SHOWN_FRAMES]],
        "stack": stack,
    }


def _stacks(scratch: str, beats: list[Heartbeat]) -> dict[int, str]:
    """The stacks of workers, by process id; the stack of a stopped process is empty."""
    files = {beat.pid: heartbeat.stack_file(scratch, beat.local_rank) for beat in beats}
    sizes = {pid: file.stat().st_size if file.is_file() else 0 for pid, file in files.items()}
    for beat in beats:
        with contextlib.suppress(OSError):
            os.kill(beat.pid, heartbeat.STACK_SIGNAL)
    time.sleep(Patience.STACKS_S)
    stacks = {}
    for pid, file in files.items():
        text = file.read_bytes()[sizes[pid] :].decode(errors="replace") if file.is_file() else ""
        # The main thread, which received the signal, is dumped last; it matters most, so put it first.
        *others, main = [thread for thread in text.split("\n\n") if "most recent call first" in thread] or [""]
        stacks[pid] = "\n\n".join([main, *others])
    return stacks
