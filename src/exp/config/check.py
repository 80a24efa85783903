"""Checks of the configuration, made once before a run starts, in the parent process. Imports no torch."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from omegaconf import MISSING, OmegaConf

from exp import console
from exp.config.resolve import check_names, walk
from exp.config.schema import DDP_KEYS, PRECISIONS, WrapperConfig
from exp.config.shares import check_shares, split_batch
from exp.config.words import translate
from exp.errors import ConfigError, nearest
from exp.plugins import Family, installed
from exp.runs.files import without_credentials

if TYPE_CHECKING:
    from exp.config.schema import ExpConfig

_CHOICES = {
    "precision": PRECISIONS,
    "wrapper.kind": ("mmddp", "ddp", "fsdp", "none"),
    "figures.format": ("png", "pdf", "svg"),
}
_BATCH = {"batch_size", "global_batch_size"}


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


def check_config(config: ExpConfig) -> None:
    """Check what no task changes: families, names of code, values of all keys, and hooks.

    Raises:
        ConfigError: something is wrong; the message has the key.
    """
    _check_family(config)
    content: Any = OmegaConf.to_container(config, resolve=False)
    _check_texts({key: value for key, _, value in walk(content)})
    check_names(config)
    check_values(config)


def _check_texts(values: Mapping[str, Any]) -> None:
    """Refuse missing values, text that is not UTF-8, and passwords in any key."""
    missing = sorted(key for key, value in values.items() if value == MISSING)
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set", f"give {' '.join(f'{key}=...' for key in missing)}")
    for key, value in values.items():
        if isinstance(value, str) and value != value.encode(errors="replace").decode():  # a lone surrogate
            raise ConfigError(f"{key}={value} has bytes that are not UTF-8", "rename this file or folder")
        if isinstance(value, str) and value != without_credentials(value):
            raise ConfigError(
                f"{key}={without_credentials(value)} contains a password, which would be saved in config.yaml",
                "leave it out, and set the environment variable from which the library reads the password",
            )


def check_values(config: ExpConfig) -> None:
    """Check choices, numbers and hooks, and that root keys do not contradict one another."""
    for key, choices in _CHOICES.items():
        value: Any = OmegaConf.select(config, key)  # type: ignore[arg-type]
        if value not in choices and not (key == "wrapper.kind" and config.wrapper._target_):
            hint = translate(key, str(value), exact=True) or nearest(str(value), choices, f"{key}=")
            raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}{hint}")
    for key, least in _MINIMUM.items():
        value = OmegaConf.select(config, key)  # type: ignore[arg-type]
        if value is not None and not value >= least:  # not `<`, so that NaN is refused, too
            raise ConfigError(f"{key}={value} must be at least {least}")
    clip = config.optim.clip_grad_norm
    if clip is not None and not clip > 0:
        raise ConfigError(f"optim.clip_grad_norm={clip} must be above 0, or null for no clipping")
    if config.max_epochs is None and config.max_steps is None:
        raise ConfigError("neither max_epochs nor max_steps is set", "give one of them")
    if config.overwrite and config.resume is not None:
        raise ConfigError(
            "overwrite=true removes the run that resume would continue", "leave out one of them, or use init_from"
        )
    if config.debug.replay_every and config.compile:
        raise ConfigError(
            "debug.replay_every with compile=true: torch may compile a pass anew at any step, with other rounding",
            "set compile=false, or leave it out",
            key="debug.replay_every",
        )
    for number, metric in enumerate(config.metrics):
        if not OmegaConf.is_dict(metric):
            raise ConfigError(
                f"metrics[{number}]={metric} is no class; metrics of the data are computed anyway, and one of yours is "
                "'metrics=[{_target_: my_package.MyMetric}]'"
            )
    check_hooks(config.hooks)
    check_shares(config)


def check_wrapper(config: ExpConfig) -> None:
    """Check the wrapper's options against the number of processes and the precision."""
    processes, wrapper = config.nproc * config.launcher.nnodes, config.wrapper
    if wrapper.kind == "none" and processes > 1:
        raise ConfigError(
            f"wrapper=none with {processes} processes would train {processes} independent models",
            "use wrapper=mmddp or wrapper=ddp, or nproc=1",
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
            "only",
            "use precision=bf16, or wrapper=ddp",
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
    family, trained_family = _family_of(config, "model"), _family_of(trained, "model")
    plugin_families = (set(plugin.families) for plugin in installed().values())  # their models may share a backbone
    if family and trained_family and not any({family, trained_family} <= families for families in plugin_families):
        raise ConfigError(
            f"init_from={console.display_path(folder)} has trained a model for {trained_family} ({trained.name}), but "
            f"this one is for {family}",
            "leave out experiment=... to use that of the weights, or use other weights",
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
            f"the model is for {of_model}, and the data are for {of_data}",
            f"choose an experiment that has both, such as "
            f"experiment={families[str(of_data)].example} or experiment={families[str(of_model)].example}",
        )
    for plugin in plugins if of_data is not None else ():
        # Only a plugin's own families read the keys that it adds to a task; with other data they would do nothing.
        keys = plugin.keys.get(f"task/{config.task.name}")
        for key, default in OmegaConf.structured(keys).items() if keys and plugin.families else ():
            if of_data not in plugin.families and config.task[key] != default:
                raise ConfigError(
                    f"task.{key}={config.task[key]} is for {' or '.join(plugin.families)}, and the data are for "
                    f"{of_data}",
                    "leave it out",
                )


UNSUPPORTED_HOOKS = (
    "Hook", "CheckpointHook", "LoggerHook", "ParamSchedulerHook", "DistSamplerSeedHook", "NaiveVisualizationHook",
    "PrepareTTAHook", "NPUProfilerHook",
)  # fmt: skip
"""Names of MMEngine's hooks that do not work in exp."""


def unsupported_hook_message(name: str) -> str:
    """The message for a hook of :data:`UNSUPPORTED_HOOKS`."""
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
            raise ConfigError(f"hooks[{index}] has no type", "write it as {type: <name of a class>, <its arguments>}")
        module, _, last = str(hook["type"]).rpartition(".")
        if last in UNSUPPORTED_HOOKS and module.split(".")[0] in ("", "mmengine"):
            raise ConfigError(unsupported_hook_message(last))
        for key, name, path in walk(OmegaConf.to_container(OmegaConf.create(hook), resolve=False), f"hooks[{index}]"):
            is_output = isinstance(path, str) and name in ("json_trace_path", "dir_name")
            if is_output and (Path(path).is_absolute() or ".." in Path(path).parts):
                raise ConfigError(f"{key}={path} must be a relative path below the run folder")


_MINIMUM: Mapping[str, int] = {
    **dict.fromkeys(
        ("nproc", "accumulate", "log_every", "checkpoint.keep_last", "launcher.nnodes", "launcher.min_nnodes"), 1
    ),
    **dict.fromkeys(("batch_size", "global_batch_size", "max_epochs", "max_steps", "val_every", "patience"), 1),
    **dict.fromkeys(("debug.train_batches", "debug.eval_batches", "debug.replay_every", "sweep.parallel_jobs"), 1),
    **dict.fromkeys(("checkpoint.every_epochs", "checkpoint.every_steps", "launcher.max_restarts"), 0),
    **dict.fromkeys(("optim.lr", "optim.weight_decay"), 0),
}
"""Lower bounds of numeric keys. Null is allowed; a key that the user's own launcher does not have is skipped."""


def derive_batch_sizes(config: ExpConfig, overrides: Sequence[str] = ()) -> None:
    """Derive the missing one of ``global_batch_size = batch_size * processes * accumulate``, in place.

    Args:
        config: the configuration.
        overrides: if they set only one of the two, the other is derived instead of taken from the experiment file.

    Raises:
        ConfigError: neither is given, the two disagree, or ``global_batch_size`` is not a multiple of ``processes *
            accumulate``, or with shares of ``accumulate``; the message then has the nearest multiples.
    """
    keys = {override.split("=")[0].lstrip("+") for override in overrides}
    shares = check_shares(config)
    per_rank = None if keys & _BATCH == {"global_batch_size"} else config.batch_size
    global_size = None if keys & _BATCH == {"batch_size"} else config.global_batch_size
    processes = config.nproc * config.launcher.nnodes
    parts = processes * config.accumulate
    if shares:
        _derive_largest_part(config, shares, keys)
        return
    layout = f"{processes} process{'es' if processes > 1 else ''} x accumulate={config.accumulate}"
    if global_size is None:
        if per_rank is None:
            raise ConfigError("neither batch_size nor global_batch_size is set", "give one of them")
        global_size = per_rank * parts
    below, remainder = global_size // parts * parts, global_size % parts
    if remainder:
        valid = " or ".join(str(value) for value in (below, below + parts) if value)
        raise ConfigError(f"global_batch_size={global_size} does not divide over {layout}", f"nearest: {valid}")
    if per_rank not in (None, global_size // parts):
        raise ConfigError(
            f"batch_size={per_rank} over {layout} is {per_rank * parts}, not global_batch_size={global_size}",
            "give only one of them",
        )
    config.batch_size, config.global_batch_size = global_size // parts, global_size


def _derive_largest_part(config: ExpConfig, shares: list[float], keys: set[str]) -> None:
    """Set ``batch_size`` to the largest part of a rank whose samples are divided in the ratio of ``shares``."""
    size, accumulate, ranks = config.global_batch_size, config.accumulate, len(shares)
    if size is None or "batch_size" in keys:
        total = f"={config.batch_size * ranks * accumulate}" if config.batch_size else ""
        raise ConfigError(
            "with launcher.share, launcher.mixed or a range of nodes ranks have unequal parts of a batch, so "
            "batch_size cannot be given",
            f"set global_batch_size{total} instead",
            key="batch_size",
        )
    if size % accumulate or (size < ranks * accumulate and not config.launcher.mixed):  # there each node knows its own
        below = max(size // accumulate, ranks) * accumulate
        raise ConfigError(
            f"global_batch_size={size} does not divide over accumulate={accumulate} micro-batches with samples for "
            f"each of {ranks} ranks",
            f"nearest: {below} or {below + accumulate}",
        )
    config.batch_size = max(split_batch(max(size // accumulate, ranks), shares))
