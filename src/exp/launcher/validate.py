"""Checks of a run, made once in the parent before it starts: configuration, files, hardware, and the run folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Sequence

from exp.config.check import (  # fmt: skip
    check_data,
    check_family,
    check_nodes,
    check_values,
    check_wrapper,
    derive_batch_sizes,
    has_weights,
    preflight_of,
)
from exp.config.compose import check_weights_exist, is_hub_source
from exp.config.resolve import check_names, check_target
from exp.errors import ConfigError, UnavailableError, user_code_errors

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.launcher.base import Launcher
    from exp.task import Task

__all__ = ["check_hardware", "validate"]

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the system has it


def validate(
    config: ExpConfig, overrides: Sequence[str], backend: Backend, task: Task, launcher: type[Launcher]
) -> None:
    """Check ``config`` and fill in derived values, such as the batch sizes.

    Args:
        config: the composed configuration; changed in place.
        overrides: the user's overrides; a batch size among them takes precedence over one in the experiment file.
        backend: the backend of ``config.backend``.
        task: the task of ``config.task``.
        launcher: the class that ``config.launcher`` names.

    Raises:
        ConfigError: a value is wrong, or two values contradict each other.
        DataError: a data file is missing or malformed.
        UnavailableError: the backend or a package is missing, or there are fewer devices than ``nproc``.
    """
    check_family(config)
    check_nodes(config)
    check_names(config)
    check_values(config)
    is_remote = launcher.is_remote(config.launcher)
    with user_code_errors("task", task):
        task.check(config)
    check_task = getattr(preflight_of(config.data), "check_task", None)
    if check_task is not None:  # checks the keys that the family adds to tasks
        check_task(config.task)
    if task.is_diagnostic:
        # Check only what no worker could report; the task itself reports too few devices, missing data, and so on.
        if task.uses_hardware and not is_remote:
            check_hardware(config, backend, counts=False)
        return
    for part in ("data", "model", "wrapper"):
        target = config[part].get("_target_")  # type: ignore[index]
        if target is not None and not is_remote:  # the nodes of a cluster may have another PYTHONPATH (launcher.setup)
            check_target(f"{part}._target_", target)
    if config.precision not in backend.capabilities.precisions:
        raise ConfigError(
            f"precision={config.precision} is not supported by backend={backend.name}; "
            f"use one of {', '.join(backend.capabilities.precisions)}"
        )
    if task.uses_hardware and not is_remote:
        check_hardware(config, backend)
    if task.trains and not has_weights(config):
        target = config.model["_target_"]
        raise ConfigError(f"task={config.task.name}: {target} has nothing to train; use task=eval to evaluate it")
    if task.trains:
        check_wrapper(config)
        derive_batch_sizes(config, overrides)
    else:
        config.batch_size = config.global_batch_size = None  # without training they need not be consistent
    _check_files(config, task)
    uses_processes = config.nproc > 1 or config.data.get("num_workers")
    if uses_processes and not is_remote and not os.access(_SHARED_MEMORY, os.W_OK):
        raise UnavailableError(
            f"{_SHARED_MEMORY} is missing or read-only, and several processes need it for shared memory; mount it "
            "(docker run --shm-size=8g), or set nproc=1 data.num_workers=0"
        )


def _check_files(config: ExpConfig, task: Task) -> None:
    if config.resume is not None and not task.saves_state:
        raise ConfigError(
            f"resume={config.resume}: task={config.task.name} saves no state to resume from; leave it out"
        )
    if config.init_from is not None and not is_hub_source(config.init_from):
        check_weights_exist(config.init_from)
    if config.resume is not None and config.resume != "auto":
        check_weights_exist(config.resume, "resume")
    if task.uses_data:
        check_data(config.data)
    if task.needs_weights and config.init_from is None and has_weights(config):
        raise ConfigError(
            f"task={config.task.name} needs weights; set init_from to a checkpoint or a run folder, "
            "such as init_from=outputs/<experiment>/<run>"
        )


def check_hardware(config: ExpConfig, backend: Backend, counts: bool = True) -> None:
    """Check that this machine has the backend and, if ``counts``, enough devices for ``nproc`` workers.

    Raises:
        UnavailableError: the backend is not available, or there are too few devices.
    """
    reason = backend.unavailable_reason()
    if reason is not None:
        raise UnavailableError(f"backend={config.backend.name} is not available: {reason}")
    count = backend.device_count() if counts and not backend.capabilities.shared_device else config.nproc
    if config.nproc > count:
        names = [f"{name}={os.environ[name]}" for name in backend.visible_variables if name in os.environ]
        ways = [f"set nproc={count}"] * (count > 0)
        ways += [f"make more devices visible ({', '.join(names)})" if names else "make more devices visible"]
        raise UnavailableError(
            f"nproc={config.nproc} asks for more devices than backend={backend.name} has here: {count}; "
            + " or ".join(ways)
        )
