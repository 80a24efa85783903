"""The typed keys of model and data, for exp's command line. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from exp.plugins import Plugin

__all__ = ["TilesConfig", "UNetConfig", "plugin"]


@dataclass
class UNetConfig:
    """Keys of :class:`dubai_unet.model.UNet`."""

    _target_: str = "dubai_unet.model.UNet"
    width: int = 32
    """Channels of the first level; each further level has twice as many."""
    depth: int = 3
    """Number of times that the resolution is halved."""


@dataclass
class TilesConfig:
    """Keys of :class:`dubai_unet.data.Tiles`."""

    _target_: str = "dubai_unet.data.Tiles"
    name: str = "dubai_tiles"
    root: Optional[str] = None
    """Folder of ``tile<n>/{images,masks}``; null: the tiles that come with exp."""
    size: int = 128
    """Side of the model's input in pixels."""
    shrink: int = 4
    """Factor by which the resolution of the files is reduced."""
    crops: int = 4
    """Random crops of each tile in an epoch."""
    eval_batch_size: int = 16
    num_workers: int = 0


plugin = Plugin(
    structures={"model/unet": UNetConfig, "data/tiles": TilesConfig},
    config="dubai_unet.conf",
)
