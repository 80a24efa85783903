"""All members of a configuration."""

from __future__ import annotations

from typing import Any, Iterator

from omegaconf import ListConfig, OmegaConf

__all__ = ["nodes", "written"]


def nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every member below ``config``; what is below a member comes after it. Interpolations are not followed.

    Args:
        config: of OmegaConf; others have no members, and neither have null, ``???`` and an interpolation.
        prefix: the key of ``config``; empty for the root.

    Yields:
        The dotted key, the container, and the key or index in it.
    """
    if not OmegaConf.is_config(config):
        return
    in_list = isinstance(config, ListConfig)
    for key in range(len(config)) if in_list else list(config):
        place = f"{prefix}[{key}]" if in_list else f"{prefix}.{key}" if prefix else str(key)
        yield place, config, key
        if not (OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key)):
            yield from nodes(config[key], place)


def written(config: Any, key: Any) -> Any:
    """A member as it is written: an interpolation is its text, and what is missing ``???``."""
    if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
        content: Any = OmegaConf.to_container(config, resolve=False)
        return content[key]
    return config[key]
