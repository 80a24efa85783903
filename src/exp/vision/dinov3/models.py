"""Scene classification (one label per image) and semantic segmentation (one label per pixel)."""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.hardware.compat import autocast_disabled
from exp.models.dropout import Dropout
from exp.vision.dinov3.backbone import Features
from exp.vision.dinov3.base import ImageModel
from exp.vision.dinov3.heads import FcnHead, blocks_of_levels, build_head, sees_levels
from exp.vision.dinov3.losses import Losses, cross_entropy, named
from exp.vision.keys import SceneClassifierConfig, SegmenterConfig
from exp.vision.tiling import Tiling

__all__ = ["SceneClassifier", "Segmenter"]


class SceneClassifier(ImageModel):
    """A linear head on the CLS token and the mean of the patch tokens, as in the paper's evaluation.

    Args:
        num_classes: classes of the data (K).
        ignore_index: the label of samples that are ignored.
        **keys: of :class:`exp.vision.keys.SceneClassifierConfig`, and the arguments of :class:`ImageModel`.
    """

    config_class = SceneClassifierConfig

    def __init__(self, num_classes: int, ignore_index: int = -1, **keys: Any) -> None:
        super().__init__(**keys)
        config = self.config
        self.losses = Losses(config, ignore_index)
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


class Segmenter(ImageModel):
    """A head on the patch tokens, whose scores are interpolated to the pixels.

    The loss of the auxiliary head, on an inner block, is the cross-entropy.

    Args:
        num_classes: classes of the data (K).
        ignore_index: the label of pixels that are ignored.
        **keys: of :class:`exp.vision.keys.SegmenterConfig`, and the arguments of :class:`ImageModel`.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    config_class = SegmenterConfig

    def __init__(self, num_classes: int, ignore_index: int = 255, **keys: Any) -> None:
        super().__init__(**keys)
        config, depth, dim = self.config, self.size.depth, self.size.embed_dim
        if sees_levels(config) and config.blocks is None:
            self.blocks = blocks_of_levels(depth)
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.losses = Losses(config, ignore_index)
        self.head = build_head(config, dim, len(self.blocks), num_classes)
        self.auxiliary_weight, inner = config.auxiliary_weight, config.auxiliary_block
        self.inner_blocks: list[int] = []
        if config.auxiliary_weight:
            self.inner_blocks = self._numbers([(2 * depth - 1) // 3 if inner is None else inner], "auxiliary_block")
            self.auxiliary_head = FcnHead(dim, num_classes, config)
        self.tiling = Tiling(config.inference, config.window, config.overlap, config.tta_scales, config.tta_flip)
        self._use_blocks(self.inner_blocks)

    def forward(
        self,
        image: torch.Tensor,
        label: torch.Tensor | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        mode: str = "tensor",
        **_: Any,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Scores, labels or the loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B, H, W), uint8; for the loss.
            sizes: (height, width) of each image without its padding at right and bottom; None: no image is padded.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **_: further keys of a batch.

        Returns:
            ``"loss"``: 0-dim float32 tensors by name. ``"predict"``: labels (B, H, W), uint8, with windows and
            test-time augmentation; ``ignore_index`` in the padding. ``"tensor"``: logits (B, K, H, W) of one pass.
        """
        if mode == "loss":
            assert label is not None
            return self._losses(image, label)
        if mode == "predict":
            return self.tiling.labels(self._logits, self.num_classes, image, sizes, self.ignore_index)
        return self._logits(image)

    def _logits(self, image: torch.Tensor) -> torch.Tensor:
        found = self.features(image, self.blocks)
        with autocast_disabled(image.device.type):
            return self._to_pixels(self._scores(found), image)

    def _losses(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.features(image, [*self.blocks, *self.inner_blocks])
        with autocast_disabled(image.device.type):
            losses = self.losses(self._to_pixels(self._scores(found[: len(self.blocks)]), image), label)
            if self.inner_blocks:
                scores = self._to_pixels(self.auxiliary_head(_map(found[-1].patches)), image)
                loss = cross_entropy(scores, label, self.ignore_index, self.losses.class_weights)
                losses["loss_auxiliary"] = self.auxiliary_weight * loss
            return named(losses)

    def _scores(self, found: Sequence[Features]) -> torch.Tensor:
        """Scores (B, K, h', w') of the features of ``self.blocks``."""
        maps = []
        for features in found:
            maps.append(_map(features.patches))
            if getattr(self.head, "sees_cls", False):
                maps.append(features.cls[:, :, None, None].expand_as(maps[-1]))
        return self.head(torch.cat(maps, dim=1))

    def _to_pixels(self, scores: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Interpolate (B, K, h', w') to whole patches, and crop to (B, K, H, W)."""
        height, width = image.shape[-2:]
        patch = self.backbone.patch_size
        padded = (-(-height // patch) * patch, -(-width // patch) * patch)
        pixels = F.interpolate(scores.float(), size=padded, mode="bilinear", align_corners=False)
        return pixels[..., :height, :width]


def _map(patches: torch.Tensor) -> torch.Tensor:
    """(B, h, w, D) -> (B, D, h, w)."""
    return patches.permute(0, 3, 1, 2)
