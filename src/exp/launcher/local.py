"""launcher=local: one worker, in this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from exp.errors import EXIT_PREEMPTED, ConfigError, Preempted
from exp.launcher.base import Launcher, Outcome
from exp.runs.failures import Failures
from exp.runs.status import PREEMPT_SIGNAL, handle_signals
from exp.session import RankInfo, describe_error, reporting
from exp.session import run as run_rank
from exp.task import task_class

if TYPE_CHECKING:
    from exp.frozen import FrozenRun

__all__ = ["LocalLauncher"]


class _Interrupted(KeyboardInterrupt):
    """Raised on a signal. A KeyboardInterrupt, because torch's data-loader workers end without a traceback on it."""


class LocalLauncher(Launcher):
    """Runs the only worker in this process."""

    def check(self, nproc: int) -> None:
        """Refuse more than one worker, restarts, and more than one node."""
        asked = {"nproc": (nproc, 1), "max_restarts": (self.config.max_restarts, 0), "nnodes": (self.config.nnodes, 1)}
        for key, (value, possible) in asked.items():
            if value != possible:
                name = key if key == "nproc" else f"launcher.{key}"
                raise ConfigError(f"{name}={value} needs launcher=torchrun; launcher=local runs a single process")

    def launch(self, run: FrozenRun) -> Outcome:
        """Run the worker; its error becomes the outcome, as with any other launcher."""
        folder, saves = run.folder, task_class(run.config).saves_state
        process, received = os.getpid(), 0
        notices: list[int] = []
        info = RankInfo(preempted=lambda: bool(notices))

        def on_signal(number: int, _frame: object) -> None:
            nonlocal received
            if number == PREEMPT_SIGNAL:
                if os.getpid() != process:
                    return  # a loader process, forked from this one: it continues until this process has saved
                if saves and not notices:
                    notices.append(number)
                    return
            received = number
            raise _Interrupted(number)

        try:
            with handle_signals(on_signal), reporting(folder, info, redirect=False):
                run_rank(folder, info)
        except Preempted as preempted:
            return Outcome(EXIT_PREEMPTED, preempted={"step": preempted.step})
        # The worker has written its error file. Every error becomes an outcome, reported as with other launchers.
        except (Exception, SystemExit, _Interrupted) as error:  # noqa: BLE001
            if received:  # native code may have replaced _Interrupted by an error of its own
                return Outcome.of_signal(received, saves)
            return Outcome.of(Failures(folder).collect() or [describe_error(error, folder, info)])
        return Outcome()
