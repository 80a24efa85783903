"""task=env: what this machine and this installation are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from exp.errors import EXIT_OK, ConfigError
from exp.task import Task

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.launcher.rank import RankInfo
    from exp.runfolder import RunFolder

__all__ = ["Env"]


@dataclass
class Env(Task):
    """Plain text to paste into a bug report."""

    _target_: str = "exp.tasks.env.Env"
    name: str = "env"

    diagnoses: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    silent: ClassVar[bool] = True  # the text alone is wanted

    def check(self, config: ExpConfig) -> None:
        """Refuse more than one process."""
        if config.nproc > 1:
            raise ConfigError(f"task=env looks from one process; leave out nproc={config.nproc}, or use task=doctor")

    def diagnose(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        """See :func:`exp.checks.env.describe`."""
        from exp.checks.env import describe

        describe(config, folder, info, backend)

    def tell_end(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
        """All has been said."""
        return EXIT_OK if outcome.exit_code == EXIT_OK else None
