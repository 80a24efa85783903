"""UNet (Ronneberger et al., arXiv 1505.04597), with batch norm and padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from exp.models.base import Model

__all__ = ["UNet"]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(Model):
    """Predicts a class for each pixel.

    Args:
        num_classes: classes (K); from the data, like the next two.
        in_channels: of the images (C).
        ignore_index: label of ignored pixels.
        width: channels of the first level.
        depth: number of times that the resolution is halved.
    """

    def __init__(
        self, num_classes: int, in_channels: int = 3, ignore_index: int = 255, width: int = 32, depth: int = 3
    ) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_block(*pair) for pair in zip([in_channels, *widths], widths))
        self.up = nn.ModuleList(_block(3 * narrow, narrow) for narrow in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, num_classes, 1)

    def logits(self, image: torch.Tensor) -> torch.Tensor:
        """Images (B, C, H, W), 0..255, to logits (B, K, H, W)."""
        x = image.to(self.head.weight.dtype) / 127.5 - 1
        skips: list[torch.Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([skip, F.interpolate(x, size=skip.shape[-2:])], dim=1))
        return self.head(x)

    def forward(
        self, image: torch.Tensor, label: torch.Tensor | None = None, mode: str = "tensor", **_: Any
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """``loss``: cross entropy; ``predict``: classes (B, H, W); ``tensor``: logits.

        The loss is summed over the labeled pixels and divided by the number of all pixels. If each rank divided by its
        own number of labeled pixels, the loss would depend on how a batch is distributed over ranks, and would be NaN
        on a rank without any.
        """
        logits = self.logits(image)
        if mode == "loss":
            assert label is not None
            total = F.cross_entropy(logits, label.long(), ignore_index=self.ignore_index, reduction="sum")
            return {"loss": total / label.numel()}
        return logits.argmax(dim=1) if mode == "predict" else logits
