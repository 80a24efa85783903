"""The launcher interface: how the workers of a run are started. The parent process does not import torch."""

from __future__ import annotations

import abc
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Sequence

from omegaconf import OmegaConf

from exp.config.resolve import create, resolve
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import ConfigError
from exp.launcher.rank_environment import check_stale_environment

if TYPE_CHECKING:
    from exp.launcher.outcome import Outcome
    from exp.launcher.progress import ProgressDisplay
    from exp.launcher.run import FrozenRun

__all__ = ["Launcher", "create_launcher", "launcher_class"]

_LOCAL = "exp.launcher.local.LocalLauncher"
_TORCHRUN = "exp.launcher.torchrun.TorchrunLauncher"


class Launcher(abc.ABC):
    """Starts the workers of a run and waits for them.

    Attributes:
        keys: typed keys of the configuration: a dataclass that inherits
            :class:`exp.config.schema.LauncherConfig`; they are the constructor's arguments.
        is_external: whether another launcher has started this process as one rank of the job; the environment variables
            of that launcher then decide rank and world size.
        owns_run_folder: whether this process writes the run folder and reports the outcome.
    """

    keys: ClassVar[type] = LauncherConfig
    is_external: ClassVar[bool] = False
    owns_run_folder: bool = True

    def __init__(self, **settings: Any) -> None:
        """Store the keys of ``config.launcher`` in ``self.config``, an object of the class ``keys``."""
        self.config: Any = self.keys(**settings)

    @classmethod
    def is_remote(cls, config: Any) -> bool:
        """Whether runs with this ``config.launcher`` are jobs on other machines, which may have other hardware.

        Such a launcher takes a whole batch of a sweep at once (:meth:`launch_all`).
        """
        del config
        return False

    @classmethod
    def adopt_rank_environment(cls, config: ExpConfig, overrides: Sequence[str]) -> None:
        """Check the variables of other launchers, and remove stale ones (:func:`check_stale_environment`).

        A class that ``is_external`` instead sets ``nproc`` and ``launcher.nnodes`` of ``config`` as the variables say.

        Raises:
            ConfigError: another launcher has started this process, too; or, if the class ``is_external``, this process
                has no rank, or the user's overrides ask for another number of processes.
        """
        del overrides
        check_stale_environment(config.launcher.nnodes)

    def check(self, nproc: int) -> None:
        """Check that this launcher can do what is configured, before anything is written.

        Raises:
            ConfigError: it cannot start ``nproc`` workers as configured.
        """

    def preflight(self, runs: Sequence[FrozenRun], logs: Path) -> str | None:
        """Have the scheduler check the request for these runs, before anything is written.

        Args:
            runs: all runs of the request.
            logs: folder for the output of the jobs.

        Returns:
            The batch script, if the configuration asks only for that (a dry run); otherwise None.

        Raises:
            ConfigError: the scheduler would refuse the request.
        """

    def job_id(self) -> str | None:
        """Name of the job, equal in all processes that start it together in one run folder; None: only one starts it.

        The processes share the lock of the run folder by this name.
        """
        return None

    def launch_all(self, runs: Sequence[FrozenRun], display: ProgressDisplay, logs: Path) -> list[Outcome]:
        """If runs are elsewhere: submit them as one batch, and wait until all have ended.

        Args:
            runs: their run folders are written; all ask for the same resources.
            display: receives progress and outcomes.
            logs: folder for the output of the jobs.
        """
        raise NotImplementedError

    @abc.abstractmethod
    def launch(self, run: FrozenRun) -> Outcome:
        """Start ``run.config.nproc`` workers on this node and wait for their end; the run folder is written already."""


def launcher_class(config: ExpConfig) -> type[Launcher]:
    """The class that ``config.launcher`` names; for ``auto``, which is decided later, the base class.

    Raises:
        ConfigError: there is no such class, or it is not a launcher.
        UnavailableError: its module cannot be imported.
    """
    target = str(config.launcher["_target_"])
    if target == "auto":
        return Launcher
    cls: type[Launcher] = resolve("launcher._target_", target, Launcher)
    return cls


def create_launcher(config: LauncherConfig, nproc: int) -> Launcher:
    """The launcher of ``config``; ``auto`` is local for one process that never restarts, torchrun otherwise.

    Args:
        config: ``config.launcher``.
        nproc: workers per node.

    Raises:
        ConfigError: the launcher cannot do what is configured.
    """
    settings: Any = OmegaConf.to_container(config, resolve=True)
    if settings["_target_"] == "auto":
        alone = nproc == 1 and settings["nnodes"] == 1 and settings["max_restarts"] == 0
        settings["_target_"] = _LOCAL if alone else _TORCHRUN
    if settings["in_process"] and settings["_target_"] != _LOCAL:
        raise ConfigError("launcher.in_process=true is for one process of launcher=local; leave it out, or set nproc=1")
    launcher: Launcher = create(settings, Launcher, "launcher")
    launcher.check(nproc)
    return launcher
