"""task=why: how two runs differ, and from which step on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from exp.errors import ConfigError
from exp.task import named_task
from exp.tasks.runs import OfRuns

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Why"]


@named_task
class Why(OfRuns):
    """Says how two runs differ, the likely causes first."""

    format: str = "text"
    """``text``, one screen; or ``json``, everything."""

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Compare them (:func:`exp.checks.why.explain`)."""
        from exp.checks.why import print_explanation

        if self.format not in ("text", "json"):
            raise ConfigError(f"task.format={self.format} must be text or json")
        return print_explanation(self.given_paths(), self.format)
