"""Tasks that check the hardware (:mod:`exp.checks`): task=doctor, env, parity and qualify.

task=qualify is a suite of checks; its checks task=operators, collectives and speed can also be run alone.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, List, Optional, Sequence

from exp.errors import ConfigError
from exp.launcher.base import launcher_class
from exp.task import ParentTask, Task, named_task

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.launcher.outcome import Outcome
    from exp.runs.folder import RunFolder
    from exp.session import RankInfo, Session

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
    if launcher.is_remote(config.launcher) or launcher.is_external:
        raise ConfigError(f"task={name} starts runs on this machine; use launcher=torchrun, if need be within a job")


@named_task
class Doctor(Task):
    """Examines every rank, its card, and how the ranks work together; the parent evaluates the findings."""

    timeout_s: int = 60
    """Time limit of one check, and of the wait for other ranks, in seconds."""
    burst_s: float = 2.0
    """How long every card multiplies matrices, in seconds."""

    is_diagnostic: ClassVar[bool] = True

    def print_header(self, config: ExpConfig, folder: RunFolder) -> bool:
        """Print what will be examined."""
        from exp.checks.diagnosis import begin

        begin(config, folder)
        return True

    def diagnose(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        """Run the checks of one rank (:func:`exp.checks.doctor.diagnose`)."""
        from exp.checks.doctor import diagnose

        diagnose(config, folder, info, backend)

    def report_outcome(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> Optional[int]:
        """Evaluate the findings of all ranks (:func:`exp.checks.diagnosis.end`)."""
        from exp.checks.diagnosis import end

        return end(config, folder, outcome)


@named_task
class Env(Task):
    """Prints a description of the environment as plain text, for bug reports."""

    is_diagnostic: ClassVar[bool] = True
    uses_hardware: ClassVar[bool] = False  # without it, too, there is something to describe
    has_comparable_result: ClassVar[bool] = False

    def check(self, config: ExpConfig) -> None:
        """Refuse more than one process."""
        _refuse_several(config, "task=doctor")

    def diagnose(self, config: ExpConfig, folder: RunFolder, info: RankInfo, backend: Backend) -> None:
        """Print the description (:func:`exp.checks.machine.describe_machine`)."""
        from exp.checks.machine import describe_machine

        describe_machine(config, folder, info, backend)


@named_task
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

    def check(self, config: ExpConfig) -> None:
        """Check the number of steps, and that the runs are on one node and without sharded tensors."""
        if not 1 <= self.steps <= _EARLY_STEPS:
            raise ConfigError(
                f"steps={self.steps} must be in 1 to {_EARLY_STEPS}, because rounding errors grow with the steps"
            )
        if config.wrapper.kind == "fsdp" and config.nproc > 1:
            raise ConfigError("task=parity compares whole tensors, but wrapper=fsdp shards them; use wrapper=ddp")
        _refuse_several_machines(config)

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Compare (:func:`exp.checks.parity.compare_backends`)."""
        from exp.checks.parity import compare_backends

        return compare_backends(config, list(overrides))


@named_task
class Trace(Task):
    """One of the two runs of ``task=parity``."""

    trains: ClassVar[bool] = True
    has_comparable_result: ClassVar[bool] = False

    def run(self, session: Session) -> dict[str, Any]:
        """Train, and record a trace (:func:`exp.checks.measure.train_traced`)."""
        from exp.checks.measure import train_traced

        return train_traced(session)


@named_task
class Qualify(ParentTask):
    """Runs a suite of checks, each in a process of its own, and writes a page of results (:mod:`exp.checks.suite`)."""

    budget_minutes: float = 60.0
    """After this time no further check starts; the same command continues with the remaining checks."""
    check_minutes: float = 8.0
    """Time limit of one check; a check that takes longer has failed."""
    checks: Optional[List[str]] = None
    """Checks to run, as patterns: ``[doctor,"speed*"]``; null: all."""
    experiments: Optional[List[str]] = None
    """Experiments to train; null: the example of each installed family of experiments."""
    steps: int = 30
    """Optimizer steps of each measurement of speed."""

    def check(self, config: ExpConfig) -> None:
        """Refuse too few steps, and launchers of other machines."""
        if self.steps <= Speed.warm_up:
            raise ConfigError(
                f"task.steps={self.steps} must be more than the {Speed.warm_up} warm-up steps, which are not measured"
            )
        _refuse_several_machines(config)

    def run_in_parent(self, config: ExpConfig, overrides: Sequence[str]) -> int:
        """Run the suite (:func:`exp.checks.suite.qualify`)."""
        from exp.checks.suite import qualify

        return qualify(config, list(overrides))


class _Journaled(Task):
    """Base class of checks that write a journal of what they try; the parent evaluates it at the end."""

    has_comparable_result: ClassVar[bool] = False

    def report_outcome(self, config: ExpConfig, folder: RunFolder, outcome: Outcome) -> Optional[int]:
        """Evaluate the journal (:func:`exp.checks.check.report_journal`)."""
        from exp.checks.check import report_journal

        return report_journal(config, folder, outcome)


@named_task
class Operators(_Journaled):
    """Compares every operator of some training steps with the CPU."""

    trains: ClassVar[bool] = True
    counts_fallbacks: ClassVar[bool] = True

    def check(self, config: ExpConfig) -> None:
        """Refuse more than one process: task=collectives checks several."""
        _refuse_several(config, "task=collectives")

    def run(self, session: Session) -> dict[str, Any]:
        """Train, and compare operators (:func:`exp.checks.operators.check_operators`)."""
        from exp.checks.operators import check_operators

        return check_operators(session)


@named_task
class Collectives(_Journaled):
    """Checks and times collective operations."""

    sizes_kib: List[int] = field(default_factory=lambda: [4, 64, 1024, 16384, 65536])
    """Sizes of the tensors, in KiB."""

    def check(self, config: ExpConfig) -> None:
        """Refuse a single process."""
        if config.nproc < 2:
            raise ConfigError("task=collectives needs nproc=2 or more: one process has nothing to exchange")

    def run(self, session: Session) -> dict[str, Any]:
        """Check and time (:func:`exp.checks.measure.measure_collectives`)."""
        from exp.checks.measure import measure_collectives

        return measure_collectives(session)


@named_task
class Speed(Task):
    """Times training steps."""

    warm_up: int = 5
    """Steps at the beginning that are not timed; later ones are timed in groups of as many."""

    trains: ClassVar[bool] = True
    has_comparable_result: ClassVar[bool] = False

    def check(self, config: ExpConfig) -> None:
        """Refuse a number of steps that leaves nothing to time after the warm-up; log a line for each as many steps."""
        config.log_every = max(self.warm_up, 1)
        if config.max_steps is not None and config.max_steps <= self.warm_up:
            raise ConfigError(f"max_steps={config.max_steps} must be more than task.warm_up={self.warm_up}")

    def run(self, session: Session) -> dict[str, Any]:
        """Train and time (:func:`exp.checks.measure.measure_speed`)."""
        from exp.checks.measure import measure_speed

        return measure_speed(session)
