"""Variables of other launchers, left over in the user's shell."""

from __future__ import annotations

import os
from typing import MutableMapping

from exp import console
from exp.errors import ConfigError
from exp.launcher.place import given_group, suggested_group

__all__ = ["drop_stale_variables", "take_stale_variables"]

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIX = "TORCHELASTIC_"


def take_stale_variables(environ: MutableMapping[str, str]) -> list[str]:
    """Remove what an earlier launch left in the environment; returns the names."""
    stale = [name for name in environ if name in _NAMES or name.startswith(_PREFIX)]
    for name in stale:
        del environ[name]
    return sorted(stale)


def drop_stale_variables(nnodes: int = 1) -> None:
    """Remove them from this process's environment, with a warning.

    Args:
        nnodes: nodes that the user asks for: as many processes may have been started, one on each.

    Raises:
        ConfigError: they are no leftovers: this process is one of several.
    """
    group = given_group(os.environ, nnodes)
    if group is not None:
        raise ConfigError(
            f"this process was started as one of several ({group}), and each would be a run of its own in one folder; "
            "launcher=external takes this place; launcher=torchrun nproc=N, started once on each node without them, "
            "starts the processes itself"
        )
    several = suggested_group(os.environ, nnodes)
    if several is not None:
        console.warn(
            f"{several} tell of several processes, but no other one with this command is seen here: this is a run of "
            "its own; launcher=external makes them one"
        )
    stale = take_stale_variables(os.environ)
    if stale:
        console.warn(f"ignoring {', '.join(stale)} of the shell: exp starts its own workers")
