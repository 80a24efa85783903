"""A frozen run, and the launcher interface: how the workers of a run are started. The parent does not import torch."""

from __future__ import annotations

import abc
import functools
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, NamedTuple, Sequence

from omegaconf import OmegaConf

from exp import console
from exp.config import compose, diff
from exp.config.diff import resume_changes, resume_error
from exp.config.resolve import instantiate, mark_untrusted, resolve, to_plain, trust_packages
from exp.config.schema import ExpConfig, LauncherConfig
from exp.errors import ConfigError, RunError, qualified_name
from exp.hardware.backend import Backend
from exp.hardware.registry import create_backend
from exp.launcher.rank_environment import check_stale_environment
from exp.runs.files import file_digest, read_json, read_yaml, to_json
from exp.runs.folder import FolderSnapshot, RunFolder
from exp.runs.lock import RunLock, read_holder
from exp.task import Task, create_task, task_class

if TYPE_CHECKING:
    from exp.launcher.outcome import Outcome, ProgressDisplay

__all__ = ["Classes", "FrozenRun", "Launcher", "check_folder", "create_launcher", "launcher_class"]

_LOCAL = "exp.launcher.local.LocalLauncher"
_TORCHRUN = "exp.launcher.torchrun.TorchrunLauncher"
_WRITTEN_WITHIN_S = 60.0  # an NFS client may show a new file late


class Classes(NamedTuple):
    """The classes that decide how a run goes; looked up once for each run."""

    task: type[Task]
    launcher: type[Launcher]

    @classmethod
    def of(cls, config: ExpConfig) -> Classes:
        """The classes that a typed configuration names; raises the errors of the two functions."""
        return cls(task_class(config), launcher_class(config))


@dataclass
class FrozenRun:
    """A frozen run: what travels from the command line to the launcher.

    The classes of task, launcher and backend are looked up once, and one object of each is made when it is needed.

    Attributes:
        config: the whole configuration (:class:`exp.config.schema.ExpConfig`), with all interpolations resolved.
        overrides: the user's overrides.
        folder: the run folder.
        classes: of task and launcher.
        snapshot: content of the folder before :meth:`write`; None: this process has not written the folder.
        lock: the lock of the folder; None: this process does not hold it.
    """

    config: ExpConfig
    overrides: list[str]
    folder: RunFolder
    classes: Classes
    snapshot: FolderSnapshot | None = None
    lock: RunLock | None = None

    @functools.cached_property
    def task(self) -> Task:
        """The task, with its keys."""
        return create_task(self.classes.task, self.config.task)

    @functools.cached_property
    def launcher(self) -> Launcher:
        """The launcher, which can do what is configured."""
        return create_launcher(self.classes.launcher, to_plain(self.config.launcher), self.config.nproc)

    @property
    def is_remote(self) -> bool:
        """Whether the run is a job on other machines, which may have other hardware."""
        return self.classes.launcher.is_remote(self.config.launcher)

    @property
    def has_peers(self) -> bool:
        """Whether nodes that were started by hand write into the same folder."""
        return self.config.launcher.nnodes > 1 and not self.is_remote

    @functools.cached_property
    def backend(self) -> Backend:
        """The hardware family."""
        return create_backend(self.config.backend)

    def contents(self) -> dict[str, bytes]:
        """The files that have the configuration, by name."""
        folder, keys = self.folder, to_plain(self.config)
        record = keys.pop("record")
        return {
            folder.env.name: to_json({"record": record}, indent=2).encode(),  # a worker adds versions and devices
            folder.config.name: OmegaConf.to_yaml(keys).encode(),
            folder.overrides.name: OmegaConf.to_yaml(list(self.overrides)).encode(),
        }

    def write(self, token: str | None = None) -> None:
        """Take the lock of the run folder, and write the configuration there.

        The records of an earlier run in the folder stay until this run begins.

        Args:
            token: name of the job, equal in all processes that start it together; None: only this process starts it.

        Raises:
            ConfigError: another run uses the folder, the folder cannot be written, or the run to resume is another one.
            RunError: the disk is full.
        """
        if self.lock is not None:
            return  # the process that started this one has written the folder
        folder, contents = self.folder, self.contents()
        digest = hashlib.sha256(contents[folder.config.name]).hexdigest()
        self.lock, joined = RunLock(folder.path, token), False
        try:
            joined = self.lock.acquire(config=digest)
            if joined:
                self._check_as_first(digest)
                return
            check_folder(self.config, self.task.saves_state)
        except ConfigError:
            self.lock.release(keep_file=joined)
            raise
        self.snapshot = FolderSnapshot(folder)
        folder.create()
        folder.clear_error_files()
        folder.write_pending(contents)
        if self.task.is_diagnostic:  # begins at once, since its session never does
            folder.commit_pending(self.config.overwrite)

    def _check_as_first(self, digest: str) -> None:
        """Check that this node has the configuration of the first, except for what each node chooses.

        Args:
            digest: SHA-256 of this node's configuration.

        Raises:
            ConfigError: a key has another value there.
        """
        assert self.lock is not None, "it has been acquired"
        deadline = time.monotonic() + _WRITTEN_WITHIN_S
        while True:
            first, config = read_holder(self.lock.path), self.folder.current_file(self.folder.config)
            if first is not None and config.is_file() and file_digest(config) == first.config:
                break
            if time.monotonic() > deadline:
                raise ConfigError(f"{first or 'the first node'} has not written {config}", "start all nodes again")
            time.sleep(0.1)
        changed = (
            [] if digest == first.config else diff.node_changes(*map(to_plain, (compose.load(config), self.config)))
        )
        if self.config.launcher.mixed:  # the ranks compare the others when they meet, so that all nodes end
            changed = [change for change in changed if change.key in ("launcher.mixed", "launcher.nnodes")]
        texts = [change.beside("there") for change in changed]
        if texts:
            more = f" and {len(texts) - 4} more keys" if len(texts) > 4 else ""
            raise ConfigError(
                f"this node has another configuration than the first, {first}: {', '.join(texts[:4])}{more}",
                "start the same command on every node, with as many processes (nproc) on each",
            )

    def rollback(self) -> bool:
        """Undo :meth:`write` after a refused run, unless the run has results.

        Returns:
            Whether the folder is as it was before. On several nodes that were started by hand nothing is undone, since
            the other nodes may be writing there; nor after a diagnosis.
        """
        if self.snapshot is None:
            return True
        done = not self.has_peers and not self.task.is_diagnostic and self.snapshot.rollback()
        self.release()
        return done

    def check_folder(self) -> None:
        """Check that the run folder still exists, and that this run still holds its lock.

        Raises:
            RunError: the folder is gone, or another run has taken it.
        """
        lost = None if self.lock is None else self.lock.check()
        if lost is not None:
            raise RunError(f"{lost}", "what it computed is lost")

    def release(self) -> None:
        """Release the lock of the folder: the run has ended, or another process has taken it over."""
        if self.lock is not None:
            self.lock.release()

    @classmethod
    def load(cls, folder: RunFolder, untrusted: bool = False) -> FrozenRun:
        """Read a run that :meth:`write` has written.

        Args:
            folder: the run folder.
            untrusted: whether somebody else may have written the folder, so that names of code in it must be checked
                (:func:`exp.config.resolve.mark_untrusted`); otherwise they were checked before they were written.
        """
        config = compose.load(folder.current_file(folder.config))
        mark_untrusted(config, groups=("launcher", "task")) if untrusted else trust_packages(config.plugins)
        overrides = list(map(str, read_yaml(folder.current_file(folder.overrides)) or ()))
        return cls(config, overrides, folder, Classes.of(config))  # refuses a class that only the folder names


def check_folder(config: ExpConfig, trains: bool) -> None:
    """Refuse to overwrite the results of an earlier run unasked, and to resume from a run with other settings.

    Args:
        config: the configuration.
        trains: whether the task can resume a training; only then the message suggests it.

    Raises:
        ConfigError: ``output_dir`` holds results and ``overwrite`` is false, or ``resume`` names a run whose settings
            differ in a way that resuming does not allow (:func:`exp.config.diff.resume_changes`).
    """
    folder = RunFolder(config.output_dir)
    completed, saved = (read_json(folder.result) or {}).get("status") == "completed", folder.has_checkpoint()
    if config.resume is not None:
        source = folder if config.resume == "auto" else RunFolder(compose.run_folder_of(config.resume) or folder.path)
        if source.has_checkpoint() and source.config.is_file():
            refused = resume_changes(to_plain(compose.load(source.config)), to_plain(config)).refused
            if refused:
                raise resume_error(refused, console.display_path(source.path))
        return
    if not config.overwrite and (completed or saved):
        holds = "a completed run" if completed else "an unfinished training"
        more = ", or resume=auto to continue it (to a larger max_epochs or max_steps)" if saved and trains else ""
        raise ConfigError(
            f"output_dir={config.output_dir} holds {holds}", f"use another one, or overwrite=true to remove it{more}"
        )


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
    """The class of ``config.launcher``; ``auto`` is local for one process that never restarts, torchrun otherwise.

    Raises:
        ConfigError: there is no such class, or it is not a launcher.
        UnavailableError: its module cannot be imported.
    """
    target, launcher = str(config.launcher._target_), config.launcher
    if target == "auto":
        alone = config.nproc == 1 and launcher.nnodes == 1 and launcher.max_restarts == 0
        target = _LOCAL if alone else _TORCHRUN
    cls: type[Launcher] = resolve("launcher._target_", target, Launcher)
    return cls


def create_launcher(cls: type[Launcher], keys: Mapping[str, Any], nproc: int) -> Launcher:
    """The launcher of a configuration.

    Args:
        cls: the result of :func:`launcher_class`.
        keys: content of ``config.launcher``, with values instead of interpolations.
        nproc: workers per node.

    Raises:
        ConfigError: the launcher cannot do what is configured.
    """
    if keys["in_process"] and qualified_name(cls) != _LOCAL:
        raise ConfigError(
            "launcher.in_process=true is for one process of launcher=local", "leave it out, or set nproc=1"
        )
    settings = {key: value for key, value in keys.items() if key != "_target_"}
    launcher: Launcher = instantiate(cls, "launcher", settings)
    launcher.check(nproc)
    return launcher
