"""task=report: a table and a page of runs that have been made. No worker, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

from omegaconf import ListConfig

from exp import console
from exp.errors import ConfigError
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.summary import Finished

__all__ = ["Report"]

_ROWS = 40  # of a table as papers print it; longer ones are in the files


@dataclass
class Report(Task):
    """Compares runs."""

    _target_: str = "exp.tasks.report.Report"
    name: str = "report"
    run: Any = None
    """A run folder, a sweep's folder, a glob, or a list of them."""

    in_parent: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> Finished:
        """Find the runs, print their table and what is published beside it, and write the files.

        They go to ``output_dir`` where the user gives one; else into the sweep's folder, if ``run`` is one; else into a
        new folder below ``outputs/report``, so that nothing is added to a run.

        Raises:
            ConfigError: ``run`` is not set or empty, or there are no runs.
        """
        from exp.config.paths import refuse_empty
        from exp.report import write_report
        from exp.report.runs import find_runs
        from exp.report.tables import as_rich, paper_tables, sweep_table
        from exp.summary import Finished

        if self.run is None:
            raise ConfigError("task=report needs run=<a run folder, a sweep's folder, a glob, or a list [a,b] of them>")
        refuse_empty({"run": self.run})
        paths = [str(path) for path in self.run] if isinstance(self.run, ListConfig) else [str(self.run)]
        runs = find_runs(paths)
        folder = Path(config.output_dir)
        if not any(override.startswith("output_dir=") for override in overrides):
            only = Path(paths[0])
            is_sweep = len(paths) == 1 and only.is_dir() and not (only / "config.yaml").is_file()
            folder = only if is_sweep else Path("outputs", "report", folder.name)
        page = write_report(runs, folder, ", ".join(paths))
        terminal = console.make_console()
        terminal.print(as_rich(sweep_table(runs), width=100))
        for table in paper_tables(runs):
            if table.published and len(table.rows) <= _ROWS:
                terminal.print()
                terminal.print(as_rich(table))
        unknown = sum(bool(run.result) and "digests" not in run.result for run in runs)
        if unknown:
            terminal.print(
                f"note: {unknown} of {len(runs)} results have no digests: nobody can tell whether they are as written"
            )
        terminal.print(f"report: {page}", soft_wrap=True)
        return Finished(runs=[run.folder for run in runs])
