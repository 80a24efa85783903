"""What of a configuration belongs to one family of models and data, as plugins say (:mod:`exp.plugins`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

from omegaconf import OmegaConf

from exp.config.structures import structure_of
from exp.console import shown
from exp.errors import ConfigError
from exp.plugins import Family, installed

if TYPE_CHECKING:
    from pathlib import Path

    from exp.config.schema import ExpConfig

__all__ = ["check_family", "check_weights"]


def check_family(config: ExpConfig) -> None:
    """Whether model, data and the task's keys are of one family, as far as plugins say.

    Raises:
        ConfigError: they are not.
    """
    families = _families()
    of_model, of_data = _family_of(config, "model"), _family_of(config, "data")
    if of_model is not None and of_data is not None and of_model != of_data:
        raise ConfigError(
            f"the model is for {of_model}, and the data are for {of_data}; choose an experiment that has both, such as "
            f"experiment={families[of_data].example} or experiment={families[of_model].example}"
        )
    if of_data is not None:
        _check_keys(config, of_data)


def check_weights(config: ExpConfig, trained: ExpConfig, folder: Path) -> None:
    """Whether weights are for a model of this family at all.

    Args:
        config: in which they are to be used.
        trained: of the run that trained them.
        folder: its run folder.

    Raises:
        ConfigError: they are not.
    """
    wanted, found = _family_of(config, "model"), _family_of(trained, "model")
    together = (set(plugin.families) for plugin in installed().values())  # their models may share a backbone
    if wanted and found and not any({wanted, found} <= families for families in together):
        raise ConfigError(
            f"init_from={shown(folder)} has trained a model for {found} ({trained.name}), this one is for {wanted}; "
            "leave the experiment out, which takes that of the weights, or use other weights"
        )


def _families() -> Mapping[str, Family]:
    return {name: family for plugin in installed().values() for name, family in plugin.families.items()}


def _family_of(config: ExpConfig, part: str) -> str | None:
    node = getattr(config, part)
    structure = OmegaConf.get_type(node)
    if structure is None or structure is dict:  # read from a file
        structure = structure_of(node.get("_target_")) or object
    return next((name for name, family in _families().items() if issubclass(structure, getattr(family, part))), None)


def _check_keys(config: ExpConfig, of_data: str) -> None:
    """Keys that a plugin adds to a task are read by its own families alone: with other data, nobody would."""
    for plugin in installed().values():
        keys = plugin.keys.get(f"task/{config.task.name}")
        if keys is None or not plugin.families or of_data in plugin.families:
            continue
        for key, default in OmegaConf.structured(keys).items():
            if getattr(config.task, key) != default:
                raise ConfigError(
                    f"task.{key}={getattr(config.task, key)} is for {' or '.join(plugin.families)}, and the data are "
                    f"for {of_data}; leave it out"
                )
