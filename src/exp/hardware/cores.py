"""The number of CPU cores that this process may use. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath

__all__ = ["usable_cores"]

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Number of cores by the affinity mask and the CPU quota of this process's control group (cgroup), at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_CGROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "" or "cpu" in controllers.split(","):
                cores = min(cores, _quota(_CGROUPS / controllers, path))
    return max(1, int(cores))


def _quota(root: Path, path: str) -> float:
    """The smallest CPU quota, in cores, of a control group and its parents.

    Args:
        root: mount point of the CPU controller.
        path: of the control group; inside a container it may be the host's path, which does not exist here.
    """
    least = float("inf")
    for part in (PurePosixPath(path), *PurePosixPath(path).parents):
        folder = root / str(part).lstrip("/.")
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if root == _CGROUPS:  # cgroup version 2, with a single tree
                quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text("ascii") for name in ("quota", "period"))
            if quota != "max" and int(quota) > 0:
                least = min(least, int(quota) / int(period))
    return least
