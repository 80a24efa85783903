"""Plain facts about this process and its machine, for the doctor and ``task=env``. Imports no torch."""

from __future__ import annotations

import os
import resource
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exp.backend import Backend

__all__ = ["SHM", "flops", "limits", "size", "variables"]

SHM = "/dev/shm"  # noqa: S108 - looked at, not written
"""Where data-loader workers hand over their batches."""

# Never the whole environment: it holds other people's secrets.
_VARIABLES = (
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "TORCH_DISTRIBUTED_BACKEND",
    "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TORCH_SHOW_CPP_STACKTRACES",
    "TORCH_LOGS",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_NTASKS",
    "SLURM_PROCID",
)


def variables(backend: Backend) -> dict[str, str]:
    """The environment variables that matter, as far as they are set: ours and those that ``backend`` names."""
    names = dict.fromkeys((*_VARIABLES, *backend.variables, *backend.env))
    return {name: os.environ[name] for name in names if name in os.environ}


def limits() -> dict[str, int | None]:
    """Bytes of shared memory, and how many files may be open; None: there is no such thing, or no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = shutil.disk_usage(SHM) if os.path.isdir(SHM) else None  # noqa: PTH112
    return {
        "shm_total": shm.total if shm else None,
        "shm_free": shm.free if shm else None,
        "open_files": None if soft == resource.RLIM_INFINITY else soft,
        "open_files_hard": None if hard == resource.RLIM_INFINITY else hard,
    }


def size(value: Any) -> str:
    """Bytes for people: ``41.9 GiB``."""
    if value is None:
        return "?"
    amount = float(value)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB" if amount < 100 else f"{amount:.0f} GiB"


def flops(value: float) -> str:
    """Operations for people, to be followed by ``FLOP`` or ``FLOP/s``: ``1.2 T``."""
    for unit, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.0f} "
