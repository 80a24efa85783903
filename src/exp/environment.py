"""What a run ran on: versions, host, source revision and devices, for ``env.json``."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import exp

if TYPE_CHECKING:
    from exp.backend import Backend

__all__ = ["describe_environment", "git_revision", "package_versions", "version_of"]

_PACKAGES = ("torch", "mmengine", "hydra-core", "omegaconf", "numpy", "pandas")


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
