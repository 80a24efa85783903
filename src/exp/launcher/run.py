"""A frozen run: its configuration, and the folder that it writes and locks."""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import dataclass

from omegaconf import OmegaConf

from exp import console
from exp.config import compose, diff
from exp.config.diff import format_value, resume_changes, resume_error
from exp.config.resolve import mark_untrusted, to_plain, trust_packages
from exp.config.schema import ExpConfig
from exp.errors import ConfigError, RunError
from exp.hardware.backend import Backend
from exp.hardware.registry import create_backend
from exp.runs.files import file_digest, read_json, read_yaml
from exp.runs.folder import FolderSnapshot, RunFolder
from exp.runs.lock import RunLock, read_holder
from exp.task import Task, create_task

__all__ = ["FrozenRun", "check_folder"]

_WRITTEN_WITHIN_S = 60.0  # an NFS client may show a new file late


@dataclass
class FrozenRun:
    """A frozen run: what travels from the command line to the launcher; classes are looked up once.

    Attributes:
        config: the whole configuration (:class:`exp.config.schema.ExpConfig`), with all interpolations resolved.
        overrides: the user's overrides.
        folder: the run folder.
        has_peers: whether nodes that were started by hand write into the same folder.
        snapshot: content of the folder before :meth:`write`; None: this process has not written the folder.
        lock: the lock of the folder; None: this process does not hold it.
    """

    config: ExpConfig
    overrides: list[str]
    folder: RunFolder
    has_peers: bool = False
    snapshot: FolderSnapshot | None = None
    lock: RunLock | None = None

    @functools.cached_property
    def task(self) -> Task:
        """The task, with its keys."""
        return create_task(self.config)

    @functools.cached_property
    def backend(self) -> Backend:
        """The hardware family."""
        return create_backend(self.config.backend)

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
        folder = self.folder
        contents = {
            folder.config.name: OmegaConf.to_yaml(self.config, resolve=True).encode(),
            folder.overrides.name: OmegaConf.to_yaml(OmegaConf.create(list(self.overrides))).encode(),
        }
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
        """Check that this node has the configuration of the first, which all workers read; the path may differ.

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
        changed = [] if digest == first.config else diff.all_changes(compose.load(config), self.config)
        # The path of the folder may be another one here, and records change nothing.
        texts = [
            f"{key}={format_value(new)} (there: {format_value(old)})"
            for key, old, new in changed
            if key != "output_dir" and not key.startswith("record.")
        ]
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
        run = cls(config, list(map(str, read_yaml(folder.current_file(folder.overrides)) or ())), folder)
        _ = run.task  # refuses a class that only the folder names
        return run


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
