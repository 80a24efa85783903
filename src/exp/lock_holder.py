"""Who holds the lock of a run folder, and whether that is still alive.

On the holder's own machine its process is looked for; elsewhere the holder has to have touched the file lately, by the
file server's own clock; and a job of Slurm's holds it from its submission to its end, queued again in between or not.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from exp.launcher.processes import stat_of

__all__ = [
    "LOCK", "STALE_AFTER_S", "Holder", "encoded", "holder_of", "is_live", "is_running", "known_alive", "last_sign",
    "read_holder",
]  # fmt: skip

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
        from exp.launcher.slurm import find_states

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
