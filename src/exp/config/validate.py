"""Checks that span several keys, made once, in the parent, before anything starts. Imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Sequence

from omegaconf import OmegaConf

from exp import hub
from exp.backend import PRECISIONS
from exp.config import trained
from exp.config.batch import derive_batch_sizes
from exp.config.explain import nearest
from exp.config.families import check_family
from exp.config.figures import check_figures
from exp.config.hardware import check_available, check_processes, runs_elsewhere
from exp.config.hooks import check_hooks, check_schedulers
from exp.config.ranges import check_ranges
from exp.config.targets import check_target, find_module, find_own_module
from exp.config.walk import nodes, written
from exp.contract import TASK_PAGE, asked
from exp.errors import ConfigError, UnavailableError
from exp.launcher.base import launcher_class
from exp.lock_holder import holder_of
from exp.runfolder import RunFolder, read_result, without_credentials
from exp.task import create_task
from exp.torch_version import FULL_SHARDING_SINCE, installed_torch
from exp.trackers import reporting

if TYPE_CHECKING:
    from exp.backend import Backend
    from exp.config.schema import ExpConfig
    from exp.task import Task

__all__ = [
    "check_data",
    "has_weights",
    "preflight_of",
    "refuse_device_arguments",
    "validate",
]

_WRAPPERS = ("mmddp", "ddp", "fsdp", "none")


def validate(config: ExpConfig, overrides: Sequence[str], backend: Backend) -> None:
    """Check ``config`` and fill in what is derived (batch sizes).

    Args:
        config: the composed configuration; changed in place.
        overrides: the user's, to tell a batch size that he gave from one that the experiment file has.
        backend: of ``config.backend``.

    Raises:
        ConfigError: a value is wrong, two do not go together, or a file is missing.
        UnavailableError: the backend or a package is not there, or there are fewer devices than ``nproc``.
    """
    check_family(config)
    _check_missing(config)
    _check_credentials(config)
    _check_values(config)
    launcher_class(config)
    task = create_task(config)
    with asked("task", task, ".check(config)", TASK_PAGE):
        task.check(config)
    check_task = getattr(preflight_of(config.data), "check_task", None)
    if check_task is not None:  # keys that the family adds to tasks
        check_task(config.task)
    if (
        config.launcher.nnodes > 1
        and not launcher_class(config).submits
        and not any(override.startswith("output_dir=") for override in overrides)
    ):
        raise ConfigError("launcher.nnodes>1 needs output_dir=<a folder that all nodes share>, the same on every node")
    if task.isolated and config.launcher["_target_"] == "auto":
        config.launcher._target_ = "exp.launcher.torchrun.TorchrunLauncher"
    if task.diagnoses:
        # Only what no worker could report: too few devices, missing data and the rest are for the diagnosis itself.
        if task.isolated and not runs_elsewhere(config):
            check_available(config, backend)
        _check_output_dir(config, task)
        return
    _check_targets(config)
    check_processes(config, backend, task)
    _check_wrapper(config, task)
    reporting.check(config.logger)
    for package in config.logger.requires:
        if find_module(package) is None:  # without importing what is above it
            raise UnavailableError(
                f"the logger needs the package {package}, which is not installed: pip install {package}"
            )
    if task.trains and not has_weights(config):
        target = config.model["_target_"]
        raise ConfigError(f"task={config.task.name}: {target} has nothing to train; task=eval measures it as it is")
    if not task.trains:
        config.batch_size = config.global_batch_size = None  # nothing is trained, and nothing has to divide
    else:
        _derive_batch(config, overrides)
    _refuse_keys_of_others(config, overrides, task)
    _check_files(config, task)


def preflight_of(data: Any) -> Any:
    """The module in which a family of data sets looks at its own files: it needs neither torch nor pandas.

    Args:
        data: ``config.data``.

    Returns:
        ``preflight`` beside the module of the class that ``data`` names, with ``preflight(data)`` and, as they are
        wanted, ``check_task(task)`` and ``take_input(data, wanted)``; None: there is none.
    """
    family = data["_target_"].rpartition(".")[0].rpartition(".")[0]
    if not family or find_module(f"{family}.preflight") is None:  # without importing what is above it
        return None
    return importlib.import_module(f"{family}.preflight")


def check_data(data: Any) -> bool:
    """Let a family of data sets look at its own files.

    Args:
        data: ``config.data``.

    Returns:
        Whether it can.

    Raises:
        DataError: a file is missing, or cannot be the right one.
    """
    module = preflight_of(data)
    if module is not None:
        module.preflight(data)
    return module is not None


def refuse_device_arguments(config: ExpConfig) -> None:
    """The wrapper's device arguments have one source, the backend (two sources were overridden by one another).

    Raises:
        ConfigError: the configuration names one.
    """
    for key in ("device_ids", "output_device"):
        if hasattr(config.wrapper, key):
            raise ConfigError(f"wrapper.{key} comes from the backend alone; remove it")


def has_weights(config: ExpConfig) -> bool:
    """Whether the model has something to train, as far as its typed keys say (:class:`exp.plugins.Plugin`)."""
    return bool(getattr(OmegaConf.get_type(config.model), "has_weights", True))


def _check_targets(config: ExpConfig) -> None:
    elsewhere = runs_elsewhere(config)
    for name in () if elsewhere else config.plugins:
        if find_own_module(name) is None:
            raise ConfigError(f"plugins: there is no module {name}; is its folder on PYTHONPATH?")
    for part in ("data", "model", "wrapper"):
        target = str(getattr(config, part).get("_target_") or "")
        if not target and part == "wrapper":
            continue  # one of exp's own
        if not target:
            raise ConfigError(f"{part}._target_ must be set: the path of a class")
        # The nodes of a cluster may have other folders on their path (launcher.setup).
        if target.startswith("exp.") or not elsewhere:
            check_target(f"{part}._target_", target)


def _check_credentials(config: ExpConfig) -> None:
    for key, parent, name in nodes(config):
        value = written(parent, name)
        if isinstance(value, str) and value != without_credentials(value):
            raise ConfigError(
                f"{key}={without_credentials(value)} has a password, which config.yaml would keep; give the address "
                "without it, and the password as its library reads it from the environment"
            )


def _check_missing(config: ExpConfig) -> None:
    missing = sorted(key for key, parent, name in nodes(config) if OmegaConf.is_missing(parent, name))
    # The data's first: the model's values refer to them.
    missing = [key for key in missing if key.startswith("data.")] or missing
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set; give {' '.join(f'{key}=...' for key in missing)}")


def _check_values(config: ExpConfig) -> None:
    for key, choices in (("precision", PRECISIONS), ("wrapper.kind", _WRAPPERS)):
        value = config.precision if key == "precision" else config.wrapper.kind
        if value not in choices and not (key == "wrapper.kind" and config.wrapper._target_):
            raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}{nearest(value, choices)}")
    check_ranges(config)
    if config.max_epochs is None and config.max_steps is None:
        raise ConfigError("neither max_epochs nor max_steps is set; give one of them")
    if config.debug.overfit and config.debug.train_batches is None:
        raise ConfigError("debug.overfit=true needs debug.train_batches: how many batches are to be learned")
    check_figures(config.figures)
    check_hooks(config.hooks)
    check_schedulers(config.schedule.param_scheduler)


def _check_wrapper(config: ExpConfig, task: Task) -> None:
    processes = config.nproc * config.launcher.nnodes
    if config.wrapper.kind == "none" and processes > 1 and task.trains:
        raise ConfigError(
            f"wrapper=none with {processes} processes would train {processes} models that never meet; "
            "use wrapper=mmddp or wrapper=ddp, or nproc=1"
        )
    if config.wrapper.kind == "fsdp":
        if task.has_reference and processes > 1:
            raise ConfigError("task=parity compares whole tensors, and wrapper=fsdp leaves none; use wrapper=ddp")
        version, here = installed_torch(), not task.on_paper and not runs_elsewhere(config)
        if task.trains and processes > 1 and here and version is not None and version < FULL_SHARDING_SINCE:
            raise UnavailableError(
                f"wrapper=fsdp: torch {'.'.join(map(str, version))} is too old for fully_shard and its checkpoints, "
                f"which take torch >= {'.'.join(map(str, FULL_SHARDING_SINCE))}; use wrapper=ddp (see docs/fsdp.md)"
            )
        for key in ("sync_batchnorm", "find_unused_parameters", "static_graph"):
            if getattr(config.wrapper, key):
                raise ConfigError(f"wrapper.{key}=true is for wrapper=ddp; with wrapper=fsdp, leave it out")
        if config.precision == "fp16" and task.trains:
            raise ConfigError(
                "wrapper=fsdp does not go with precision=fp16, whose loss scaler would see one rank's shards only; use "
                "precision=bf16, or wrapper=ddp"
            )
    if config.compile and config.dropout_by_sample:
        raise ConfigError(
            "compile=true would compile anew at every step with dropout_by_sample=true, whose masks depend on the "
            "step; leave one of them out"
        )


def _refuse_keys_of_others(config: ExpConfig, overrides: Sequence[str], task: Task) -> None:
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "steps" and not task.has_reference:
            raise ConfigError(
                f"{override}: steps is a key of task=parity; for task={config.task.name}, set max_steps={value}"
            )
        if key == "reference" and not task.has_reference:
            raise ConfigError(f"{override}: reference is a key of task=parity; add task=parity, or leave it out")
        if key == "resume" and value not in ("", "null") and not task.saves_state:
            raise ConfigError(f"{override}: task={config.task.name} saves no state to resume from; leave it out")
        if key == "run":
            raise ConfigError(f"{override}: run is a key of task=report and task=track; add one, or leave it out")


def _derive_batch(config: ExpConfig, overrides: Sequence[str]) -> None:
    given = {override.split("=")[0].lstrip("+") for override in overrides}
    # Only one of the two is the user's word; the experiment file's other one gives way to it.
    if "batch_size" in given and "global_batch_size" not in given:
        config.global_batch_size = None
    elif "global_batch_size" in given and "batch_size" not in given:
        config.batch_size = None
    world_size = config.nproc * config.launcher.nnodes
    config.batch_size, config.global_batch_size = derive_batch_sizes(
        config.batch_size, config.global_batch_size, config.accumulate, world_size
    )


def _check_files(config: ExpConfig, task: Task) -> None:
    if hub.is_name(config.init_from):
        hub.parse(str(config.init_from))
    elif config.init_from is not None:
        trained.check_weights_there(config.init_from)
    if config.resume is not None and config.resume != "auto":
        trained.check_weights_there(config.resume, "resume")
    if task.uses_data and not task.on_paper:
        check_data(config.data)
    if task.needs_weights and config.init_from is None and has_weights(config):
        raise ConfigError(
            f"task={config.task.name} needs weights; set init_from to a checkpoint or a run folder, "
            "such as init_from=outputs/<experiment>/<run>"
        )
    _check_output_dir(config, task)


def _check_output_dir(config: ExpConfig, task: Task) -> None:
    if config.overwrite and config.resume is not None:
        raise ConfigError("overwrite=true is for a run that begins anew; leave it out, or resume, or use init_from")
    if holder_of(RunFolder(config.output_dir).path) is None:  # else the lock decides first
        check_folder(config, task.saves_state)


def check_folder(config: ExpConfig, trains: bool) -> None:
    """Refuse a run folder that holds results which this run would overwrite unasked.

    Args:
        config: the configuration.
        trains: whether the run could continue a training.

    Raises:
        ConfigError: it does.
    """
    folder = RunFolder(config.output_dir)
    previous = read_result(folder)
    if config.resume is not None or config.overwrite:
        return
    saved = folder.has_checkpoint()
    if previous is not None and previous.get("status") == "completed":
        further = ", or add resume=auto and a larger max_epochs or max_steps to train it further"
        raise ConfigError(
            f"output_dir={config.output_dir} holds a completed run; use another one, or overwrite=true to remove it"
            + further * (saved and trains)
        )
    if saved:
        raise ConfigError(
            f"output_dir={config.output_dir} holds an unfinished training; "
            + ("add resume=auto to continue it, " if trains else "")
            + "use another one, or overwrite=true to remove it"
        )
