"""Tasks that check the hardware (:mod:`exp.checks`): task=doctor, env, parity and qualify.

task=operators, collectives and speed are rows of the last; each can be run alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, List, Optional

from exp.errors import EXIT_OK, ConfigError
from exp.task import ParentTask, Task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder

__all__ = ["Collectives", "Doctor", "Env", "Operators", "Parity", "Qualify", "Speed", "Trace"]


_EARLY_STEPS = 20
"""Steps whose losses can be held to a tolerance. Training magnifies rounding errors: on a card that computes what the
CPU does, the default experiment was 1e-5 away after 33 to more than 100 steps, and up to 2e-4 after 100."""


def _refuse_several_machines(config: ExpConfig) -> None:
    """For tasks that start runs of their own, one after the other."""
    from exp.launcher.base import launcher_class

    name, launcher = config.task.name, launcher_class(config)
    if config.launcher.nnodes > 1:
        raise ConfigError(f"task={name} is for one machine; run it on each, without launcher.nnodes")
    if launcher.submits or launcher.joins:
        raise ConfigError(f"task={name} starts runs here; take launcher=torchrun, within a job if need be")


@dataclass
class Doctor(Task):
    """Examines every rank, its card, and the job that they make; the parent judges."""

    _target_: str = "exp.tasks.checks.Doctor"
    name: str = "doctor"
    timeout_s: int = 60
    """Longest that a check may take, and that ranks wait for one another, in seconds."""
    burst_s: float = 2.0
    """How long every card multiplies matrices, in seconds."""

    diagnoses: ClassVar[bool] = True
    isolated: ClassVar[bool] = True  # the parent is to survive a device that hangs or crashes
    work: ClassVar[str] = "exp.checks.doctor.diagnose"

    def announce(self, config: ExpConfig, folder: RunFolder) -> bool:
        """What is examined."""
        from exp.checks import diagnosis

        diagnosis.begin(config, folder)
        return True

    def tell_end(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
        """The table of findings."""
        from exp.checks import diagnosis

        return None if outcome.interrupted_by is not None else diagnosis.end(config, folder, outcome)


@dataclass
class Env(Task):
    """Plain text to paste into a bug report."""

    _target_: str = "exp.tasks.checks.Env"
    name: str = "env"

    diagnoses: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    work: ClassVar[str] = "exp.checks.env.describe"

    def check(self, config: ExpConfig) -> None:
        """Refuse more than one process."""
        if config.nproc > 1:
            raise ConfigError(f"task=env looks from one process; leave out nproc={config.nproc}, or use task=doctor")

    def announce(self, config: ExpConfig, folder: RunFolder) -> bool:
        """Nothing: the text alone is wanted."""
        return True

    def tell_end(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
        """All has been said."""
        return EXIT_OK if outcome.exit_code == EXIT_OK else None


@dataclass
class Parity(ParentTask):
    """Makes two runs, each of which leaves a trace of a few steps, and compares them (:mod:`exp.checks.parity`)."""

    _target_: str = "exp.tasks.checks.Parity"
    name: str = "parity"
    reference: str = "cpu"
    """The backend to compare with."""
    steps: int = 20
    """Optimizer steps to compare."""
    tolerance: Optional[float] = None
    """Largest relative difference of the loss; null: 1e-5 in fp32, 2e-2 in bf16, 2e-3 in fp16. Outputs of modules may
    differ by 10 times as much, gradients and parameters by 100 times."""

    trains: ClassVar[bool] = True
    uses_data: ClassVar[bool] = True
    uses_hardware: ClassVar[bool] = True
    work: ClassVar[str] = "exp.checks.parity.compare_backends"

    def check(self, config: ExpConfig) -> None:
        """Two runs on one node, one after the other, whose tensors are whole."""
        if not 1 <= self.steps <= _EARLY_STEPS:
            raise ConfigError(
                f"steps={self.steps} must be at least 1, and at most {_EARLY_STEPS}: rounding errors grow"
            )
        if config.wrapper.kind == "fsdp" and config.nproc > 1:
            raise ConfigError("task=parity compares whole tensors, and wrapper=fsdp leaves none; use wrapper=ddp")
        _refuse_several_machines(config)


@dataclass
class Trace(Task):
    """One of the two runs of ``task=parity``."""

    _target_: str = "exp.tasks.checks.Trace"
    name: str = "trace"
    steps: int = 20

    trains: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    work: ClassVar[str] = "exp.checks.training.train_traced"


@dataclass
class Qualify(ParentTask):
    """Makes all rows, each in a process of its own, and one page of them (:mod:`exp.checks.suite`)."""

    _target_: str = "exp.tasks.checks.Qualify"
    name: str = "qualify"
    budget_minutes: float = 60.0
    """After it no further row begins; the same command goes on with them."""
    row_minutes: float = 8.0
    """A row that takes longer has failed."""
    rows: Optional[List[str]] = None
    """Which rows are made, as patterns: ``[doctor,"speed*"]``; null: all."""
    experiments: Optional[List[str]] = None
    """Experiments that are trained; null: the example of each installed family."""
    steps: int = 30
    """Optimizer steps of each measurement of speed."""

    work: ClassVar[str] = "exp.checks.suite.qualify"

    def check(self, config: ExpConfig) -> None:
        """Refuse steps that are none, and more than one machine."""
        if self.steps <= Speed.warm_up:
            raise ConfigError(
                f"task.steps={self.steps} must be more than {Speed.warm_up}, which come before the measurement"
            )
        _refuse_several_machines(config)


@dataclass
class _Journaled(Task):
    """Writes a journal of what it tries, which is judged at the end."""

    isolated: ClassVar[bool] = True
    compared: ClassVar[bool] = False

    def tell_end(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> int | None:
        """See :func:`exp.checks.verdict.end_journaled`."""
        from exp.checks.verdict import end_journaled

        return end_journaled(config, folder, outcome)


@dataclass
class Operators(_Journaled):
    """Compares every operator of some training steps with the CPU."""

    _target_: str = "exp.tasks.checks.Operators"
    name: str = "operators"
    trains: ClassVar[bool] = True
    counts_fallbacks: ClassVar[bool] = True
    work: ClassVar[str] = "exp.checks.operators.check_operators"

    def check(self, config: ExpConfig) -> None:
        """Refuse more than one process: what they exchange is task=collectives' to check."""
        if config.nproc > 1:
            raise ConfigError(f"task=operators looks at one card; leave out nproc={config.nproc}")


@dataclass
class Collectives(_Journaled):
    """Checks and times what ranks exchange."""

    _target_: str = "exp.tasks.checks.Collectives"
    name: str = "collectives"
    sizes_kib: List[int] = field(default_factory=lambda: [4, 64, 1024, 16384, 65536])
    """Sizes of the tensors, in KiB."""

    work: ClassVar[str] = "exp.checks.collectives.measure_collectives"

    def check(self, config: ExpConfig) -> None:
        """Refuse a single process."""
        if config.nproc < 2:
            raise ConfigError("task=collectives needs nproc=2 or more: one process has nothing to exchange")


@dataclass
class Speed(Task):
    """Times training steps."""

    _target_: str = "exp.tasks.checks.Speed"
    name: str = "speed"
    warm_up: int = 5
    """Steps at the beginning that do not count."""

    trains: ClassVar[bool] = True
    isolated: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    work: ClassVar[str] = "exp.checks.training.measure_speed"

    def check(self, config: ExpConfig) -> None:
        """Refuse a warm-up that leaves nothing."""
        if config.max_steps is not None and config.max_steps <= self.warm_up:
            raise ConfigError(f"max_steps={config.max_steps} must be more than task.warm_up={self.warm_up}")
