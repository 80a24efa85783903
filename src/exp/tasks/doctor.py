"""task=doctor: does everything work together?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from exp.errors import ConfigError
from exp.task import Task

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["Doctor"]


@dataclass
class Doctor(Task):
    """Examines every rank, its card, and the job that they make; the parent judges."""

    _target_: str = "exp.tasks.doctor.Doctor"
    name: str = "doctor"
    timeout_s: int = 60
    """Longest that a check may take, and that ranks wait for one another, in seconds."""
    burst_s: float = 2.0
    """How long every card multiplies matrices, in seconds."""

    diagnoses: ClassVar[bool] = True
    isolated: ClassVar[bool] = True  # the parent is to survive a device that hangs or crashes

    def check(self, config: ExpConfig) -> None:
        """Refuse times that are none."""
        for key in ("timeout_s", "burst_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"task.{key}={getattr(self, key)} must be more than 0 seconds")

    def diagnose(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        """See :func:`exp.checks.doctor.diagnose`."""
        from exp.checks.doctor import diagnose

        diagnose(config, folder, info, backend)

    def announce(self, config: ExpConfig, folder: RunFolder) -> bool:
        """What is examined."""
        from exp.checks import report

        report.begin(config, folder)
        return True

    def tell_end(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
        """The table of findings."""
        from exp.checks import report

        if outcome.interrupted_by is not None:
            return None
        return report.end(config, folder, outcome)
