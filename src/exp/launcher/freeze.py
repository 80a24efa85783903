"""Freezes the configuration of a run: composes what Hydra could not know, checks it, and fills in derived values.

Later changes of YAML files do not change a frozen run.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from omegaconf import OmegaConf

from exp.config import compose, diff
from exp.config.check import check_weights
from exp.config.resolve import trust_packages
from exp.config.schema import ExpConfig
from exp.config.sources import structure_of
from exp.errors import ConfigError
from exp.hardware.registry import choose_available, create_backend
from exp.launcher.base import launcher_class
from exp.launcher.run import FrozenRun
from exp.launcher.validate import validate
from exp.runs.files import read_json
from exp.runs.folder import RunFolder
from exp.task import create_task, task_class
from exp.trackers import check as check_trackers

__all__ = ["compose_run", "freeze", "validate_run"]


def freeze(config: ExpConfig, overrides: list[str]) -> FrozenRun:
    """Validate the configuration that Hydra has composed, and fill in derived values. Writes nothing.

    Args:
        config: composed by Hydra, without the node ``hydra``.
        overrides: the user's overrides.

    Raises:
        ConfigError: a value is wrong, two values contradict each other, or a file is missing.
        UnavailableError: the hardware or a package is not available.
    """
    return validate_run(compose_run(config, overrides), overrides)


def compose_run(config: ExpConfig, overrides: list[str]) -> ExpConfig:
    """The first half of :func:`freeze`; jobs of a sweep that differ only in plain values can share its result.

    A task that needs weights takes model and data from the run in ``init_from``.
    :func:`exp.config.compose.primary_config` has usually composed the configuration so. It is composed again here in
    two cases: in a sweep over ``init_from``, where it knew only one run; and if only a YAML file names the task, which
    it did not know.

    Returns:
        The typed configuration, with the chosen backend.

    Raises:
        ConfigError: a key or a type is wrong, or the configuration names code that the user has not chosen.
        UnavailableError: the backend is not available.
    """
    trust_packages(config.plugins, overrides)
    primary, task_overrides, folder = compose.primary_config(overrides, task_class(config).needs_weights)
    if "," in config.backend._target_:  # backend=auto: the candidates
        config = _with_backend(config, primary, task_overrides)
    elif folder != OmegaConf.select(config, "record.trained_in"):  # type: ignore[arg-type]
        config = compose.compose(primary, task_overrides)
    config = compose.typed(config)  # checks what +KEY=VALUE added, too
    compose.replace_dict_overrides(config, overrides)
    _record_choices(config)
    return config


def validate_run(config: ExpConfig, overrides: list[str], output_dir: Path | None = None) -> FrozenRun:
    """The second half of :func:`freeze`: everything that depends on values; changes ``config`` in place.

    Args:
        config: the result of :func:`compose_run`.
        overrides: the user's overrides.
        output_dir: the run folder; None: that of the configuration.
    """
    launcher = launcher_class(config)
    has_peers = config.launcher.nnodes > 1 and not launcher.is_remote(config.launcher)
    if has_peers and not compose.sets_output_dir(config):
        raise ConfigError("launcher.nnodes>1 needs output_dir=<a folder that all nodes share>, the same on every node")
    compose.make_paths_absolute(config)
    validate(config, overrides, create_backend(config.backend), create_task(config), launcher)
    output_dir = (
        Path(output_dir or config.output_dir).expanduser().absolute()
    )  # after the checks: a task may set the name in it
    config.output_dir = str(output_dir)
    check_trackers(config.logger)
    _record_config_diff(config, overrides)
    return FrozenRun(config, overrides, RunFolder(output_dir), has_peers)


def _with_backend(config: ExpConfig, primary: str, overrides: list[str]) -> ExpConfig:
    """The configuration with the first available backend in place of ``backend=auto``."""
    name = choose_available(config.backend._target_.split(","))
    other_overrides = [override for override in overrides if not override.startswith(("backend=", "backend._target_="))]
    try:
        return compose.compose(primary, [*other_overrides, f"backend={name}"])
    except MissingConfigException:  # a backend of another package, without a YAML file
        return compose.compose(primary, [*other_overrides, f"backend._target_={name}", f"backend.name={name}"])


def _record_choices(config: ExpConfig) -> None:
    """Record the choices of config groups, and which keys follow others."""
    record = config.record
    choices = HydraConfig.get().runtime.choices.items()
    # The record has the choices of the run in init_from already.
    chosen = {group: name for group, name in choices if "/" not in group and name not in (None, compose.RUN_CONFIG)}
    record.chosen = {**record.chosen, **chosen, "backend": config.backend.name}
    record.follows = compose.interpolations(config)


def _record_config_diff(config: ExpConfig, overrides: list[str]) -> None:
    """Record how the configuration differs from the run in ``init_from``, and from the experiment of the reference."""
    record = config.record
    folder = compose.run_folder_of(config.init_from) if task_class(config).needs_weights else None
    if folder is not None:
        record.trained_in = str(folder)
        earlier = compose.load(RunFolder(folder).config)
        check_weights(config, earlier, folder)
        modified = RunFolder(folder).modified_files(read_json(RunFolder(folder).result) or {})
        record.differs = [f"{name} was changed after that run" for name in modified if name == "config.yaml"]
        record.differs += diff.diff_lines(config, earlier, "trained with")
    changed = folder is not None or any(re.match(r"[+~]*(data|model)\b", override) for override in overrides)
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
