"""All nodes of a configuration as they are written, and all its values, in a fraction of the time that OmegaConf takes.

A sweep looks at every node of every job some times over; and most of what takes OmegaConf its time is done once for
each node: imports within functions, flags looked for in everything above, an interpolation's grammar.
"""

from __future__ import annotations

import re
from typing import Any, Iterator

from omegaconf import MISSING, AnyNode, BooleanNode, DictConfig, FloatNode, IntegerNode, ListConfig, Node, StringNode

__all__ = ["REFERENCE", "nodes", "plain"]

REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
"""An interpolation that is another key and nothing else."""
_CONTAINERS = (DictConfig, ListConfig)
_COPIED = (AnyNode, BooleanNode, FloatNode, IntegerNode, StringNode)


def nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Every member below ``config``. Nothing is resolved.

    Args:
        config: of OmegaConf; others have no members, and neither have null, ``???`` and an interpolation.
        prefix: the key of ``config``; empty for the root.

    Yields:
        The dotted key, the container, the key or index in it, and the node. What is below a node comes after it.
    """
    if not isinstance(config, _CONTAINERS):
        return
    content: Any = config._content
    if content is None or isinstance(content, str):
        return
    in_list = isinstance(config, ListConfig)
    for key, node in enumerate(content) if in_list else list(content.items()):
        place = f"{prefix}[{key}]" if in_list else f"{prefix}.{key}" if prefix else str(key)
        yield place, config, key, node
        if isinstance(node, _CONTAINERS):
            yield from nodes(node, place)


def plain(node: Any) -> Any:
    """What ``OmegaConf.to_container(node, resolve=True)`` gives, and the value of a node that is no container.

    Args:
        node: of OmegaConf.

    Raises:
        OmegaConfBaseException: an interpolation leads nowhere.
    """
    value = node._value()
    if isinstance(value, str):
        if "${" not in value or not node._is_interpolation():
            return value
        leads_to = _copied(node, value)
        leads_to = node._dereference_node() if leads_to is None else leads_to
        return plain(leads_to) if isinstance(leads_to, _CONTAINERS) else leads_to._value()
    if isinstance(value, dict) and isinstance(node, DictConfig):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list) and isinstance(node, ListConfig):
        return [plain(child) for child in value]
    return plain(value) if isinstance(value, Node) else value


def _copied(node: Any, value: str) -> Any:
    """The node whose value this interpolation has as it is; None: OmegaConf has to find it, or to convert it."""
    found = REFERENCE.fullmatch(value)
    target = node._get_root() if found else None
    for key in found.group(1).split(".") if found else ():
        content = target._content if isinstance(target, DictConfig) else None
        target = content.get(key) if isinstance(content, dict) else None
    if target is None or type(target) is not type(node) or type(node) not in _COPIED:
        return None
    there = target._value()
    special = there is None or (isinstance(there, str) and (there == MISSING or "${" in there))
    return None if special else target
