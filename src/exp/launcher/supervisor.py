"""Supervises the agent or a single worker: forwards signals, kills a hanging rank, leaves no process behind.

If no rank makes progress, the rank that hangs is the one for which the others wait.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Callable, Mapping, Sequence, Union

from exp import console
from exp.errors import EXIT_PREEMPTED
from exp.launcher.base import Launcher
from exp.launcher.outcome import Outcome
from exp.runs import heartbeat, signals
from exp.runs.failures import Failures, RankFailure
from exp.runs.files import read_json, write_json
from exp.runs.folder import RunFolder
from exp.runs.heartbeat import Heartbeat, Stage, running_ranks
from exp.runs.lock import is_alive, proc_stat
from exp.runs.scratch import ENDING_FLAG, PREEMPT_FLAG, PREEMPTED_FILE, RUN_FOLDER_FILE
from exp.runs.signals import signal_name
from exp.worker.processes import ForkedProcess, kill_job

if TYPE_CHECKING:
    from exp.launcher.run import FrozenRun

__all__ = ["HangDetector", "Supervisor"]

Process = Union["subprocess.Popen[bytes]", ForkedProcess]

_SIGNAL_PATIENCE_S = 3.0  # time for the workers to tell the trackers, and to restore the terminal
_ERROR_PATIENCE_S = 6.0  # torch's agent itself would wait half a minute for ranks that ignore SIGTERM
_RESTART_PATIENCE_S = 60.0  # with restarts: the agent needs time to start the workers again
_SHARE = 0.9  # of the time-out of collectives: the launcher reports before the waiting ranks time out
_STACKS_WITHIN_S = 1.5
_SHOWN_FRAMES = 12
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/exp/distributed.py")
_UNTIMED = (Stage.FREE, Stage.DONE)
_STOPPED = {"T": "; it is stopped (SIGSTOP)", "D": "; it is stuck in the kernel"}


@dataclass
class Supervisor:
    """Supervises one process, torch's agent or a worker, and all processes that it starts.

    Attributes:
        launcher: its configuration has the time limits.
        scratch: the private folder of the job on this node.
        signals: preemption signals: on the first the workers save their state, on a second of the same number they end
            at once. All other processes of the job are started with these signals blocked, because a scheduler may send
            them to all.
        failures: the failures of the ranks; None: the worker reports the run folder once all ranks have met.
        notices: preemption signals received so far.
        received: the signal that ended the job.
        killed: whether this process ended the job, because a rank had failed or did not end.
        unkillable: ids of processes that survived SIGKILL.
    """

    launcher: Launcher
    run: FrozenRun
    scratch: str
    signals: Sequence[signal.Signals]
    failures: Failures | None = None
    notices: list[int] = field(default_factory=list)
    received: int | None = None
    killed: bool = False
    unkillable: list[int] = field(default_factory=list)
    _detector: HangDetector | None = None
    _deadline: float | None = None
    _session: int | None = None

    def __post_init__(self) -> None:
        self._saves = self.run.task.saves_state

    def watch(self, start: Callable[[IO[bytes]], Process], log: Path, nproc: int, groups: int) -> int:
        """Start a process; return its exit code when it and all processes that it started have ended.

        Args:
            start: takes a file for stderr; starts the process, with the private folder in its environment.
            log: that file.
            nproc: workers to supervise.
            groups: number of supervisors in the job; together they find the rank that hangs.
        """
        heartbeat.make_file(self.scratch, nproc)
        try:
            with signals.handle_signals(self._on_signal):
                with signals.block_signals(self.signals), log.open("ab") as stderr:
                    process = start(stderr)
                self._session = process.pid
                while process.poll() is None:
                    self._look(groups)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.2)
                self._meet()
        finally:
            if (
                self.launcher.is_external
            ):  # this job is over, and the outer launcher sends SIGTERM when the first rank ends
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if self._detector is not None:
                self._detector.close()
            self.unkillable = kill_job(self.scratch, self._session)
            console.make_console().show_cursor()  # a worker that was killed has not done it
        assert process.returncode is not None
        return process.returncode

    def outcome(self, ended: Callable[[], Outcome]) -> Outcome:
        """The outcome of the job.

        Args:
            ended: returns it if neither preemption nor another signal has ended the job.
        """
        preempted = read_json(Path(self.scratch, PREEMPTED_FILE))
        if preempted is not None:
            notices = [signal_name(number) for number in self.notices]
            outcome = Outcome(EXIT_PREEMPTED, preempted={**preempted, "signals": notices})
        else:
            outcome = ended() if self.received is None else Outcome.of_signal(self.received, self._saves)
        attempts = Counter(path.name.split("-")[1] for path in Path(self.scratch).glob("attempt-*"))
        by_others = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        outcome.restarts = max(by_others, max(attempts.values(), default=1) - 1)
        outcome.unkillable = self.unkillable
        return outcome

    def _meet(self) -> None:
        """Look for the run folder that the worker reports, if it is not known."""
        joined = (read_json(Path(self.scratch, RUN_FOLDER_FILE)) or {}) if self.failures is None else {}
        if "folder" in joined:
            self.failures = Failures(RunFolder(joined["folder"]), self.scratch)

    def _look(self, groups: int) -> None:
        """End a rank that hangs, and the whole job after a signal or if ranks do not end after a failure."""
        now = time.monotonic()
        self._meet()
        if self.received is not None and self._deadline is None:
            self._interrupt(now)
        elif self._deadline is not None and now > self._deadline:
            self._kill()
        elif self.failures is not None and self.received is None:
            if self._detector is None:
                limits = self.launcher.config.timeout_s, self.launcher.config.step_timeout_s
                self._detector = HangDetector(self.failures, self.scratch, groups, *limits)
            errors = self.failures.read()
            hung = self._detector.look(errors)
            if hung is not None:  # then it is handled like a rank that died by itself
                with contextlib.suppress(ProcessLookupError):
                    os.kill(hung, signal.SIGKILL)
            # Torch's agent ends the other ranks, and may restart all; a restarted rank removes its error file.
            restarts = self.launcher.config.max_restarts > 0
            patience_s = _RESTART_PATIENCE_S if restarts else _ERROR_PATIENCE_S
            ends = self._is_explained(errors) and (not restarts or any(running_ranks(self.scratch)))
            self._deadline = (self._deadline or now + patience_s) if ends else None

    def _is_explained(self, errors: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the failures name a cause, or none is to be expected from this node.

        A rank that is gone without an error will be explained by its guard, or by the agent if the guard was killed,
        however busy the node is.
        """
        explained = {error["pid"] for error in errors}
        gone = any(beat.pid not in explained for beat in running_ranks(self.scratch, alive=False))
        return any(not error["caused_by_peer"] for error in errors) or (bool(errors) and not gone)

    def _interrupt(self, now: float) -> None:
        """After a signal: ask the workers to end; they are killed if they do not."""
        running = running_ranks(self.scratch)
        Path(self.scratch, ENDING_FLAG).touch()
        for beat in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGINT)
        self._deadline = now + (_SIGNAL_PATIENCE_S if running else 0.0)

    def _kill(self) -> None:
        """Kill the job. The ranks that did not end after another one had failed are not the cause."""
        if self.failures is not None and self.received is None:
            for beat in running_ranks(self.scratch):
                ended = "ended, because another rank had failed"
                self.failures.write(
                    RankFailure(beat.rank, beat.local_rank, "Ended", ended, pid=beat.pid, caused_by_peer=True)
                )
        self.killed = True
        Path(self.scratch, ENDING_FLAG).touch()
        kill_job(self.scratch, self._session)

    def _on_signal(self, number: int, frame: object) -> None:
        """Preemption: set the flag. Another signal, or a second preemption: end the job."""
        del frame
        # An outer launcher repeats the signal when the first rank has ended.
        early = self.failures is None and number == signal.SIGTERM  # the ranks have not met: there is nothing to save
        if (
            self._saves
            and not early
            and number in self.signals
            and (self.launcher.is_external or number not in self.notices)
        ):
            self.notices.append(number)
            Path(self.scratch, PREEMPT_FLAG).touch()
        elif self.received is None:
            self.received, self._deadline = number, None
        else:
            self._deadline = 0.0  # at once


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
    _still: list[tuple[Heartbeat, float]] = field(default_factory=list)
    _looked: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = self.failures.folder
        self._view = self.folder.logs / f"stuck-{socket.gethostname()}-{os.getpid()}.json"

    def look(self, errors: Sequence[Mapping[str, Any]]) -> int | None:
        """Look for a rank that hangs; called a few times per second.

        Args:
            errors: content of the error files in the run folder.

        Returns:
            The process id of the rank that hangs, if it is one of this node; its error file is written. Otherwise None.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now
        beats = heartbeat.read(self.scratch)
        if not beats or any(beat.pid == 0 for beat in beats):
            return None
        before = self._still if len(self._still) == len(beats) else [(beat, 0.0) for beat in beats]
        self._still = [(beat, still + passed if beat == last else 0.0) for beat, (last, still) in zip(beats, before)]
        timed_out = (re.search("time.?out|timed out", error["message"], re.IGNORECASE) for error in errors)
        in_vain = bool(errors) and all(error["caused_by_peer"] for error in errors) and all(timed_out)
        failed = {error["rank"] for error in errors} if in_vain else set()
        going = [(beat, still) for beat, still in self._still if beat.stage != Stage.DONE and beat.rank not in failed]
        if any(not is_alive(beat.pid) for beat, _ in going):
            return None  # the others have lost this rank, and torch's agent ends them
        if in_vain:
            return self._judge(going, only_busy=True)
        if self.step_timeout_s == 0 or not going or any(still <= self._limit(beat) for beat, still in going):
            self.close()
            return None
        return self._judge(going)

    def close(self) -> None:
        """Remove this node's view from the run folder: the job is over, or its ranks make progress again."""
        self._view.unlink(missing_ok=True)

    def _limit(self, beat: Heartbeat) -> float:
        """Seconds that a rank may stay in the stage of its last heartbeat.

        From outside, a compilation or a file system that stalls looks like a hang. The others wait for this rank as
        long as collectives may take, so by default only the last tenth of that is taken from it; if nobody waits,
        nothing.
        """
        alone = self.nnodes * len(self._still) == 1
        most = float("inf") if alone else _SHARE * self.timeout_s
        if beat.stage in _UNTIMED:
            return float("inf")
        if self.step_timeout_s is None or beat.stage == Stage.CHECKPOINT or beat.times <= 1:
            return most
        return self.step_timeout_s

    def _judge(self, going: list[tuple[Heartbeat, float]], only_busy: bool = False) -> int | None:
        """Agree with the other nodes on the rank that hangs; return its process id if it is one of this node.

        Args:
            going: heartbeats of the ranks that have neither ended nor failed, and seconds since they last changed.
            only_busy: some ranks timed out in a collective, so the rank that hangs is not waiting in one.
        """
        mine = read_json(self._view)
        if mine is None:
            stacks = _stacks(self.scratch, [beat for beat, _ in going])
            mine = [_describe(beat, still, stacks[beat.pid]) for beat, still in going]
            for each in mine:
                head, stack = each["message"].splitlines()[0], each.pop("stack") or "(none: it does not answer)"
                with self.folder.log_file(each["rank"]).open("a", encoding="utf-8") as log:
                    log.write(f"rank {each['rank']}: {head}; its stack:\n{stack}\n")
            write_json(self._view, mine)
        views = [read_json(path) for path in self.folder.logs.glob("stuck-*.json")]
        if len(views) < self.nnodes:
            return None  # ranks of another node still make progress, or are in a stage with a longer limit
        held_up = [each for view in views for each in view or [] if not (only_busy and each["waits"])]
        first = min(held_up, key=lambda each: list(each["order"]), default=None)
        if first is None or first not in mine:
            return None  # the node of that rank reports it
        hung = RankFailure(first["rank"], first["local_rank"], "RankHung", first["message"], pid=first["pid"])
        self.failures.write(hung)
        self._still = []
        self.close()
        return int(first["pid"])


def _describe(beat: Heartbeat, still: float, stack: str) -> dict[str, Any]:
    """One rank in a node's view; the rank with the smallest ``order`` over all nodes is the one that hangs."""
    stopped = _STOPPED.get("".join(proc_stat(beat.pid)[:1]), "")
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    waits = any(mark in frame for frame in frames[:6] for mark in _WAITING)
    where = "outside of steps" if beat.stage in _UNTIMED else Stage(beat.stage).name.lower().replace("_", " ")
    head = f"no progress for {still:.0f} s in step {beat.step}, {where}{stopped}"
    return {
        "waits": waits and not stopped,
        "order": [not stopped, beat.step, beat.stage, waits, beat.times, beat.rank],
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
    found = {}
    for pid, file in files.items():
        text = file.read_bytes()[sizes[pid] :].decode(errors="replace") if file.is_file() else ""
        # The main thread, which received the signal, is dumped last; it matters most, so put it first.
        *others, main = [thread for thread in text.split("\n\n") if "most recent call first" in thread] or [""]
        found[pid] = "\n\n".join([main, *others])
    return found
