"""Finds the rank that hangs: if no rank makes progress, it is the one for which the others wait."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.runs import heartbeat
from exp.runs.failures import Failures, RankFailure
from exp.runs.files import read_json, write_json
from exp.runs.heartbeat import Heartbeat, Stage
from exp.runs.lock import is_alive, proc_stat

if TYPE_CHECKING:
    pass

__all__ = ["HangDetector"]

_SHARE = 0.9  # of the time-out of collectives: the launcher reports before the waiting ranks time out
_STACKS_WITHIN_S = 1.5
_SHOWN_FRAMES = 12
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/exp/distributed.py")
_UNTIMED = (Stage.FREE, Stage.DONE)
_STOPPED = {"T": "; it is stopped (SIGSTOP)", "D": "; it is stuck in the kernel"}


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
        timed_out = (re.search("time.?out|timed out", error["message"], re.IGNORECASE) for error in errors)
        collectives_timed_out = bool(errors) and all(error["caused_by_peer"] for error in errors) and all(timed_out)
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
        most = float("inf") if alone else _SHARE * self.timeout_s
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
                head, stack = entry["message"].splitlines()[0], entry.pop("stack") or "(none: it does not answer)"
                with self.folder.log_file(entry["rank"]).open("a", encoding="utf-8") as log:
                    log.write(f"rank {entry['rank']}: {head}; its stack:\n{stack}\n")
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
        hung = RankFailure(first["rank"], first["local_rank"], "RankHung", first["message"], pid=first["pid"])
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
    head = f"no progress for {stalled_s:.0f} s in step {beat.step}, {where}{stopped}"
    return {
        "in_collective": in_collective and not stopped,
        "blame_key": [not stopped, beat.step, beat.stage, in_collective, beat.times, beat.rank],
        "rank": beat.rank,
        "local_rank": beat.local_rank,
        "pid": beat.pid,
        "message": "\n".join([head, *(f"  {line.strip()}" for line in frames[:_SHOWN_FRAMES])]),
        "stack": stack,
    }


def _stacks(scratch: str, beats: list[Heartbeat]) -> dict[int, str]:
    """The stacks of workers, by process id; the stack of a stopped process is empty."""
    files = {beat.pid: heartbeat.stack_file(scratch, beat.local_rank) for beat in beats}
    sizes = {pid: file.stat().st_size if file.is_file() else 0 for pid, file in files.items()}
    for beat in beats:
        with contextlib.suppress(OSError):
            os.kill(beat.pid, heartbeat.STACK_SIGNAL)
    time.sleep(_STACKS_WITHIN_S)
    stacks = {}
    for pid, file in files.items():
        text = file.read_bytes()[sizes[pid] :].decode(errors="replace") if file.is_file() else ""
        # The main thread, which received the signal, is dumped last; it matters most, so put it first.
        *others, main = [thread for thread in text.split("\n\n") if "most recent call first" in thread] or [""]
        stacks[pid] = "\n\n".join([main, *others])
    return stacks
