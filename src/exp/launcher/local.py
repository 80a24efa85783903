"""launcher=local: one worker, in a supervised child process; or in this process, for debuggers."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from exp.errors import ConfigError, Preempted, SignalReceived
from exp.launcher.base import Launcher
from exp.launcher.outcome import Outcome
from exp.launcher.supervisor import Supervisor
from exp.runs.failures import Failures
from exp.runs.job import PREEMPT_SIGNAL, SCRATCH_VARIABLE
from exp.session import RankInfo
from exp.worker.main import guard, preempted_in, run_and_exit
from exp.worker.processes import fork
from exp.worker.session import describe_error, reporting, run_rank

if TYPE_CHECKING:
    from exp.launcher.base import FrozenRun

__all__ = ["LocalLauncher"]


class LocalLauncher(Launcher):
    """Forks a guard, which forks the only worker (:mod:`exp.worker.main`): a new interpreter would take longer."""

    def check(self, nproc: int) -> None:
        """Refuse more than one worker, restarts, and more than one node."""
        limits = {"nproc": (nproc, 1), "max_restarts": (self.config.max_restarts, 0), "nnodes": (self.config.nnodes, 1)}
        for key, (value, possible) in limits.items():
            if value != possible:
                name = key if key == "nproc" else f"launcher.{key}"
                raise ConfigError(f"{name}={value} needs launcher=torchrun; launcher=local runs a single process")

    def launch(self, run: FrozenRun) -> Outcome:
        """Run the worker; however it ends, none of its processes is left behind."""
        if self.config.in_process:
            return self._run_here(run)
        folder, parent = run.folder, os.getpid()
        with tempfile.TemporaryDirectory(prefix="exp-") as scratch:

            def main() -> int:
                os.environ[SCRATCH_VARIABLE] = scratch
                info = RankInfo(preempted=preempted_in(scratch))
                return guard(lambda: run_and_exit(folder, info), info, str(folder.path), parent)

            failures = Failures(folder, scratch)
            job = Supervisor(self, run, scratch, (PREEMPT_SIGNAL,), failures)
            code = job.watch(lambda log: fork(main, log), folder.log_file(0), 1, 1)
            detail = f"the process that waited for the worker ended with {code}"
            return job.outcome(lambda: Outcome.of(failures.collect(), detail) if code else Outcome())

    def _run_here(self, run: FrozenRun) -> Outcome:
        """Run the worker in this process, which has a terminal; a crash of the worker ends this process, too."""
        folder, info = run.folder, RankInfo()
        try:
            with reporting(folder, info, redirect=False):
                run_rank(folder, info)
        except Preempted as preempted:
            return Outcome(preempted.exit_code, preempted={"step": preempted.step})
        except SignalReceived as ended:
            return Outcome.of_signal(ended.number, run.task.saves_state)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - reported as with other launchers
            return Outcome.of(Failures(folder).collect() or [describe_error(error, folder, info)])
        return Outcome()
