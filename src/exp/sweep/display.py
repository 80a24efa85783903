"""Shows a sweep on the terminal: a line for each job that has ended, and below them the running jobs, redrawn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Sequence

from exp import console
from exp.errors import EXIT_OK, EXIT_PREEMPTED
from exp.launcher.base import Outcome, describe_failure
from exp.launcher.follow import Watcher, clock
from exp.runs.files import read_json
from exp.runs.folder import number_text, selecting_value

if TYPE_CHECKING:
    from exp.sweep import Job, Sweep

__all__ = ["SweepDisplay"]

_REDRAW_S = 0.25
_MOST_RUNNING = 12


class SweepDisplay(Watcher):
    """Shows one batch of a sweep.

    Args:
        sweep: with all jobs so far.
        jobs: jobs of the batch to run; ``number`` in the methods is the index in this list.
    """

    def __init__(self, sweep: Sweep, jobs: Sequence[Job]) -> None:
        super().__init__()
        self.sweep = sweep
        self.jobs = jobs
        self._common = sweep.common_overrides()
        self._running: dict[int, tuple[float, str]] = {}  # start time and state of each running job
        self._ended = self._failed = 0
        self._drawn = 0.0

    def state(self, number: int, text: str) -> None:
        """Show the state of a running job; only on a terminal."""
        since, _ = self._running.get(number, (time.monotonic(), ""))
        self._running[number] = since, text
        self._draw()

    def ended(self, number: int, outcome: Outcome) -> None:
        """Print the result or the failure of a job."""
        self._running.pop(number, None)
        self._ended += 1
        job = self.jobs[number]
        if outcome.interrupted_by is not None:
            self.say(f"{job.title(self._common)}: {describe_failure(outcome)}")
        elif outcome.exit_code not in (EXIT_OK, EXIT_PREEMPTED):
            self.failed(job, describe_failure(outcome))
        else:
            result = (read_json(job.run.folder.result) if job.run is not None else None) or {}
            text = "preempted" if outcome.exit_code == EXIT_PREEMPTED else "done"
            if result.get("metric") is not None:
                chosen_by = selecting_value(result)
                text = f"{result['metric_name']} {number_text(result['metric'])}"
                text += "" if chosen_by is None else f" (validation {number_text(chosen_by)})"
            seconds = f"  {result['wall_s']:.0f} s" if result.get("wall_s") else ""
            self.say(f"{job.title(self._common)}: {text}{seconds}  ({self._ended} of {len(self.jobs)})")
        self._drawn = 0.0
        self._draw()

    def failed(self, job: Job, text: str) -> None:
        """Print the error of a job."""
        self._failed += 1
        if self.live is None:
            console.error(f"{job.title(self._common)}: {text}")
        else:
            text = f"{job.title(self._common)}: FAILED: {text}"
            self.console.print(text, style="red", highlight=False, markup=False, soft_wrap=True)

    def _draw(self) -> None:
        if self.live is None or time.monotonic() - self._drawn < _REDRAW_S:
            return
        self._drawn = time.monotonic()
        from rich.text import Text

        waiting = len(self.jobs) - self._ended - len(self._running)
        head = (
            f"{self._ended} of {len(self.jobs)} ended, {len(self._running)} under way, {waiting} waiting, "
            f"{self._failed} failed  {clock(self._drawn - self.sweep.began)}"
        )
        rows = [
            f"  {self.jobs[number].title(self._common)}  {text}  {clock(self._drawn - since)}"
            for number, (since, text) in list(self._running.items())[:_MOST_RUNNING]
        ]
        self.live.update(Text("\n".join([head, *rows]), no_wrap=True, overflow="ellipsis"), refresh=True)
