"""MobileNetV2 (Sandler et al., arXiv 1801.04381), with the names of torchvision's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping, Sequence

import torch
from torch import nn

from exp.vision.backbones.base import Backbone, Features, Published

__all__ = ["MobileNetV2"]

# Of each group of blocks: expansion, channels, number of blocks, stride of the first (the paper's table 2).
GROUPS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
LEVELS = {4: (24, 4), 7: (32, 8), 14: (96, 16), 19: (1280, 32)}  # number of layers: channels and stride of the map


def _convolve(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU6())


class _Block(nn.Module):
    """Expansion, depthwise convolution, and a projection without activation; residual where shapes allow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = [_convolve(inputs, hidden)] if expansion > 1 else []
        layers += [_convolve(hidden, hidden, 3, stride, groups=hidden)]
        self.conv = nn.Sequential(*layers, nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.is_residual else self.conv(x)


class MobileNetV2(Backbone):
    """Maps at 1/4, 1/8, 1/16 and 1/32 of the image; the last has the 1280 channels that ImageNet's classes see."""

    input_weights = ("features.0.0.weight",)

    def __init__(self, in_channels: int = 3, out_indices: Sequence[int] | None = None) -> None:
        super().__init__(in_channels, out_indices)
        layers: list[nn.Module] = [_convolve(in_channels, 32, 3, stride=2)]
        width = 32
        for expansion, channels, count, stride in GROUPS:
            for number in range(count):
                layers.append(_Block(width, channels, 1 if number else stride, expansion))
                width = channels
        self.features = nn.Sequential(*layers, _convolve(width, 1280))
        self.level_channels, self.level_strides = (list(values) for values in zip(*LEVELS.values()))
        self.select_levels(None)

    def forward(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> Features:
        """See :class:`exp.vision.backbones.base.Backbone`."""
        indices = self.out_indices if out_indices is None else list(out_indices)
        x, maps = self.pad(image), []
        for stage in self.stages()[: max(indices) + 1]:
            for layer in stage:
                x = layer(x)
            maps.append(x.float())
        return Features([maps[level] for level in indices])

    def stages(self) -> list[list[nn.Module]]:
        """The layers of each level; the first has the stem, too."""
        layers, ends = list(self.features), list(LEVELS)
        return [layers[first:end] for first, end in zip([0, *ends], ends)]

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> Published | None:
        """The file of torchvision; its pixels are normalized as exp does it by default."""
        del source
        if "features.0.0.weight" not in state:
            return None
        weights = {name: value for name, value in state.items() if name.startswith("features.")}
        return Published(weights, {name: value for name, value in state.items() if name not in weights})
