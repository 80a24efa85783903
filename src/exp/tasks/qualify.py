"""task=qualify: prove a machine; and task=operators, collectives and speed, which are rows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, List, Optional, Sequence

from exp.errors import ConfigError
from exp.task import Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.session import Session
    from exp.summary import Finished

__all__ = ["Collectives", "Operators", "Qualify", "Speed"]


@dataclass
class Qualify(Task):
    """Makes all rows, each in a process of its own, and one page of them (:mod:`exp.checks.qualify`)."""

    _target_: str = "exp.tasks.qualify.Qualify"
    name: str = "qualify"
    budget_minutes: float = 60.0
    """Rows that do not fit into it are not run; the same command goes on with them."""
    row_minutes: float = 8.0
    """A row that takes longer has failed; the soak has its own time besides."""
    soak_minutes: float = 10.0
    """How long the last row trains; 0: it is left out."""
    rows: Optional[List[str]] = None
    """Which rows are made, as patterns: ``[doctor,"speed*"]``; null: all."""
    experiments: Optional[List[str]] = None
    """Experiments that are trained; null: the example of each installed family."""
    small: Optional[bool] = None
    """Train the examples in a small form; null: only where the cards are the CPU, or simulated."""
    steps: int = 30
    """Optimizer steps of each measurement of speed."""

    in_parent: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    def check(self, config: ExpConfig) -> None:
        """Refuse times that are none, and what needs one machine."""
        for key in ("budget_minutes", "row_minutes"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"task.{key}={getattr(self, key)} must be more than 0")
        if self.steps <= Speed.warm_up:
            raise ConfigError(
                f"task.steps={self.steps} must be more than {Speed.warm_up}, which come before the measurement"
            )
        if self.soak_minutes < 0:
            raise ConfigError(f"task.soak_minutes={self.soak_minutes} must be at least 0")
        if config.launcher.nnodes > 1:
            raise ConfigError("task=qualify proves one machine; run it on each, without launcher.nnodes")
        from exp.launcher.base import launcher_class

        if launcher_class(config).submits:
            raise ConfigError("task=qualify runs many short jobs here; take launcher=torchrun, within a job if need be")

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> Finished:
        """See :func:`exp.checks.qualify.qualify`."""
        from exp.checks.qualify import qualify

        return qualify(config, list(overrides))


@dataclass
class Operators(Task):
    """Compares every operator of some training steps with the CPU."""

    _target_: str = "exp.tasks.qualify.Operators"
    name: str = "operators"
    skip: List[str] = field(default_factory=list)
    """Operators that are left to the CPU, because the device ends the process: ``aten.gelu.default``."""

    trains: ClassVar[bool] = True
    isolated: ClassVar[bool] = True
    counts_fallbacks: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    modules = ("exp.checks.operators",)

    def check(self, config: ExpConfig) -> None:
        """Refuse more than one process: what they exchange is task=collectives' to check."""
        if config.nproc > 1:
            raise ConfigError(f"task=operators looks at one card; leave out nproc={config.nproc}")

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.checks.operators.check_operators`."""
        from exp.checks.operators import check_operators

        return check_operators(session)


@dataclass
class Collectives(Task):
    """Checks and times what ranks exchange."""

    _target_: str = "exp.tasks.qualify.Collectives"
    name: str = "collectives"
    sizes_kib: List[int] = field(default_factory=lambda: [4, 64, 1024, 16384, 65536])
    """Sizes of the tensors, in KiB."""
    skip: List[str] = field(default_factory=list)
    """What is left out, because it hangs: ``all_reduce bf16``."""

    isolated: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    modules = ("exp.checks.collectives",)

    def check(self, config: ExpConfig) -> None:
        """Refuse a single process."""
        if config.nproc < 2:
            raise ConfigError("task=collectives needs nproc=2 or more: one process has nothing to exchange")
        if not self.sizes_kib or min(self.sizes_kib) < 1:
            raise ConfigError(f"task.sizes_kib={self.sizes_kib} must be a list of sizes from 1 on")

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.checks.collectives.measure_collectives`."""
        from exp.checks.collectives import measure_collectives

        return measure_collectives(session)


@dataclass
class Speed(Task):
    """Times training steps."""

    _target_: str = "exp.tasks.qualify.Speed"
    name: str = "speed"
    warm_up: int = 5
    """Steps at the beginning that do not count."""

    trains: ClassVar[bool] = True
    isolated: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    modules = ("exp.checks.training",)

    def check(self, config: ExpConfig) -> None:
        """Refuse a warm-up that leaves nothing."""
        if config.max_steps is not None and config.max_steps <= self.warm_up:
            raise ConfigError(f"max_steps={config.max_steps} must be more than task.warm_up={self.warm_up}")

    def run(self, session: Session) -> dict[str, Any]:
        """See :func:`exp.checks.training.measure_speed`."""
        from exp.checks.training import measure_speed

        return measure_speed(session)
