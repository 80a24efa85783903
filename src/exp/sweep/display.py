"""A sweep on the terminal: what runs now, and a table of results that grows, best first; elsewhere a line per job."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

from exp import console
from exp.errors import EXIT_OK, EXIT_PREEMPTED
from exp.launcher.base import Watcher
from exp.launcher.outcome import Outcome, describe_failure
from exp.launcher.status import clock, time_left
from exp.result import selecting_value
from exp.runfolder import read_json

if TYPE_CHECKING:
    from rich.table import Table

    from exp.report.runs import Run
    from exp.sweep import Job, Sweep

__all__ = ["SweepDisplay", "progress"]

_REDRAW_S = 0.25
_MOST_RUNNING = 12
_BEST = 10
_COMPARING = 20  # results are compared for at most one part in so many of the time
_MANY = 50  # jobs: fewer take no time worth a word


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows how far something is that is done for each job: a bar on a terminal, a line elsewhere, nothing for few.

    Args:
        what: is done.
        total: number of jobs.

    Yields:
        What is to be called when one is done.
    """
    terminal = console.make_console()
    if total < _MANY:
        yield lambda: None
        return
    if not terminal.is_terminal:
        terminal.print(f"{what} {total} jobs", highlight=False)
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(console=terminal, transient=True) as bar:
        task = bar.add_task(f"{what} {total} jobs", total=total)
        yield lambda: bar.advance(task)


class SweepDisplay(Watcher):
    """Shows a batch of a sweep.

    Args:
        sweep: with all jobs so far.
        jobs: those of the batch that run, in the order in which the launcher counts them.
    """

    def __init__(self, sweep: Sweep, jobs: Sequence[Job]) -> None:
        self.sweep = sweep
        self.jobs = jobs
        self._common = sweep.common_overrides()
        self._console = console.make_console()
        self._live: Any = None
        self._states: dict[int, str] = {}
        self._began: dict[int, float] = {}
        self._ended = 0
        self._failed = 0
        self._drawn = 0.0
        self._results: list[Run] = []
        self._table: Table | None = None
        self._compared = 0
        self._compare_from = 0.0

    def __enter__(self) -> SweepDisplay:
        first_batch = len(self.jobs) == len([job for job in self.sweep.jobs if job.run is not None and not job.skipped])
        done = [job for job in self.sweep.jobs if job.skipped]
        if done and first_batch:
            self.say(f"{len(done)} of {len(self.sweep.jobs)} jobs are done already")
        if first_batch:
            jobs = "1 job" if len(self.jobs) == 1 else f"{len(self.jobs)} jobs"
            self.say(f"{jobs} to run; sweep folder: {console.shown(self.sweep.folder)}")
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def refused(self, job: Job) -> None:
        """A job whose configuration is wrong."""
        assert job.outcome is not None
        self._failed += 1
        self._error(job, job.outcome.detail or "refused")

    def state(self, number: int, text: str) -> None:
        """Show it on a terminal."""
        if text.startswith("running"):
            self._began.setdefault(number, time.monotonic())
        self._states[number] = text
        self._draw()

    def ended(self, number: int, outcome: Outcome) -> None:
        """Add the job to the table; say at once what went wrong."""
        self._states.pop(number, None)
        self._ended += 1
        job = self.jobs[number]
        if outcome.interrupted_by is not None:
            self.say(f"{job.title(self._common)}: {describe_failure(outcome)}")
        elif outcome.exit_code not in (EXIT_OK, EXIT_PREEMPTED):
            self._failed += 1
            self._error(job, describe_failure(outcome))
        elif self._live is None:
            self.say(self._line(job, outcome))
        if self._live is not None:
            self._add_result(job)
            self._draw(now=True)

    def _error(self, job: Job, text: str) -> None:
        if self._live is None:
            console.error(f"{job.title(self._common)}: {text}")
            return
        first, *rest = text.splitlines() or [""]
        head = f"{job.title(self._common)}: FAILED: {first}"
        self._console.print("\n".join([head, *rest]), style="red", highlight=False, markup=False, soft_wrap=True)

    def _line(self, job: Job, outcome: Outcome) -> str:
        result = (read_json(job.run.folder.result) if job.run is not None else None) or {}
        text = "preempted" if outcome.exit_code == EXIT_PREEMPTED else "done"
        if result.get("metric") is not None:
            text = f"{result['metric_name']} {result['metric']:.4f}"
            chosen_by = selecting_value(result)
            text += "" if chosen_by is None else f" (validation {chosen_by:.4f})"
        seconds = f"  {result['wall_s']:.0f} s" if result.get("wall_s") else ""
        return f"{job.title(self._common)}: {text}{seconds}  ({self._ended} of {len(self.jobs)})"

    def _add_result(self, job: Job) -> None:
        from exp.report.runs import find_runs

        if job.run is not None and job.run.folder.config.is_file():
            self._results.append(
                dataclasses.replace(find_runs([job.run.folder.path])[0], name=job.run.folder.path.name)
            )

    def _draw(self, now: bool = False) -> None:
        if self._live is None or (not now and time.monotonic() - self._drawn < _REDRAW_S):
            return
        self._drawn = time.monotonic()
        from rich.console import Group
        from rich.text import Text

        waiting = len(self.jobs) - self._ended - len(self._states)
        parts: list[Any] = [
            Text(
                f"{self._ended} of {len(self.jobs)} ended, {len(self._states)} under way, {waiting} waiting, "
                f"{self._failed} failed  {clock(time.monotonic() - self.sweep.began)}",
                style="bold",
            )
        ]
        for number, text in list(self._states.items())[:_MOST_RUNNING]:
            began = self._began.get(number)
            since = f"  {clock(time.monotonic() - began)}" if began is not None else ""
            job = self.jobs[number]
            left = time_left(job.run.folder, job.run.config) if job.run is not None and began is not None else ""
            since += f", {left}" if left else ""
            parts.append(Text(f"  {job.title(self._common)}  {text}{since}", no_wrap=True, overflow="ellipsis"))
        if len(self._states) > _MOST_RUNNING:
            parts.append(Text(f"  and {len(self._states) - _MOST_RUNNING} more"))
        if self._results:
            parts += [Text(), self._best()]
        self._live.update(Group(*parts), refresh=True)

    def _best(self) -> Table:
        """The best results so far; of very many, which take a while to compare, a little less often than drawn."""
        from exp.report.tables import as_rich, sweep_table

        now = time.monotonic()
        if self._table is None or (len(self._results) > self._compared and now > self._compare_from):
            self._table = as_rich(sweep_table(self._results, most=_BEST), width=100)
            self._compared = len(self._results)
            self._compare_from = now + _COMPARING * (time.monotonic() - now)
        return self._table
