"""task=parity: does this backend compute what another one does?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Optional

from exp.errors import ConfigError
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session

__all__ = ["Parity"]


@dataclass
class Parity(Task):
    """One of two runs, each of which leaves a trace of a few steps; the parent compares (:mod:`exp.checks.parity`)."""

    _target_: str = "exp.tasks.parity.Parity"
    name: str = "parity"
    tolerance: Optional[float] = None
    """Largest relative difference of the loss; null: 1e-5 in fp32, 2e-2 in bf16, 2e-3 in fp16. Outputs of modules may
    differ by 10 times as much, gradients and parameters by 100 times."""

    trains: ClassVar[bool] = True
    isolated: ClassVar[bool] = True  # the plug-ins of two devices need not live in one process
    has_reference: ClassVar[bool] = True
    modules = ("exp.checks.training",)

    def check(self, config: ExpConfig) -> None:
        """Two runs on one node, one after the other."""
        if config.reference is None:
            raise ConfigError("task=parity compares with another backend; set reference=cpu, or another one")
        if config.steps < 1:
            raise ConfigError(f"steps={config.steps} must be at least 1")
        if config.launcher.nnodes > 1:
            raise ConfigError("task=parity runs on one node; leave out launcher.nnodes")
        from exp.launcher.base import launcher_class

        if launcher_class(config).submits:
            raise ConfigError(
                "task=parity is two runs, one after the other; take launcher=torchrun, within a job if need be"
            )

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.checks.training.train_traced`."""
        from exp.checks.training import train_traced

        return train_traced(session)
