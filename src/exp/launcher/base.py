"""The launcher interface, and which launcher a configuration names."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

from omegaconf import OmegaConf

from exp.config.resolve import create
from exp.config.resolve import resolve as resolve_name
from exp.config.schema import ExpConfig, LauncherConfig

if TYPE_CHECKING:
    from pathlib import Path

    from exp.frozen import FrozenRun
    from exp.launcher.follow import Watcher
    from exp.launcher.outcome import Outcome

__all__ = ["Launcher", "launcher_class", "resolve"]

_LOCAL = "exp.launcher.local.LocalLauncher"
_TORCHRUN = "exp.launcher.torchrun.TorchrunLauncher"


class Launcher(abc.ABC):
    """Starts the workers of a run and waits for them.

    Attributes:
        keys: typed keys of the configuration: a dataclass that inherits
            :class:`exp.config.schema.LauncherConfig`; they are the constructor's arguments.
        submits: whether it hands runs to a scheduler, as jobs that may outlive this process, and takes the batch of a
            sweep at once (:meth:`launch_all`).
        joins: whether this process is one of a group that something outside has started: the variables that give its
            rank count.
    """

    keys: ClassVar[type] = LauncherConfig
    submits: ClassVar[bool] = False
    joins: ClassVar[bool] = False

    def __init__(self, **settings: Any) -> None:
        """Take the keys of ``config.launcher`` as ``self.config``, an object of ``keys``."""
        self.config: Any = self.keys(**settings)

    @classmethod
    def is_elsewhere(cls, config: Any) -> bool:
        """Whether runs with this ``config.launcher`` take place on other machines, whose hardware this one lacks."""
        del config
        return False

    @classmethod
    def take_place(cls, config: ExpConfig, overrides: Sequence[str]) -> None:
        """Where it ``joins``: set ``nproc`` and ``launcher.nnodes`` of the composed configuration to what is there.

        Raises:
            ConfigError: this process has no rank, or the user's overrides ask for another number of processes.
        """

    @property
    def leads(self) -> bool:
        """Whether this process writes the run folder and reports the outcome."""
        return True

    def check(self, nproc: int) -> None:
        """Refuse what this launcher cannot do, before anything is written.

        Raises:
            ConfigError: it cannot start ``nproc`` workers as configured.
        """

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Have the scheduler look at the request for runs, before anything is written.

        Returns:
            What would be handed to it (output in the folder ``logs``), if the configuration asks only for that.

        Raises:
            ConfigError: it would refuse the request.
        """

    def job_token(self) -> str | None:
        """What all processes of a job that start it together in one run folder know it by; None: there is one."""
        return None

    def launch_all(self, runs: Sequence[FrozenRun], watcher: Watcher, logs: Path) -> list[Outcome]:
        """Where it ``submits``: runs that have been written, as one batch, to their ends.

        Args:
            runs: all ask for the same of the scheduler.
            watcher: receives progress and outcomes.
            logs: where the scheduler writes to.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def launch(self, run: FrozenRun) -> Outcome:
        """Run what has been written, in ``run.config.nproc`` workers on this node, to the end."""


def launcher_class(config: ExpConfig) -> type[Launcher]:
    """The class that ``config.launcher`` names; for ``auto``, which is not decided yet, the base class.

    Raises:
        ConfigError: there is none, or it is no launcher.
        UnavailableError: its module does not import.
    """
    target = str(config.launcher["_target_"])
    if target == "auto":
        return Launcher
    cls: type[Launcher] = resolve_name("launcher._target_", target, Launcher)
    return cls


def resolve(config: LauncherConfig, nproc: int) -> Launcher:
    """The launcher of ``config``; ``auto`` is local for one process that never restarts, torchrun otherwise.

    Args:
        config: ``config.launcher``.
        nproc: workers per node.

    Raises:
        ConfigError: it cannot do what is asked for.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    if settings["_target_"] == "auto":
        alone = nproc == 1 and settings["nnodes"] == 1 and settings["max_restarts"] == 0
        settings["_target_"] = _LOCAL if alone else _TORCHRUN
    launcher: Launcher = create(settings, Launcher, "launcher")
    launcher.check(nproc)
    return launcher
