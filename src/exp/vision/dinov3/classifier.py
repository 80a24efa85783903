"""Scene classification: one label for an image."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import nn

from exp.hardware.compat import autocast_disabled
from exp.models.dropout import Dropout
from exp.vision.dinov3.base import ImageModel
from exp.vision.dinov3.layers import check_dropout
from exp.vision.dinov3.losses import Losses, named

__all__ = ["SceneClassifier"]


class SceneClassifier(ImageModel):
    """A linear head on the CLS token beside the mean of the patch tokens, as the paper evaluates its features.

    Args:
        num_classes: of the data (K).
        ignore_index: the label of samples that do not count.
        dropout: probability of dropping a feature before the head.
        label_smoothing: see :class:`exp.vision.dinov3.losses.Losses`.
        class_weights: see there (K numbers); None: all 1.
        cross_entropy_weight: see there.
        focal_weight: see there.
        focal_gamma: see there.
        **backbone: see :class:`ImageModel`.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int = -1,
        dropout: float = 0.0,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] | None = None,
        cross_entropy_weight: float = 1.0,
        focal_weight: float = 0.0,
        focal_gamma: float = 2.0,
        **backbone: Any,
    ) -> None:
        super().__init__(**backbone)
        self.losses = Losses(
            num_classes, ignore_index, class_weights, cross_entropy_weight, focal_weight, focal_gamma,
            label_smoothing=label_smoothing,
        )  # fmt: skip
        check_dropout(dropout)
        self.dropout = Dropout(dropout)
        self.head = nn.Linear(2 * self.size.embed_dim * len(self.blocks), num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        self._use_blocks()

    def forward(
        self,
        image: torch.Tensor,
        label: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        mode: str = "tensor",
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Scores of the classes, or their loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B,), int64; only for the loss.
            index: number of each sample; part of a batch, not used.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).

        Returns:
            ``"loss"``: 0-dim float32 tensors by name; logits (B, K), float32, for the other modes.

        Raises:
            ValueError: ``mode`` is unknown, or the loss is asked for without labels.
        """
        del index
        parts = []
        for features in self.features(image, self.blocks):
            parts += [features.cls, features.patches.mean(dim=(1, 2))]
        with autocast_disabled(image.device.type):
            logits = self.head(self.dropout(torch.cat(parts, dim=-1)))
        if mode in ("predict", "tensor"):
            return logits
        if mode != "loss" or label is None:
            raise ValueError(f"mode={mode!r} must be 'loss' with labels, 'predict' or 'tensor'")
        return named(self.losses(logits, label))

    def settings_of(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Those of the backbone, the number of classes, and of the blocks that the head sees."""
        settings = super().settings_of(state)
        head = state.get("head.weight")
        if head is not None and head.dim() == 2:
            settings["data.classes"] = f"<{head.shape[0]} names>"
            settings.update(self._blocks_in(state, head.shape[1] / 2))
        return settings
