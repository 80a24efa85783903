"""The typed keys, for exp's command line; no torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from exp.plugins import Plugin

__all__ = ["TilesConfig", "UNetConfig", "plugin"]


@dataclass
class UNetConfig:
    """Of :class:`dubai_unet.model.UNet`."""

    _target_: str = "dubai_unet.model.UNet"
    width: int = 32
    """Channels of the first level; each further one has twice as many."""
    depth: int = 3
    """How often the resolution is halved."""


@dataclass
class TilesConfig:
    """Of :class:`dubai_unet.data.Tiles`."""

    _target_: str = "dubai_unet.data.Tiles"
    name: str = "dubai_tiles"
    root: Optional[str] = None
    """Folder of ``tile<n>/{images,masks}``; null: the tiles that come with exp."""
    size: int = 128
    """Pixels a side of what the model sees."""
    shrink: int = 4
    """The files are read at one such part of their resolution."""
    crops: int = 4
    """Random crops of each tile in an epoch."""
    eval_batch_size: int = 16
    num_workers: int = 0


plugin = Plugin(
    structures={"model/unet": UNetConfig, "data/tiles": TilesConfig},
    config="dubai_unet.conf",
)
