"""task=track: hands runs that are over to trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

from omegaconf import ListConfig

from exp import console
from exp.errors import EXIT_FAILED, EXIT_OK, ConfigError
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.summary import Finished

__all__ = ["Track"]


@dataclass
class Track(Task):
    """Hands runs to the trackers of ``logger``: runs of a node without network, or whose tracker had gone."""

    _target_: str = "exp.tasks.track.Track"
    name: str = "track"
    run: Any = None
    """A run folder, a sweep's folder, a glob, or a list of them."""

    in_parent: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> Finished:
        """One run after the other; what a tracker has received is not sent again.

        Raises:
            ConfigError: there is no run, or no tracker.
        """
        from exp.config.paths import refuse_empty
        from exp.report.runs import find_runs
        from exp.runs.folder import RunFolder
        from exp.runs.lock import holder_of
        from exp.summary import Finished
        from exp.trackers.reporting import check, hand_over

        if self.run is None:
            raise ConfigError("task=track needs run=<a run folder, a sweep's folder, a glob, or a list [a,b] of them>")
        refuse_empty({"run": self.run})
        if not config.logger.trackers:
            raise ConfigError("task=track needs logger=<a tracker, or a list [a,b] of them>; --help lists them")
        check(config.logger)
        paths = [str(path) for path in self.run] if isinstance(self.run, ListConfig) else [str(self.run)]
        runs = find_runs(paths)
        complete = True
        terminal = console.make_console()
        for run in runs:
            going_on = " goes on, and reports by itself" if holder_of(run.folder) is not None else ""
            terminal.print(f"{console.shown(run.folder)}{going_on}", highlight=False, markup=False, soft_wrap=True)
            if not going_on:
                for reporter in hand_over(config.logger, RunFolder(run.folder), console.warn):
                    complete &= reporter.state["closed"]
                    address = reporter.state["address"]
                    if address:
                        terminal.print(f"  {reporter.name}: {address}", highlight=False, soft_wrap=True)
        return Finished(EXIT_OK if complete else EXIT_FAILED)
