"""The lock of a folder (of a run, a sweep, or kept features): one holder at a time, on all machines that share it.

The lock is the file ``.lock`` in the folder, created exclusively (``O_EXCL``), which works on network file systems,
too. The file names its holder; the lock of a dead holder does not count. On its own machine a holder is alive if its
process runs. On other machines it is alive if it has touched the file within two minutes, by the file server's clock. A
Slurm job is alive from its submission to its end, also while it is requeued; only its own cluster knows it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Iterator

from exp import console
from exp.errors import ConfigError, RunError
from exp.runs.files import write_atomically

LOCK = ".lock"
STALE_AFTER_S = 120.0
"""Seconds after its last heartbeat until a holder on another machine counts as dead."""
_HEARTBEAT_S = 10.0
_POLL_S = 0.5
_HEARTBEAT_THREAD = "run-locks"
_MIN_FREE_BYTES = 2**16  # about the size of the records of the shortest run


@dataclass(frozen=True)
class LockHolder:
    """The holder of a lock, as the lock file records it.

    Attributes:
        token: equal in all processes of one job; empty: the lock file cannot be read.
        host: name of the machine.
        machine: boot id and process id namespace; if these are equal, ``pid`` means the same process. Empty: several
            processes on any machines share the lock, of which ``pid`` is one.
        pid: process id.
        started: start time of the process in clock ticks since boot; needed because process ids are reused.
        since: when the lock was taken, in seconds since the epoch.
        job: id of the Slurm job; empty: no job.
        cluster: of the job (:func:`exp.runs.slurm.local_cluster`); empty: not known.
        config: SHA-256 of the configuration that the holder writes into the folder; empty: none, or it is not known.
        secret: random name of the rendezvous, which nobody without access to the folder can guess.
        seen: last heartbeat, that is the time of the lock file, in seconds since the epoch.
    """

    token: str = ""
    host: str = "unknown host"
    machine: str = ""
    pid: int = 0
    started: int = 0
    since: float = 0.0
    job: str = ""
    cluster: str = ""
    config: str = ""
    secret: str = ""
    seen: float = 0.0

    @classmethod
    def current(cls, token: str, job: str = "", shared: bool = False, config: str = "") -> LockHolder:
        """This process as a holder; ``shared``: other processes on any machines hold the lock, too."""
        start, secret, host = _start_time(os.getpid()) or 0, secrets.token_hex(16), socket.gethostname()
        machine, cluster = "" if shared else _machine_id(), ""
        if job:
            from exp.runs.slurm import local_cluster  # only runs on Slurm need it

            cluster = local_cluster() or ""
        return cls(token, host, machine, os.getpid(), start, time.time(), job, cluster, config, secret)

    def encoded(self) -> bytes:
        """The content of the lock file."""
        return (json.dumps(asdict(self)) + "\n").encode()  # noqa: TID251 - plain

    def __str__(self) -> str:
        if not self.token:
            return "one whose lock cannot be read"
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        cluster = f" of cluster {self.cluster}" if self.cluster else ""
        job = f"Slurm job {self.job}{cluster}, submitted from " if self.job else ""
        return f"{job}host {self.host}, pid {self.pid}, since {since}"


def live_holder(folder: Path) -> LockHolder | None:
    """The live holder of the lock of a run folder; None: the lock is free, or its holder is dead."""
    holder = read_holder(folder / LOCK)
    return None if holder is None or _is_holder_alive(holder, time.time()) is False else holder


def read_holder(path: Path) -> LockHolder | None:
    """The holder in a lock file; None: there is no file. If the file cannot be read, a holder with an empty token."""
    try:
        seen = path.stat().st_mtime
        content = json.loads(path.read_bytes())
        return replace(LockHolder(**{key: content[key] for key in asdict(LockHolder())}), seen=seen)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, RecursionError):
        return LockHolder(seen=seen)


def proc_stat(pid: int) -> list[str]:
    """Fields of proc_pid_stat(5) from the third on: state (``R``, ``S``, ``D``, ``T``, ``Z``), parent, ...

    Returns:
        The fields; empty if there is no such process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return proc_stat(pid)[:1] not in ([], ["Z"])


class RunLock:
    """The lock of a folder, as one process holds it.

    Args:
        folder: :meth:`acquire` makes it, with its parents; those that are still empty at the end are removed.
        token: equal in all processes of one job, which share the lock; None: this process does not share it.
        key: configuration key of the folder, for messages.

    Attributes:
        created_dirs: the folders that did not exist before, the innermost first.
        lost_reason: how the lock was lost while it was held; None: it was not lost.
    """

    def __init__(self, folder: Path, token: str | None = None, key: str = "output_dir") -> None:
        self.folder = folder
        self.key = key
        self.path = folder / LOCK
        self.token = token or secrets.token_hex(8)
        self._shared = token is not None
        self._content = b""
        self._inode = 0
        self._guard = threading.RLock()
        self._display_path = console.display_path(folder)
        self.created_dirs: list[Path] = []
        self.lost_reason: str | None = None

    def acquire(self, job: str = "", config: str = "") -> bool:
        """Make the folder and take its lock; a dead holder is replaced.

        Args:
            job: id of the Slurm job that this process belongs to; empty: no job.
            config: SHA-256 of the configuration that this process would write.

        Returns:
            Whether another process of the same job already holds it.

        Raises:
            ConfigError: another run holds the lock, the folder cannot be made or written, or something in it is a
                symbolic link that leads out of it.
            RunError: the disk is full.
        """
        self.created_dirs = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            root = os.path.realpath(self.folder)
            for link in _symlinks(root):
                target = os.path.realpath(link)
                if os.path.commonpath([root, target]) != root:
                    raise ConfigError(
                        f"{link} is a link to {target}, outside of this folder, and exp might write there; remove the "
                        f"link, or use another {self.key}"
                    )
            with tempfile.TemporaryFile(dir=str(self.folder)) as file:
                file.write(b"\1" * _MIN_FREE_BYTES)  # a full disk accepts empty files
            already_held = self._acquire_file(LockHolder.current(self.token, job, self._shared, config))
        except OSError as error:
            kind = RunError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else ConfigError
            raise kind(f"cannot write to the folder {self.folder}: {error.strerror}; set {self.key}") from error
        # The first process of a job has chosen the secret name of the rendezvous; the others keep its file content.
        self._content = self.path.read_bytes()
        self._inode = self.folder.stat().st_ino
        _held_locks.append(self)
        if all(thread.name != _HEARTBEAT_THREAD for thread in threading.enumerate()):
            threading.Thread(target=_heartbeat_loop, name=_HEARTBEAT_THREAD, daemon=True).start()
        return already_held

    def transfer_to(self, **holder: Any) -> None:
        """Stop holding the lock, and make another process or a Slurm job of the same token its holder.

        Args:
            **holder: attributes of :class:`LockHolder` that differ: ``job``, or ``pid``.
        """
        self.release(keep_file=True)
        current = self._read_own()
        if current is not None:
            started = _start_time(holder.get("pid", current.pid)) or 0
            write_atomically(self.path, replace(current, started=started, **holder).encoded())

    def release(self, keep_file: bool = False) -> None:
        """Stop holding the lock, if this process holds it; remove its file, and the empty folders that it has created.

        Args:
            keep_file: leave the file and the folders to the same job, which may be started again.
        """
        with self._guard, contextlib.suppress(OSError):
            if self in _held_locks:
                _held_locks.remove(self)
                if not keep_file and self._read_own() is not None:
                    self.path.unlink()
        for folder in [] if keep_file else self.created_dirs:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _read_own(self) -> LockHolder | None:
        """The holder in the lock file, if it has this token."""
        holder = read_holder(self.path)
        return holder if holder is not None and holder.token == self.token else None

    def check(self) -> str | None:
        """Touch the lock file as a heartbeat.

        Returns:
            How the lock was lost: the folder is gone, or another run has the lock. None: it was not lost.
        """
        with self._guard, contextlib.suppress(OSError):  # the file server may not answer for a while
            if self.lost_reason is None and self in _held_locks:
                holder = read_holder(self.path)
                if not (self.folder.is_dir() and self.folder.stat().st_ino == self._inode):
                    self.lost_reason = (
                        f"the run folder {self._display_path} was deleted or moved while the run was going on"
                    )
                elif holder is None:
                    _create_exclusively(self.path, self._content)  # the file was deleted: write it again
                elif holder.token == self.token:
                    os.utime(str(self.path))
                else:
                    self.lost_reason = f"the run folder {self._display_path} was taken by another run: {holder}"
        return self.lost_reason

    def _acquire_file(self, this: LockHolder) -> bool:
        """Create the lock file; return whether a process of the same job has created it before."""
        waited_for: LockHolder | None = None
        while not _create_exclusively(self.path, this.encoded()):
            holder, now = read_holder(self.path), self._now()
            if holder is None:
                continue  # its holder has just removed the file
            age = f"{max(now - holder.seen, 0):.0f} s ago"
            same_job = holder.token == self.token
            # Another node of a job that was started by hand has the same configuration; otherwise this is a new job of
            # that name, or a mistake, and only the heartbeat of the earlier one tells which.
            if same_job and (
                (this.config in ("", holder.config) and now - holder.seen < STALE_AFTER_S) or holder.machine
            ):
                return True
            alive = _is_holder_alive(holder, now)
            if alive is False:
                self._remove(holder)
            elif alive or waited_for not in (None, holder):
                if same_job:
                    return True
                follow = f"; to follow it: task=attach run={self._display_path}" if holder.job else ""
                if holder.job and now - holder.seen >= STALE_AFTER_S:
                    follow += (
                        f"; if it has ended, and Slurm cannot be asked for it here: rm {self._display_path}/{LOCK}"
                    )
                raise ConfigError(
                    f"{self._display_path} is in use by another run: {holder}, last heartbeat {age}; wait for its end, "
                    f"or use another {self.key}{follow}"
                )
            else:
                # A restarted container finds its predecessor's lock; only missing heartbeats show that it is dead.
                if waited_for is None:
                    console.warn(
                        f"{self._display_path} was in use by another run {age}: {holder}; waiting for its next "
                        f"heartbeat, or until there was none for {STALE_AFTER_S:.0f} s"
                    )
                waited_for = holder
                time.sleep(_POLL_S)
        return False

    def _now(self) -> float:
        """Time of the file server's clock, in seconds since the epoch; modification times are from this clock, too."""
        with tempfile.TemporaryFile(dir=str(self.folder)) as file:
            return os.fstat(file.fileno()).st_mtime

    def _remove(self, dead: LockHolder) -> None:
        """Remove the file of a dead holder, one process at a time, so that nobody removes that of its successor."""
        folder = os.open(str(self.folder), os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # some network file systems lock no folders
                fcntl.flock(folder, fcntl.LOCK_EX)
            if read_holder(self.path) == dead:
                self.path.unlink(missing_ok=True)
        finally:
            os.close(folder)


_held_locks: list[RunLock] = []
"""The locks that this process holds; a sweep holds those of all its waiting jobs."""


def _heartbeat_loop() -> None:
    """Touch the lock files every 10 s; if a lock is lost, end this process by SIGTERM."""
    while True:
        time.sleep(_HEARTBEAT_S)
        for lock in list(_held_locks):
            if lock.check() is not None and lock in _held_locks:
                _held_locks.remove(lock)  # the other locks stay held until they are released
                os.kill(os.getpid(), signal.SIGTERM)


def _symlinks(folder: str) -> Iterator[str]:
    """Yield the symbolic links in a folder and below, and follow none."""
    with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                yield from _symlinks(entry.path)


def _create_exclusively(path: Path, content: bytes) -> bool:
    """Create a file exclusively; return whether it did not exist."""
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def _is_holder_alive(holder: LockHolder, now: float) -> bool | None:
    """Whether a holder is alive; None: only its next heartbeat can show it.

    Args:
        holder: may be on another machine or in another container; then only heartbeats show that it is alive.
        now: current time of the clock that times its heartbeats.
    """
    if holder.job:
        from exp.runs.slurm import find_states, local_cluster

        states = find_states([holder.job]) if holder.cluster in ("", local_cluster()) else None
        if states is None:  # Slurm does not know the job here, and a job that waits in its queue has no heartbeat
            return True
        if states[holder.job].name != "GONE":
            return not states[holder.job].ended
    elif holder.machine == _machine_id():
        return _start_time(holder.pid) == holder.started
    return False if now - holder.seen >= STALE_AFTER_S else None


def _machine_id() -> str:
    """Boot id and process id namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None: there is no such process, or it is a zombie."""
    fields = proc_stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])
