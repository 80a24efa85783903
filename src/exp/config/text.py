"""A configuration as YAML: what ``OmegaConf.to_yaml`` gives, with the parts that many jobs share written once."""

from __future__ import annotations

import functools
import pickle
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

__all__ = ["to_yaml"]


def to_yaml(config: Any) -> str:
    """The text of ``OmegaConf.to_yaml(config, resolve=True)``: that of its root keys, one below the other.

    Args:
        config: a dictionary of OmegaConf.
    """
    plain: Any = OmegaConf.to_container(config, resolve=True)
    try:
        return "".join(_block(pickle.dumps({key: value})) for key, value in plain.items())
    except OmegaConfBaseException:  # a string that only looks like an interpolation
        return OmegaConf.to_yaml(config, resolve=True)


@functools.lru_cache(maxsize=256)
def _block(pickled: bytes) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(pickle.loads(pickled)))  # noqa: S301 - of the function above
