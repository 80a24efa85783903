"""Follows submitted jobs to their end, by their state in Slurm and by the files in their run folders.

The command that submitted a job follows it, or ``task=attach run=<folder>``. The latter reads ``logs/job.json``, which
was written when the job was submitted, and the lock of the run folder, which the job holds until it ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from omegaconf import ListConfig

from exp import console
from exp.config.compose import load
from exp.errors import EXIT_FAILED, EXIT_OK, ConfigError
from exp.launcher.base import FrozenRun
from exp.launcher.execute import report_outcome
from exp.launcher.outcome import Outcome, ProgressDisplay, outcome_file, progress_of, tail_of
from exp.runs import slurm
from exp.runs.files import read_json
from exp.runs.folder import RunFolder
from exp.runs.job import handle_signals, signal_name
from exp.runs.lock import live_holder
from exp.runs.slurm import JobState
from exp.task import resume_command

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["JOB_FILE", "ProgressDisplay", "SubmittedJob", "attach", "follow", "progress_of"]

JOB_FILE = "job.json"
"""File in ``logs`` of a run folder: the ``job`` id of its Slurm job, its ``cluster``, and ``logs``, the folder of the
job's output."""

_CONFIRM_POLLS = 2  # polls that must show a job as ended: a job that is being requeued looks so for a moment


@dataclass
class SubmittedJob:
    """A submitted job, and its state so far.

    Attributes:
        id: Slurm's job id; in an array ``123_4``.
        folder: the run folder.
        logs: folder for the output of the job.
        outcome: the outcome; None: the job has not ended.
        ended_polls: number of successive polls that showed the job as ended.
    """

    id: str
    folder: RunFolder
    logs: Path
    outcome: Outcome | None = None
    ended_polls: int = 0
    was_running: bool = False

    @property
    def log(self) -> Path:
        """Output of the first node's task."""
        return self.logs / f"{self.id}_0_log.out"

    def poll(self, state: JobState) -> str:
        """Take the state of one poll; return the text to show.

        An outcome file that reports success ends the job at once. One that reports a failure counts only when Slurm
        shows the job as ended, because a job that is requeued has written the outcome of its interruption, too.
        """
        outcome = Outcome.read(outcome_file(self.folder, self.id))
        if outcome is not None and outcome.exit_code == EXIT_OK:
            self.outcome = outcome
            return "completed"
        self.ended_polls = self.ended_polls + 1 if state.ended else 0
        if self.ended_polls >= _CONFIRM_POLLS:
            self.outcome = self._end(state, outcome)
        if state.name == "RUNNING":
            self.was_running = True
            return f"running on {state.nodes}  {progress_of(self.folder)}".rstrip()
        again = "queued again, " if self.was_running and state.name == "PENDING" else ""
        return f"{again}{state.name.lower()}" + (f" ({state.reason})" if state.reason else "")

    def _end(self, state: JobState, outcome: Outcome | None) -> Outcome:
        """The outcome of a job that failed."""
        if outcome is not None and state.name in ("FAILED", "COMPLETED", "GONE"):
            return outcome
        lines = [slurm.describe_end(self.id, state)]
        if outcome is not None and outcome.preempted is not None and outcome.preempted["step"] is not None:
            command = resume_command(load(self.folder.current_file(self.folder.config)), self.folder)
            lines.append(f"  its state after step {outcome.preempted['step']} is saved; to continue: {command}")
        return Outcome(EXIT_FAILED, detail="\n".join([*lines, *tail_of(self.log)]))


def _on_signal(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def follow(jobs: Sequence[SubmittedJob], watcher: ProgressDisplay, poll_s: float) -> list[Outcome]:
    """Wait until all jobs have ended; a signal to this process ends the wait, but not the jobs.

    Args:
        jobs: submitted jobs.
        watcher: receives states and outcomes.
        poll_s: seconds between two polls of Slurm.

    Returns:
        An outcome for each job.
    """
    waiting = dict(enumerate(jobs))
    try:
        with handle_signals(_on_signal, more_follows=True):
            while True:
                states = slurm.find_states([job.id for job in waiting.values()])
                for number, job in list(waiting.items()):
                    if states is None:
                        watcher.state(number, "Slurm does not answer; still waiting")
                        continue
                    watcher.state(number, job.poll(states[job.id]))
                    if job.outcome is not None:
                        del waiting[number]
                        watcher.ended(number, job.outcome)
                if not waiting:
                    break
                time.sleep(poll_s)
    except KeyboardInterrupt as leave:
        names, number = " ".join(job.id for job in waiting.values()), leave.args[0]
        for job in waiting.values():
            job.outcome = Outcome(128 + number, interrupted_by=signal_name(number), still_running=True)
        log = next(iter(waiting.values())).log if waiting else ""
        watcher.say(f"{names} will continue; tail -f {log} shows its output, scancel {names} ends it")
    return [job.outcome or Outcome() for job in jobs]


def attach(config: ExpConfig) -> int:
    """``task=attach``: follow the job whose run folder is ``task.run``, and report its end.

    Raises:
        ConfigError: the folder has no submitted job.
    """
    run = config.task.run
    if run is None or isinstance(run, ListConfig):
        raise ConfigError("task=attach needs run=<the run folder of a submitted job>")
    folder = RunFolder(Path(str(run)).expanduser())
    display_path, holder, written = (
        console.display_path(folder.path),
        live_holder(folder.path),
        read_json(folder.logs / JOB_FILE),
    )
    if not {"job", "cluster", "logs"} <= {*(written or ())} or (holder is not None and holder.job != written["job"]):
        who = "" if holder is None else f": {holder} runs it"
        raise ConfigError(
            f"run={display_path} has no submitted job{who}; task=attach follows jobs of launcher=submitit"
        )
    cluster = written["cluster"]
    if cluster not in ("", slurm.local_cluster() or cluster):
        raise ConfigError(
            f"run={display_path} is a job of the Slurm cluster {cluster}, not of this one; start task=attach there"
        )
    submitted, number = FrozenRun.load(folder, untrusted=True), written["job"]
    with ProgressDisplay() as watcher:
        watcher.say(f"following job {number} of {display_path}")
        job = SubmittedJob(number, folder, Path(written["logs"]))
        outcome = follow([job], watcher, submitted.config.launcher.poll_s)[0]
    return report_outcome(submitted, outcome)
