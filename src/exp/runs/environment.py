"""What a run ran on: versions, host, source revision, devices, variables and limits. Imports no torch."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import exp

if TYPE_CHECKING:
    from exp.hardware.backend import Backend

__all__ = [
    "SHM",
    "describe_environment",
    "git_revision",
    "package_versions",
    "process_limits",
    "variables",
    "version_of",
]

SHM = "/dev/shm"  # noqa: S108 - looked at, not written
"""Where data-loader workers hand over their batches."""

_PACKAGES = ("torch", "mmengine", "hydra-core", "omegaconf", "numpy", "pandas")
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


def describe_environment(backend: Backend, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Versions, host, git revision and cards, as plain JSON."""
    return {
        "exp": exp.__version__,
        "git_revision": git_revision(Path(exp.__file__).parent),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "packages": package_versions(),
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


def git_revision(folder: Path) -> str | None:
    """The commit that ``folder`` is at, with ``-dirty`` where files differ; None outside a git checkout."""
    try:
        described = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return described.stdout.strip() or None if described.returncode == 0 else None


def variables(backend: Backend) -> dict[str, str]:
    """The environment variables that matter, as far as they are set: ours and those that ``backend`` names."""
    names = dict.fromkeys((*_VARIABLES, *backend.variables, *backend.env))
    return {name: os.environ[name] for name in names if name in os.environ}


def process_limits() -> dict[str, int | None]:
    """Bytes of shared memory, and how many files may be open; None: there is no such thing, or no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = shutil.disk_usage(SHM) if os.path.isdir(SHM) else None  # noqa: PTH112
    return {
        "shm_total": shm.total if shm else None,
        "shm_free": shm.free if shm else None,
        "open_files": None if soft == resource.RLIM_INFINITY else soft,
        "open_files_hard": None if hard == resource.RLIM_INFINITY else hard,
    }
