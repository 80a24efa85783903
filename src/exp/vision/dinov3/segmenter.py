"""Semantic segmentation: one label for each pixel."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F

from exp.compat import autocast_disabled
from exp.errors import ConfigError
from exp.vision.dinov3.base import ImageModel
from exp.vision.dinov3.heads import FcnHead, build_head
from exp.vision.dinov3.inference import Inference
from exp.vision.dinov3.losses import cross_entropy, dice_loss

__all__ = ["Segmenter"]


class Segmenter(ImageModel):
    """A head on the patch tokens, whose scores are interpolated to the pixels.

    Args:
        num_classes: of the data (K).
        ignore_index: the label of pixels that do not count.
        head: ``linear`` or ``upsample`` (:mod:`exp.vision.dinov3.heads`).
        head_channels: channels of the up-sampling and the auxiliary head.
        head_norm: their norm, ``batch`` or ``group``.
        dropout: probability of dropping a channel before a head's last layer.
        auxiliary_weight: weight of the auxiliary head's loss; 0: there is no such head.
        auxiliary_block: the block that it sees, from 0; None: at two thirds of the depth.
        class_weights: weight of each class in the cross-entropy (K numbers); None: all 1.
        dice_weight: weight of the Dice loss beside the cross-entropy.
        inference: ``slide`` (windows, as large as training crops) or ``whole`` images.
        window: side of a window in pixels.
        overlap: share of a window that the next one covers again, below 1.
        tta_scales: images are also predicted at these scales; their probabilities are averaged.
        tta_flip: also mirrored.
        **backbone: see :class:`ImageModel`.

    Raises:
        ConfigError: the settings do not go together.
    """

    class_weights: torch.Tensor | None

    def __init__(
        self,
        num_classes: int,
        ignore_index: int = 255,
        head: str = "upsample",
        head_channels: int = 256,
        head_norm: str = "batch",
        dropout: float = 0.1,
        auxiliary_weight: float = 0.0,
        auxiliary_block: int | None = None,
        class_weights: Sequence[float] | None = None,
        dice_weight: float = 0.0,
        inference: str = "slide",
        window: int = 512,
        overlap: float = 1 / 3,
        tta_scales: Sequence[float] = (1.0,),
        tta_flip: bool = False,
        **backbone: Any,
    ) -> None:
        super().__init__(**backbone)
        if class_weights is not None and len(class_weights) != num_classes:
            raise ConfigError(
                f"model.class_weights has {len(class_weights)} numbers, but the data have {num_classes} classes"
            )
        self.ignore_index = ignore_index
        self.dice_weight = dice_weight
        self.auxiliary_weight = auxiliary_weight
        weights = None if class_weights is None else torch.tensor(list(class_weights), dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)
        dim = self.size.embed_dim
        self.head = build_head(head, dim * len(self.blocks), num_classes, head_channels, head_norm, dropout)
        self.auxiliary_block = (2 * self.size.depth - 1) // 3 if auxiliary_block is None else auxiliary_block
        if auxiliary_weight:
            if not 0 <= self.auxiliary_block < self.size.depth:
                raise ConfigError(f"model.auxiliary_block={auxiliary_block} is not from 0 to {self.size.depth - 1}")
            self.auxiliary_head = FcnHead(dim, num_classes, head_channels, head_norm, dropout)
        self.inference = Inference(inference, window, overlap, tta_scales, tta_flip)
        self._use_blocks(*([self.auxiliary_block] if auxiliary_weight else []))

    def forward(
        self,
        image: torch.Tensor,
        label: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        mode: str = "tensor",
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Scores, labels or the loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B, H, W), uint8; only for the loss.
            index: number of each sample; part of a batch, not used.
            sizes: (height, width) of each image, where smaller ones are padded at right and bottom.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).

        Returns:
            ``"loss"``: 0-dim float32 tensors by name. ``"predict"``: labels (B, H, W), uint8, by way of windows and
            test-time augmentation; ``ignore_index`` in the padding. ``"tensor"``: logits (B, K, H, W) of one pass.

        Raises:
            ValueError: ``mode`` is unknown, or the loss is asked for without labels.
        """
        del index
        if mode == "tensor":
            return self._logits(image)
        if mode == "predict":
            return self.inference.labels(self._logits, image, sizes, self.ignore_index)
        if mode != "loss" or label is None:
            raise ValueError(f"mode={mode!r} must be 'loss' with labels, 'predict' or 'tensor'")
        return self._losses(image, label)

    def _logits(self, image: torch.Tensor) -> torch.Tensor:
        maps = [_map(features.patches) for features in self.features(image, self.blocks)]
        with autocast_disabled(image.device.type):
            return self._to_pixels(self.head(torch.cat(maps, dim=1)), image)

    def _losses(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = [*self.blocks, self.auxiliary_block] if self.auxiliary_weight else self.blocks
        maps = [_map(features.patches) for features in self.features(image, blocks)]
        with autocast_disabled(image.device.type):
            return self._losses_of(maps, image, label)

    def _losses_of(self, maps: list[torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self._to_pixels(self.head(torch.cat(maps[: len(self.blocks)], dim=1)), image)
        losses = {"loss": self._cross_entropy(logits, label)}
        if self.dice_weight:
            losses["loss_dice"] = self.dice_weight * dice_loss(logits, label, self.ignore_index)
        if self.auxiliary_weight:
            auxiliary = self._to_pixels(self.auxiliary_head(maps[-1]), image)
            losses["loss_auxiliary"] = self.auxiliary_weight * self._cross_entropy(auxiliary, label)
        if len(losses) > 1:
            losses["loss_ce"] = losses.pop("loss")  # "loss" is the sum of all
        return losses

    def settings_of(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Those of the backbone and of the heads."""
        settings = super().settings_of(state)
        last, first = state.get("head.classify.weight"), state.get("head.stages.0.weight")
        if last is not None:
            settings["data.classes"] = f"<{last.shape[0]} names>"
            settings["model.head"] = "linear" if first is None else "upsample"
            settings.update(self._blocks_in(state, last.shape[1] if first is None else first.shape[0]))
            settings["model.auxiliary_weight"] = "<above 0>" if "auxiliary_head.classify.weight" in state else 0.0
        if first is not None:
            settings["model.head_channels"] = first.shape[1]
            settings["model.head_norm"] = "batch" if "head.stages.1.running_mean" in state else "group"
        return settings

    def _cross_entropy(self, logits: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits, label, self.ignore_index, self.class_weights)

    def _to_pixels(self, scores: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Interpolate (B, K, cells) to (B, K, H, W); what lies over the padding to whole patches is cut off."""
        height, width = image.shape[-2:]
        patch = self.backbone.patch_size
        padded = (-(-height // patch) * patch, -(-width // patch) * patch)
        pixels = F.interpolate(scores.float(), size=padded, mode="bilinear", align_corners=False)
        return pixels[..., :height, :width]


def _map(patches: torch.Tensor) -> torch.Tensor:
    """(B, h, w, D) -> (B, D, h, w)."""
    return patches.permute(0, 3, 1, 2)
