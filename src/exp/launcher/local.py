"""launcher=local: one worker, in this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from exp.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError, Preempted
from exp.launcher.base import Launcher
from exp.launcher.outcome import Outcome, collect_failures, exit_code_of
from exp.launcher.processes import handle_signals, signal_name
from exp.launcher.rank import RankInfo
from exp.preemption import PREEMPT_SIGNAL

if TYPE_CHECKING:
    from exp.preemption import PreemptionFlag
    from exp.runfolder import RunFolder

__all__ = ["LocalLauncher"]


class LocalLauncher(Launcher):
    """Runs the only worker here."""

    def check(self, nproc: int) -> None:
        """Refuse several workers, restarts and nodes."""
        if nproc != 1:
            raise ConfigError(f"nproc={nproc} needs launcher=torchrun; launcher=local runs one process, this one")
        if self.max_restarts:
            raise ConfigError("launcher.max_restarts needs launcher=torchrun; launcher=local cannot restart itself")
        if self.nnodes != 1:
            raise ConfigError(f"launcher.nnodes={self.nnodes} needs launcher=torchrun")

    def launch(self, folder: RunFolder, nproc: int, saves: bool = True) -> Outcome:
        """Run the worker; an error of it becomes the outcome, as with any other launcher."""
        from exp.launcher.worker import describe_error, run_worker

        for stale in folder.logs.glob("rank*.error.json"):
            stale.unlink()
        info = RankInfo.single()
        signals = _Signals(info.preemption_flag, saves)
        try:
            with handle_signals(signals):
                run_worker(folder, info, redirect=False)
        except _Interrupted:
            return signals.outcome()
        except Preempted as preempted:
            return Outcome(EXIT_PREEMPTED, preempted={"step": preempted.step})
        # The worker has written its error file; every error ends here, in the same words as those of other launchers.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            if signals.received is not None:  # it was raised within native code, which made another error of it
                return signals.outcome()
            failures = collect_failures(folder)
            if not failures:  # no space even for that
                failures = [describe_error(error, folder, info)]
            return Outcome(exit_code_of(failures[0]), failures=failures)
        return Outcome(EXIT_OK)


class _Interrupted(KeyboardInterrupt):
    """A signal has come. A KeyboardInterrupt, because torch's data-loader workers end quietly on that."""


class _Signals:
    """Preemption asks to save first; any other signal, or a second one, ends the run at once.

    Args:
        preemption_flag: for the training loop.
        saves: whether there is anything to save.
    """

    def __init__(self, preemption_flag: PreemptionFlag, saves: bool) -> None:
        self.preemption_flag = preemption_flag
        self.saves = saves
        self.received: int | None = None
        self._process = os.getpid()

    def __call__(self, number: int, _frame: object) -> None:
        if number == PREEMPT_SIGNAL:
            if os.getpid() != self._process:
                return  # a loader's process, forked from this one: it goes on until this one has saved
            if self.saves and not self.preemption_flag.is_set():
                self.preemption_flag.set()
                return
        self.received = number
        raise _Interrupted(number)

    def outcome(self) -> Outcome:
        """Of a run that a signal has ended."""
        assert self.received is not None
        if self.received == PREEMPT_SIGNAL and not self.saves:
            return Outcome(EXIT_PREEMPTED, preempted={"step": None})
        return Outcome(128 + self.received, interrupted_by=signal_name(self.received))
