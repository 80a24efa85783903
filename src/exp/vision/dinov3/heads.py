"""Segmentation heads: from maps of patch features to a score per class and cell."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import nn

from exp.config.explain import nearest
from exp.errors import ConfigError
from exp.models.dropout import Dropout2d
from exp.vision.dinov3.layers import norm_layer
from exp.vision.dinov3.pyramid_heads import LEVELS, DptHead, UperNetHead, default_widths

__all__ = ["HEADS", "OVER_LEVELS", "FcnHead", "LinearHead", "UpsampleHead", "build_head", "head_settings"]

HEADS = ("linear", "upsample", "upernet", "dpt")
"""What ``model.head`` may be."""

OVER_LEVELS = ("upernet", "dpt")
"""Those that see four blocks."""


def build_head(
    kind: str,
    dim: int,
    num_blocks: int,
    num_classes: int,
    channels: int,
    norm: str,
    dropout: float,
    reassembled: Sequence[int] | None = None,
) -> nn.Module:
    """The head that ``model.head`` names.

    Args:
        kind: one of :data:`HEADS`.
        dim: channels of a block's map.
        num_blocks: maps that the head sees side by side.
        num_classes: of the data (K).
        channels: of the head's own layers.
        norm: see :func:`exp.vision.dinov3.layers.norm_layer`.
        dropout: probability of dropping a feature before the last layer.
        reassembled: see :class:`exp.vision.dinov3.pyramid_heads.DptHead`.

    Raises:
        ConfigError: there is no such head or norm, or it sees another number of blocks.
    """
    if kind not in HEADS:
        raise ConfigError(f"model.head={kind} is not one of {', '.join(HEADS)}{nearest(kind, HEADS)}")
    if reassembled is not None and kind != "dpt":
        raise ConfigError(
            f"model.reassemble_channels={list(reassembled)} is for model.head=dpt, not {kind}; leave it out"
        )
    if kind == "linear":
        return LinearHead(dim * num_blocks, num_classes, dropout)
    if kind == "upsample":
        return UpsampleHead(dim * num_blocks, num_classes, channels, norm, dropout)
    if num_blocks != LEVELS:
        raise ConfigError(
            f"model.head={kind} sees {LEVELS} blocks, but model.blocks names {num_blocks}; name {LEVELS}, or set "
            "model.blocks=null for the ends of four equal parts of the backbone"
        )
    if kind == "upernet":
        return UperNetHead(dim, num_classes, channels, norm, dropout)
    return DptHead(dim, num_classes, channels, norm, dropout, reassembled)


def head_settings(state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Which head has made these weights.

    Args:
        state: of a segmenter; has ``head.classify.weight``.

    Returns:
        Keys of the configuration; and ``width``: the channels that the head sees of the blocks' maps.
    """
    last = state["head.classify.weight"]
    found: dict[str, Any] = {"model.head": "linear", "width": last.shape[1]}
    if "head.stages.0.weight" in state:
        found = {"model.head": "upsample", "width": state["head.stages.0.weight"].shape[0]}
    elif "head.lateral.0.0.weight" in state:
        found = {"model.head": "upernet", "width": LEVELS * state["head.lateral.0.0.weight"].shape[1]}
    elif "head.readout.0.0.weight" in state:
        widths = [state[f"head.project.{level}.weight"].shape[0] for level in range(LEVELS)]
        dim = state["head.readout.0.0.weight"].shape[0]
        standard = widths == default_widths(dim)
        found = {"model.head": "dpt", "width": LEVELS * dim}
        found["model.reassemble_channels"] = None if standard else widths
    if found["model.head"] != "linear":
        found["model.head_channels"] = last.shape[1]
        batch = any(key.startswith("head.") and key.endswith(".running_mean") for key in state)
        found["model.head_norm"] = "batch" if batch else "group"
    return found


class LinearHead(nn.Module):
    """One linear layer per patch: the usual probe of what features hold."""

    def __init__(self, dim: int, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(dim, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, h, w)."""
        return self.classify(self.dropout(features))


class UpsampleHead(nn.Module):
    """Two stages that double the resolution by a transposed and a plain convolution, then a linear layer.

    Args:
        dim: channels of the feature map (D).
        num_classes: classes (K).
        channels: of both stages.
        norm: see :func:`exp.vision.dinov3.layers.norm_layer`.
        dropout: probability of dropping a channel before the linear layer.
    """

    def __init__(
        self, dim: int, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.1
    ) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for width in (dim, channels):
            stages += [nn.ConvTranspose2d(width, channels, 2, stride=2), norm_layer(norm, channels), nn.GELU()]
            stages += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm_layer(norm, channels), nn.GELU()]
        self.stages = nn.Sequential(*stages)
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, 4 h, 4 w)."""
        return self.classify(self.dropout(self.stages(features)))


class FcnHead(nn.Module):
    """A convolution and a linear layer (FCN, arXiv 1411.4038): the auxiliary head on an inner block."""

    def __init__(
        self, dim: int, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.convolve = nn.Sequential(nn.Conv2d(dim, channels, 3, padding=1, bias=False), norm_layer(norm, channels))
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, h, w)."""
        return self.classify(self.dropout(torch.relu(self.convolve(features))))
