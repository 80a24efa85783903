"""Runs jobs side by side on this machine: as many as there are free cards, or CPU cores."""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from typing import TYPE_CHECKING, Any, Sequence

from exp.errors import EXIT_FAILED, EXIT_OK, RunError
from exp.hardware.backend import usable_cores
from exp.hardware.cards import visible_devices_env
from exp.launcher.outcome import Outcome, outcome_file, progress_of, tail_of
from exp.runs.job import PREEMPT_SIGNAL, block_signals, handle_signals, signal_name
from exp.worker.processes import JOB_VARIABLE, kill_job, start_module

if TYPE_CHECKING:
    from exp.launcher.base import FrozenRun
    from exp.launcher.outcome import ProgressDisplay


_POLL_S = 0.1
_PATIENCE_S = 8.0  # longer than a job's own launcher waits for its workers to end
_CORES = "cores"
_LOG = "output.log"  # stdout and stderr of a job


class _LocalScheduler:
    """State of :func:`run_locally`: the jobs that wait, and those that run with their devices.

    Jobs of the CPU backend take CPU cores; as many jobs on simulated cards run as there are cores for. With
    ``parallel_jobs``, at most that many jobs run at a time, and they may share cores.

    Attributes:
        running: process and devices of each running job.
    """

    def __init__(self, runs: Sequence[FrozenRun], parallel_jobs: int | None) -> None:
        self.runs = runs
        self.parallel_jobs = parallel_jobs
        self.waiting = list(range(len(runs)))
        self.running: dict[int, tuple[subprocess.Popen[bytes], list[int]]] = {}
        self.received: int | None = None
        self.deadline = float("inf")
        self.job_marker = secrets.token_hex(8)

    def allocate(self, number: int) -> list[int] | None:
        """Choose the devices of a job, cards or cores; empty: any. None: not all that the job needs are free."""
        backend, nproc, cores = self.runs[number].backend, self.runs[number].config.nproc, usable_cores()
        limit = max(1, cores // nproc) if self.parallel_jobs is None and backend.simulate else self.parallel_jobs
        if limit is not None and len(self.running) >= limit:
            return None
        if not backend.capabilities.shared_device:
            # Without a variable that hides cards, a job sees all cards, so it gets all.
            count = backend.device_count()
            needed = nproc if backend.visible_variables else count
        else:
            count, needed = cores, min(nproc, cores) if limit is None else 0
        used = (devices for job, (_, devices) in self.running.items() if self.runs[job].backend.name == backend.name)
        free = sorted({*range(count)}.difference(*used))
        return free[:needed] if len(free) >= needed else None

    def start_ready_jobs(self) -> None:
        """Start the waiting jobs whose devices are free, in order; to be called when a job has ended.

        Raises:
            RunError: somebody has deleted the folder of such a job.
        """
        waiting, self.waiting = self.waiting, []
        unavailable: set[tuple[object, ...]] = set()
        for number in waiting:
            run, backend = self.runs[number], self.runs[number].backend
            request = backend.name, backend.simulate, run.config.nproc
            devices = None if request in unavailable else self.allocate(number)
            if devices is None:  # nor are the devices of an equal job free
                unavailable.add(request)
                self.waiting.append(number)
                continue
            assert run.lock is not None, "it has been written"
            run.folder.check_exists()
            arguments = [str(run.folder.path), str(os.getpid()), run.lock.token]
            environment = {**os.environ, **self._job_environment(number, devices), JOB_VARIABLE: self.job_marker}
            with block_signals((PREEMPT_SIGNAL,)), (run.folder.logs / _LOG).open("wb") as log:
                process = start_module("exp.sweep.run_job", *arguments, environment=environment, stdout=log, stderr=log)
            run.lock.transfer_to(pid=process.pid)
            self.running[number] = process, devices

    def _job_environment(self, number: int, devices: list[int]) -> dict[str, str]:
        """Environment variables that limit a job to its devices and its share of the cores."""
        backend = self.runs[number].backend
        if not devices:
            return {}
        variables = visible_devices_env(backend, devices)
        if "OMP_NUM_THREADS" not in {**os.environ, **backend.env} and not backend.simulate:
            # Jobs on the other cards need cores, too.
            cards = backend.device_count() if not backend.capabilities.shared_device else usable_cores()
            variables["OMP_NUM_THREADS"] = str(max(1, usable_cores() // cards))
        return variables

    def finish(self, number: int) -> Outcome:
        """The outcome of a job whose process has ended; its devices are free again."""
        process, _ = self.running.pop(number)
        folder, code = self.runs[number].folder, process.returncode
        file = outcome_file(folder, str(process.pid))
        written = Outcome.read(file)  # the exit code alone does not tell: code of the user may change it
        file.unlink(missing_ok=True)
        completed = written is not None and written.exit_code == EXIT_OK
        if self.received not in (None, PREEMPT_SIGNAL) and not completed:
            return Outcome(128 + self.received, interrupted_by=signal_name(self.received))
        if written is not None:
            return written
        try:
            folder.check_exists()
        except RunError as error:
            return Outcome(EXIT_FAILED, printed=True, detail=str(error))
        reason = f"killed by {signal_name(-code)}" if code < 0 else f"exited with code {code} before its time"
        return Outcome(EXIT_FAILED, printed=True, detail="\n".join([reason, *tail_of(folder.logs / _LOG)]))

    def on_signal(self, number: int, _frame: Any) -> None:
        """Forward a signal to the jobs, which run in sessions of their own."""
        if number != PREEMPT_SIGNAL:
            self.deadline = time.monotonic() + (_PATIENCE_S if self.received is None else 0)
        self.received = number
        for process, _ in list(self.running.values()):
            if process.poll() is None:
                process.send_signal(number)


def run_locally(
    runs: Sequence[FrozenRun], parallel_jobs: int | None, watcher: ProgressDisplay
) -> tuple[dict[int, Outcome], int | None]:
    """Run jobs, each in a process of its own with devices of its own; start them in order, as devices become free.

    Args:
        runs: their run folders are written.
        parallel_jobs: maximum number of jobs at a time; None: as many as devices allow.
        watcher: receives progress and outcomes.

    Returns:
        The outcomes by index in ``runs``, and the signal that has ended the jobs (None: none). After a signal, running
        jobs were ended, and waiting jobs, which have no outcome, were not started.
    """
    scheduler = _LocalScheduler(runs, parallel_jobs)
    outcomes: dict[int, Outcome] = {}
    try:
        with handle_signals(scheduler.on_signal, more_follows=True):
            has_changed = True
            while scheduler.running or (scheduler.waiting and scheduler.received is None):
                if has_changed and scheduler.received is None:
                    scheduler.start_ready_jobs()
                has_changed = False
                for number, (process, _) in list(scheduler.running.items()):
                    if process.poll() is None:
                        watcher.state(number, f"running  {progress_of(runs[number].folder)}".rstrip())
                    else:
                        outcomes[number], has_changed = scheduler.finish(number), True
                        watcher.ended(number, outcomes[number])
                if time.monotonic() > scheduler.deadline:
                    kill_job(scheduler.job_marker)
                time.sleep(_POLL_S)
    finally:
        kill_job(scheduler.job_marker)
    return outcomes, scheduler.received
