"""Tasks that check the hardware (:mod:`exp.checks`): task=doctor, env, parity and qualify.

task=qualify is a suite of checks; its checks task=operators, collectives and speed can also be run alone.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, ClassVar, List, Optional

from exp.errors import ConfigError
from exp.launcher.base import launcher_class
from exp.task import ParentTask, Task, named

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

__all__ = ["Collectives", "Doctor", "Env", "Operators", "Parity", "Qualify", "Speed", "Trace"]


_EARLY_STEPS = 20
"""Steps whose losses can be compared with a tolerance. Training amplifies rounding errors: on a card that computes
correctly, losses of the default experiment differed from the CPU's by 1e-5 after 33 to more than 100 steps, and by up
to 2e-4 after 100."""


def _refuse_several(config: ExpConfig, instead: str) -> None:
    """Refuse more than one process; ``instead`` is what the user can use for several."""
    if config.nproc > 1:
        raise ConfigError(
            f"task={config.task.name} runs in one process; leave out nproc={config.nproc}, or use {instead}"
        )


def _refuse_several_machines(config: ExpConfig) -> None:
    """Refuse launchers of other machines, for a task that itself starts runs on this machine, one after the other."""
    name, launcher = config.task.name, launcher_class(config)
    if config.launcher.nnodes > 1:
        raise ConfigError(f"task={name} is for one machine; run it on each, without launcher.nnodes")
    if launcher.is_elsewhere(config.launcher) or launcher.joins:
        raise ConfigError(f"task={name} starts runs on this machine; use launcher=torchrun, if need be within a job")


@named
class Doctor(Task):
    """Examines every rank, its card, and how the ranks work together; the parent evaluates the findings."""

    timeout_s: int = 60
    """Time limit of one check, and of the wait for other ranks, in seconds."""
    burst_s: float = 2.0
    """How long every card multiplies matrices, in seconds."""

    diagnoses: ClassVar[bool] = True
    work: ClassVar[str] = "exp.checks.doctor.diagnose"
    begin: ClassVar[str] = "exp.checks.doctor.begin"
    end: ClassVar[str] = "exp.checks.doctor.end"


@named
class Env(Task):
    """Prints a description of the environment as plain text, for bug reports."""

    diagnoses: ClassVar[bool] = True
    uses_hardware: ClassVar[bool] = False  # without it, too, there is something to describe
    compared: ClassVar[bool] = False
    work: ClassVar[str] = "exp.checks.doctor.describe"

    def check(self, config: ExpConfig) -> None:
        """Refuse more than one process."""
        _refuse_several(config, "task=doctor")


@named
class Parity(ParentTask):
    """Runs a few steps on two backends, records a trace of each, and compares the traces (:mod:`exp.checks.parity`)."""

    reference: str = "cpu"
    """The backend to compare with."""
    steps: int = 20
    """Optimizer steps to compare."""
    tolerance: Optional[float] = None
    """Largest relative difference of the loss; null: 1e-5 in fp32, 2e-2 in bf16, 2e-3 in fp16. Outputs of modules may
    differ by 10 times as much, gradients and parameters by 100 times."""

    trains: ClassVar[bool] = True
    work: ClassVar[str] = "exp.checks.parity.compare_backends"

    def check(self, config: ExpConfig) -> None:
        """Check the number of steps, and that the runs are on one node and without sharded tensors."""
        if not 1 <= self.steps <= _EARLY_STEPS:
            raise ConfigError(
                f"steps={self.steps} must be in 1 to {_EARLY_STEPS}, because rounding errors grow with the steps"
            )
        if config.wrapper.kind == "fsdp" and config.nproc > 1:
            raise ConfigError("task=parity compares whole tensors, but wrapper=fsdp shards them; use wrapper=ddp")
        _refuse_several_machines(config)


@named
class Trace(Task):
    """One of the two runs of ``task=parity``."""

    trains: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    work: ClassVar[str] = "exp.checks.measure.train_traced"


@named
class Qualify(ParentTask):
    """Runs a suite of checks, each in a process of its own, and writes a page of results (:mod:`exp.checks.suite`)."""

    budget_minutes: float = 60.0
    """After this time no further check starts; the same command continues with the remaining checks."""
    row_minutes: float = 8.0
    """Time limit of one check; a check that takes longer has failed."""
    rows: Optional[List[str]] = None
    """Checks to run, as patterns: ``[doctor,"speed*"]``; null: all."""
    experiments: Optional[List[str]] = None
    """Experiments to train; null: the example of each installed family of experiments."""
    steps: int = 30
    """Optimizer steps of each measurement of speed."""

    work: ClassVar[str] = "exp.checks.suite.qualify"

    def check(self, config: ExpConfig) -> None:
        """Refuse too few steps, and launchers of other machines."""
        if self.steps <= Speed.warm_up:
            raise ConfigError(
                f"task.steps={self.steps} must be more than the {Speed.warm_up} warm-up steps, which are not measured"
            )
        _refuse_several_machines(config)


class _Journaled(Task):
    """Base class of checks that write a journal of what they try; the parent evaluates it at the end."""

    compared: ClassVar[bool] = False
    end: ClassVar[str] = "exp.checks.check.end_journaled"


@named
class Operators(_Journaled):
    """Compares every operator of some training steps with the CPU."""

    trains: ClassVar[bool] = True
    counts_fallbacks: ClassVar[bool] = True
    work: ClassVar[str] = "exp.checks.operators.check_operators"

    def check(self, config: ExpConfig) -> None:
        """Refuse more than one process: task=collectives checks several."""
        _refuse_several(config, "task=collectives")


@named
class Collectives(_Journaled):
    """Checks and times collective operations."""

    sizes_kib: List[int] = field(default_factory=lambda: [4, 64, 1024, 16384, 65536])
    """Sizes of the tensors, in KiB."""

    work: ClassVar[str] = "exp.checks.measure.measure_collectives"

    def check(self, config: ExpConfig) -> None:
        """Refuse a single process."""
        if config.nproc < 2:
            raise ConfigError("task=collectives needs nproc=2 or more: one process has nothing to exchange")


@named
class Speed(Task):
    """Times training steps."""

    warm_up: int = 5
    """Steps at the beginning that are not timed; later ones are timed in groups of as many."""

    trains: ClassVar[bool] = True
    compared: ClassVar[bool] = False
    work: ClassVar[str] = "exp.checks.measure.measure_speed"

    def check(self, config: ExpConfig) -> None:
        """Refuse a number of steps that leaves nothing to time after the warm-up; log a line for each as many steps."""
        config.log_every = max(self.warm_up, 1)
        if config.max_steps is not None and config.max_steps <= self.warm_up:
            raise ConfigError(f"max_steps={config.max_steps} must be more than task.warm_up={self.warm_up}")
