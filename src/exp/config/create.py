"""Makes the object that a config node names."""

from __future__ import annotations

import inspect
from typing import Any, Mapping

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from exp import contract
from exp.config.names import names_in
from exp.config.targets import load_target
from exp.errors import ConfigError

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
        ConfigError: there is no such module, or no such name in it, the user has not chosen its code, or the class
            lacks members that its interface asks for.
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
    _check_arguments(made, config, key, arguments)
    return contract.made(made.func, key, *made.args, **made.keywords, **arguments)


def _check_arguments(made: Any, config: Any, key: str, arguments: Mapping[str, Any]) -> None:
    """Whether a constructor takes these keys: its own error would come with a traceback, and without the key."""
    try:
        signature = inspect.signature(made.func)
    except (TypeError, ValueError):
        return  # of a class in C
    try:
        signature.bind(*made.args, **made.keywords, **arguments)
    except TypeError as error:
        given = f" (of the data: {', '.join(arguments)})" if arguments else ""
        raise ConfigError(f"{key or 'configuration'}: {config['_target_']} {_said(error)}{given}") from error


def _said(error: TypeError) -> str:
    text = str(error)
    name = text.rpartition("argument")[2].strip(": ")
    return f"takes no key {name}" if "unexpected" in text else f"needs the key {name}" if "missing" in text else text
