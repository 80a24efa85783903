"""One run at a time in a run folder, whichever of the machines that share the folder it is on.

The lock is the file ``.lock`` in the run folder, created exclusively (``O_EXCL``), which holds on network file systems,
too. It names its holder, and is worth nothing without it. On the holder's own machine its process is looked for;
elsewhere the holder has to have touched the file lately, by the file server's own clock; and a job of Slurm's holds it
from its submission to its end, queued again in between or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from exp import console
from exp.errors import ConfigError
from exp.runs.files import write_atomically

__all__ = ["LOCK", "STALE_AFTER_S", "Holder", "RunLock", "holder_of", "is_running", "read_holder", "stat_of"]

LOCK = ".lock"
STALE_AFTER_S = 120.0
"""So long after its last sign of life a holder on another machine counts as dead."""
_BEAT_S = 10.0
_LOOK_S = 0.5
_MOMENT_S = 0.05
_TAKING = ".lock.taking"
_TAKING_PATIENCE_S = 10.0
_WRITTEN_WITHIN_S = 1.0


@dataclass(frozen=True)
class Holder:
    """What a lock says.

    Attributes:
        token: what all processes of one job know it by; empty: the lock cannot be read.
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

    def encoded(self) -> bytes:
        """The content of its lock."""
        return (json.dumps(asdict(self)) + "\n").encode()  # noqa: TID251 - plain

    def __str__(self) -> str:
        if not self.token:
            return "one whose lock cannot be read"
        since = datetime.fromtimestamp(self.since).strftime("%Y-%m-%d %H:%M:%S")
        job = f"Slurm job {self.job}, submitted from " if self.cluster == "slurm" else ""
        return f"{job}host {self.host}, pid {self.pid}, since {since}"


def holder_of(folder: Path) -> Holder | None:
    """Who holds the lock of a run folder; None: nobody that is alive."""
    holder = read_holder(folder / LOCK)
    return holder if holder is not None and _is_live(holder, _last_sign(folder / LOCK), time.time()) else None


def read_holder(path: Path) -> Holder | None:
    """What a lock says; None: there is none. One that cannot be read has a holder without a name."""
    try:
        known = json.loads(path.read_bytes())
        return Holder(**{key: known[key] for key in asdict(Holder())})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return Holder()


def is_running(holder: Holder) -> bool:
    """Whether the process of a holder that is of this machine is alive."""
    return _started(holder.pid) == holder.started


def stat_of(pid: int) -> list[str]:
    """Fields of proc_pid_stat(5) from the third on: the state (``R``, ``S``, ``D``, ``T``, ``Z``), the parent, ...

    Returns:
        Empty if there is no such process.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


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

    def let_go(self, to: Holder | None = None) -> None:
        """Leave the lock to another process of the same job.

        Args:
            to: a submitted job, which outlives this process; None: who takes it over will say so.
        """
        with _guard:
            if self in _kept:
                _kept.remove(self)
                holder = read_holder(self.path)
                # Unless the job has taken it over already.
                if to is not None and holder is not None and holder.token == self.token and not holder.job:
                    write_atomically(self.path, to.encoded())

    def release(self, ended: bool = False) -> None:
        """Remove the lock if this process holds it.

        Args:
            ended: also one that was left to another process, because that has ended.
        """
        with _guard:
            if self not in _kept and not ended:
                return
            self.let_go()
            holder = read_holder(self.path)
            if holder is not None and holder.token == self.token:
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def check(self) -> str | None:
        """Show that the holder is alive; returns how the lock was lost, if it was: the folder is gone, or another's."""
        with _guard, contextlib.suppress(OSError):  # the file server may not answer for a while
            if self in _kept and self.lost is None:
                holder = read_holder(self.path)
                if not self._is_there():
                    self.lost = f"the run folder {self._shown} was deleted or moved while the run was going on"
                elif holder is None:
                    _created(self.path, self._content)  # somebody tidied up
                elif holder.token == self.token:
                    os.utime(str(self.path))
                else:
                    self.lost = f"the run folder {self._shown} was taken by another run: {holder}"
        return self.lost

    def _is_there(self) -> bool:
        try:
            return self.folder.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def _hold(self, me: Holder, replace: bool = False) -> bool:
        joined = self._take(me, replace)
        # Of several that join, the first has named the store over which all meet.
        self._content = self.path.read_bytes() if joined else me.encoded()
        self._inode = self.folder.stat().st_ino
        with _guard:
            _kept.append(self)
        if not any(thread.name == "run-lock" for thread in threading.enumerate()):
            threading.Thread(target=_keep_all, name="run-lock", daemon=True).start()
        return joined

    def _take(self, me: Holder, replace: bool) -> bool:
        first: tuple[Holder, float] | None = None  # the holder that was found, and its last sign of life
        while not _created(self.path, me.encoded()):
            holder, seen, now = read_holder(self.path), _last_sign(self.path), self._now()
            if holder is None or not seen or (not holder.token and now - seen < _WRITTEN_WITHIN_S):
                time.sleep(_MOMENT_S)  # it is being removed, or written
            elif holder.token == self.token:
                if replace:
                    write_atomically(self.path, me.encoded())
                return True
            elif not _is_live(holder, seen, now):
                if self._replaced(holder, me):
                    break
            elif _known_alive(holder) or (first is not None and first != (holder, seen)):
                raise ConfigError(self._in_use(holder, now - seen))
            else:
                # A container that was killed and has been started again finds its own lock: only time can tell.
                if first is None:
                    first = holder, seen
                    console.warn(
                        f"{self._shown} was in use by another run {max(now - seen, 0):.0f} s ago: {holder}; waiting "
                        f"until it gives a sign of life, or has given none for {STALE_AFTER_S:.0f} s"
                    )
                time.sleep(_LOOK_S)
        return False

    def _now(self) -> float:
        """The file server's clock, by which the lock was touched."""
        with tempfile.TemporaryFile(dir=str(self.folder)) as file:
            return os.fstat(file.fileno()).st_mtime

    def _replaced(self, dead: Holder, me: Holder) -> bool:
        """Take the lock of a dead holder; of several that find it dead, one at a time: none takes a new one."""
        taking = self.folder / _TAKING
        if not _created(taking, b""):
            with contextlib.suppress(OSError):
                if self._now() - taking.stat().st_mtime > _TAKING_PATIENCE_S:
                    taking.unlink()
            time.sleep(_MOMENT_S)
            return False
        try:
            if read_holder(self.path) != dead:
                return False
            write_atomically(self.path, me.encoded())
            time.sleep(_MOMENT_S)
            return read_holder(self.path) == me  # two may have found that a third one died in this very place
        finally:
            with contextlib.suppress(OSError):
                taking.unlink()

    def _in_use(self, holder: Holder, age: float) -> str:
        seen = "" if holder.is_here() else f", last sign of life {max(age, 0):.0f} s ago"
        follow = f"; to follow it: task=attach run={self._shown}" if holder.job else ""
        return (
            f"{self._shown} is in use by another run: {holder}{seen}; wait for its end, or use another "
            f"{self.key}{follow}"
        )


_kept: list[RunLock] = []
_guard = threading.RLock()


def _keep_all() -> None:
    """Show signs of life for all locks of this process; where one is lost, its run has to end."""
    while True:
        time.sleep(_BEAT_S)
        for lock in list(_kept):
            if lock.check() is not None:
                lock.let_go()
                os.kill(os.getpid(), signal.SIGTERM)


def _created(path: Path, content: bytes) -> bool:
    """Whether this process has made the file, which nobody had, and it is still the one at this path."""
    try:
        with open(str(path), "xb", opener=lambda name, flags: os.open(name, flags, 0o640)) as file:
            file.write(content)
            file.flush()
            # Somebody who slept for minutes before he wrote is taken for dead by then.
            with contextlib.suppress(FileNotFoundError):
                return path.stat().st_ino == os.fstat(file.fileno()).st_ino
    except FileExistsError:
        pass
    return False


def _is_live(holder: Holder, seen: float, now: float) -> bool:
    """Whether a holder is alive.

    Args:
        holder: what the lock says.
        seen: when the lock was touched last, in seconds since the epoch.
        now: by the same clock.
    """
    certain = _known_alive(holder)
    return now - seen < STALE_AFTER_S if certain is None else certain


def _last_sign(path: Path) -> float:
    """When the holder of a lock has last touched it, in seconds since the epoch; 0: the lock is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _known_alive(holder: Holder) -> bool | None:
    """Whether a holder is alive; None: it is on another machine, or in another container, and only the lock tells."""
    if holder.cluster == "slurm":
        from exp.runs.slurm import find_states  # of no use to any other run

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
