"""Variables of other launchers in the user's shell: left over, or meant."""

from __future__ import annotations

from typing import Mapping, MutableMapping

from exp.errors import ConfigError
from exp.launcher.base import RankInfo

__all__ = ["rank_from_shell", "take_stale_variables"]

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_PREFIX = "TORCHELASTIC_"
_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def take_stale_variables(environ: MutableMapping[str, str]) -> list[str]:
    """Remove what an earlier launch left in the environment; returns the names."""
    stale = [name for name in environ if name in _NAMES or name.startswith(_PREFIX)]
    for name in stale:
        del environ[name]
    return sorted(stale)


def rank_from_shell(environ: Mapping[str, str]) -> RankInfo:
    """The place that an outer launcher (torchrun, srun with a wrapper) gave to this process.

    Raises:
        ConfigError: a variable is missing or no number.
    """
    missing = [name for name in _NEEDED if name not in environ]
    if missing:
        raise ConfigError(
            f"launcher.use_shell_env=true, but {', '.join(missing)} is not set; "
            "start exp from torchrun, or leave it out"
        )
    try:
        return RankInfo(
            rank=int(environ["RANK"]),
            local_rank=int(environ["LOCAL_RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
            node_rank=int(environ.get("GROUP_RANK", "0")),
            restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            single_node=environ["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1"),
        )
    except ValueError as error:
        raise ConfigError(f"launcher.use_shell_env=true, but a variable is no number: {error}") from error
