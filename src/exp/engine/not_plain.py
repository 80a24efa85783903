"""What cannot go into a checkpoint, told with its key and who put it there."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

from exp.engine.checkpoint import plain
from exp.errors import RunError

__all__ = ["telling_what_is_not_plain"]

_OWN_KEYS = ("meta", "state_dict", "data", "data_files", "config", "optimizer", "param_schedulers", "rng", "best")
"""Of a checkpoint; what else is in it comes from hooks."""


@contextlib.contextmanager
def telling_what_is_not_plain(
    contents: Iterable[Mapping[str, Any]], hooks: Callable[[], Sequence[str]]
) -> Iterator[None]:
    """While checkpoints are copied; looks at them where that fails.

    Args:
        contents: the checkpoints.
        hooks: gives the names of those that may add to them.

    Raises:
        RunError: instead of the TypeError of :func:`exp.engine.checkpoint.plain`.
    """
    try:
        yield
    except TypeError as error:
        found = next((place for content in contents for place in _not_plain(content)), None)
        if found is None:
            raise
        names = "" if found[0] in _OWN_KEYS else ", ".join(hooks())
        place = f"hooks: before_save_checkpoint of {names}" if names else "the checkpoint"
        raise RunError(
            f"{place}: {error} (key {'.'.join(found)}); give it numbers, strings, lists, dicts and tensors; see "
            "docs/hooks.md"
        ) from error


def _not_plain(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys that lead to what is no plain data."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        try:
            plain(value, lambda tensor: tensor)
        except TypeError:
            yield place
    for key, each in items:
        yield from _not_plain(each, (*place, str(key)))
