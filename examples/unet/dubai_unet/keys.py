"""The typed keys of backbone and head, for exp's command line. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from exp.plugins import Plugin

__all__ = ["DecoderConfig", "EncoderConfig", "plugin"]


@dataclass
class EncoderConfig:
    """Keys of :class:`dubai_unet.network.Encoder`."""

    _target_: str = "dubai_unet.network.Encoder"
    width: int = 32
    """Channels of the first level; each further level has twice as many."""
    depth: int = 3
    """Number of times that the resolution is halved."""


@dataclass
class DecoderConfig:
    """Keys of :class:`dubai_unet.network.Decoder`."""

    _target_: str = "dubai_unet.network.Decoder"


plugin = Plugin(
    structures={"model/backbone/unet": EncoderConfig, "model/head/unet": DecoderConfig},
    config="dubai_unet.conf",
)
