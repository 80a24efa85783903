"""How workers are started and supervised. Nothing here imports torch in the parent process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from exp.config.resolve import create
from exp.launcher.base import Launcher
from exp.launcher.outcome import describe_failure

if TYPE_CHECKING:
    from exp.config.schema import LauncherConfig

__all__ = ["Launcher", "describe_failure", "resolve"]

_LOCAL = "exp.launcher.local.LocalLauncher"
_TORCHRUN = "exp.launcher.torchrun.TorchrunLauncher"


def resolve(config: LauncherConfig, nproc: int) -> Launcher:
    """The launcher of ``config``; ``auto`` is local for one process that never restarts, torchrun otherwise.

    Args:
        config: ``config.launcher``.
        nproc: workers per node.

    Raises:
        ConfigError: it cannot do what is asked for.
    """
    node: Any = config
    settings: Any = OmegaConf.to_container(node, resolve=True)
    if settings["_target_"] == "auto":
        alone = nproc == 1 and settings["nnodes"] == 1 and settings["max_restarts"] == 0
        settings["_target_"] = _LOCAL if alone else _TORCHRUN
    launcher: Launcher = create(settings, Launcher, "launcher")
    launcher.check(nproc)
    return launcher
