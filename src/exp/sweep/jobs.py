"""The jobs of a batch: their state, and the lines on the terminal that show it.

On the terminal: a line for each job that has ended, and below them the running jobs, drawn by rich.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Collection, Sequence

from exp import console
from exp.errors import EXIT_OK, EXIT_PREEMPTED
from exp.launcher.base import FrozenRun
from exp.launcher.outcome import Outcome, ProgressDisplay, describe_failure
from exp.runs.files import read_json
from exp.runs.folder import validation_metric

__all__ = ["Job", "MissingMetric", "SweepDisplay"]

_COUNTS_ROW = -1  # number of the first row of the display


class MissingMetric(float):
    """The metric of a job without one: nan in calculations, but ``float(...)`` of it raises.

    Nevergrad and Ax treat nan as a failed job. Optuna's sweeper marks a trial as failed if its value is no number, but
    ends the whole search if the value is nan.
    """

    def __new__(cls) -> MissingMetric:
        """Make the value nan."""
        return super().__new__(cls, "nan")

    def __float__(self) -> float:
        """Raise ValueError."""
        raise ValueError("the job has no metric")


@dataclass
class Job:
    """One job of a sweep, and its state so far.

    Attributes:
        run: not frozen if its configuration was refused.
        skipped: whether an earlier sweep has completed the job.
    """

    run: FrozenRun
    outcome: Outcome | None = None
    skipped: bool = False

    @property
    def state(self) -> str:
        """The state of the job, in words."""
        outcome = self.outcome
        if self.skipped:
            return "done before"
        if outcome is None:
            return "not begun"
        if outcome.still_running or outcome.interrupted_by is not None:
            return "submitted" if outcome.still_running else "interrupted"
        return {EXIT_OK: "completed", EXIT_PREEMPTED: "preempted"}.get(outcome.exit_code, "failed")

    @property
    def metric(self) -> float:
        """The value for the sweeper; :class:`MissingMetric` if the job has not completed or has no finite metric."""
        has_result = self.state in ("completed", "done before")
        value = validation_metric(read_json(self.run.folder.result)) if has_result else None
        return MissingMetric() if value is None or value != value else value

    def title(self, common: Collection[str] = ()) -> str:
        """Number of the job's folder and its overrides that are not ``common``, such as ``3 seed=2 optim.lr=0.001``."""
        return " ".join([self.run.folder.path.name, *(text for text in self.run.overrides if text not in common)])


class SweepDisplay(ProgressDisplay):
    """Shows one batch of a sweep.

    Args:
        jobs: jobs of the batch to run; ``number`` in the methods is the index in this list.
        common: overrides that all jobs have, which titles leave out.
    """

    def __init__(self, jobs: Sequence[Job], common: Collection[str]) -> None:
        super().__init__()
        self.jobs, self._common_overrides = jobs, common
        self._ended = self._failed = 0

    def state(self, number: int, text: str) -> None:
        """Show the state of a running job, below counts of all; only on a terminal."""
        num_running = len(self.rows.keys() - {_COUNTS_ROW})
        num_waiting = len(self.jobs) - self._ended - num_running
        counts = f"{num_running} under way, {num_waiting} waiting, {self._failed} failed"
        self.draw(_COUNTS_ROW, f"{self._ended} of {len(self.jobs)} ended, {counts}")
        if number in self.rows or text.startswith("running"):
            self.draw(number, f"  {self.jobs[number].title(self._common_overrides)}  {text}")

    def ended(self, number: int, outcome: Outcome) -> None:
        """Print the result or the failure of a job."""
        self._ended += 1
        if number in self.rows:
            self.live.remove_task(self.rows.pop(number))
        job, folder = self.jobs[number], self.jobs[number].run.folder
        if outcome.exit_code not in (EXIT_OK, EXIT_PREEMPTED):
            self.failed(job, describe_failure(outcome, folder))
            return
        result = read_json(folder.result) or {}
        text = "preempted" if outcome.exit_code == EXIT_PREEMPTED else "done"
        if result.get("metric") is not None:
            chosen_by = validation_metric(result)
            text = f"{result['metric_name']} {console.format_metric(result['metric'])}"
            text += "" if chosen_by is None else f" (validation {console.format_metric(chosen_by)})"
        seconds = f"  {result['wall_s']:.0f} s" if result.get("wall_s") else ""
        self.say(f"{job.title(self._common_overrides)}: {text}{seconds}  ({self._ended} of {len(self.jobs)})")

    def failed(self, job: Job, text: str) -> None:
        """Print the error of a job."""
        self._failed += 1
        console.error(f"{job.title(self._common_overrides)}: {text}")
