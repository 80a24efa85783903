"""From what Hydra has composed to a run: validated, and completed by what follows from it. Writes nothing."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any, cast

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from exp import hub
from exp.config import paths, structures, trained
from exp.config.check import check_weights, validate
from exp.config.differences import different, overruled
from exp.config.resolve import check_names
from exp.config.schema import ExpConfig
from exp.config.structures import replace_given
from exp.errors import ConfigError
from exp.frozen import FrozenRun
from exp.hardware.registry import choose, create_backend
from exp.launcher.base import launcher_class
from exp.runs.folder import RunFolder, read_result
from exp.task import create_task, task_class
from exp.trackers import reporting

if TYPE_CHECKING:
    from pathlib import Path

    from exp.hardware.backend import Backend

__all__ = ["check", "complete", "compose", "freeze", "prepare"]


def freeze(config: ExpConfig, overrides: list[str], output_dir: Path) -> FrozenRun:
    """Validate what Hydra has composed, and fill in what is derived. Writes nothing.

    Args:
        config: composed by Hydra, without its own part.
        overrides: the user's.
        output_dir: the run folder.

    Raises:
        ConfigError: a value is wrong, two do not go together, or a file is missing.
        UnavailableError: the hardware or a package is not there.
    """
    return complete(prepare(config, overrides), overrides, output_dir)


def prepare(config: ExpConfig, overrides: list[str]) -> ExpConfig:
    """The first half of :func:`freeze`, which jobs of a sweep that differ in plain values can share.

    Args:
        config: composed by Hydra, without its own part.
        overrides: the user's.

    Returns:
        The configuration with its types, of the backend that was chosen.

    Raises:
        ConfigError: a key or a type is wrong, or the user has not chosen code that is named.
        UnavailableError: the backend is not there.
    """
    check_names(config, overrides)
    config = _choose_backend(*_as_trained(config, overrides))
    config = structures.typed(config)  # checks what +KEY=VALUE added, too
    replace_given(config, overrides)
    _note_choices(config, overrides)
    return config


def complete(config: ExpConfig, overrides: list[str], output_dir: Path) -> FrozenRun:
    """The second half of :func:`freeze`: everything that depends on values.

    Args:
        config: of :func:`prepare`; changed in place.
        overrides: the user's.
        output_dir: the run folder.

    Raises:
        ConfigError: a value is wrong, two do not go together, or a file is missing.
        UnavailableError: the hardware or a package is not there.
    """
    check_names(config, overrides)
    config.output_dir = str(output_dir.absolute())
    paths.expand(config)
    check(config, overrides, create_backend(config.backend))
    _take_note(config, overrides)
    return FrozenRun(config, overrides, RunFolder(output_dir))


def check(config: ExpConfig, overrides: list[str], backend: Backend) -> None:
    """Check every value, and fill in what is derived; errors as of :func:`complete`."""
    validate(config, overrides, backend, create_task(config), launcher_class(config))
    reporting.check(config.logger)
    if paths.is_of_hub(config.init_from):
        hub.parse(str(config.init_from))


def _as_trained(config: ExpConfig, overrides: list[str]) -> tuple[ExpConfig, list[str], str | None]:
    """The configuration on top of that of the run in ``init_from``, where it is to be used as it was trained.

    The command line has seen to that already (:func:`exp.config.trained.begin`), but in a sweep over runs it knew only
    one of them, and of a task that only a file names it did not know that it needs weights.

    Returns:
        It, and what it was composed of, should it be composed once more: overrides and primary configuration.
    """
    if not task_class(config).needs_weights:
        return config, overrides, None
    folder = trained.run_folder_of(config.init_from)
    begun_with = None if config.record is None else config.record.trained_in
    if folder is None or str(folder) == begun_with:
        return config, overrides, None
    if begun_with is None:
        primary, kept = trained.begin(overrides, needs_weights=True)
        if primary != trained.OF_RUN:
            return config, overrides, None
        return compose(kept, primary), kept, primary
    trained.offer(folder)
    return compose(overrides), overrides, None


def _take_note(config: ExpConfig, overrides: list[str]) -> None:
    """Fill in ``config.record``."""
    record = config.record
    _note_choices(config, overrides)
    folder = trained.run_folder_of(config.init_from) if task_class(config).needs_weights else None
    if folder is not None:
        record.trained_in = str(folder)
        earlier = structures.load(RunFolder(folder).config)
        check_weights(config, earlier, folder)
        altered = RunFolder(folder).altered(read_result(RunFolder(folder)) or {})
        record.differs = [f"{name} is not as it was written" for name in altered if name == "config.yaml"]
        record.differs += different(config, earlier, "trained with")
    else:
        record.overruled = overruled(config, overrides, _alone, record.chosen.get("experiment"))
    if config.data.get("horizon") in config.published:
        changed = record.trained_in is not None or any(re.match(r"[+~]*(data|model)\b", each) for each in overrides)
        if changed:  # else there is nothing to compare, and composing takes a moment
            experiment = record.chosen.get("experiment")
            shipped = _as_shipped(experiment, config.data.horizon)
            if shipped is None:
                record.published_differs = [f"experiment={experiment} is not here to compare with"]
            else:
                left_out = ("data.root", "seed", "precision")
                record.published_differs = different(config, shipped, "there", left_out)


def _note_choices(config: ExpConfig, overrides: list[str]) -> None:
    """Fill in what was chosen, and which keys follow others."""
    record: Any = config.record
    groups = {"experiment", *(field.name for field in dataclasses.fields(ExpConfig))}
    if (
        record.trained_in is not None
    ):  # of these, the run's choices stand in the record; only the user's count beside them
        groups -= {group for group in trained.GROUPS if not any(each.startswith(f"{group}=") for each in overrides)}
    choices: Any = OmegaConf.to_container(HydraConfig.get().runtime.choices)
    chosen = {group: choice for group, choice in choices.items() if group in groups and choice}
    noted = {
        "chosen": {**record.chosen, **chosen, "backend": config.backend.name},
        "follows": trained.follows(config),
    }
    for key, value in noted.items():
        if record[key] != value:  # new nodes take their time, and jobs of a sweep have the same here
            record[key] = value


@functools.lru_cache(maxsize=None)
def _alone(primary: str) -> Any:
    """What one file says, such as ``data/illness``; jobs of a sweep share it."""
    return compose([], primary)


@functools.lru_cache(maxsize=None)
def _as_shipped(experiment: str | None, horizon: int) -> ExpConfig | None:
    """An experiment as its file has it; None: there is no such file here."""
    try:
        return compose([f"experiment={experiment}", f"data.horizon={horizon}"], "config")
    except MissingConfigException:
        return None


def compose(overrides: list[str], primary: str | None = None) -> ExpConfig:
    """The configuration for these overrides, without Hydra's own part.

    Args:
        overrides: as on the command line.
        primary: the primary configuration; None: that of this command line.
    """
    loader = GlobalHydra.instance().config_loader()
    # A backend's file may lie in a folder that only this adds.
    searched = [override for override in HydraConfig.get().overrides.hydra if override.startswith("hydra.searchpath=")]
    primary = primary or HydraConfig.get().job.config_name
    composed = loader.load_configuration(primary, [*overrides, *searched], run_mode=RunMode.RUN)
    with open_dict(composed):
        del composed["hydra"]
    return cast(ExpConfig, composed)  # not typed yet, but of its form


def _choose_backend(config: ExpConfig, overrides: list[str], primary: str | None) -> ExpConfig:
    """Replace ``backend=auto`` by the first that is available, with that backend's own configuration."""
    if config.backend._target_ != "auto":
        return config
    if config.backend.simulate:
        raise ConfigError("backend.simulate=true with backend=auto: say which backend's devices are to be simulated")
    name = choose(list(config.backend.options["candidates"]))
    kept = [each for each in overrides if not each.startswith(("backend=", "backend.options.candidates="))]
    try:
        return compose([*kept, f"backend={name}"], primary)
    except MissingConfigException:
        # Installed by another package, and no YAML file of its own in the search path: the class's own defaults.
        config.backend._target_ = config.backend.name = name
        config.backend.options = {}
        return config
