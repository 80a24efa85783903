"""Keys that are dictionaries: ``data.palette={road: "6EC1E4"}`` on the command line.

In Hydra a dictionary of a typed schema is closed: it takes no member that is not there yet, and one that is given is
merged into what the file of an experiment has. Here it takes any member; and of data and model, one that is given
replaces what was there, as a list does: a palette for other data is not to keep the classes of the experiment's.
``data.palette.road=...`` sets one member, ``data.palette=null`` leaves none. Settings (``backend.env``) are merged.
"""

from __future__ import annotations

from typing import Any, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

__all__ = ["opened", "replace_given"]

_REPLACED = ("data.", "model.")


def opened(structure: type) -> DictConfig:
    """The node of a dataclass whose fields of type ``Dict`` take members on the command line.

    Such a field has to be a dictionary by default, not null: OmegaConf cannot merge into a typed one that is null.
    """
    node: DictConfig = OmegaConf.structured(structure)
    _open(node)
    return node


def _open(node: Any) -> None:
    for key in list(node):
        child = None if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key) else node[key]
        if isinstance(child, DictConfig):
            if OmegaConf.get_type(child) is dict:
                OmegaConf.set_struct(child, False)
            else:
                _open(child)


def replace_given(config: Any, overrides: Sequence[str]) -> None:
    """Give each dictionary of data and model that the command line sets the value that it has there, and nothing else.

    Args:
        config: composed and typed; changed in place.
        overrides: the user's.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        if override.is_add() or override.is_force_add() or override.is_delete() or not key.startswith(_REPLACED):
            continue
        value = override.value()
        if isinstance(value, dict) and isinstance(OmegaConf.select(config, key), DictConfig):
            OmegaConf.update(config, key, value, merge=False)
