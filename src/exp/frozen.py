"""A run, composed and validated once and written down: nothing that happens to YAML files later changes it."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from exp.backends_registry import choose, create_backend
from exp.config import explain, paths, schema, trained
from exp.config.dictionaries import replace_given
from exp.config.names import allow, check_names
from exp.config.schema import DIAGNOSES
from exp.config.text import to_yaml
from exp.config.validate import refuse_device_arguments, validate
from exp.errors import ConfigError
from exp.footprint import Footprint
from exp.runfolder import RunFolder, write_atomically

__all__ = ["FrozenRun", "complete", "freeze", "prepare"]


@dataclass
class FrozenRun:
    """What a launcher is given.

    Attributes:
        config: the whole configuration (:class:`exp.config.schema.ExpConfig`), without interpolations to come.
        overrides: what the user gave on the command line.
        folder: the run folder.
        reference: task=parity: the configuration to compare with.
        footprint: of :meth:`write`.
    """

    config: Any
    overrides: list[str]
    folder: RunFolder
    reference: Any | None = None
    footprint: Footprint | None = None

    def write(self) -> None:
        """Make the run folder and put the configuration into it.

        Raises:
            RunError: the folder cannot be written.
        """
        folder = self.folder
        self.footprint = Footprint(folder)
        folder.create()
        write_atomically(folder.config, to_yaml(self.config).encode())
        write_atomically(folder.overrides, OmegaConf.to_yaml(OmegaConf.create(self.overrides)).encode())
        if self.reference is not None:
            write_atomically(folder.reference, OmegaConf.to_yaml(self.reference, resolve=True).encode())
        if folder.result.is_file():
            folder.result.unlink()  # of an attempt that this one continues

    def take_back(self) -> bool:
        """Leave the folder as it was before :meth:`write`, where the run was refused and nothing has come of it.

        Returns:
            Whether it is so now. Not on several nodes that were started by hand: others may be writing there.
        """
        alone = self.config.launcher.nnodes == 1 or self.config.launcher.get("cluster") is not None
        if self.footprint is None:
            return True
        return alone and self.config.task.name not in DIAGNOSES and self.footprint.take_back()

    @classmethod
    def load(cls, folder: RunFolder) -> FrozenRun:
        """Read what :meth:`write` has written."""
        reference = schema.load(folder.reference) if folder.reference.is_file() else None
        overrides: Any = OmegaConf.to_container(OmegaConf.load(folder.overrides))
        config = schema.load(folder.config)
        allow(config.plugins)  # they were checked before they were written
        return cls(config, overrides, folder, reference)


def freeze(config: DictConfig, overrides: list[str], output_dir: Path) -> FrozenRun:
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


def prepare(config: DictConfig, overrides: list[str]) -> DictConfig:
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
    config = _choose_backend(_as_trained(config, overrides), overrides)
    refuse_device_arguments(config)
    config = schema.typed(config)  # checks what +KEY=VALUE added, too
    replace_given(config, overrides)
    return config


def complete(config: DictConfig, overrides: list[str], output_dir: Path) -> FrozenRun:
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
    validate(config, overrides, create_backend(config.backend))
    _take_note(config, overrides)
    reference = _reference(config, overrides) if config.task.name == "parity" else None
    return FrozenRun(config, overrides, RunFolder(output_dir), reference)


def _as_trained(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The configuration on top of that of the run in ``init_from``, where it is to be used as it was trained.

    The command line has seen to that already (:func:`exp.config.trained.begin`), but in a sweep over runs it knew only
    one of them.
    """
    if config.task.name not in schema.WITH_WEIGHTS or config.record.trained_in is None:
        return config
    folder = trained.run_folder_of(config.init_from)
    if folder is None or str(folder) == config.record.trained_in:
        return config
    trained.offer(folder)
    return _compose(overrides)


def _take_note(config: DictConfig, overrides: list[str]) -> None:
    """Fill in ``config.record``."""
    record, choices = config.record, HydraConfig.get().runtime.choices
    chosen = {group: choice for group, choice in choices.items() if group in (*config, "experiment")}
    record.chosen = {
        **record.chosen,
        **{group: choice for group, choice in chosen.items() if choice != trained.OF_RUN},
        "backend": config.backend.name,
    }
    record.follows = trained.follows(config)
    folder = trained.run_folder_of(config.init_from) if config.task.name in schema.WITH_WEIGHTS else None
    if folder is not None:
        record.trained_in = str(folder)
        record.differs = trained.different(config, schema.load(RunFolder(folder).config), "trained with")
    if config.data.get("horizon") in config.published:
        changed = record.trained_in is not None or any(re.match(r"[+~]*(data|model)\b", each) for each in overrides)
        if changed:  # else there is nothing to compare, and composing takes a moment
            experiment = record.chosen.get("experiment")
            shipped = _as_shipped(experiment, config.data.horizon)
            if shipped is None:
                record.published_differs = [f"experiment={experiment} is not here to compare with"]
            else:
                left_out = ("data.root", "seed", "precision")
                record.published_differs = trained.different(config, shipped, "there", left_out)


@functools.lru_cache(maxsize=None)
def _as_shipped(experiment: str | None, horizon: int) -> DictConfig | None:
    """An experiment as its file has it; None: there is no such file here."""
    try:
        return _compose([f"experiment={experiment}", f"data.horizon={horizon}"], "config")
    except MissingConfigException:
        return None


def _reference(config: DictConfig, overrides: list[str]) -> DictConfig:
    """The same configuration for the reference of ``task=parity``, ready to run.

    What the user has set below ``backend`` is meant for the backend under test; the reference has what its own file
    says, unless it is the same one.
    """
    kept = list(overrides)
    if f"backend={config.reference}" not in overrides:
        kept = [override for override in overrides if not override.lstrip("+~").startswith("backend")]
    try:
        composed = _compose([*kept, f"backend={config.reference}"])
    except MissingConfigException as error:
        # Raised as it is, it would name a key that the user has not given, after a line of Hydra's own.
        raise ConfigError(explain.explain(error, []).replace("backend=", "reference=", 1)) from error
    check_names(composed, overrides)
    composed = _choose_backend(composed, kept)
    check_names(composed, overrides)
    with open_dict(composed):
        composed.output_dir = config.output_dir
    reference = schema.typed(composed)
    backend = create_backend(reference.backend)
    if reference.precision == "tf32" and "tf32" not in backend.precisions:
        reference.precision = "fp32"  # which TF32 approximates
    validate(reference, overrides, backend)
    config.reference = reference.backend.name  # where it was auto
    return reference


def _compose(overrides: list[str], primary: str | None = None) -> DictConfig:
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
    return composed


def _choose_backend(config: DictConfig, overrides: list[str]) -> DictConfig:
    """Replace ``backend=auto`` by the first that is available, with that backend's own configuration."""
    if config.backend["_target_"] != "auto":
        return config
    if config.backend.simulate:
        raise ConfigError("backend.simulate=true with backend=auto: say which backend's devices are to be simulated")
    name = choose(list(config.backend.options.candidates))
    kept = [override for override in overrides if not override.startswith("backend=")]
    try:
        return _compose([*kept, f"backend={name}"])
    except MissingConfigException:
        # Installed by another package, and no YAML file of its own in the search path: the class's own defaults.
        config.backend._target_ = config.backend.name = name
        config.backend.options = {}
        return config
