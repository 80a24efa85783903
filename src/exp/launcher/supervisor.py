"""Runs the process that starts the workers, or is one: passes signals on, ends what hangs, leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Mapping, Sequence

from exp.errors import EXIT_PREEMPTED
from exp.launcher.hang_detector import HangDetector, unfinished
from exp.launcher.outcome import Outcome, RankFailure, failure_of, write_error
from exp.launcher.processes import JOB_VARIABLE, handle_signals, is_alive, kill_job, signal_name, start_module
from exp.launcher.rank import JOINED, SCRATCH_VARIABLE
from exp.runs import status
from exp.runs.files import read_json
from exp.runs.folder import RunFolder
from exp.runs.status import PREEMPT_SIGNAL, PreemptionFlag, held_back, preempted_at

if TYPE_CHECKING:
    from exp.launcher.base import Launcher

__all__ = ["Supervisor"]

_TERM_PATIENCE_S = 4.0
_GONE_PATIENCE_S = 1.5  # less than a rank waits after it has lost another one
_ERROR_PATIENCE_S = 6.0  # torch's agent itself would wait half a minute for ranks that ignore SIGTERM
_RESTART_PATIENCE_S = 60.0  # the agent starts the workers again


@dataclass
class Supervisor:
    """One process, torch's agent or a worker, with all that it starts."""

    launcher: Launcher
    """Whose limits of time hold."""
    scratch: str
    """The private folder of the job on this node."""
    folder: RunFolder | None
    """The run folder; None: the worker says which it is, once it has met the others."""
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
                with held_back(self.signals), log.open("ab") as stderr:
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
        preempted = preempted_at(self.scratch)
        if preempted is None and self.received == PREEMPT_SIGNAL and not self.saves:
            preempted = {"step": None}
        if preempted is not None:
            notices = [signal_name(number) for number in self.notices]
            return Outcome(EXIT_PREEMPTED, preempted={**preempted, "signals": notices})
        if self.received is None:
            return None
        return Outcome(128 + self.received, interrupted_by=signal_name(self.received))

    def _look(self, groups: int) -> None:
        if self.folder is None:
            joined = read_json(Path(self.scratch, JOINED)) or {}
            self.folder = RunFolder(joined["folder"]) if "folder" in joined else None
        folder, now = self.folder, time.monotonic()
        if folder is not None and self.received is None and not self.killed:
            if self._detector is None:
                limits = self.launcher.config.timeout_s, self.launcher.config.step_timeout_s
                self._detector = HangDetector(folder, self.scratch, groups, *limits, self.local_rank)
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
                for local_rank, beat in gone:
                    write_error(folder, failure_of(beat, local_rank, None), self.scratch)
            # Torch's agent ends the other ranks, and may start all again: a rank that does so removes its error file.
            restarts = self.launcher.config.max_restarts > 0
            failed = any(folder.logs.glob("rank*.error.json")) and not (restarts and not unfinished(self.scratch))
            patience_s = _RESTART_PATIENCE_S if restarts else _ERROR_PATIENCE_S
            self._deadline = (self._deadline or now + patience_s) if failed or self.killed else None
        if self._deadline is not None and now > self._deadline:
            self._end()

    def _end(self) -> None:
        """End the workers, so that torch's agent reports how the first has ended; where that was not enough, all."""
        others = unfinished(self.scratch)
        if self.folder is None or self.received is not None or self.killed or not others:
            self.killed = True
            kill_job(self._job)
            return
        for local_rank, beat in others:
            ended = "ended, because another rank had failed"
            failure = RankFailure(beat.rank, local_rank, "Ended", ended, pid=beat.pid, of_peer=True)
            write_error(self.folder, failure, self.scratch)
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
            PreemptionFlag(self.scratch).set()
        elif self.received is None:
            self.received = number
            deaf = again or signal.SIGTERM in self.signals
            self._deadline = 0.0 if deaf else time.monotonic() + _TERM_PATIENCE_S
            if not deaf and self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
        else:
            self._deadline = 0.0
