"""The user's packages, and what the names of a configuration lead to where MMEngine's registries look them up.

On their own these import any dotted path, and any module of a plain name that nobody has registered. So all names are
looked at here, before MMEngine sees the first of them.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from typing import Any, Sequence

import mmengine.registry
from mmengine.registry import Registry
from mmengine.utils import get_object_from_string

from exp.config.names import allow, check_name, check_object, is_standard, names_in, refusal
from exp.config.targets import find_module
from exp.errors import ConfigError, UnavailableError

__all__ = ["choose_code"]

_SETTING = re.compile(r"(?:model|data)\.(?!\w*pipeline)")
"""Keys of models and data, which no registry is asked for by us."""
_REGISTERING = ("mmengine.hooks", "mmengine.optim", "mmengine.model", "mmengine.visualization", "mmcv.transforms")


def choose_code(config: Any) -> None:
    """Import the packages in ``plugins``, and refuse a configuration whose names lead to anything that is not chosen.

    Args:
        config: frozen, of OmegaConf.

    Raises:
        ConfigError: there is no such package, or a name leads elsewhere; the key is named.
        UnavailableError: a module does not import.
    """
    _import_plugins(config.plugins)
    for key, name in names_in(config):
        if key.endswith(("_target_", "_scope_")):
            continue  # checked where it is loaded; of a scope its name says all
        if "." in name:
            _check_dotted(key, name)
        elif _SETTING.match(key) and is_standard(name):
            continue  # ``model.mask_type: random`` means no code; and if it did, it would be Python's own
        elif find_module(name) is not None and not _is_registered(name):
            raise refusal(key, name, name)  # it would be imported, to look for a class in it


def _import_plugins(plugins: Sequence[str]) -> None:
    allow(plugins)
    for name in plugins:
        if find_module(name) is None:
            raise ConfigError(f"plugins: there is no module {name}; is its folder on PYTHONPATH?")
        try:
            importlib.import_module(name)
        except Exception as error:  # another's module may raise anything while it loads
            raise UnavailableError(
                f"plugins: the module {name} does not import ({type(error).__name__}: {error})"
            ) from error


def _check_dotted(key: str, name: str) -> None:
    check_name(key, name)
    try:
        found = get_object_from_string(name)
    except Exception as error:  # as above
        raise UnavailableError(f"{key}={name} does not import ({type(error).__name__}: {error})") from error
    if found is not None:  # or it is a registry's scope and name, or unknown, which is told where it is wanted
        check_object(key, name, found)


def _is_registered(name: str) -> bool:
    for module in _REGISTERING:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    return any(name in each.module_dict for each in vars(mmengine.registry).values() if isinstance(each, Registry))
