"""Supervises the agent or a single worker: forwards signals, kills a hanging rank, leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
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
from exp.runs import heartbeat
from exp.runs.failures import Failures, HangDetector, Patience, RankFailure
from exp.runs.files import read_json, write_json
from exp.runs.folder import RunFolder
from exp.runs.heartbeat import running_ranks
from exp.runs.job import (
    ENDING_FLAG,
    NODES_FILE,
    PREEMPT_FLAG,
    PREEMPTED_FILE,
    RUN_FOLDER_FILE,
    block_signals,
    handle_signals,
    signal_name,
)
from exp.worker.processes import ForkedProcess, kill_job

if TYPE_CHECKING:
    from exp.launcher.base import FrozenRun

__all__ = ["Supervisor"]

Process = Union["subprocess.Popen[bytes]", ForkedProcess]


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
        end_signal: the signal that ended the job.
        killed: whether this process ended the job, because a rank had failed or did not end.
        unkillable: ids of processes that survived SIGKILL.
    """

    launcher: Launcher
    run: FrozenRun
    scratch: str
    signals: Sequence[signal.Signals]
    failures: Failures | None = None
    preempt_signals: list[int] = field(default_factory=list)
    end_signal: int | None = None
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
            with handle_signals(self._on_signal):
                with block_signals(self.signals), log.open("ab") as stderr:
                    process = start(stderr)
                self._session = process.pid
                while process.poll() is None:
                    self._poll(groups)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.2)
                self._discover_run_folder()
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
            notices = [signal_name(number) for number in self.preempt_signals]
            outcome = Outcome(EXIT_PREEMPTED, preempted={**preempted, "signals": notices})
        else:
            outcome = ended() if self.end_signal is None else Outcome.of_signal(self.end_signal, self._saves)
        attempts = Counter(path.name.split("-")[1] for path in Path(self.scratch).glob("attempt-*"))
        by_others = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        outcome.restarts = max(by_others, max(attempts.values(), default=1) - 1)
        outcome.unkillable = self.unkillable
        return outcome

    def _discover_run_folder(self) -> None:
        """Look for the run folder that the worker reports, if it is not known."""
        report = (read_json(Path(self.scratch, RUN_FOLDER_FILE)) or {}) if self.failures is None else {}
        if "folder" in report:
            self.failures = Failures(RunFolder(report["folder"]), self.scratch)

    def _poll(self, groups: int) -> None:
        """End a rank that hangs, and the whole job after a signal or if ranks do not end after a failure."""
        now = time.monotonic()
        self._discover_run_folder()
        nodes = Path(self.scratch, NODES_FILE)
        is_elastic = nodes.exists()  # the nodes of the job come and go
        if is_elastic:
            groups = int(nodes.read_text() or groups)
        if self.end_signal is not None and self._deadline is None:
            self._interrupt(now)
        elif groups == 0 and self.preempt_signals:  # this node waits for others, and has nothing to save
            write_json(Path(self.scratch, PREEMPTED_FILE), {"step": None})
            self._kill()
        elif self._deadline is not None and now > self._deadline:
            self._kill()
        elif self.failures is not None and self.end_signal is None:
            if self._detector is None:
                limits = self.launcher.config.timeout_s, self.launcher.config.step_timeout_s
                self._detector = HangDetector(self.failures, self.scratch, groups, *limits)
            self._detector.nnodes = groups
            errors = self.failures.read()
            hung = self._detector.poll(errors)
            if hung is not None:  # then it is handled like a rank that died by itself
                with contextlib.suppress(ProcessLookupError):
                    os.kill(hung, signal.SIGKILL)
            # Torch's agent ends the other ranks, and may restart all; a restarted rank removes its error file.
            restarts = self.launcher.config.max_restarts > 0 or is_elastic
            patience_s = Patience.RESTART_S if restarts else Patience.AFTER_ERROR_S
            ends = self._is_explained(errors) and (not restarts or any(running_ranks(self.scratch)))
            self._deadline = (self._deadline or now + patience_s) if ends else None

    def _is_explained(self, errors: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the failures name a cause, or none is to be expected from this node.

        A rank that is gone without an error will be explained by its guard, or by the agent if the guard was killed,
        however busy the node is.
        """
        explained = {error["pid"] for error in errors}
        has_unexplained_end = any(beat.pid not in explained for beat in running_ranks(self.scratch, alive=False))
        return any(not error["caused_by_peer"] for error in errors) or (bool(errors) and not has_unexplained_end)

    def _interrupt(self, now: float) -> None:
        """After a signal: ask the workers to end; they are killed if they do not."""
        running = running_ranks(self.scratch)
        Path(self.scratch, ENDING_FLAG).touch()
        for beat in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGINT)
        self._deadline = now + (Patience.AFTER_SIGNAL_S if running else 0.0)

    def _kill(self) -> None:
        """Kill the job. The ranks that did not end after another one had failed are not the cause."""
        if self.failures is not None and self.end_signal is None:
            for beat in running_ranks(self.scratch):
                ended = "ended, because another rank had failed"
                self.failures.write(
                    RankFailure(beat.rank, beat.local_rank, "SignalReceived", ended, pid=beat.pid, caused_by_peer=True)
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
            and (self.launcher.is_external or number not in self.preempt_signals)
        ):
            self.preempt_signals.append(number)
            Path(self.scratch, PREEMPT_FLAG).touch()
        elif self.end_signal is None:
            self.end_signal, self._deadline = number, None
        else:
            self._deadline = 0.0  # at once
