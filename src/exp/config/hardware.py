"""Whether the machine at hand has what a run asks for; no worker is started, and torch is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp.config.backends import check_backend
from exp.errors import ConfigError, UnavailableError
from exp.launcher.base import launcher_class

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.task import Task

__all__ = ["check_available", "check_hardware", "check_processes", "runs_elsewhere"]


def check_available(config: ExpConfig, backend: Backend) -> None:
    """Whether this machine has the backend's hardware and software.

    Raises:
        UnavailableError: it has not.
    """
    reason = backend.why_unavailable()
    if reason is not None:
        raise UnavailableError(f"backend={config.backend.name} is not available: {reason}")


def check_hardware(config: ExpConfig, backend: Backend) -> None:
    """Whether this machine has what ``nproc`` workers need.

    Raises:
        ConfigError: as :func:`exp.config.backends.check_backend`.
        UnavailableError: it has not.
    """
    check_backend(backend)
    check_available(config, backend)
    count = backend.device_count() if backend.exclusive_devices else config.nproc
    if config.nproc > count:
        raise UnavailableError(
            f"nproc={config.nproc} asks for more devices than backend={backend.name} has here: {count}; "
            f"set nproc={count} or make more devices visible"
        )


def check_processes(config: ExpConfig, backend: Backend, task: Task) -> None:
    """Whether the backend knows the precision, and this machine has the devices, if the run takes place on it.

    Raises:
        ConfigError: the backend does not do this precision.
        UnavailableError: there are not enough devices.
    """
    if config.precision not in backend.precisions:
        raise ConfigError(
            f"precision={config.precision} is not supported by backend={backend.name}; "
            f"use one of {', '.join(backend.precisions)}"
        )
    if not task.on_paper and not runs_elsewhere(config):
        check_hardware(config, backend)


def runs_elsewhere(config: ExpConfig) -> bool:
    """Whether the run's hardware is not that of this machine, but of a cluster's nodes."""
    return launcher_class(config).is_elsewhere(config.launcher)
