"""Makes the object that a config node names."""

from __future__ import annotations

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

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
        ConfigError: there is no such module, or no such name in it.
        UnavailableError: the module is there, and does not import.
    """
    try:
        made = instantiate(config, _partial_=True, _convert_="all")
    except InstantiationException:
        load_target(f"{key}._target_".lstrip("."), str(config["_target_"]))  # says what it was, if the target was it
        raise
    return made(**arguments)
