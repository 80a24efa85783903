"""Runs jobs side by side on this machine: as many as there are free cards, or CPU cores."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Sequence

from exp.errors import EXIT_FAILED, EXIT_PREEMPTED
from exp.hardware.cards import only
from exp.hardware.cores import usable_cores
from exp.hardware.registry import create_backend
from exp.launcher.follow import progress_of
from exp.launcher.outcome import Outcome, log_file, outcome_file, tail_of
from exp.launcher.processes import JOB_VARIABLE, kill_job, start_module
from exp.runs.status import PREEMPT_SIGNAL, handle_signals, signal_name

if TYPE_CHECKING:
    from exp.frozen import FrozenRun
    from exp.hardware.backend import Backend
    from exp.launcher.follow import Watcher

__all__ = ["pack"]

_POLL_S = 0.1
_PATIENCE_S = 8.0  # longer than a job's own launcher waits for its workers to end
_CORES = "cores"


class _Pools:
    """The free devices, by backend. Simulated cards and the CPU backend use CPU cores.

    Args:
        parallel_jobs: maximum number of jobs at a time, which may then share cores; None: CPU jobs do not share cores.
    """

    def __init__(self, parallel_jobs: int | None) -> None:
        self.parallel_jobs = parallel_jobs
        self.running = 0
        self._free: dict[str, list[int]] = {_CORES: list(range(usable_cores()))}

    def take(self, backend: Backend, nproc: int) -> dict[str, list[int]] | None:
        """Reserve the devices of a job.

        Returns:
            Device numbers by pool; None if not all that the job needs are free.
        """
        if self.parallel_jobs is not None and self.running >= self.parallel_jobs:
            return None
        needed: dict[str, int] = {}
        if backend.exclusive_devices:
            count = backend.device_count()
            self._free.setdefault(backend.name, list(range(count)))
            # Without a variable that hides cards, a job sees all cards, so it gets all.
            needed[backend.name] = nproc if backend.visible_variables else count
        if (not backend.exclusive_devices or backend.simulate) and self.parallel_jobs is None:
            needed[_CORES] = min(nproc, usable_cores())
        if any(len(self._free[pool]) < count for pool, count in needed.items()):
            return None
        self.running += 1
        return {pool: [self._free[pool].pop(0) for _ in range(count)] for pool, count in needed.items()}

    def give_back(self, taken: dict[str, list[int]]) -> None:
        """Free the devices of a job that has ended."""
        self.running -= 1
        for pool, devices in taken.items():
            self._free[pool] = sorted(self._free[pool] + devices)


@dataclass
class _Running:
    """The process of one job, and its devices."""

    run: FrozenRun
    process: subprocess.Popen[bytes]
    taken: dict[str, list[int]]

    def outcome(self) -> Outcome:
        """The outcome of the job; its process has ended."""
        outcome, end = Outcome.read(outcome_file(self.run.folder, str(self.process.pid))), self.process.returncode
        if outcome is None:
            how = f"killed by {signal_name(-end)}" if end < 0 else f"exited with code {end} before its time"
            detail = "\n".join([how, *tail_of(log_file(self.run.folder))])
            return Outcome(EXIT_FAILED, reported=True, detail=detail)
        return outcome


class _Packing:
    """State of :func:`pack`."""

    def __init__(self, runs: Sequence[FrozenRun], parallel_jobs: int | None) -> None:
        self.runs = runs
        self.pools = _Pools(parallel_jobs)
        self.backends = [create_backend(run.config.backend) for run in runs]
        self.waiting = list(range(len(runs)))
        self.running: dict[int, _Running] = {}
        self.received: int | None = None
        self.deadline = float("inf")
        self.mark = secrets.token_hex(8)

    def start_what_fits(self) -> None:
        """Start the waiting jobs whose devices are free, in order."""
        for number in list(self.waiting):
            run, backend = self.runs[number], self.backends[number]
            taken = self.pools.take(backend, run.config.nproc)
            if taken is None:
                continue
            self.waiting.remove(number)
            assert run.lock is not None, "it has been written"
            run.lock.let_go()
            arguments = [str(run.folder.path), run.lock.token, str(os.getpid())]
            environment = {**os.environ, **self._own(run, backend, taken), JOB_VARIABLE: self.mark}
            with log_file(run.folder).open("wb") as log:
                process = start_module("exp.sweep.job", *arguments, environment=environment, stdout=log, stderr=log)
            self.running[number] = _Running(run, process, taken)

    @staticmethod
    def _own(run: FrozenRun, backend: Backend, taken: dict[str, list[int]]) -> dict[str, str]:
        """Environment variables that limit a job to its devices and its share of the cores."""
        devices = taken.get(backend.name) or taken.get(_CORES)
        if devices is None:
            return {}
        own = only(backend, devices)
        if "OMP_NUM_THREADS" not in {**os.environ, **backend.env} and not backend.simulate:
            # Jobs on the other cards need cores, too.
            cards = backend.device_count() if backend.exclusive_devices else 0
            own["OMP_NUM_THREADS"] = str(max(1, usable_cores() // cards if cards else len(devices) // run.config.nproc))
        return own

    def on_signal(self, number: int, _frame: Any) -> None:
        """Forward a signal to the jobs: SIGTERM, or the preemption signal. Jobs run in sessions of their own."""
        if number != PREEMPT_SIGNAL:
            self.deadline = time.monotonic() + (_PATIENCE_S if self.received is None else 0)
        self.received = number
        for job in list(self.running.values()):
            if job.process.poll() is None:
                job.process.send_signal(number if number == PREEMPT_SIGNAL else signal.SIGTERM)

    def interrupted(self, begun: bool) -> Outcome | None:
        """The outcome of a job that a signal ended or kept from starting; None: the job's own outcome counts.

        Args:
            begun: whether the job was started.
        """
        if self.received is None or (begun and self.received == PREEMPT_SIGNAL):
            return None
        if self.received == PREEMPT_SIGNAL:
            return Outcome(EXIT_PREEMPTED, preempted={"step": None}, begun=False)
        return Outcome(128 + self.received, interrupted_by=signal_name(self.received), begun=begun)


def pack(runs: Sequence[FrozenRun], parallel_jobs: int | None, watcher: Watcher) -> list[Outcome]:
    """Run jobs, each in a process of its own with devices of its own; start them in order, as devices become free.

    Args:
        runs: their run folders are written.
        parallel_jobs: maximum number of jobs at a time; None: as many as devices allow.
        watcher: receives progress and outcomes.

    Returns:
        An outcome for each run. After a signal, running jobs were ended, and waiting jobs were not started.
    """
    packing = _Packing(runs, parallel_jobs)
    outcomes: dict[int, Outcome] = {}
    try:
        with handle_signals(packing.on_signal):
            while packing.running or (packing.waiting and packing.received is None):
                if packing.received is None:
                    packing.start_what_fits()
                for number, job in list(packing.running.items()):
                    if job.process.poll() is None:
                        watcher.state(number, f"running  {progress_of(job.run.folder)}".rstrip())
                        continue
                    del packing.running[number]
                    packing.pools.give_back(job.taken)
                    outcome = outcomes[number] = packing.interrupted(begun=True) or job.outcome()
                    watcher.ended(number, outcome)
                if time.monotonic() > packing.deadline:
                    kill_job(packing.mark)
                time.sleep(_POLL_S)
    finally:
        kill_job(packing.mark)
    return [outcomes.get(number) or packing.interrupted(begun=False) or Outcome() for number in range(len(runs))]
