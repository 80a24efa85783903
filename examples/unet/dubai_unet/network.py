"""UNet (Ronneberger et al., arXiv 1505.04597), with batch norm and padding: its two halves."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from exp.vision.backbones.base import Backbone, Features
from exp.vision.heads import Head

__all__ = ["Decoder", "Encoder"]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Encoder(Backbone):
    """The contracting half: a map at 1, 1/2, 1/4, ... of the image's resolution.

    Args:
        in_channels: of the image, from the data.
        width: channels of the first level.
        depth: number of times that the resolution is halved.
    """

    input_weights = ("levels.0.0.weight",)

    def __init__(self, in_channels: int = 3, width: int = 32, depth: int = 3) -> None:
        super().__init__(in_channels, out_indices=range(depth + 1))  # the head gets all levels
        self.level_channels = [width * 2**level for level in range(depth + 1)]
        self.level_strides = [2**level for level in range(depth + 1)]
        self.levels = nn.ModuleList(map(_block, [in_channels, *self.level_channels], self.level_channels))
        self.select_levels(None)

    def forward(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> Features:
        """Maps (B, C_i, H / 2**i, W / 2**i)."""
        indices = self.out_indices if out_indices is None else list(out_indices)
        x, maps = self.pad(image), []
        for level, block in enumerate(self.levels[: max(indices) + 1]):
            x = block(F.max_pool2d(x, 2) if level else x)
            maps.append(x.float())
        return Features([maps[level] for level in indices])

    def stages(self) -> list[list[nn.Module]]:
        """One block for each level."""
        return [[block] for block in self.levels]


class Decoder(Head):
    """The expanding half: from the coarsest map to the finest, each joined to the one above.

    Args:
        info: channels and strides of the maps, from the backbone.
        num_classes: classes (K), from the data.
    """

    def __init__(self, info: Any, num_classes: int) -> None:
        super().__init__(info, num_classes)
        finer, coarser = info.channels[:-1], info.channels[1:]
        self.up = nn.ModuleList(_block(low + high, high) for low, high in zip(coarser, finer))
        self.classify = nn.Conv2d(info.channels[0], num_classes, 1)

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores (B, K, H, W)."""
        del cls
        x = maps[-1]
        for block, skip in zip(reversed(self.up), reversed(maps[:-1])):
            x = block(torch.cat([skip, F.interpolate(x, size=skip.shape[-2:])], dim=1))
        return self.classify(x)
