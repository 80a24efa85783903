"""Runs the process that starts the workers, or is one: passes signals on, ends what hangs, leaves nothing behind.

A rank hangs if all stand still, and it holds up the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from exp.errors import EXIT_PREEMPTED
from exp.launcher.outcome import Failures, Outcome, RankFailure, unfinished, waited_in_vain
from exp.launcher.processes import JOB_VARIABLE, is_alive, kill_job, start_module
from exp.launcher.rank import JOINED, SCRATCH_VARIABLE, this_host
from exp.runs import status
from exp.runs.files import read_json, write_json
from exp.runs.folder import RunFolder
from exp.runs.lock import stat_of
from exp.runs.status import PREEMPT_SIGNAL, Beat, Stage, handle_signals, signal_name

if TYPE_CHECKING:
    from exp.launcher.base import Launcher

__all__ = ["HangDetector", "Supervisor"]

_TERM_PATIENCE_S = 4.0
_GONE_PATIENCE_S = 1.5  # less than a rank waits after it has lost another one
_ERROR_PATIENCE_S = 6.0  # torch's agent itself would wait half a minute for ranks that ignore SIGTERM
_RESTART_PATIENCE_S = 60.0  # the agent starts the workers again
_LEAST_S = 60.0
_LEAST_FOR_HOOKS_S = 600.0  # the user's may do anything now and then, such as send a file away
_TIMES_SLOWEST = 20
_SHARE = 0.9  # of the time-out of collectives, so that we speak before the ranks that wait do
_STACKS_WITHIN_S = 1.5
_SHOWN_FRAMES = 12
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/exp/engine/distributed.py")
_NAMES = {
    Stage.DATA: "waiting for data", Stage.FORWARD: "forward pass", Stage.BACKWARD: "backward pass and update",
    Stage.HOOKS: "hooks", Stage.VALIDATION: "validation", Stage.METRICS: "metrics",
    Stage.AFTER_VALIDATION: "hooks after a validation", Stage.CHECKPOINT: "writing a checkpoint", Stage.TEST: "test",
    Stage.TEST_METRICS: "metrics",
}  # fmt: skip
_STOPPED = {"T": "; it is stopped (SIGSTOP)", "D": "; it is stuck in the kernel"}


@dataclass
class Supervisor:
    """One process, torch's agent or a worker, with all that it starts."""

    launcher: Launcher
    """Whose limits of time hold."""
    scratch: str
    """The private folder of the job on this node."""
    failures: Failures | None
    """Of the run; None: the worker says which folder it is, once it has met the others."""
    saves: bool
    """Whether the workers can save their state when they have to end."""
    signals: Sequence[signal.Signals]
    """On these they do, and on a second one of the same kind they end at once. No process of the job but this one ever
    sees them: who sends them may send them to all."""
    local_rank: int | None = None
    """Of the only worker to watch; None: all of this node."""
    notices: list[int] = field(default_factory=list)
    """Signals on which the workers were asked to save."""
    received: int | None = None
    """The signal that ended the job."""
    killed: bool = False
    """Whether this process ended the job, because a rank had failed or did not end."""
    unkillable: list[int] = field(default_factory=list)
    """Processes that were still there at the end."""
    _job: str = field(default_factory=lambda: secrets.token_hex(8))
    _process: subprocess.Popen[bytes] | None = None
    _detector: HangDetector | None = None
    _deadline: float | None = None
    _gone_since: float | None = None

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, nproc: int, groups: int
    ) -> tuple[int, int]:
        """Run a module of ours to the end of all that it starts.

        Args:
            command: the module's dotted name, and its arguments.
            environment: its variables.
            log: where its stderr goes.
            nproc: workers of this node.
            groups: how many supervisors of the job watch workers, which agree on the one that hangs.

        Returns:
            Its process id and exit code; negative for a signal.
        """
        environment = {**environment, JOB_VARIABLE: self._job, SCRATCH_VARIABLE: self.scratch}
        status.make_file(self.scratch, nproc)
        try:
            with handle_signals(self._on_signal):
                with status.held_back(self.signals), log.open("ab") as stderr:
                    self._process = start_module(*command, environment=environment, stderr=stderr)
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(timeout=0.2)
                        break
                    self._look(groups)
        finally:
            if self.launcher.joins:  # those outside end the others when the first has ended: that comes too late
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if self._detector is not None:
                self._detector.close()
            self.unkillable = kill_job(self._job)
        return self._process.pid, self._process.returncode

    def outcome(self) -> Outcome | None:
        """Of a job that was preempted or interrupted; None: it has ended by itself."""
        preempted = status.preempted_at(self.scratch)
        if preempted is None and self.received == PREEMPT_SIGNAL and not self.saves:
            preempted = {"step": None}
        if preempted is not None:
            notices = [signal_name(number) for number in self.notices]
            return Outcome(EXIT_PREEMPTED, preempted={**preempted, "signals": notices})
        if self.received is None:
            return None
        return Outcome(128 + self.received, interrupted_by=signal_name(self.received))

    def _look(self, groups: int) -> None:
        if self.failures is None:
            joined = read_json(Path(self.scratch, JOINED)) or {}
            self.failures = Failures(RunFolder(joined["folder"]), self.scratch) if "folder" in joined else None
        failures, now = self.failures, time.monotonic()
        if failures is not None and self.received is None and not self.killed:
            if self._detector is None:
                limits = self.launcher.config.timeout_s, self.launcher.config.step_timeout_s
                self._detector = HangDetector(failures, self.scratch, groups, *limits, self.local_rank)
            hung = self._detector.look()
            if hung is not None:  # what follows is as if it had died by itself
                with contextlib.suppress(ProcessLookupError):
                    os.kill(hung, signal.SIGKILL)
                time.sleep(0.2)
                self.killed = is_alive(hung)  # stuck in the kernel: its parent waits for it
            # A rank that leaves with exit code 0 before its end is none that has failed, to torch's agent.
            gone = unfinished(self.scratch, alive=False)
            self._gone_since = (self._gone_since or now) if gone else None
            if self._gone_since is not None and now - self._gone_since > _GONE_PATIENCE_S:
                failures.write_lost()
            # Torch's agent ends the other ranks, and may start all again: a rank that does so removes its error file.
            restarts = self.launcher.config.max_restarts > 0
            failed = any(failures.folder.logs.glob("rank*.error.json")) and not (
                restarts and not unfinished(self.scratch)
            )
            patience_s = _RESTART_PATIENCE_S if restarts else _ERROR_PATIENCE_S
            self._deadline = (self._deadline or now + patience_s) if failed or self.killed else None
        if self._deadline is not None and now > self._deadline:
            self._end()

    def _end(self) -> None:
        """End the workers, so that torch's agent reports how the first has ended; where that was not enough, all."""
        others = unfinished(self.scratch)
        if self.failures is None or self.received is not None or self.killed or not others:
            self.killed = True
            kill_job(self._job)
            return
        for local_rank, beat in others:
            ended = "ended, because another rank had failed"
            self.failures.write(RankFailure(beat.rank, local_rank, "Ended", ended, pid=beat.pid, of_peer=True))
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)
        self._deadline = None
        if self.launcher.config.max_restarts == 0:
            self.killed, self._deadline = True, time.monotonic() + _TERM_PATIENCE_S

    def _on_signal(self, number: int, frame: object) -> None:
        """Preempted: pass it on. First signal: have the process end its workers. Second, or preempted twice: kill."""
        del frame
        again = number in self.notices
        if self.saves and number in self.signals and (self.launcher.joins or not again):
            self.notices.append(number)  # those outside repeat it when the first rank has ended
            status.PreemptionFlag(self.scratch).set()
        elif self.received is None:
            self.received = number
            deaf = again or signal.SIGTERM in self.signals
            self._deadline = 0.0 if deaf else time.monotonic() + _TERM_PATIENCE_S
            if not deaf and self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
        else:
            self._deadline = 0.0


@dataclass
class HangDetector:
    """Watches the workers of one node, or one of them.

    Time that nobody watches does not count: on a laptop asleep this process stands still with the workers.
    """

    failures: Failures
    """Of the run; several nodes agree in its folder on whom to name."""
    scratch: str
    """Where the workers leave their heartbeats."""
    nnodes: int
    """Nodes of the job; where each process watches its own worker only, how many these are."""
    timeout_s: float
    """Of collectives: longest for anything."""
    step_timeout_s: float | None
    """Longest for what belongs to a step; None: from the slowest so far; 0: never ends a run."""
    local_rank: int | None = None
    """Of the only worker to watch; None: all."""
    _still: list[tuple[Beat, float]] = field(default_factory=list)
    _slowest: float = 0.0
    _looked: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = self.failures.folder
        self._view = self.folder.logs / f"stuck-{this_host()}-{os.getpid()}.json"
        for stale in self.folder.logs.glob("stuck-*.json"):
            stale.unlink()

    def look(self) -> int | None:
        """Called a few times a second; names the rank that hangs (its error file) and returns its process's id."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now
        beats = [beat for rank, beat in enumerate(status.read(self.scratch)) if self.local_rank in (None, rank)]
        if not beats or any(beat.pid == 0 for beat in beats):
            return None
        before = self._still if len(self._still) == len(beats) else [(beat, 0.0) for beat in beats]
        self._still = [(beat, still + passed if beat == last else 0.0) for beat, (last, still) in zip(beats, before)]
        for (last, still), beat in zip(before, beats):
            if last != beat and last.pid == beat.pid and last.stage in _NAMES and last.stage != Stage.CHECKPOINT:
                self._slowest = max(self._slowest, still)
        errors = [read_json(path) or {} for path in self.folder.logs.glob("rank*.error.json")]
        in_vain = bool(errors) and all(map(waited_in_vain, errors))
        failed = {error["rank"] for error in errors} if in_vain else set()
        going = [(beat, still) for beat, still in self._still if beat.stage != Stage.DONE and beat.rank not in failed]
        if any(not is_alive(beat.pid) for beat, _ in going):
            return None  # it is the one that the others have lost, and torch's agent ends them
        if in_vain:
            return self._judge(going, only_busy=True)
        if self.step_timeout_s == 0 or not going or any(still <= self._limit(beat) for beat, still in going):
            self.close()
            return None
        return self._judge(going)

    def close(self) -> None:
        """Withdraw what this node has written: the job is over, or its ranks go on."""
        with contextlib.suppress(FileNotFoundError):
            self._view.unlink()

    def _limit(self, beat: Beat) -> float:
        """Seconds that a rank may stand still where it is."""
        most = _SHARE * self.timeout_s
        if beat.stage not in _NAMES:
            return float("inf")
        if beat.stage == Stage.CHECKPOINT or beat.times <= 1:
            return most
        if self.step_timeout_s is not None:
            return self.step_timeout_s
        hooks = beat.stage in (Stage.HOOKS, Stage.AFTER_VALIDATION)
        return min(most, max(_LEAST_FOR_HOOKS_S if hooks else _LEAST_S, _TIMES_SLOWEST * self._slowest))

    def _judge(self, going: list[tuple[Beat, float]], only_busy: bool = False) -> int | None:
        """Agree with the other nodes on the rank that holds up all; returns its process's id if it is one of ours.

        Args:
            going: ranks that have neither ended nor failed.
            only_busy: some have waited for another one until their time was up: it is none that waits itself.
        """
        mine = read_json(self._view)
        if mine is None:
            stacks = _stacks(self.scratch, [beat for beat, _ in going])
            mine = [_describe(beat, still, *stacks[beat.pid]) for beat, still in going if beat.pid in stacks]
            for each in mine:
                with self.folder.log_file(each["rank"]).open("a", encoding="utf-8") as log:
                    head, stack = each["message"].splitlines()[0], each["stack"] or "(none: it does not answer)"
                    log.write(f"rank {each['rank']}: {head}; its stack:\n{stack}\n")
            write_json(self._view, mine)
        views = [read_json(path) for path in self.folder.logs.glob("stuck-*.json")]
        if len(views) < self.nnodes:
            return None  # the ranks of another node still move, or may take longer where they are
        held_up = [each for view in views for each in view or [] if not (only_busy and each["waits"])]
        first = min(held_up, key=lambda each: list(each["order"]), default=None)
        if first is None or first not in mine:
            return None  # its own node names it
        hung = RankFailure(first["rank"], first["local_rank"], "RankHung", first["message"], pid=first["pid"])
        self.failures.write(hung)
        self._still = []
        self.close()
        return int(first["pid"])


def _describe(beat: Beat, still: float, local_rank: int, stack: str) -> dict[str, Any]:
    """One rank, for all nodes to compare; the one that holds up the others has the least ``order``."""
    stopped = _STOPPED.get(_state(beat.pid), "")
    frames = [line for line in stack.splitlines() if line.lstrip().startswith("File ")]
    waits = any(mark in frame for frame in frames[:6] for mark in _WAITING)
    where = _NAMES.get(Stage(beat.stage), "set-up" if beat.step == 0 else "between steps")
    head = f"no progress for {still:.0f} s in step {beat.step}, {where}{stopped}"
    return {
        "waits": waits and not stopped,
        "order": [not stopped, beat.step, beat.stage, waits, beat.times, beat.rank],
        "rank": beat.rank,
        "local_rank": local_rank,
        "pid": beat.pid,
        "message": "\n".join([head, *(f"  {line.strip()}" for line in frames[:_SHOWN_FRAMES])]),
        "stack": stack,
    }


def _stacks(scratch: str, beats: list[Beat]) -> dict[int, tuple[int, str]]:
    """Local rank and stack of workers, by process id; the stack of one that is stopped is empty."""
    files = {each.pid: (rank, status.stack_file(scratch, rank)) for rank, each in enumerate(status.read(scratch))}
    sizes = {pid: file.stat().st_size if file.is_file() else 0 for pid, (_, file) in files.items()}
    for beat in beats:
        with contextlib.suppress(OSError):
            os.kill(beat.pid, status.STACK_SIGNAL)
    time.sleep(_STACKS_WITHIN_S)
    found = {}
    for pid, (local_rank, file) in files.items():
        text = file.read_bytes()[sizes[pid] :].decode(errors="replace") if file.is_file() else ""
        # The main thread, which got the signal, comes last, and matters most.
        *others, main = [thread for thread in text.split("\n\n") if "most recent call first" in thread] or [""]
        found[pid] = local_rank, "\n\n".join([main, *others])
    return found


def _state(pid: int) -> str:
    """``R``, ``S``, ``D``, ``T`` (stopped), ...; empty: gone."""
    return "".join(stat_of(pid)[:1])
