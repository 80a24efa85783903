"""Variables of other launchers, left over in the user's shell."""

from __future__ import annotations

from typing import MutableMapping

__all__ = ["take_stale_variables"]

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIX = "TORCHELASTIC_"


def take_stale_variables(environ: MutableMapping[str, str]) -> list[str]:
    """Remove what an earlier launch left in the environment; returns the names."""
    stale = [name for name in environ if name in _NAMES or name.startswith(_PREFIX)]
    for name in stale:
        del environ[name]
    return sorted(stale)
