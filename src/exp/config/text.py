"""A configuration as YAML: what ``OmegaConf.to_yaml`` gives, with the parts that many jobs share written once."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.walk import plain

__all__ = ["to_yaml"]

_UNQUOTED = re.compile(r"[A-Za-z_/][\w./=-]*[/=][\w./=-]*", re.ASCII)
"""Paths and overrides that YAML cannot take for anything else, nor break: what is new in each job of a sweep."""
_KEPT = 256
_blocks: dict[str, str] = {}
"""The text of what many jobs of a sweep share, by its ``repr``."""


def to_yaml(config: Any) -> str:
    """The text of ``OmegaConf.to_yaml(config, resolve=True)``: that of its members, one below the other.

    Args:
        config: a dictionary of OmegaConf, or a list of strings.
    """
    try:
        if isinstance(config, list):
            parts = [_part([item], [0], item) for item in config]
        else:
            parts = [_part({key: value}, {key: 0}, value) for key, value in plain(config).items()]
        return "".join(parts) or OmegaConf.to_yaml(config)
    except OmegaConfBaseException:  # a string that only looks like an interpolation; or one that leads nowhere
        return OmegaConf.to_yaml(config, resolve=True)


def _part(member: Any, like: Any, value: Any) -> str:
    if type(value) is int or (type(value) is str and _UNQUOTED.fullmatch(value)):
        return f"{_block(like)[:-2]}{value}\n"  # in the place of 0
    return _block(member)


def _block(member: Any) -> str:
    key = repr(member)
    if key not in _blocks:
        if len(_blocks) >= _KEPT:
            _blocks.clear()
        _blocks[key] = OmegaConf.to_yaml(OmegaConf.create(member))
    return _blocks[key]
