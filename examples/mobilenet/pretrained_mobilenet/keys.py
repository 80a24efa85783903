"""The typed keys of the backbone, for exp's command line. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from exp.plugins import Plugin

__all__ = ["MobileNetConfig", "plugin"]


@dataclass
class MobileNetConfig:
    """Keys of :class:`pretrained_mobilenet.backbone.MobileNetV2`."""

    _target_: str = "pretrained_mobilenet.backbone.MobileNetV2"
    out_indices: Optional[List[int]] = None
    """Levels whose maps the head gets, from 0 (-1: the last); null: as many as the head needs."""


plugin = Plugin(structures={"model/backbone/mobilenet": MobileNetConfig}, config="pretrained_mobilenet.conf")
