"""The environment of a run, on which its numbers depend, too: versions, variables and limits of this machine.

Imports no torch.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import exp
from exp.runs.inputs import git_revision

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = [
    "SHM", "describe_environment", "package_versions", "process_limits", "reported_variables", "version_of",
]  # fmt: skip

SHM = "/dev/shm"  # noqa: S108 - only its size is read
"""Shared memory, through which data-loader workers pass batches."""

_PACKAGES = ("torch", "mmengine", "hydra-core", "omegaconf", "numpy", "pandas")
# Never the whole environment: it may contain secrets.
_VARIABLES = (
    "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_BACKEND",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_LOGS", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS",
    "SLURM_PROCID",
)  # fmt: skip


def describe_environment(backend: Backend, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Content of ``env.json``: versions, host, git revision, variables and devices."""
    return {
        "exp": exp.__version__,
        "git_revision": git_revision(Path(exp.__file__).parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "packages": package_versions(),
        "variables": reported_variables(backend),
        "backend": backend.name,
        "backend_env": {name: os.environ.get(name) for name in backend.worker_env(0, 1, single_node=True)},
        "devices": devices,
    }


def package_versions() -> dict[str, str | None]:
    """Versions of the packages that a run's numbers depend on; None: not installed."""
    return {name: version_of(name) for name in _PACKAGES}


def version_of(package: str) -> str | None:
    """Version of an installed package; None: it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def reported_variables(backend: Backend) -> dict[str, str]:
    """The relevant environment variables that are set: a fixed list, and those that ``backend`` names."""
    names, prefixes = {*_VARIABLES, *backend.env, *backend.visible_variables}, backend.capabilities.reported_env
    return {name: value for name, value in os.environ.items() if name in names or name.startswith(prefixes)}


def process_limits() -> dict[str, int | None]:
    """Size of the shared memory in bytes, and limits of open files; None: no shared memory, or no limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)
    total, _, free = shutil.disk_usage(SHM) if os.path.isdir(SHM) else (None, None, None)  # noqa: PTH112
    return {"shm_total": total, "shm_free": free, "open_files": soft, "open_files_hard": hard}
