"""Makes the object that a config node names."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from exp.config.names import names_in
from exp.config.targets import load_target

__all__ = ["create"]


def create(config: Any, key: str = "", **arguments: Any) -> Any:
    """Hydra's ``instantiate``, but with the constructor's own errors.

    Hydra wraps what a constructor raises into an error of its own; the type, the exit code and the first line are lost
    with it. A partial leaves the call to us.

    Args:
        config: has ``_target_`` and arguments.
        key: of ``config``, for messages; empty: it is the root.
        **arguments: further ones.

    Raises:
        ConfigError: there is no such module, or no such name in it, or the user has not chosen its code.
        UnavailableError: the module is there, and does not import.
    """
    for key_of_it, name in names_in(config if OmegaConf.is_config(config) else OmegaConf.create(config), key):
        if key_of_it.endswith("_target_"):
            load_target(key_of_it, name)  # Hydra would take more than the user has chosen
    try:
        made = instantiate(config, _partial_=True, _convert_="all")
    except InstantiationException:
        load_target(f"{key}._target_".lstrip("."), str(config["_target_"]))  # says what it was, if the target was it
        raise
    return made(**arguments)
