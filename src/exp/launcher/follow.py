"""Follows submitted jobs to their end, by what Slurm says of them and by what they leave in their run folders.

A job is followed by the command that submitted it, by the same command given again, or by ``task=attach run=<folder>``.
The latter two find what they need in the run folder: ``logs/job.json``, written when the job was submitted, and the
lock, which the job has as long as it lives.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from omegaconf import ListConfig

from exp import console, summary
from exp.advice import to_continue
from exp.config.structures import load
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_UNAVAILABLE, ConfigError
from exp.frozen import FrozenRun
from exp.launcher import slurm
from exp.launcher.base import Watcher
from exp.launcher.node import outcome_file, read_outcome
from exp.launcher.outcome import Outcome, tail_of
from exp.launcher.processes import handle_signals, signal_name
from exp.launcher.slurm import JobState
from exp.launcher.status import StatusLine, progress_of
from exp.lock_holder import Holder, holder_of, is_running
from exp.runfolder import RunFolder, read_json, write_json
from exp.runlock import RunLock

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.summary import Finished

__all__ = ["Followed", "attach", "attach_to", "follow", "remember", "the_same"]

_NOT_COMPARED = ("launcher", "output_dir", "overwrite", "resume")
_SURE_AFTER = 2  # looks that show a job ended: one that is being queued again looks so for a moment
_NEVER_AFTER = 3


@dataclass
class Followed:
    """One job.

    Attributes:
        holder: the job, as the lock of its run folder names it.
        folder: the run folder.
        logs: where the job prints to.
        outcome: what has become of it.
    """

    holder: Holder
    folder: RunFolder
    logs: Path
    outcome: Outcome | None = None
    looks: int = 0
    """How often, one after the other, it was seen to have ended, or to wait for ever."""
    has_run: bool = False
    _last: str = ""

    @property
    def id(self) -> str:
        """Slurm's number of the job; in an array ``123_4``."""
        return self.holder.job

    @property
    def log(self) -> Path:
        """What the first node's task printed."""
        return self.logs / f"{self.id}_0_log.out"

    @property
    def on_slurm(self) -> bool:
        """Whether Slurm has it; otherwise it is a process of this machine."""
        return self.holder.cluster == "slurm"

    def cancel(self) -> None:
        """End it."""
        if self.on_slurm:
            slurm.cancel([self.id])
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.holder.pid, signal.SIGINT)

    def look(self, state: JobState) -> str:
        """Take note of a state; returns what to show.

        An outcome that says completed ends it at once. A failure counts once Slurm says that the job has ended: one
        that is queued again has left a record of its interruption, too.
        """
        left = read_outcome(outcome_file(self.folder, self.id))
        if left is not None and left.exit_code == EXIT_OK:
            self.outcome = left
            return "completed"
        if state.ended:
            self.looks += 1
            if self.looks >= _SURE_AFTER:
                self.outcome = self._end(state, left)
            return self._last or state.name.lower()
        if slurm.never_starts(state):
            self.looks += 1
            if self.looks >= _NEVER_AFTER:
                slurm.cancel([self.id])
                self.outcome = Outcome(
                    EXIT_UNAVAILABLE,
                    detail=f"Slurm will never start job {self.id} ({state.reason}), so it was cancelled; ask for less "
                    "(launcher.nodes, launcher.time_minutes), or for another partition",
                )
        else:
            self.looks = 0
        self._last = self._describe(state)
        return self._last

    def _describe(self, state: JobState) -> str:
        if state.name == "PENDING":
            again = "queued again, " if self.has_run else ""
            return f"{again}pending" + (f" ({state.reason})" if state.reason else "")
        if state.name == "RUNNING":
            self.has_run = True
            return f"running on {state.nodes}  {progress_of(self.folder)}".rstrip()
        return state.name.lower()

    def _end(self, state: JobState, left: Outcome | None) -> Outcome:
        """What a job that has ended without success has to say."""
        if left is not None and state.name in ("FAILED", "COMPLETED", "GONE"):
            return left
        lines = [slurm.describe_end(self.id, state)]
        if left is not None and left.preempted is not None and left.preempted["step"] is not None:
            command = to_continue(load(self.folder.in_use(self.folder.config)), self.folder)
            lines.append(f"  its state after step {left.preempted['step']} is saved; to continue: {command}")
        lines += tail_of(self.log)
        return Outcome(EXIT_FAILED, detail="\n".join(lines))


class _Leave(KeyboardInterrupt):
    """Ctrl-C, or another signal that ends the wait."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _leave(number: int, _frame: object) -> None:
    raise _Leave(number)


def follow(jobs: Sequence[Followed], watcher: Watcher, poll_s: float, cancel_on_exit: bool) -> list[Outcome]:
    """Wait until all jobs have ended.

    Args:
        jobs: submitted, all to the same cluster.
        watcher: is told of each change.
        poll_s: seconds between two looks.
        cancel_on_exit: whether a signal to this process cancels them; otherwise they go on.

    Returns:
        An outcome for each.
    """
    on_slurm = jobs[0].on_slurm
    try:
        with handle_signals(_leave):
            while True:
                waiting = [number for number, job in enumerate(jobs) if job.outcome is None]
                if not waiting:
                    break
                states = slurm.find_states([jobs[number].id for number in waiting]) if on_slurm else None
                for number in waiting:
                    if on_slurm and states is None:
                        watcher.state(number, "Slurm does not answer; still waiting")
                        continue
                    job = jobs[number]
                    watcher.state(number, job.look(states[job.id] if states else _local_state(job)))
                    if job.outcome is not None:
                        watcher.ended(number, job.outcome)
                if any(job.outcome is None for job in jobs):
                    time.sleep(poll_s)
    except _Leave as leave:
        return _left(jobs, watcher, leave.number, cancel_on_exit)
    return [job.outcome or Outcome() for job in jobs]


def _local_state(job: Followed) -> JobState:
    return JobState("RUNNING", nodes="this machine") if is_running(job.holder) else JobState("COMPLETED")


def _left(jobs: Sequence[Followed], watcher: Watcher, number: int, cancel_on_exit: bool) -> list[Outcome]:
    """Nobody waits any more."""
    open_jobs = [job for job in jobs if job.outcome is None]
    names = ", ".join(job.id for job in open_jobs)
    if cancel_on_exit:
        for job in open_jobs:
            job.cancel()
        watcher.say(f"cancelled {names}")
    else:
        watcher.say(f"{names} will go on; to see what is printed: tail -f {open_jobs[0].log}")
    name = signal_name(number)
    for job in open_jobs:
        job.outcome = Outcome(128 + number, interrupted_by=name, left=not cancel_on_exit)
    return [job.outcome or Outcome() for job in jobs]


def _record(folder: RunFolder) -> Path:
    return folder.logs / "job.json"


def remember(folder: RunFolder, lock: RunLock | None, job: Any, cluster: str, logs: Path) -> Followed:
    """Leave word of a job that has just been submitted, and let it have the lock of its run folder.

    Args:
        folder: the run folder.
        lock: of this process.
        job: submitit's.
        cluster: ``slurm`` or ``local``.
        logs: where the job prints to.

    Returns:
        The job, to be followed.
    """
    pid = int(job.job_id) if cluster == "local" else None  # submitit's local jobs are called as their processes
    token = lock.token if lock is not None else ""
    holder = Holder.me(token, str(job.job_id), cluster, pid=pid)
    write_json(_record(folder), {"logs": str(logs), "holder": asdict(holder)})
    if lock is not None:
        lock.hand_to(holder)
    return Followed(holder, folder, logs)


def the_same(run: FrozenRun, folder: RunFolder) -> bool:
    """Whether a command is the one that made the run in ``folder``, as far as what it computes goes."""
    return _given(run.overrides) == _given(FrozenRun.load(folder).overrides)


def _given(overrides: Sequence[str]) -> list[str]:
    return sorted(each for each in overrides if each.lstrip("+~").partition("=")[0].split(".")[0] not in _NOT_COMPARED)


def attach(config: ExpConfig) -> Finished:
    """``task=attach``: follow the job whose run folder is ``run``.

    Raises:
        ConfigError: there is none.
    """
    if config.run is None or isinstance(config.run, ListConfig):
        raise ConfigError("task=attach needs run=<the run folder of a submitted job>")
    return attach_to(RunFolder(Path(str(config.run)).expanduser()))


def attach_to(folder: RunFolder) -> Finished:
    """Follow the job of a run folder to its end, and tell that as the command would have that submitted it.

    Raises:
        ConfigError: the folder is no submitted job's, or its process is on another machine.
    """
    shown = console.shown(folder.path)
    holder = holder_of(folder.path)
    if holder is not None and not holder.job:
        raise ConfigError(f"{shown} is no submitted job's: {holder} runs it; wait for its end")
    written = read_json(_record(folder)) or {}
    if holder is None:
        if not written:
            raise ConfigError(f"run={shown} holds no submitted job; attach follows those of launcher=submitit")
        holder = Holder(**written["holder"])
    if holder.cluster == "local" and not holder.is_here():
        raise ConfigError(f"the job of {shown} is a process of {holder.host}; give this command there")
    logs = Path(written.get("logs", folder.path / "slurm"))
    run = FrozenRun.load(folder, of_others=True)
    settings, followed = run.config.launcher, Followed(holder, folder, logs)
    with StatusLine() as status:
        status.say(f"following {'job' if followed.on_slurm else 'process'} {holder.job} of {shown}")
        outcome = follow([followed], status, settings.poll_s, settings.cancel_on_exit)[0]
    if not outcome.left:
        RunLock(folder.path, holder.token).release(ended=True)
    return summary.end(run.config, folder, outcome)
