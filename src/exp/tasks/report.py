"""task=report: a table and a page of runs that have been made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Sequence

from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.summary import Finished

__all__ = ["Report"]


@dataclass
class Report(Task):
    """Compares runs."""

    _target_: str = "exp.tasks.report.Report"
    name: str = "report"

    in_parent: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> Finished:
        """See :func:`exp.report.command.write_report`."""
        from exp.report.command import write_report
        from exp.summary import Finished

        return Finished(runs=write_report(config, overrides))
