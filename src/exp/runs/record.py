"""The keys of ``result.json``, and the description of the environment in ``env.json``.

Imports no torch: for a run that failed, the parent process writes both.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from omegaconf import OmegaConf

import exp

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend

__all__ = [
    "SHM", "blank_result", "describe_environment", "git_revision", "in_role", "number_text", "package_versions",
    "process_limits", "selecting_value", "variables", "version_of",
]  # fmt: skip

SHM = "/dev/shm"  # noqa: S108 - looked at, not written
"""Shared memory, through which data-loader workers pass batches."""

_PACKAGES = ("torch", "mmengine", "hydra-core", "omegaconf", "numpy", "pandas")
# Never the whole environment: it may contain secrets.
_VARIABLES = (
    "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "TORCH_DISTRIBUTED_BACKEND",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_LOGS", "RANK",
    "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS",
    "SLURM_PROCID",
)  # fmt: skip

_NOT_YET_KNOWN = (
    "metric_name", "metric", "selected_by", "reported", "published", "trained_in", "device_type", "process_group",
    "fallback", "samples_per_second", "time_to_first_step_s", "memory_peak", "flops_per_second", "flops_share",
    "left_device", "wall_s", "resumed_from", "error",
)  # fmt: skip


def describe_environment(backend: Backend, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Content of ``env.json``: versions, host, git revision and devices."""
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
    """The commit of ``folder``, with ``-dirty`` if files differ from it; None outside a git checkout."""
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
    """The relevant environment variables that are set: a fixed list, and those that ``backend`` names."""
    names = dict.fromkeys((*_VARIABLES, *backend.variables, *backend.env))
    return {name: os.environ[name] for name in names if name in os.environ}


def process_limits() -> dict[str, int | None]:
    """Size of the shared memory in bytes, and limits of open files; None: no shared memory, or no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = shutil.disk_usage(SHM) if os.path.isdir(SHM) else None  # noqa: PTH112
    return {
        "shm_total": shm.total if shm else None,
        "shm_free": shm.free if shm else None,
        "open_files": None if soft == resource.RLIM_INFINITY else soft,
        "open_files_hard": None if hard == resource.RLIM_INFINITY else hard,
    }


def in_role(metric: str | None, measured_on: str, value: float | None) -> dict[str, Any] | None:
    """The value of ``selected_by`` or ``reported`` in ``result.json``; None if there is no ``value``."""
    return None if value is None else {"metric": metric, "measured_on": measured_on, "value": value}


def selecting_value(result: Mapping[str, Any] | None) -> float | None:
    """The metric by which runs are compared and the best is chosen; never one of the test split. None: no such metric.

    Args:
        result: content of ``result.json``, also of older versions.
    """
    result = result or {}
    key: Any = "value" if "selected_by" in result else result.get("metric_name")
    chosen = result.get("selected_by", result.get("validation"))
    return chosen.get(key) if isinstance(chosen, dict) else None


def number_text(value: float, like: float | None = None) -> str:
    """A metric as text: four decimals; if its size is below 1e-3 or from 1e5 on, four significant digits.

    Args:
        value: the metric.
        like: value whose size decides on the format, so that two values have the same; None: ``value``.
    """
    size = abs(value if like is None else like)
    return f"{value:.4f}" if 1e-3 <= size < 1e5 or size == 0 else f"{value:.4g}"


def blank_result(config: ExpConfig) -> dict[str, Any]:
    """Every key of ``result.json``: values that follow from the configuration, and null for the rest.

    Args:
        config: the frozen configuration.
    """
    weights: Any = OmegaConf.to_container(OmegaConf.create(config.record.weights))
    return {
        "status": "failed",
        "task": config.task.name,
        "experiment": config.name,
        "metrics": {},
        "metric_units": {},
        "greater_is_better": False,
        "measured_on": "test",
        "differs": [],
        "weights": weights or None,
        "backend": config.backend.name,
        "simulated": config.backend.simulate,
        "devices": [],
        "wrapper": config.wrapper.kind,
        "precision": config.precision,
        "world_size": config.nproc * config.launcher.nnodes,
        "batch_size": config.batch_size,
        "accumulate": config.accumulate,
        "global_batch_size": config.global_batch_size,
        "steps": 0,
        "epochs": 0,
        "restarts": 0,
        "changed_on_resume": {},
        **dict.fromkeys(_NOT_YET_KNOWN),
    }
