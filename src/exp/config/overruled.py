"""Where an experiment departs from a choice that the user has named: it is composed after that, and wins. No torch."""

from __future__ import annotations

import re
from typing import Any, Callable, Iterator, Sequence

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.schema import ExpConfig
from exp.config.trained import text_of

__all__ = ["overruled"]

_CHOICE = re.compile(r"(data|model|optim|schedule|wrapper)=([\w.-]+)")


def overruled(
    config: ExpConfig, overrides: Sequence[str], compose: Callable[[str], Any], experiment: str | None
) -> list[str]:
    """A line for each choice of the command line of which the experiment changes something.

    Args:
        config: composed, with its types.
        overrides: the user's; keys that they set are his own business.
        compose: gives the configuration of a primary file, such as ``data/illness``.
        experiment: its name; None: there is none.
    """
    if experiment is None:
        return []
    lines = []
    own = tuple(each.lstrip("+~").partition("=")[0] for each in overrides)
    for group, choice in filter(None, map(_chosen, overrides)):
        try:
            alone = compose(f"{group}/{choice}")[group]
        except (HydraException, OmegaConfBaseException, KeyError):
            continue  # a file that cannot stand alone
        changed = []
        for key, value in _values(alone, f"{group}."):
            mine = OmegaConf.select(config, key, default=value)  # type: ignore[arg-type]
            set_by_user = any(f"{key}.".startswith(f"{each}.") for each in own if each != group)
            if mine != value and not set_by_user:
                changed.append(f"{key}={text_of(mine)} ({group}={choice}: {text_of(value)})")
        if changed:
            lines.append(f"experiment={experiment} sets {', '.join(changed)}")
    return lines


def _chosen(override: str) -> tuple[str, str] | None:
    match = _CHOICE.fullmatch(override)
    return None if match is None else (match.group(1), match.group(2))


def _values(node: DictConfig, prefix: str) -> Iterator[tuple[str, Any]]:
    """Plain values that are set, by their dotted key; what follows another key, or is null, is not."""
    for key in map(str, node):
        if OmegaConf.is_interpolation(node, key) or OmegaConf.is_missing(node, key):
            continue
        value = node[key]
        if isinstance(value, DictConfig):
            yield from _values(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float, str)):
            yield f"{prefix}{key}", value
