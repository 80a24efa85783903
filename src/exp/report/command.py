"""``task=report``: what the command line does for it. No worker, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Sequence

from omegaconf import ListConfig

from exp import console
from exp.config.paths import refuse_empty
from exp.errors import ConfigError

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["write_report"]

_ROWS = 40  # of a table as papers print it; longer ones are in the files


def write_report(config: ExpConfig, overrides: Sequence[str]) -> list[Path]:
    """Find the runs, print their table and what is published beside it, and write the files.

    They go to ``output_dir`` where the user gives one; else into the sweep's folder, if ``run`` is one; else into a new
    folder below ``outputs/report``, so that nothing is added to a run.

    Args:
        config: with ``run`` and ``output_dir``.
        overrides: the user's.

    Returns:
        The folders of the runs.

    Raises:
        ConfigError: ``run`` is not set or empty, or there are no runs.
    """
    from exp.report import write_report as write
    from exp.report.paper import paper_tables
    from exp.report.paper_formats import as_rich
    from exp.report.runs import find_runs
    from exp.report.terminal import as_rich_table

    if config.run is None:
        raise ConfigError("task=report needs run=<a run folder, a sweep's folder, a glob, or a list [a,b] of them>")
    refuse_empty({"run": config.run})
    paths = [str(path) for path in config.run] if isinstance(config.run, ListConfig) else [str(config.run)]
    runs = find_runs(paths)
    folder = Path(config.output_dir)
    if not any(override.startswith("output_dir=") for override in overrides):
        only = Path(paths[0])
        is_sweep = len(paths) == 1 and only.is_dir() and not (only / "config.yaml").is_file()
        folder = only if is_sweep else Path("outputs", "report", folder.name)
    page = write(runs, folder, ", ".join(paths))
    terminal = console.make_console()
    terminal.print(as_rich_table(runs))
    for table in paper_tables(runs):
        if table.published and len(table.rows) <= _ROWS:
            terminal.print()
            terminal.print(as_rich(table))
            for note in table.notes:
                terminal.print(note, style="dim", soft_wrap=True, markup=False)
    unknown = sum(run.result is not None and "digests" not in run.result for run in runs)
    if unknown:
        terminal.print(
            f"note: {unknown} of {len(runs)} results have no digests: nobody can tell whether they are as written"
        )
    terminal.print(f"report: {page}", soft_wrap=True)
    return [run.folder for run in runs]
