"""Runs jobs side by side on this machine: as many as its cards, or its processor's cores, have room for."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Sequence

from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, REFUSED
from exp.hardware.cards import only
from exp.hardware.cores import usable_cores
from exp.hardware.registry import create_backend
from exp.launcher.base import Watcher
from exp.launcher.job import ENDED, PARENT_VARIABLE
from exp.launcher.outcome import Outcome, tail_of
from exp.launcher.processes import JOB_VARIABLE, handle_signals, kill_job, signal_name, start_module
from exp.launcher.status import progress_of
from exp.preemption import PREEMPT_SIGNAL
from exp.runfolder import read_json

if TYPE_CHECKING:
    from pathlib import Path

    from exp.frozen import FrozenRun
    from exp.hardware.backend import Backend

__all__ = ["pack"]

_POLL_S = 0.1
_PATIENCE_S = 8.0  # a job's own launcher gives its workers some seconds to end
_CORES = "cores"


class _Pools:
    """The devices that are free, by family; simulated cards and the CPU itself live on the processor's cores.

    Args:
        parallel_jobs: at most so many jobs at a time; they may then share cores.
    """

    def __init__(self, parallel_jobs: int | None) -> None:
        self.parallel_jobs = parallel_jobs
        self.running = 0
        self._free: dict[str, list[int]] = {_CORES: list(range(usable_cores()))}
        self._cores = len(self._free[_CORES])

    def take(self, backend: Backend, nproc: int) -> dict[str, list[int]] | None:
        """What a job needs, if it is free; None: it has to wait."""
        if self.parallel_jobs is not None and self.running >= self.parallel_jobs:
            return None
        needed: dict[str, int] = {}
        if backend.exclusive_devices:
            count = backend.device_count()
            self._free.setdefault(backend.name, list(range(count)))
            # Where a job cannot be kept from seeing all cards, it has them all.
            needed[backend.name] = nproc if backend.visible_variables else count
        if (not backend.exclusive_devices or backend.simulate) and self.parallel_jobs is None:
            needed[_CORES] = min(nproc, self._cores)
        if any(len(self._free[pool]) < count for pool, count in needed.items()):
            return None
        self.running += 1
        return {pool: [self._free[pool].pop(0) for _ in range(count)] for pool, count in needed.items()}

    def give_back(self, taken: dict[str, list[int]]) -> None:
        """A job has ended."""
        self.running -= 1
        for pool, devices in taken.items():
            self._free[pool] = sorted(self._free[pool] + devices)


class _Running:
    """One job's process.

    Args:
        run: the frozen run.
        environment: of the process.
        taken: its devices.
    """

    def __init__(self, run: FrozenRun, environment: dict[str, str], taken: dict[str, list[int]]) -> None:
        self.run, self.taken = run, taken
        self.log = run.folder.logs / "output.log"
        self._before = _version(run.folder.result)
        if run.lock is not None:
            run.lock.let_go()
        token = "" if run.lock is None else run.lock.token
        with self.log.open("wb") as log:
            self.process = start_module(
                "exp.launcher.job", str(run.folder.path), token, environment=environment, stdout=log, stderr=log
            )

    def outcome(self, received: int | None) -> Outcome:
        """What became of it, now that it has ended."""
        ended = read_json(self.run.folder.logs / ENDED) or {}
        code = ended["exit_code"] if ended.get("pid") == self.process.pid else None
        # A job that did not begin has left the record of an earlier one as it was.
        mine = _version(self.run.folder.result) != self._before
        result = (read_json(self.run.folder.result) if mine else None) or {}
        if received is not None and received != PREEMPT_SIGNAL:
            return Outcome(128 + received, interrupted_by=signal_name(received))
        if code == EXIT_OK:
            return Outcome(restarts=result.get("restarts", 0))
        if code == EXIT_PREEMPTED:
            return Outcome(code, preempted={"step": result.get("steps")})
        error = result.get("error")
        if error is not None:
            said = [error["message"], *([f"  log: {self.log}"] if code not in REFUSED else [])]
        elif code is not None:
            said = [f"exit code {code}", *tail_of(self.log)]
        else:
            end = self.process.returncode
            how = f"killed by {signal_name(-end)}" if end < 0 else f"exited with code {end} before its time"
            said = [how, *tail_of(self.log)]
        return Outcome(code or EXIT_FAILED, detail="\n".join(said), reported=True)


def _version(path: Path) -> tuple[int, int] | None:
    """Changes with the file, which is replaced and not written to."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_mtime_ns


def pack(runs: Sequence[FrozenRun], parallel_jobs: int | None, watcher: Watcher) -> list[Outcome]:
    """Run jobs, each in a process of its own with devices of its own, in order, as soon as there is room.

    Args:
        runs: with their folders written.
        parallel_jobs: at most so many at a time; None: as many as there is room for.
        watcher: is told what becomes of each.

    Returns:
        An outcome for each. After a signal: what was running has been ended, what waited has not been started.
    """
    mark = secrets.token_hex(8)
    pools = _Pools(parallel_jobs)
    backends = [create_backend(run.config.backend) for run in runs]
    waiting = deque(range(len(runs)))
    running: dict[int, _Running] = {}
    outcomes: dict[int, Outcome] = {}
    signals = _Signals(running)
    try:
        with handle_signals(signals):
            while running or (waiting and signals.received is None):
                if signals.received is None:
                    _start_what_fits(runs, backends, waiting, running, pools, mark)
                for number, job in list(running.items()):
                    if job.process.poll() is None:
                        watcher.state(number, f"running  {progress_of(job.run.folder)}".rstrip())
                        continue
                    del running[number]
                    pools.give_back(job.taken)
                    outcomes[number] = job.outcome(signals.received)
                    watcher.ended(number, outcomes[number])
                signals.kill_late(mark)
                time.sleep(_POLL_S)
    finally:
        kill_job(mark)
    return [outcomes.get(number) or _not_started(signals.received) for number in range(len(runs))]


def _start_what_fits(
    runs: Sequence[FrozenRun],
    backends: Sequence[Backend],
    waiting: deque[int],
    running: dict[int, _Running],
    pools: _Pools,
    mark: str,
) -> None:
    for number in list(waiting):
        run, backend = runs[number], backends[number]
        taken = pools.take(backend, run.config.nproc)
        if taken is None:
            continue
        waiting.remove(number)
        devices = taken.get(backend.name) or taken.get(_CORES)
        own = {JOB_VARIABLE: mark, PARENT_VARIABLE: str(os.getpid())}
        if devices is not None:
            own.update(only(backend, devices))
            threads = "OMP_NUM_THREADS"
            if not backend.exclusive_devices and threads not in os.environ:
                own[threads] = str(max(1, len(devices) // run.config.nproc))
            elif not backend.simulate and threads not in {**os.environ, **backend.env}:
                own[threads] = str(max(1, usable_cores() // backend.device_count()))  # jobs beside it compute, too
        running[number] = _Running(run, {**os.environ, **own}, taken)


class _Signals:
    """Hands signals on to the jobs, which have sessions of their own.

    Args:
        running: the jobs that run; changes while they do.
    """

    def __init__(self, running: dict[int, _Running]) -> None:
        self.received: int | None = None
        self._running = running
        self._deadline: float | None = None

    def __call__(self, number: int, _frame: Any) -> None:
        again = self.received is not None
        self.received = number
        for job in list(self._running.values()):
            if job.process.poll() is None:
                job.process.send_signal(number if number == PREEMPT_SIGNAL else signal.SIGTERM)
        if number != PREEMPT_SIGNAL:
            self._deadline = 0.0 if again else time.monotonic() + _PATIENCE_S

    def kill_late(self, mark: str) -> None:
        """Kill what does not end."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline = None
            kill_job(mark)


def _not_started(received: int | None) -> Outcome:
    if received == PREEMPT_SIGNAL:
        return Outcome(EXIT_PREEMPTED, preempted={"step": None}, begun=False)
    assert received is not None
    return Outcome(128 + received, interrupted_by=signal_name(received), begun=False)
