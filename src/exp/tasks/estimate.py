"""task=estimate: what a training takes, before it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Optional, Sequence

from exp.errors import ConfigError
from exp.task import ParentTask

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.summary import Finished

__all__ = ["Estimate"]


@dataclass
class Estimate(ParentTask):
    """Parameters, operations, memory by kind, bytes on the wire, and the batch that fits; needs no hardware."""

    _target_: str = "exp.tasks.estimate.Estimate"
    name: str = "estimate"
    memory_gib: Optional[float] = None
    """Memory of a card, in GiB; null: that of the cards here, as the vendor's monitor tells it."""
    headroom: float = 0.1
    """Share of the memory that is left to what is not counted: the driver, collectives' buffers, fragments."""

    trains: ClassVar[bool] = True

    def check(self, config: ExpConfig) -> None:
        """Refuse memory that is none."""
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ConfigError(f"task.memory_gib={self.memory_gib} must be more than 0, or null")
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"task.headroom={self.headroom} must be from 0 to less than 1")

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> Finished:
        """See :func:`exp.estimate.command.write_estimate`."""
        from exp.estimate.command import write_estimate

        return write_estimate(config, list(overrides), self)
