"""Makes the object that a config node names."""

from __future__ import annotations

import inspect
from typing import Any, Mapping

from omegaconf import OmegaConf

from exp import contract
from exp.config.targets import resolve
from exp.errors import ConfigError

__all__ = ["create", "make"]


def create(config: Any, base: type | tuple[type, ...], key: str, **arguments: Any) -> Any:
    """The object of the class in ``_target_``, with the other keys as its arguments.

    Parts of a model may be named by ``_target_``, too, where they are modules of torch.

    Args:
        config: has ``_target_`` and arguments.
        base: the interface of the key; no class but one that inherits it is called.
        key: of ``config``, for messages.
        **arguments: further ones.

    Raises:
        ConfigError: there is no such class, the user has not chosen its code, it is none of the interface, it does not
            take these arguments, or it lacks members that its interface asks for.
        UnavailableError: the module is there, and does not import.
    """
    content: Any = OmegaConf.to_container(
        config if OmegaConf.is_config(config) else OmegaConf.create(config), resolve=True
    )
    target = str(content.pop("_target_"))
    return make(resolve(f"{key}._target_", target, base), target, key, content, arguments)


def make(cls: Any, name: str, key: str, content: Mapping[str, Any], arguments: Mapping[str, Any] | None = None) -> Any:
    """An object of a class that a configuration has named.

    Args:
        cls: the class.
        name: as it stands there.
        key: that has it, for messages.
        content: the arguments in the configuration, resolved.
        arguments: further ones.

    Raises:
        ConfigError: as :func:`create`.
    """
    given = _arguments(content, key, asks_registries=not contract.is_own(cls))
    _check_arguments(cls, name, key, given, arguments or {})
    return contract.made(cls, key, **given, **(arguments or {}))


def _arguments(value: Any, key: str, asks_registries: bool) -> Any:
    """A value of the configuration, with the parts that it names made; of the names that a registry may be asked for,
    none leads to code that is not chosen.
    """
    if isinstance(value, list):
        return [_arguments(item, f"{key}[{number}]", asks_registries) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "_target_" in value:
        if not key.startswith("model."):
            raise ConfigError(f"{key}._target_: only parts of a model are named so; have the class above it make this")
        from torch import nn

        return create(value, nn.Module, key)
    for name, item in value.items() if asks_registries else ():
        if isinstance(item, str) and (name in ("type", "_scope_") or str(name).endswith("_type")):
            from exp.engine.registries import check_type  # MMEngine's, and so torch

            check_type(f"{key}.{name}", item)
    return {name: _arguments(item, f"{key}.{name}", asks_registries) for name, item in value.items()}


def _check_arguments(cls: Any, name: str, key: str, content: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    """Whether a constructor takes these keys: its own error would come with a traceback, and without the key."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):
        return  # of a class in C
    try:
        signature.bind(**content, **more)
    except TypeError as error:
        given = f" (of the data: {', '.join(more)})" if more else ""
        raise ConfigError(f"{key}: {name} {_said(error)}{given}") from error


def _said(error: TypeError) -> str:
    text = str(error)
    name = text.rpartition("argument")[2].strip(": ")
    return f"takes no key {name}" if "unexpected" in text else f"needs the key {name}" if "missing" in text else text
