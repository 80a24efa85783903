"""A run as it is written down: nothing that happens to YAML files later changes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from exp import console
from exp.config import differences, structures, trained
from exp.config.check import check_folder
from exp.config.resolve import allow, distrust
from exp.config.schema import ExpConfig
from exp.errors import ConfigError, RunError
from exp.launcher.base import launcher_class
from exp.runs.folder import RunFolder, Snapshot, missing_folders, remove_empty
from exp.runs.lock import RunLock
from exp.task import task_class

__all__ = ["FrozenRun"]


@dataclass
class FrozenRun:
    """What a launcher is given.

    Attributes:
        config: the whole configuration (:class:`exp.config.schema.ExpConfig`), without interpolations to come.
        overrides: what the user gave on the command line.
        folder: the run folder.
        snapshot: of :meth:`write`.
        lock: of the folder, once it is taken.
    """

    config: ExpConfig
    overrides: list[str]
    folder: RunFolder
    snapshot: Snapshot | None = None
    lock: RunLock | None = None

    def write(self, token: str | None = None) -> None:
        """Take the run folder, and put the configuration into it: beside an earlier record, until the run has begun.

        Args:
            token: what all the processes of a job that share the folder know it by; None: this process is alone.

        Raises:
            ConfigError: somebody else is at work there, or the run that is to be continued was another one.
            RunError: the folder cannot be written.
        """
        if self.lock is not None:
            return  # whoever started this process has written it
        folder = self.folder
        missing = missing_folders(folder.logs)
        lock = RunLock(folder.path, token)
        folder.create()
        try:
            joined = lock.acquire()
            self.lock = lock
            if not joined:
                check_folder(self.config, task_class(self.config).saves_state)  # another run may have left it meanwhile
            self._check_resumed()
        except ConfigError:
            self.release()  # its lock is a file of the folder
            remove_empty(missing)
            raise
        self.snapshot = Snapshot(folder, missing)
        contents = {
            folder.config.name: OmegaConf.to_yaml(self.config, resolve=True).encode(),
            folder.overrides.name: OmegaConf.to_yaml(OmegaConf.create(list(self.overrides))).encode(),
        }
        config = folder.in_use(folder.config)
        if not (joined and config.is_file() and config.read_bytes() == contents[config.name]):
            folder.stage(contents)
        if task_class(self.config).diagnoses:  # what it leaves is no record of a run that could be lost
            folder.begin(self.config.overwrite)
            folder.drop_earlier()

    def _check_resumed(self) -> None:
        """Whether the run that is to be continued is this one, by its record.

        Raises:
            ConfigError: it is not.
        """
        resume = self.config.resume
        if resume is None:
            return
        folder = self.folder if resume == "auto" else trained.run_folder_of(resume)
        folder = RunFolder(folder) if isinstance(folder, Path) else folder
        if folder is None or not folder.has_checkpoint() or not folder.config.is_file():
            return
        old = structures.load(folder.config)
        if task_class(old).saves_state:
            refused = differences.changes(differences.as_plain(old), differences.as_plain(self.config)).refused
            if refused:
                raise ConfigError(differences.refusal(refused, console.shown(folder.path)))

    def take_back(self) -> bool:
        """Leave the folder as it was before :meth:`write`, where the run was refused and nothing has come of it.

        Returns:
            Whether it is so now. Not on several nodes that were started by hand: others may be writing there.
        """
        if self.snapshot is None:
            return True
        alone = self.config.launcher.nnodes == 1 or launcher_class(self.config).submits
        done = alone and not task_class(self.config).diagnoses and self.snapshot.take_back()
        self.folder.drop_earlier()
        self.release()
        if done:
            remove_empty(self.snapshot.missing)
        return done

    def check_folder(self) -> None:
        """Whether the run folder is still there, and this run's.

        Raises:
            RunError: it is not.
        """
        lost = None if self.lock is None else self.lock.check()
        if lost is not None:
            raise RunError(f"{lost}; what it computed is lost")

    def release(self) -> None:
        """Let go of the folder: the run has ended, or has been handed to another process."""
        if self.lock is not None:
            self.lock.release()

    @classmethod
    def load(cls, folder: RunFolder, of_others: bool = False) -> FrozenRun:
        """Read what :meth:`write` has written.

        Args:
            folder: the run folder.
            of_others: it may be a stranger's; else its names were checked before they were written.
        """
        config = structures.load(folder.in_use(folder.config))
        distrust(config, groups=("launcher", "task")) if of_others else allow(config.plugins)
        task_class(config)  # refuses what only the folder names
        overrides: Any = OmegaConf.to_container(OmegaConf.load(folder.in_use(folder.overrides)))
        return cls(config, overrides, folder)
