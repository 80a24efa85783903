"""Checks of the configuration, made once before a run starts, in the parent process. Imports no torch."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from omegaconf import MISSING, OmegaConf

from exp import console
from exp.config.compose import check_weights_there, is_of_hub, load, run_folder_of
from exp.config.differences import changes, refusal
from exp.config.resolve import as_plain, check_names, check_target, nodes
from exp.config.schema import DDP_KEYS, PRECISIONS, WrapperConfig
from exp.errors import ConfigError, UnavailableError, user_code_errors
from exp.plugins import Family, installed
from exp.runs.files import read_json, without_credentials
from exp.runs.folder import RunFolder

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig
    from exp.hardware.backend import Backend
    from exp.launcher.base import Launcher
    from exp.task import Task

__all__ = [
    "REFUSED", "check_data", "check_folder", "check_hardware", "check_hooks", "check_weights", "derive_batch_sizes",
    "has_weights", "preflight_of", "refused_hook", "validate",
]  # fmt: skip

_CHOICES = {
    "precision": PRECISIONS,
    "wrapper.kind": ("mmddp", "ddp", "fsdp", "none"),
    "figures.format": ("png", "pdf", "svg"),
}
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the system has it
_BATCH = {"batch_size", "global_batch_size"}


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
    _check_family(config)
    _check_nodes(config)
    check_names(config)
    _check_values(config)
    elsewhere = launcher.is_elsewhere(config.launcher)
    with user_code_errors("task", task):
        task.check(config)
    check_task = getattr(preflight_of(config.data), "check_task", None)
    if check_task is not None:  # checks the keys that the family adds to tasks
        check_task(config.task)
    if task.diagnoses:
        # Check only what no worker could report; the task itself reports too few devices, missing data, and so on.
        if task.uses_hardware and not elsewhere:
            check_hardware(config, backend, counts=False)
        return
    for part in ("data", "model", "wrapper"):
        target = config[part].get("_target_")  # type: ignore[index]
        if target is not None and not elsewhere:  # the nodes of a cluster may have another PYTHONPATH (launcher.setup)
            check_target(f"{part}._target_", target)
    if config.precision not in backend.capabilities.precisions:
        raise ConfigError(
            f"precision={config.precision} is not supported by backend={backend.name}; "
            f"use one of {', '.join(backend.capabilities.precisions)}"
        )
    if task.uses_hardware and not elsewhere:
        check_hardware(config, backend)
    if task.trains and not has_weights(config):
        target = config.model["_target_"]
        raise ConfigError(f"task={config.task.name}: {target} has nothing to train; use task=eval to evaluate it")
    if task.trains:
        _check_wrapper(config)
        derive_batch_sizes(config, overrides)
    else:
        config.batch_size = config.global_batch_size = None  # without training they need not be consistent
    _check_files(config, task)
    several = config.nproc > 1 or config.data.get("num_workers")
    if several and not elsewhere and not os.access(_SHARED_MEMORY, os.W_OK):
        raise UnavailableError(
            f"{_SHARED_MEMORY} is missing or read-only, and several processes need it for shared memory; mount it "
            "(docker run --shm-size=8g), or set nproc=1 data.num_workers=0"
        )


def preflight_of(data: Any) -> Any:
    """The module with which a family of data sets checks its files before a run; it imports neither torch nor pandas.

    Args:
        data: ``config.data``, with types.

    Returns:
        The module that ``preflight`` of the typed keys names (:class:`exp.plugins.Plugin`). It has ``preflight(data)``
        and, optionally, ``check_task(task)`` and ``take_input(data, wanted)``. None: there is no such module.
    """
    module = getattr(OmegaConf.get_type(data), "preflight", None)
    return module and importlib.import_module(module)


def check_data(data: Any) -> bool:
    """Check the data files with the ``preflight`` module of their family (:func:`preflight_of`).

    Args:
        data: ``config.data``.

    Returns:
        Whether the family has such a module; without one, nothing is checked.

    Raises:
        DataError: a file is missing, or is not the expected one.
    """
    module = preflight_of(data)
    if module is not None:
        module.preflight(data)
    return module is not None


def has_weights(config: ExpConfig) -> bool:
    """Whether the model has weights, according to ``has_weights`` of its typed keys (:class:`exp.plugins.Plugin`).

    True if the model has no typed keys.
    """
    return bool(getattr(OmegaConf.get_type(config.model), "has_weights", True))


def _check_nodes(config: ExpConfig) -> None:
    missing = sorted(key for key, _, _, value in nodes(config) if value == MISSING)
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set; give {' '.join(f'{key}=...' for key in missing)}")
    for key, _, _, value in nodes(config):
        if isinstance(value, str) and value != value.encode(errors="replace").decode():  # a lone surrogate
            raise ConfigError(f"{key}={value} has bytes that are not UTF-8; rename this file or folder")
        if isinstance(value, str) and value != without_credentials(value):
            raise ConfigError(
                f"{key}={without_credentials(value)} contains a password, which would be saved in config.yaml; leave "
                "it out, and set the environment variable from which the library reads the password"
            )


def _check_values(config: ExpConfig) -> None:
    for key, choices in _CHOICES.items():
        value: Any = OmegaConf.select(config, key)  # type: ignore[arg-type]
        if value not in choices and not (key == "wrapper.kind" and config.wrapper._target_):
            raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}")
    for key, least in _LEAST.items():
        value = OmegaConf.select(config, key)  # type: ignore[arg-type]
        if value is not None and not value >= least:  # not `<`, so that NaN is refused, too
            raise ConfigError(f"{key}={value} must be at least {least}")
    clip = config.optim.clip_grad_norm
    if clip is not None and not clip > 0:
        raise ConfigError(f"optim.clip_grad_norm={clip} must be above 0, or null for no clipping")
    if config.max_epochs is None and config.max_steps is None:
        raise ConfigError("neither max_epochs nor max_steps is set; give one of them")
    if config.overwrite and config.resume is not None:
        raise ConfigError(
            "overwrite=true removes the run that resume would continue; leave out one of them, or use init_from"
        )
    check_hooks(config.hooks)


def _check_wrapper(config: ExpConfig) -> None:
    processes, wrapper = config.nproc * config.launcher.nnodes, config.wrapper
    if wrapper.kind == "none" and processes > 1:
        raise ConfigError(
            f"wrapper=none with {processes} processes would train {processes} independent models; "
            "use wrapper=mmddp or wrapper=ddp, or nproc=1"
        )
    if wrapper.kind == "none" and wrapper.options:
        raise ConfigError(f"wrapper=none takes no wrapper.options: {', '.join(map(str, wrapper.options))}")
    default = WrapperConfig()
    unread = [*(DDP_KEYS if wrapper._target_ else ()), *(["sync_batchnorm"] if wrapper.kind == "fsdp" else [])]
    for key in unread:
        if wrapper[key] != getattr(default, key):  # type: ignore[index]
            raise ConfigError(f"wrapper.{key} is for wrapper=ddp, and wrapper={wrapper.kind} does not read it")
    if wrapper.kind == "fsdp" and config.precision == "fp16":
        raise ConfigError(
            "wrapper=fsdp does not support precision=fp16, because the loss scaler would see the shards of one rank "
            "only; use precision=bf16, or wrapper=ddp"
        )


def _check_files(config: ExpConfig, task: Task) -> None:
    if config.resume is not None and not task.saves_state:
        raise ConfigError(
            f"resume={config.resume}: task={config.task.name} saves no state to resume from; leave it out"
        )
    if config.init_from is not None and not is_of_hub(config.init_from):
        check_weights_there(config.init_from)
    if config.resume is not None and config.resume != "auto":
        check_weights_there(config.resume, "resume")
    if task.uses_data:
        check_data(config.data)
    if task.needs_weights and config.init_from is None and has_weights(config):
        raise ConfigError(
            f"task={config.task.name} needs weights; set init_from to a checkpoint or a run folder, "
            "such as init_from=outputs/<experiment>/<run>"
        )


def check_folder(config: ExpConfig, trains: bool) -> None:
    """Refuse to overwrite the results of an earlier run unasked, and to resume from a run with other settings.

    Args:
        config: the configuration.
        trains: whether the task can resume a training; only then the message suggests it.

    Raises:
        ConfigError: ``output_dir`` holds results and ``overwrite`` is false, or ``resume`` names a run whose settings
            differ in a way that resuming does not allow (:func:`exp.config.differences.changes`).
    """
    folder = RunFolder(config.output_dir)
    completed, saved = (read_json(folder.result) or {}).get("status") == "completed", folder.has_checkpoint()
    if config.resume is not None:
        source = folder if config.resume == "auto" else RunFolder(run_folder_of(config.resume) or folder.path)
        if source.has_checkpoint() and source.config.is_file():
            refused = changes(as_plain(load(source.config)), as_plain(config)).refused
            if refused:
                raise ConfigError(refusal(refused, console.display_path(source.path)))
        return
    if not config.overwrite and (completed or saved):
        holds = "a completed run" if completed else "an unfinished training"
        more = ", or resume=auto to continue it (to a larger max_epochs or max_steps)" if saved and trains else ""
        raise ConfigError(
            f"output_dir={config.output_dir} holds {holds}; use another one, or overwrite=true to remove it{more}"
        )


def check_hardware(config: ExpConfig, backend: Backend, counts: bool = True) -> None:
    """Check that this machine has the backend and, if ``counts``, enough devices for ``nproc`` workers.

    Raises:
        UnavailableError: the backend is not available, or there are too few devices.
    """
    reason = backend.why_unavailable()
    if reason is not None:
        raise UnavailableError(f"backend={config.backend.name} is not available: {reason}")
    count = backend.device_count() if counts and backend.exclusive_devices else config.nproc
    if config.nproc > count:
        names = [f"{name}={os.environ[name]}" for name in backend.visible_variables if name in os.environ]
        ways = [f"set nproc={count}"] * (count > 0)
        ways += [f"make more devices visible ({', '.join(names)})" if names else "make more devices visible"]
        raise UnavailableError(
            f"nproc={config.nproc} asks for more devices than backend={backend.name} has here: {count}; "
            + " or ".join(ways)
        )


def check_weights(config: ExpConfig, trained: ExpConfig, folder: Path) -> None:
    """Refuse weights of a model of another family, such as forecasting instead of vision.

    Args:
        config: the configuration that uses the weights.
        trained: the configuration of the run that trained them.
        folder: the folder of that run.

    Raises:
        ConfigError: the families differ, and no plugin has both.
    """
    wanted, found = _family_of(config, "model"), _family_of(trained, "model")
    together = (set(plugin.families) for plugin in installed().values())  # their models may share a backbone
    if wanted and found and not any({wanted, found} <= families for families in together):
        raise ConfigError(
            f"init_from={console.display_path(folder)} has trained a model for {found} ({trained.name}), but this one "
            f"is for {wanted}; leave out experiment=... to use that of the weights, or use other weights"
        )


def _families() -> dict[str, Family]:
    return {name: family for plugin in installed().values() for name, family in plugin.families.items()}


def _family_of(config: ExpConfig, part: str) -> str | None:
    keys = OmegaConf.get_type(config[part]) or object  # type: ignore[index]
    return next((name for name, family in _families().items() if issubclass(keys, getattr(family, part))), None)


def _check_family(config: ExpConfig) -> None:
    """Refuse model, data and keys of the task that belong to different families, as far as plugins define these."""
    plugins, families = installed().values(), _families()
    of_model, of_data = _family_of(config, "model"), _family_of(config, "data")
    if None not in (of_model, of_data) and of_model != of_data:
        raise ConfigError(
            f"the model is for {of_model}, and the data are for {of_data}; choose an experiment that has both, such as "
            f"experiment={families[str(of_data)].example} or experiment={families[str(of_model)].example}"
        )
    for plugin in plugins if of_data is not None else ():
        # Only a plugin's own families read the keys that it adds to a task; with other data they would do nothing.
        keys = plugin.keys.get(f"task/{config.task.name}")
        for key, default in OmegaConf.structured(keys).items() if keys and plugin.families else ():
            if of_data not in plugin.families and config.task[key] != default:
                raise ConfigError(
                    f"task.{key}={config.task[key]} is for {' or '.join(plugin.families)}, and the data are for "
                    f"{of_data}; leave it out"
                )


REFUSED = (
    "Hook", "CheckpointHook", "LoggerHook", "ParamSchedulerHook", "DistSamplerSeedHook", "NaiveVisualizationHook",
    "PrepareTTAHook", "NPUProfilerHook",
)  # fmt: skip
"""Names of MMEngine's hooks that do not work in exp."""


def refused_hook(name: str) -> str:
    """The message for a hook of :data:`REFUSED`."""
    return f"hooks: {name} cannot be used here; docs/extend/hooks.md has the reason, and what to use instead"


def check_hooks(hooks: Sequence[Any]) -> None:
    """Refuse hooks that would write outside the run folder, and those of MMEngine that do not work in exp.

    Args:
        hooks: ``config.hooks``; each has ``type``, the name or dotted path of a class.

    Raises:
        ConfigError: there is such a hook; the message names it.
    """
    for index, hook in enumerate(hooks):
        if not isinstance(hook.get("type"), str):
            raise ConfigError(f"hooks[{index}] has no type; write it as {{type: <name of a class>, <its arguments>}}")
        module, _, last = str(hook["type"]).rpartition(".")
        if last in REFUSED and module.split(".")[0] in ("", "mmengine"):
            raise ConfigError(refused_hook(last))
        for key, _, name, path in nodes(hook, f"hooks[{index}]"):
            written = isinstance(path, str) and name in ("json_trace_path", "dir_name")
            if written and (Path(path).is_absolute() or ".." in Path(path).parts):
                raise ConfigError(f"{key}={path} must be a relative path below the run folder")


_LEAST: Mapping[str, int] = {
    **dict.fromkeys(("nproc", "accumulate", "log_every", "checkpoint.keep_last", "launcher.nnodes"), 1),
    **dict.fromkeys(("batch_size", "global_batch_size", "max_epochs", "max_steps", "val_every", "patience"), 1),
    **dict.fromkeys(("debug.train_batches", "debug.eval_batches", "sweep.parallel_jobs"), 1),
    **dict.fromkeys(("checkpoint.every_epochs", "checkpoint.every_steps", "launcher.max_restarts"), 0),
}
"""Lower bounds of numeric keys. Null is allowed; a key that the user's own launcher does not have is skipped."""


def derive_batch_sizes(config: ExpConfig, overrides: Sequence[str] = ()) -> None:
    """Derive the missing one of ``global_batch_size = batch_size * processes * accumulate``, in place.

    Args:
        config: the configuration.
        overrides: if they set only one of the two, the other is derived instead of taken from the experiment file.

    Raises:
        ConfigError: neither is given, the two disagree, or ``global_batch_size`` is not a multiple of ``processes *
            accumulate``; the message then has the nearest multiples.
    """
    given = {override.split("=")[0].lstrip("+") for override in overrides}
    each = None if given & _BATCH == {"global_batch_size"} else config.batch_size
    whole = None if given & _BATCH == {"batch_size"} else config.global_batch_size
    processes = config.nproc * config.launcher.nnodes
    parts = processes * config.accumulate
    spread = f"{processes} process{'es' if processes > 1 else ''} x accumulate={config.accumulate}"
    if whole is None:
        if each is None:
            raise ConfigError("neither batch_size nor global_batch_size is set; give one of them")
        whole = each * parts
    below, rest = whole // parts * parts, whole % parts
    if rest:
        valid = " or ".join(str(value) for value in (below, below + parts) if value)
        raise ConfigError(f"global_batch_size={whole} does not divide over {spread}; nearest: {valid}")
    if each not in (None, whole // parts):
        raise ConfigError(
            f"batch_size={each} over {spread} is {each * parts}, not global_batch_size={whole}; give only one of them"
        )
    config.batch_size, config.global_batch_size = whole // parts, whole
