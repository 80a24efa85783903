"""The files of a sweep, and the table at its end."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from exp import console
from exp.advice import to_continue_sweep
from exp.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError
from exp.footprint import remove_empty

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from exp.report.runs import Run
    from exp.sweep import Sweep

__all__ = ["finish", "remove_unused", "run_folders", "write"]

_RECORDS = ("multirun.yaml", "sweep.csv", "sweep_seeds.csv", "sweep.json")  # the first is Hydra's


def run_folders(folder: Path) -> list[Path]:
    """The run folders of a sweep."""
    return [path.parent for path in sorted(folder.glob("*/config.yaml"))]


def remove_unused(folder: Path, missing: list[Path]) -> None:
    """Remove what was made for a sweep of which no job has begun.

    Args:
        folder: of the sweep.
        missing: the folders that were not there before (:func:`exp.footprint.missing_folders`).
    """
    if run_folders(folder):
        return
    new = folder in missing
    for name in _RECORDS if new else _RECORDS[:1]:
        if (folder / name).is_file():
            (folder / name).unlink()
    if new and (folder / "slurm").is_dir():
        shutil.rmtree(str(folder / "slurm"))
    remove_empty(missing)


def write(sweep: Sweep) -> None:
    """``sweep.csv`` and ``sweep.json`` of the jobs so far."""
    from exp.report.rows import write_rows

    sweep.runs = _results(sweep.folder)
    if sweep.runs:
        write_rows(sweep.runs, sweep.folder)


def _results(folder: Path) -> list[Run]:
    """Runs that can be compared; none where all jobs examine something, as those of ``task=doctor``."""
    from exp.report.runs import find_runs

    try:
        return find_runs([folder]) if run_folders(folder) else []
    except ConfigError:
        return []


def finish(sweep: Sweep, terminal: Console) -> None:
    """Print the table of results and what became of the jobs; draw the plots and write the report."""
    from exp.report.tables import as_rich, sweep_table

    runs = sweep.runs or _results(sweep.folder)
    terminal.print()
    if runs:
        terminal.print(as_rich(sweep_table(runs), width=100))
    waiting = sum(job.outcome is not None and job.outcome.left for job in sweep.jobs)
    ended = [job.outcome for job in sweep.jobs if job.outcome is not None and job.outcome.begun]
    counts = {
        "completed": sum(each.exit_code == EXIT_OK and not each.left for each in ended),
        "done before": sum(job.skipped for job in sweep.jobs),
        "submitted": waiting,
        "failed": sum(
            each.interrupted_by is None and each.exit_code not in (EXIT_OK, EXIT_PREEMPTED) and not each.left
            for each in ended
        ),
        "interrupted": sum(each.interrupted_by is not None for each in ended),
        "preempted": sum(each.exit_code == EXIT_PREEMPTED for each in ended),
        "not begun": sum(not job.skipped for job in sweep.jobs) - len(ended),
    }
    text = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    terminal.print(
        f"{text}; {time.monotonic() - sweep.began:.0f} s; results in {console.shown(sweep.folder)}", soft_wrap=True
    )
    if sweep.interrupted_by is not None or counts["preempted"] or counts["not begun"]:
        terminal.print(f"to do the rest: {to_continue_sweep(sweep.folder)}", soft_wrap=True, markup=False)
    completed = any(run.status == "completed" for run in runs)
    if completed and sweep.settings.plots and not waiting and sweep.interrupted_by is None:
        from exp.report import write_report

        page = write_report(runs, sweep.folder, sweep.name)
        terminal.print(f"report: {console.shown(page)}", soft_wrap=True)
