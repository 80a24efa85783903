"""Segmentation heads: from maps of patch features to a score per class and cell."""

from __future__ import annotations

import torch
from torch import nn

from exp.errors import ConfigError
from exp.models.dropout import Dropout2d

__all__ = ["FcnHead", "LinearHead", "UpsampleHead", "build_head"]


def build_head(kind: str, dim: int, num_classes: int, channels: int, norm: str, dropout: float) -> nn.Module:
    """The head that ``model.head`` names.

    Args:
        kind: ``linear`` or ``upsample``.
        dim: channels of the feature map.
        num_classes: of the data (K).
        channels: of the head's own layers.
        norm: see :class:`UpsampleHead`.
        dropout: probability of dropping a feature before the last layer.

    Raises:
        ConfigError: there is no such head or norm.
    """
    if kind == "linear":
        return LinearHead(dim, num_classes, dropout)
    if kind == "upsample":
        return UpsampleHead(dim, num_classes, channels, norm, dropout)
    raise ConfigError(f"model.head={kind} is not one of linear, upsample")


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        # At most 32 groups (Wu and He, arXiv 1803.08494), and no fewer than 8 channels in each.
        groups = next(count for count in (32, 16, 8, 4, 2, 1) if count == 1 or channels % (8 * count) == 0)
        return nn.GroupNorm(groups, channels)
    raise ConfigError(f"model.head_norm={kind} is not one of batch, group")


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
        norm: ``batch`` (statistics over the batch: synchronise them over devices with ``wrapper.sync_batchnorm``) or
            ``group`` (does not look at the batch, so results do not depend on how it is spread over devices).
        dropout: probability of dropping a channel before the linear layer.
    """

    def __init__(
        self, dim: int, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.1
    ) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for width in (dim, channels):
            stages += [nn.ConvTranspose2d(width, channels, 2, stride=2), _norm(norm, channels), nn.GELU()]
            stages += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), _norm(norm, channels), nn.GELU()]
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
        self.convolve = nn.Sequential(nn.Conv2d(dim, channels, 3, padding=1, bias=False), _norm(norm, channels))
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, h, w)."""
        return self.classify(self.dropout(torch.relu(self.convolve(features))))
