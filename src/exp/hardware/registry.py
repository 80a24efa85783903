"""Finds backends by class path, or by name in the entry-point group ``exp.backends``. Imports no torch."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from exp import console
from exp.config.resolve import resolve
from exp.config.schema import BackendConfig
from exp.errors import ConfigError, ExpError, UnavailableError, user_code_errors
from exp.hardware.backend import Backend
from exp.plugins import entry_points


def installed() -> Mapping[str, Any]:
    """The entry points of the group ``exp.backends``, by name."""
    return entry_points("exp.backends")


def create_backend(config: BackendConfig | Mapping[str, Any]) -> Backend:
    """Make the backend that ``config`` names by ``_target_``.

    Args:
        config: :class:`exp.config.schema.BackendConfig`, or a mapping with its fields. ``_target_`` is the path of a
            class, or the name of an entry point in the group ``exp.backends``.

    Raises:
        ConfigError: there is no such class, or it is not a backend.
        UnavailableError: its module cannot be imported.
    """
    node: Any = config
    plain: Any = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
    target = plain.pop("_target_")
    if "." not in target:
        if target not in installed():
            raise ConfigError(
                f"backend._target_={target} is not installed",
                f"installed are {', '.join(sorted(installed())) or 'none'}",
            )
        target = installed()[target].value.replace(":", ".")
    cls = resolve("backend._target_", target, Backend)
    with user_code_errors("backend", cls):
        backend: Backend = cls(**plain)
    return backend


def choose_available(candidates: Sequence[str]) -> str:
    """The first available backend, for ``backend=auto``.

    A backend that is not installed or cannot be imported is skipped with a warning.

    Args:
        candidates: names in order of preference; backends of other installed packages are tried before them.

    Returns:
        Name of the backend.

    Raises:
        UnavailableError: no backend is available; the message has the reason for each.
    """
    external = sorted(name for name, point in installed().items() if not point.value.startswith("exp.backends."))
    reasons: list[str] = []
    for name in dict.fromkeys([*external, *candidates]):
        try:
            reason = create_backend({"_target_": name, "name": name}).unavailable_reason()
        except (ExpError, TypeError) as error:
            console.warn(f"{error}; backend=auto skips '{name}'")
            continue
        if reason is None:
            return name
        reasons.append(f"{name}: {reason}")
    raise UnavailableError("backend=auto found no device", details=reasons, key="backend")
