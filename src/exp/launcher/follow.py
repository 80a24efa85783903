"""Follows submitted jobs to their end, by what Slurm says of them and by what they leave in their run folders."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Sequence

from exp.advice import to_continue
from exp.config.structures import load
from exp.errors import EXIT_FAILED, EXIT_OK, EXIT_UNAVAILABLE
from exp.launcher import slurm
from exp.launcher.base import Watcher
from exp.launcher.failures import tail_of
from exp.launcher.node import outcome_file, read_outcome
from exp.launcher.outcome import Outcome
from exp.launcher.processes import handle_signals, signal_name
from exp.launcher.slurm import JobState
from exp.launcher.status import progress_of

if TYPE_CHECKING:
    from pathlib import Path

    from exp.runfolder import RunFolder

__all__ = ["Followed", "follow"]

_SURE_AFTER = 2  # looks that show a job ended: one that is being queued again looks so for a moment
_NEVER_AFTER = 3


@dataclass
class Followed:
    """One job.

    Attributes:
        job: submitit's.
        folder: the run folder.
        logs: where the job prints to.
        outcome: what has become of it.
    """

    job: Any
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
        return str(self.job.job_id)

    @property
    def log(self) -> Path:
        """What the first node's task printed."""
        return self.logs / f"{self.id}_0_log.out"

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


def follow(
    jobs: Sequence[Followed], watcher: Watcher, poll_s: float, cancel_on_exit: bool, on_slurm: bool
) -> list[Outcome]:
    """Wait until all jobs have ended.

    Args:
        jobs: submitted.
        watcher: is told of each change.
        poll_s: seconds between two looks.
        cancel_on_exit: whether a signal to this process cancels them; otherwise they go on.
        on_slurm: whether Slurm has them; otherwise submitit's local executor.

    Returns:
        An outcome for each.
    """
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
    running = job.job.state == "RUNNING"
    return JobState("RUNNING", nodes="this machine") if running else JobState("COMPLETED")


def _left(jobs: Sequence[Followed], watcher: Watcher, number: int, cancel_on_exit: bool) -> list[Outcome]:
    """Nobody waits any more."""
    open_jobs = [job for job in jobs if job.outcome is None]
    names = ", ".join(job.id for job in open_jobs)
    if cancel_on_exit:
        for job in open_jobs:
            job.job.cancel(check=False)
        watcher.say(f"cancelled {names}")
    else:
        watcher.say(f"{names} will go on; to see what is printed: tail -f {open_jobs[0].log}")
    name = signal_name(number)
    for job in open_jobs:
        job.outcome = Outcome(128 + number, interrupted_by=name, left=not cancel_on_exit)
    return [job.outcome or Outcome() for job in jobs]
