"""How many cores this process may use. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath

__all__ = ["cores_of_task", "usable_cores"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores that the affinity mask and the CPU quota of this process's control group leave it, at least one."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):
                cores = min(cores, _quota(_CGROUPS / controllers, path))
    return max(1, int(cores))


def cores_of_task() -> int | None:
    """Cores that srun has given to this task alone, not to be shared out once more; None: it does not say."""
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(cores) if cores.isdigit() else None


def _quota(root: Path, path: str) -> float:
    """The least that a control group or one above it allows; within a container ``path`` may be the host's."""
    least = float("inf")
    for part in (PurePosixPath(path), *PurePosixPath(path).parents):
        folder = root / str(part).lstrip("/.")
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if root == _CGROUPS:  # version 2: one tree
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                least = min(least, int(quota) / int(period))
    return least
