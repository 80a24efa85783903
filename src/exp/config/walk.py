"""All the nodes of a configuration, as they are written: nothing is resolved, and so nothing takes its time."""

from __future__ import annotations

from typing import Any, Iterator

from omegaconf import ListConfig, OmegaConf

__all__ = ["nodes"]


def nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Every member below ``config``.

    Args:
        config: of OmegaConf; others have no members, and neither have null, ``???`` and an interpolation.
        prefix: the key of ``config``; empty for the root.

    Yields:
        The dotted key, the container, the key or index in it, and the node. What is below a node comes after it.
    """
    if not OmegaConf.is_config(config):
        return
    content = config._content
    if content is None or isinstance(content, str):
        return
    in_list = isinstance(config, ListConfig)
    for key, node in enumerate(content) if in_list else list(content.items()):
        place = f"{prefix}[{key}]" if in_list else f"{prefix}.{key}" if prefix else str(key)
        yield place, config, key, node
        yield from nodes(node, place)
