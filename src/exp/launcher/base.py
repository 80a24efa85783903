"""The launcher interface."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

from exp.config.resolve import resolve
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import ConfigError
from exp.task import task_class

if TYPE_CHECKING:
    from pathlib import Path

    from exp.frozen import FrozenRun
    from exp.launcher.outcome import Outcome
    from exp.runfolder import RunFolder

__all__ = ["Launcher", "Watcher", "launcher_class"]


class Watcher(abc.ABC):
    """Is told what becomes of runs that are not in this process."""

    @abc.abstractmethod
    def say(self, text: str) -> None:
        """Something that the user is to read."""

    @abc.abstractmethod
    def state(self, number: int, text: str) -> None:
        """How a run is doing; called often."""

    @abc.abstractmethod
    def ended(self, number: int, outcome: Outcome) -> None:
        """A run has ended."""


@dataclass(eq=False)
class Launcher(abc.ABC):
    """Starts the workers of a run and waits for them.

    Attributes:
        keys: typed keys of the configuration: a dataclass that inherits
            :class:`exp.config.schema.LauncherConfig`; they are the constructor's arguments.
        submits: whether it hands runs to a scheduler, as jobs that may outlive this process, and takes the batch of a
            sweep at once (:meth:`launch_all`).
        joins: whether this process is one of a group that something outside has started: the variables that tell its
            place in it count.
    """

    keys: ClassVar[type] = LauncherConfig
    submits: ClassVar[bool] = False
    joins: ClassVar[bool] = False

    nnodes: int = 1
    """Nodes that take part."""
    rdzv_endpoint: str | None = None
    """``host:port`` where agents of several nodes meet."""
    rdzv_id: str = "exp"
    """Tells jobs at one endpoint apart."""
    max_restarts: int = 0
    """How often all workers are started again."""
    fork: bool = True
    """Whether workers may be forked from one process that has imported everything."""
    timeout_s: int = 1800
    """Seconds to wait for other nodes and for collectives."""
    step_timeout_s: float | None = None
    """Seconds that all ranks may stand still within training or evaluation; None: from the slowest so far, at least a
    minute; 0: any time."""

    def __post_init__(self) -> None:
        if self.step_timeout_s is not None and self.step_timeout_s < 0:
            raise ConfigError(f"launcher.step_timeout_s={self.step_timeout_s} must be positive, 0 (never) or null")
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise ConfigError(
                f"launcher.nnodes={self.nnodes} needs a meeting point; "
                "set launcher.rdzv_endpoint=<host of one node>:<port>"
            )

    @classmethod
    def is_elsewhere(cls, config: Any) -> bool:
        """Whether runs take place on other machines, whose hardware this one cannot tell.

        Args:
            config: ``config.launcher``, with the fields of ``keys``.
        """
        del config
        return False

    @classmethod
    def take_place(cls, config: ExpConfig, overrides: Sequence[str]) -> None:
        """Where it ``joins``: set ``nproc`` and ``launcher.nnodes`` to what is there, first of all.

        Args:
            config: the whole configuration, as composed; may be changed.
            overrides: the user's.

        Raises:
            ConfigError: there is no place to take, or the user has asked for another number of processes.
        """

    @property
    def leads(self) -> bool:
        """Whether this process writes the run folder and tells the outcome; one that does not has ``take_part``."""
        return True

    def take_part(self, run: FrozenRun) -> int:
        """Run this process's share of a run that another process leads; returns the exit code."""
        raise NotImplementedError

    def check(self, nproc: int) -> None:
        """Refuse what this launcher cannot do, before anything is written.

        Raises:
            ConfigError: it cannot start ``nproc`` workers as configured.
        """

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Have the scheduler look at a request, before anything is written.

        Args:
            runs: to be submitted together.
            logs: where the scheduler would write to.

        Returns:
            What would be handed to it, where the configuration asks for no more than that; None: go on.

        Raises:
            ConfigError: it would refuse the request.
        """

    def job_token(self) -> str | None:
        """What all processes of a job that start it together, in one run folder, know it by; None: there is one."""
        return None

    def launch_run(self, run: FrozenRun) -> Outcome:
        """:meth:`launch` what has been written."""
        return self.launch(run.folder, run.config.nproc, saves=task_class(run.config).saves_state)

    def launch_all(self, runs: Sequence[FrozenRun], watcher: Watcher, logs: Path) -> list[Outcome]:
        """Where it ``submits``: runs that have been written, as one batch, to their ends.

        Args:
            runs: all ask for the same of the scheduler.
            watcher: is told what becomes of each.
            logs: where the scheduler writes to.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def launch(self, folder: RunFolder, nproc: int, saves: bool = True) -> Outcome:
        """Run ``config.yaml`` of ``folder`` in ``nproc`` workers on this node, to the end.

        Args:
            folder: the run folder.
            nproc: workers.
            saves: whether the task can save its state when it has to end.
        """


def launcher_class(config: ExpConfig) -> type[Launcher]:
    """The class that ``config.launcher`` names; for ``auto``, which is not decided yet, the base class.

    Raises:
        ConfigError: there is none, or it is no launcher.
        UnavailableError: its module does not import.
    """
    target = str(config.launcher["_target_"])
    if target == "auto":
        return Launcher
    cls: type[Launcher] = resolve("launcher._target_", target, Launcher)
    return cls
