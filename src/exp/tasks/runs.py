"""task=report, clean, track, attach and watch: work with finished or submitted runs, without workers and torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

from exp import console
from exp.errors import EXIT_FAILED, EXIT_OK, ConfigError
from exp.task import ParentTask, named_task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.report.runs import Run

__all__ = ["Attach", "Clean", "Report", "Track", "Watch"]


@dataclass
class OfRuns(ParentTask):
    run: Any = None
    """A run folder, a sweep's folder, a glob, or a list of these."""

    def given_paths(self) -> list[str]:
        """The paths in ``run``.

        Raises:
            ConfigError: ``run`` is not set or empty.
        """
        from exp.config.compose import check_not_empty

        if self.run is None:
            raise ConfigError(
                f"task={self.name} needs run=<a run folder, a sweep's folder, a glob, or a list [a,b] of them>"
            )
        check_not_empty("run", self.run)
        return [str(path) for path in self.run] if isinstance(self.run, list) else [str(self.run)]

    def find(self) -> list[Run]:
        """The runs that ``run`` names.

        Raises:
            ConfigError: ``run`` is not set or empty, or there are no runs.
        """
        from exp.report.runs import find_runs

        return find_runs(self.given_paths())


@named_task
class Report(OfRuns):
    """Compares runs in a table and on a page."""

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Find the runs, print their table and tables with reference metrics, and write the files.

        The files go to ``output_dir`` if the user sets it; else into the sweep's folder, if ``run`` is one; else into a
        new folder below ``outputs/report``, so that no run folder changes.
        """
        from exp.config.compose import sets_output_dir
        from exp.report.formats import as_rich
        from exp.report.page import write_report
        from exp.report.tables import results_tables

        paths, runs = self.given_paths(), self.find()
        folder = Path(config.output_dir)
        if not sets_output_dir(config):
            only = Path(paths[0])
            is_sweep = len(paths) == 1 and only.is_dir() and not (only / "config.yaml").is_file()
            folder = only if is_sweep else Path("outputs", "report", folder.name)
        page = write_report(runs, folder, ", ".join(paths))
        terminal = console.make_console()
        for table in results_tables(runs):
            terminal.print(as_rich(table))
        terminal.print(f"report: {page}", soft_wrap=True)
        type(self).runs = [run.folder for run in runs]
        return EXIT_OK


@named_task
class Clean(OfRuns):
    """Shows how much of run folders is of no use any more, or removes it."""

    remove: bool = False
    """Remove it; otherwise only show it."""

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Show or remove checkpoints and leftovers (:mod:`exp.runs.clean`); runs that go on are left alone."""
        from exp.runs.clean import find_removable, remove
        from exp.runs.folder import RunFolder
        from exp.runs.lock import live_holder

        runs = self.find()
        terminal, total = console.make_console(), 0
        for run in runs:
            if live_holder(run.folder) is not None:
                console.warn(f"{console.display_path(run.folder)} is still running, and is left alone")
                continue
            for item in (remove if self.remove else find_removable)(RunFolder(run.folder)):
                total += item.size
                line = f"{console.format_bytes(item.size):>9}  {console.display_path(item.path)}  {item.reason}"
                terminal.print(line, highlight=False, markup=False, soft_wrap=True)
        done = "removed" if self.remove else "could be removed: task.remove=true removes it"
        terminal.print(f"{console.format_bytes(total)} {done}", highlight=False)
        return EXIT_OK


@named_task
class Track(OfRuns):
    """Sends runs to the trackers of ``logger``, for example runs of a node without network access."""

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Send the runs one after the other; records that a tracker has received are not sent again.

        Raises:
            ConfigError: there is no run, or no tracker.
        """
        from exp.runs.folder import RunFolder
        from exp.runs.lock import live_holder
        from exp.trackers.base import check, upload_finished

        runs = self.find()
        if not config.logger.trackers:
            raise ConfigError("task=track needs logger=<a tracker, or a list [a,b] of them>; --help lists them")
        check(config.logger)
        complete = True
        terminal = console.make_console()
        for run in runs:
            going_on = " is still running, and reports by itself" if live_holder(run.folder) is not None else ""
            terminal.print(
                f"{console.display_path(run.folder)}{going_on}", highlight=False, markup=False, soft_wrap=True
            )
            if not going_on:
                for reporter in upload_finished(config.logger, RunFolder(run.folder), console.warn):
                    complete &= reporter.state["closed"]
                    address = reporter.state["address"]
                    if address:
                        terminal.print(f"  {reporter.name}: {address}", highlight=False, soft_wrap=True)
        return EXIT_OK if complete else EXIT_FAILED


@named_task
class Attach(ParentTask):
    """Follows a submitted job to its end."""

    run: Any = None
    """The run folder of a submitted job."""

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Follow the job (:func:`exp.launcher.slurm.follow.attach`)."""
        from exp.launcher.slurm.follow import attach

        return attach(config)


@named_task
class Watch(ParentTask):
    """Shows the ranks of a run and the cards of this host, beside the run."""

    run: Any = None
    """A run folder; null: the newest run on this host."""
    format: str = "table"
    """``table``, on a terminal until the run ends; or ``json``, once."""

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Show them (:func:`exp.launcher.watch.watch`)."""
        from exp.launcher.watch import watch

        return watch(config)
