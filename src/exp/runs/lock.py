"""One run at a time in a run folder, whichever of the machines that share the folder it is on.

The lock is the file ``.lock`` in the run folder, made by ``link(2)``, which is exclusive on network file systems, too.
It names its holder, and is worth nothing without it. On the holder's own machine its process is looked for; elsewhere
the holder has to have touched the file lately, by the file server's own clock; and a job of Slurm's holds it from its
submission to its end, queued again in between or not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import signal
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from exp import console
from exp.errors import ConfigError
from exp.runs.slurm import find_states

__all__ = [
    "LOCK",
    "STALE_AFTER_S",
    "Holder",
    "RunLock",
    "encoded",
    "holder_of",
    "is_live",
    "is_running",
    "known_alive",
    "last_sign",
    "read_holder",
    "stat_of",
]

LOCK = ".lock"
STALE_AFTER_S = 120.0
"""So long after its last sign of life a holder on another machine counts as dead."""


@dataclass(frozen=True)
class Holder:
    """What a lock says.

    Attributes:
        token: what all processes of one job know it by.
        host: name of the machine.
        machine: its boot and the space of its process ids: where these are the same, ``pid`` means the same.
        pid: the process.
        started: when that began, in the kernel's clock ticks since boot: ids are used again.
        since: seconds since the epoch.
        job: id of the job that it belongs to, in its scheduler's words; empty: none.
        cluster: ``slurm`` or ``local``; empty: none.
        several: several processes hold it together, and ``pid`` is only one of them.
        secret: what they call the store by over which they meet, so that nobody else can guess it.
    """

    token: str = ""
    host: str = "unknown host"
    machine: str = ""
    pid: int = 0
    started: int = 0
    since: float = 0.0
    job: str = ""
    cluster: str = ""
    several: bool = False
    secret: str = ""

    @classmethod
    def me(cls, token: str, job: str = "", cluster: str = "", several: bool = False, pid: int | None = None) -> Holder:
        """This process, or another one of this machine."""
        pid = os.getpid() if pid is None else pid
        start, secret = _started(pid) or 0, secrets.token_hex(16)
        return cls(token, socket.gethostname(), _machine(), pid, start, time.time(), job, cluster, several, secret)

    def is_here(self) -> bool:
        """Whether its process id means a process of this machine."""
        return self.machine == _machine()

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        job = f"Slurm job {self.job}, submitted from " if self.cluster == "slurm" else ""
        return f"{job}host {self.host}, pid {self.pid}, since {since}"


def holder_of(folder: Path) -> Holder | None:
    """Who holds the lock of a run folder; None: nobody that is alive."""
    holder = read_holder(folder / LOCK)
    return holder if holder is not None and is_live(holder, folder / LOCK, time.time()) else None


def encoded(holder: Holder) -> bytes:
    """What a lock of this holder says."""
    return (json.dumps(asdict(holder)) + "\n").encode()  # noqa: TID251 - plain


def read_holder(path: Path) -> Holder | None:
    """What a lock says; None: there is none. One that cannot be read has a holder without a name."""
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        known = json.loads(content)
        return Holder(**{key: known[key] for key in asdict(Holder())})
    except (ValueError, KeyError, TypeError):
        return Holder()


def is_running(holder: Holder) -> bool:
    """Whether the process of a holder that is of this machine is alive."""
    return _started(holder.pid) == holder.started


def is_live(holder: Holder, path: Path, now: float) -> bool:
    """Whether the holder that a lock names is alive.

    Args:
        holder: what the lock says.
        path: the lock.
        now: by the clock of the file server, in seconds since the epoch.
    """
    certain = known_alive(holder)
    return now - last_sign(path) < STALE_AFTER_S if certain is None else certain


def last_sign(path: Path) -> float:
    """When the holder of a lock has last touched it, in seconds since the epoch; 0: the lock is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def known_alive(holder: Holder) -> bool | None:
    """Whether a holder is alive; None: it is on another machine, or in another container, and only the lock tells."""
    if holder.cluster == "slurm":
        states = find_states([holder.job])
        if states is not None:
            return not states[holder.job].ended
    elif holder.is_here() and not holder.several:
        return is_running(holder)
    return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> int | None:
    """When a process began; None: there is none, or it has ended and waits for its parent to notice."""
    fields = stat_of(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


_BEAT_S = 10.0
_LOOK_S = 0.5
_TAKING = ".lock.taking"
_TAKING_PATIENCE_S = 10.0
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class RunLock:
    """The lock of a run folder, as one process has it.

    Args:
        folder: the run folder; it exists when :meth:`acquire` is called.
        token: what the processes of one job that share the folder know it by; None: this process is alone.
        key: of the configuration, by which another folder is chosen.
    """

    def __init__(self, folder: Path, token: str | None = None, key: str = "output_dir") -> None:
        self.folder = folder
        self.key = key
        self.path = folder / LOCK
        self.token = token or secrets.token_hex(8)
        self._several = token is not None
        self._content = b""
        self._inode = 0
        self._held = False
        self._beating = threading.Lock()
        self._shown = console.shown(folder)
        self.lost: str | None = None
        """How it was lost while it was held; None: it was not."""

    def acquire(self) -> bool:
        """Take the lock, from a holder that is dead if need be.

        Returns:
            Whether others of the same job hold it already.

        Raises:
            ConfigError: somebody else holds it.
            OSError: the folder cannot be written.
        """
        return self._hold(Holder.me(self.token, several=self._several))

    def take_over(self, job: str = "", cluster: str = "") -> None:
        """Take the lock over from another process of the same job, or take it where that has let go of it.

        Raises:
            ConfigError: somebody else holds it.
        """
        self._hold(Holder.me(self.token, job, cluster), replace=True)

    def hand_to(self, job: Holder) -> None:
        """Let a submitted job have the lock, unless it has taken it over already: it outlives this process."""
        if self._held:
            self._stop()
            holder = read_holder(self.path)
            if holder is not None and holder.token == self.token and not holder.job:
                self._write(job).replace(self.path)

    def let_go(self) -> None:
        """Leave the lock to another process of the same job, which takes it over."""
        self._stop()

    def release(self, ended: bool = False) -> None:
        """Remove the lock if this process holds it.

        Args:
            ended: also one that was left to another process, because that has ended.
        """
        if not self._held and not ended:
            return
        self._stop()
        holder = read_holder(self.path)
        if holder is not None and holder.token == self.token:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def check(self) -> str | None:
        """How the lock was lost, where it was: the folder is gone, or somebody else's."""
        if self._held and self.lost is None:
            self._beat()
        return self.lost

    # -- taking it --------------------------------------------------------------------------------------------------

    def _hold(self, me: Holder, replace: bool = False) -> bool:
        mine = self._write(me)
        try:
            joined = self._take(mine, replace)
        finally:
            with contextlib.suppress(OSError):
                mine.unlink()
        if joined:
            me = dataclasses.replace(me, secret=(read_holder(self.path) or me).secret)
        self._content = encoded(me)
        self._inode = self.folder.stat().st_ino
        self._held = True
        _keep(self)
        return joined

    def _write(self, holder: Holder) -> Path:
        path = self.folder / f".lock.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(2)}"
        path.write_bytes(encoded(holder))
        return path

    def _take(self, mine: Path, replace: bool) -> bool:
        first: tuple[Holder, float] | None = None  # the holder that was found, and its last sign of life
        while not _linked(mine, self.path):
            now = mine.stat().st_mtime  # by the file server's clock, as are the times of the lock
            holder, seen = read_holder(self.path), last_sign(self.path)
            if holder is None or not seen:
                continue
            if holder.token == self.token:
                if replace:
                    mine.replace(self.path)
                return True
            if not is_live(holder, self.path, now):
                self._break(holder, mine)
                continue
            if known_alive(holder) or (first is not None and first != (holder, seen)):
                raise ConfigError(self._in_use(holder, now - seen))
            # A container that was killed and has been started again finds its own lock: only time can tell.
            if first is None:
                first = holder, seen
                console.warn(
                    f"{self._shown} was in use by another run {max(now - seen, 0):.0f} s ago: {holder}; waiting until "
                    f"it gives a sign of life, or has given none for {STALE_AFTER_S:.0f} s"
                )
            time.sleep(_LOOK_S)
            os.utime(str(mine))
        return False

    def _break(self, dead: Holder, mine: Path) -> None:
        """Remove the lock of a dead holder; of several that find it dead, one at a time: none takes a new one."""
        taking = self.folder / _TAKING
        if not _linked(mine, taking):
            with contextlib.suppress(OSError):
                if mine.stat().st_mtime - taking.stat().st_mtime > _TAKING_PATIENCE_S:
                    taking.unlink()
            time.sleep(0.05)
            os.utime(str(mine))
            return
        try:
            if read_holder(self.path) == dead:
                self.path.unlink()
        finally:
            with contextlib.suppress(OSError):
                taking.unlink()

    def _in_use(self, holder: Holder, age: float) -> str:
        seen = "" if holder.is_here() else f", last sign of life {max(age, 0):.0f} s ago"
        return f"{self._shown} is in use by another run: {holder}{seen}; " + (
            f"wait for its end, or use another {self.key}; to follow it: task=attach run={self._shown}"
            if holder.job
            else f"wait for its end, or use another {self.key}"
        )

    # -- keeping it -------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Show that the holder is alive; find out whether it still is one."""
        with self._beating, contextlib.suppress(OSError):  # the file server may not answer for a while
            if not self._held:
                return
            try:
                there = self.folder.stat().st_ino == self._inode
            except FileNotFoundError:
                there = False
            if not there:
                self.lost = f"the run folder {self._shown} was deleted or moved while the run was going on"
                return
            holder = read_holder(self.path)
            if holder is None:
                self.path.write_bytes(self._content)  # somebody tidied up
            elif holder.token == self.token:
                os.utime(str(self.path))
            else:
                self.lost = f"the run folder {self._shown} was taken by another run: {holder}"

    def _stop(self) -> None:
        with self._beating:
            self._held = False
        with _guard:
            if self in _kept:
                _kept.remove(self)


_kept: list[RunLock] = []
_guard = threading.Lock()
_wake = threading.Event()


def _keep(lock: RunLock) -> None:
    with _guard:
        _kept.append(lock)
    if not any(thread.name == "run-lock" for thread in threading.enumerate()):
        threading.Thread(target=_keep_all, name="run-lock", daemon=True).start()


def _keep_all() -> None:
    """Show signs of life for all locks of this process; where one is lost, its run has to end."""
    while True:
        _wake.wait(_BEAT_S)
        with _guard:
            kept = list(_kept)
        for lock in kept:
            lock._beat()
            if lock.lost is not None:
                lock._stop()
                os.kill(os.getpid(), signal.SIGTERM)


def _linked(mine: Path, path: Path) -> bool:
    """Whether ``mine`` now has the name ``path``, too, which nobody had."""
    before = mine.stat().st_nlink
    try:
        os.link(str(mine), str(path))
    except FileExistsError:
        return mine.stat().st_nlink > before  # over NFS the answer may have got lost
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:  # a file system without links
            descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(mine.read_bytes())
    return True


def stat_of(pid: int) -> list[str]:
    """Fields of proc_pid_stat(5) from the third on: the state (``R``, ``S``, ``D``, ``T``, ``Z``), the parent, ...

    Returns:
        Empty if there is no such process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
