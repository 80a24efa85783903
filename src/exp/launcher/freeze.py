"""Freezes the configuration of a run: composes what Hydra could not know, checks it, and fills in derived values.

Later changes of YAML files do not change a frozen run.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from exp.config import compose, diff
from exp.config.check import (
    check_config,
    check_data,
    check_weights,
    check_wrapper,
    derive_batch_sizes,
    has_weights,
    preflight_of,
)
from exp.config.compose import check_weights_exist, is_hub_source
from exp.config.resolve import check_target, trust_packages
from exp.config.sources import structure_of
from exp.errors import ConfigError, UnavailableError, user_code_errors
from exp.hardware.backend import PROCESS_GROUP_VARIABLE
from exp.hardware.environment import version_of
from exp.hardware.registry import choose_available
from exp.launcher.base import Classes, FrozenRun
from exp.runs.files import read_json
from exp.runs.folder import RunFolder
from exp.task import task_class
from exp.trackers.base import check as check_trackers

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.task import Task

__all__ = ["check_hardware", "compose_run", "freeze", "validate_run"]

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the system has it


def freeze(config: ExpConfig, overrides: list[str]) -> FrozenRun:
    """Validate the configuration that Hydra has composed, and fill in derived values. Writes nothing.

    Args:
        config: composed by Hydra, without the node ``hydra``.
        overrides: the user's overrides.

    Raises:
        ConfigError: a value is wrong, two values contradict each other, or a file is missing.
        UnavailableError: the hardware or a package is not available.
    """
    config = compose_run(config, overrides)
    return validate_run(config, overrides, Classes.of(config))


def compose_run(config: ExpConfig, overrides: list[str], task: type[Task] | None = None) -> ExpConfig:
    """The first half of :func:`freeze`; jobs of a sweep that differ only in plain values can share its result.

    A task that needs weights takes model and data from the run in ``init_from``.
    :func:`exp.config.compose.primary_config` has usually composed the configuration so. It is composed again here in
    two cases: in a sweep over ``init_from``, where it knew only one run; and if only a YAML file names the task, which
    it did not know.

    Args:
        config: composed by Hydra, without the node ``hydra``.
        overrides: the user's overrides.
        task: the class of the task, if it has been looked up already.

    Returns:
        The typed configuration, with the chosen backend.

    Raises:
        ConfigError: a key or a type is wrong, or the configuration names code that the user has not chosen.
        UnavailableError: the backend is not available.
    """
    trust_packages(config.plugins, overrides)
    task = task or task_class(config)
    primary, task_overrides, folder = compose.primary_config(overrides, task.needs_weights)
    if "," in config.backend._target_:  # backend=auto: the candidates
        config = _with_backend(config, primary, task_overrides)
    elif folder != OmegaConf.select(config, "record.trained_in"):  # type: ignore[arg-type]
        config = compose.compose(primary, task_overrides)
    return compose.finish(config, overrides, task.paths)


def validate_run(
    config: ExpConfig, overrides: list[str], classes: Classes, output_dir: Path | None = None
) -> FrozenRun:
    """The second half of :func:`freeze`: everything that depends on values; changes ``config`` in place.

    Args:
        config: the result of :func:`compose_run`.
        overrides: the user's overrides.
        classes: of task and launcher.
        output_dir: the run folder; None: that of the configuration.
    """
    run = FrozenRun(config, overrides, RunFolder(config.output_dir), classes)
    if config.launcher.mixed:
        _check_mixed(run)
    if config.launcher.min_nnodes is not None:
        _check_elastic(run)
    if run.has_peers and not compose.sets_output_dir(config):
        raise ConfigError("launcher.nnodes>1 needs output_dir=<a folder that all nodes share>, the same on every node")
    _check_run(run)
    # After the checks, since a task may set the name in the path.
    run.folder = RunFolder(Path(output_dir or config.output_dir).expanduser().absolute())
    config.output_dir = str(run.folder.path)
    check_trackers(config.logger)
    _record_config_diff(run)
    return run


def _check_mixed(run: FrozenRun) -> None:
    """Refuse what ranks with cards of different vendors cannot do together.

    Raises:
        ConfigError: a key needs collectives of one vendor, or the nodes are not started by hand.
        UnavailableError: torch is older than 2.1.
    """
    config, wrapper, key = run.config, run.config.wrapper, None
    group = run.backend.requested_process_group or os.environ.get(PROCESS_GROUP_VARIABLE, "gloo")
    if config.launcher.nnodes == 1 or run.is_remote or run.classes.launcher.is_external:
        key, why = "launcher.mixed", "it is for several nodes (launcher.nnodes) that are each started by hand"
    elif wrapper._target_ is not None or wrapper.sync_batchnorm or wrapper.broadcast_buffers:
        key = "wrapper" if wrapper._target_ is not None else "wrapper.sync_batchnorm or wrapper.broadcast_buffers"
        why = (
            f"gradients go through the CPU, and wrapper={wrapper.kind} does not; use wrapper=ddp without these options"
        )
    elif group != "gloo":
        key, why = "backend.process_group", f"ranks of all vendors have gloo in common, not {group}; leave it out"
    elif config.precision == "fp16":
        key, why = "precision", "the loss scalers of two vendors may have different scales; use bf16 or fp32"
    if key is not None:
        raise ConfigError(f"launcher.mixed=true does not go with this {key}: {why}", key=key)
    _check_torch("launcher.mixed=true", "use one vendor's cards")


def _check_elastic(run: FrozenRun) -> None:
    """Refuse what cannot be done by nodes that come and go.

    Raises:
        ConfigError: the nodes are not started by hand, differ, or do not train; or the range is empty.
        UnavailableError: torch is older than 2.1.
    """
    launcher, why = run.config.launcher, None
    asked = f"launcher.nnodes={launcher.min_nnodes}:{launcher.nnodes}"
    if int(launcher.min_nnodes or 0) >= launcher.nnodes:
        why = "the first number must be below the second"
    elif run.is_remote or run.classes.launcher.is_external:
        why = "it is for nodes that are each started by hand, with launcher=torchrun (docs/hardware/launch.md)"
    elif launcher.mixed or launcher.shares or launcher.share is not None:
        why = "all ranks have equal parts of a batch, so it does not go with launcher.mixed, share or shares"
    elif not run.task.trains:
        why = f"it is for training, and task={run.config.task.name} saves no checkpoints from which others go on"
    if why is not None:
        raise ConfigError(f"{asked}: {why}", key="launcher.nnodes")
    _check_torch(asked, "give a fixed number of nodes")


def _check_torch(asked: str, instead: str) -> None:
    """Raise UnavailableError if torch is older than 2.1."""
    version = str(version_of("torch"))
    if tuple(map(int, version.split(".")[:2])) < (2, 1):
        raise UnavailableError(f"{asked} needs torch 2.1 or later, and this is {version}; {instead}")


def _with_backend(config: ExpConfig, primary: str, overrides: list[str]) -> ExpConfig:
    """The configuration with the first available backend in place of ``backend=auto``."""
    name = choose_available(config.backend._target_.split(","))
    other_overrides = [override for override in overrides if not override.startswith(("backend=", "backend._target_="))]
    try:
        return compose.compose(primary, [*other_overrides, f"backend={name}"])
    except MissingConfigException:  # a backend of another package, without a YAML file
        return compose.compose(primary, [*other_overrides, f"backend._target_={name}", f"backend.name={name}"])


def _record_config_diff(run: FrozenRun) -> None:
    """Record how the configuration differs from the run in ``init_from``, and from the experiment of the reference."""
    config, record = run.config, run.config.record
    folder = compose.run_folder_of(config.init_from) if run.task.needs_weights else None
    if folder is not None:
        record.trained_in = str(folder)
        earlier = compose.load(RunFolder(folder).config)
        check_weights(config, earlier, folder)
        modified = RunFolder(folder).modified_files(read_json(RunFolder(folder).result) or {})
        record.differs = [f"{name} was changed after that run" for name in modified if name == "config.yaml"]
        record.differs += diff.diff_lines(config, earlier, "trained with")
    changed = folder is not None or any(re.match(r"[+~]*(data|model)\b", override) for override in run.overrides)
    record.reference = _reference(config, changed)


def _reference(config: ExpConfig, changed: bool) -> dict[str, Any]:
    """The reference metrics for the data, and how a changed configuration differs from the experiment that has them."""
    key = getattr(structure_of(config.data.get("_target_")), "reference_key", None)
    value = None if key is None else config.data[key]
    if value not in config.reference.metrics or config.reference.data != config.data.name:
        return {}
    override, experiment = f"data.{key}={value}", config.record.chosen.get("experiment")
    differs: list[str] = []
    if changed:
        original = _experiment_config(experiment, override)
        differs = (
            [f"experiment={experiment} is not here to compare with"]
            if original is None
            else diff.diff_lines(config, original, "there", ("data.root", "seed", "precision"))
        )
    return {**config.reference.metrics[value], "source": config.reference.source, "by": override, "differs": differs}


@functools.lru_cache(maxsize=None)
def _experiment_config(experiment: str | None, override: str) -> ExpConfig | None:
    """The configuration of an experiment without other overrides; None: there is no such experiment here."""
    try:
        return compose.compose("config", [f"experiment={experiment}", override])
    except MissingConfigException:
        return None


def _check_run(run: FrozenRun) -> None:
    """Check the configuration of a run, in place, and fill in derived values, such as the batch sizes.

    Args:
        run: a batch size among its overrides takes precedence over one in the experiment file.

    Raises:
        ConfigError: a value is wrong, or two values contradict each other.
        DataError: a data file is missing or malformed.
        UnavailableError: the backend or a package is missing, or there are fewer devices than ``nproc``.
    """
    config, backend, task, is_remote = run.config, run.backend, run.task, run.is_remote
    check_config(config)
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
            f"precision={config.precision} is not supported by backend={backend.name}",
            f"use one of {', '.join(backend.capabilities.precisions)}",
        )
    if task.uses_hardware and not is_remote:
        check_hardware(config, backend)
    if task.trains and not has_weights(config):
        target = config.model["_target_"]
        raise ConfigError(f"task={config.task.name}: {target} has nothing to train", "use task=eval to evaluate it")
    if task.trains:
        check_wrapper(config)
        derive_batch_sizes(config, run.overrides)
    else:
        config.batch_size = config.global_batch_size = None  # without training they need not be consistent
    _check_files(config, task)
    uses_processes = config.nproc > 1 or config.data.get("num_workers")
    if uses_processes and not is_remote and not os.access(_SHARED_MEMORY, os.W_OK):
        raise UnavailableError(
            f"{_SHARED_MEMORY} is missing or read-only, and several processes need it for shared memory",
            "mount it (docker run --shm-size=8g), or set nproc=1 data.num_workers=0",
        )


def _check_files(config: ExpConfig, task: Task) -> None:
    if config.resume is not None and not task.saves_state:
        raise ConfigError(
            f"resume={config.resume}: task={config.task.name} saves no state to resume from", "leave it out"
        )
    if config.init_from is not None and not is_hub_source(config.init_from):
        check_weights_exist(config.init_from)
    if config.resume is not None and config.resume != "auto":
        check_weights_exist(config.resume, "resume")
    if task.uses_data:
        check_data(config.data)
    if task.needs_weights and config.init_from is None and has_weights(config):
        raise ConfigError(
            f"task={config.task.name} needs weights",
            "set init_from to a checkpoint or a run folder, such as init_from=outputs/<experiment>/<run>",
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
