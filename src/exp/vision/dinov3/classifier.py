"""Scene classification: one label for an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from exp.hardware.compat import autocast_disabled
from exp.models.dropout import Dropout
from exp.vision.dinov3.base import ImageModel
from exp.vision.dinov3.losses import Losses, named
from exp.vision.model_config import SceneClassifierConfig

__all__ = ["SceneClassifier"]


class SceneClassifier(ImageModel):
    """A linear head on the CLS token beside the mean of the patch tokens, as the paper evaluates its features.

    Args:
        num_classes: of the data (K).
        ignore_index: the label of samples that do not count.
        **keys: of :class:`exp.vision.model_config.SceneClassifierConfig`, and those that :class:`ImageModel` takes.
    """

    config_class = SceneClassifierConfig

    def __init__(self, num_classes: int, ignore_index: int = -1, **keys: Any) -> None:
        super().__init__(**keys)
        config = self.config
        self.losses = Losses(config, num_classes, ignore_index)
        self.dropout = Dropout(config.dropout)
        self.head = nn.Linear(2 * self.size.embed_dim * len(self.blocks), num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        self._use_blocks()

    def forward(
        self, image: torch.Tensor, label: torch.Tensor | None = None, mode: str = "tensor", **_: Any
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Scores of the classes, or their loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B,), int64; for the loss.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **_: further keys of a batch.

        Returns:
            ``"loss"``: 0-dim float32 tensors by name; logits (B, K), float32, for the other modes.
        """
        parts = []
        for features in self.features(image, self.blocks):
            parts += [features.cls, features.patches.mean(dim=(1, 2))]
        with autocast_disabled(image.device.type):
            logits = self.head(self.dropout(torch.cat(parts, dim=-1)))
        return named(self.losses(logits, label)) if mode == "loss" else logits
