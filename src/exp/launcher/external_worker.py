"""The one worker that a process of launcher=external has started: waits for it, signals it, ends it when it hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from exp.launcher.joining import JOINED
from exp.launcher.processes import kill_job
from exp.launcher.pulse import Pulse
from exp.preemption import PREEMPT_SIGNAL
from exp.runfolder import RunFolder, read_json

if TYPE_CHECKING:
    from exp.launcher.external import ExternalLauncher
    from exp.preemption import PreemptionFlag

__all__ = ["PREEMPTION_SIGNALS", "WorkerWatch"]

PREEMPTION_SIGNALS = (PREEMPT_SIGNAL, signal.SIGTERM)
_ERROR_PATIENCE_S = 6.0


class WorkerWatch:
    """Waits for the worker, hands preemption on to it, and ends it when it hangs.

    Args:
        launcher: knows its place, and how long it may stand still.
        preemption_flag: for the worker; None: it has nothing to save.
        folder: where errors of other ranks end this one, which may wait for them for ever; None: nowhere.
        job: what marks its processes.
        scratch: its private folder.
    """

    def __init__(
        self,
        launcher: ExternalLauncher,
        preemption_flag: PreemptionFlag | None,
        folder: RunFolder | None,
        job: str,
        scratch: str,
    ) -> None:
        self.launcher = launcher
        self.scratch = scratch
        self.pulse: Pulse | None = None
        self.preemption_flag = preemption_flag
        self.folder = folder
        self.job = job
        self.told: list[int] = []
        self.received: int | None = None
        self._deadline: float | None = None

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until it has ended; returns its exit code, negative for a signal."""
        while True:
            try:
                return process.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                if not self.told and self.received is None:
                    self._end_what_hangs()
                failed = self.folder is not None and any(self.folder.logs.glob("rank*.error.json"))
                if failed and self._deadline is None:
                    self._deadline = time.monotonic() + _ERROR_PATIENCE_S
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self.told.append(signal.SIGKILL)
                    kill_job(self.job)

    def _end_what_hangs(self) -> None:
        """Kill the worker where it is the one that holds up the others: each process knows its own worker's beats."""
        if self.pulse is None:
            joined = read_json(Path(self.scratch, JOINED)) or {}
            if "folder" not in joined:
                return
            launcher, place = self.launcher, self.launcher.place
            self.pulse = Pulse(
                RunFolder(joined["folder"]),
                self.scratch,
                place.world_size,
                launcher.timeout_s,
                launcher.step_timeout_s,
                place.local_rank,
            )
        hung = self.pulse.look()
        if hung is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(hung, signal.SIGKILL)

    def close(self) -> None:
        """The worker has ended."""
        if self.pulse is not None:
            self.pulse.close()

    def on_signal(self, number: int, frame: object) -> None:
        """Preemption is passed on, however often it comes: those outside repeat it when the first rank has ended."""
        del frame
        if self.preemption_flag is not None and number in PREEMPTION_SIGNALS:
            if not self.told:
                self.preemption_flag.set()
            self.told.append(number)
        else:
            self.received = self.received or number
            self._deadline = 0.0
