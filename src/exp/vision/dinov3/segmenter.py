"""Semantic segmentation: one label for each pixel."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F

from exp.errors import ConfigError
from exp.hardware.compat import autocast_disabled
from exp.vision.dinov3.backbone import Features
from exp.vision.dinov3.base import ImageModel
from exp.vision.dinov3.heads import OVER_LEVELS, FcnHead, build_head, head_settings
from exp.vision.dinov3.layers import check_dropout
from exp.vision.dinov3.losses import Losses, cross_entropy, named
from exp.vision.dinov3.pyramid_heads import blocks_of_levels
from exp.vision.tiling import Tiling

__all__ = ["Segmenter"]


class Segmenter(ImageModel):
    """A head on the patch tokens, whose scores are interpolated to the pixels.

    Args:
        num_classes: of the data (K).
        ignore_index: the label of pixels that do not count.
        head: ``linear``, ``upsample`` (:mod:`exp.vision.dinov3.heads`), ``upernet`` or ``dpt``
            (:mod:`exp.vision.dinov3.pyramid_heads`).
        head_channels: channels of the heads' own layers; a linear one has none.
        reassemble_channels: see :class:`exp.vision.dinov3.pyramid_heads.DptHead`.
        head_norm: their norm, ``batch`` or ``group``.
        dropout: probability of dropping a channel before a head's last layer.
        auxiliary_weight: weight of the auxiliary head's loss; 0: there is no such head.
        auxiliary_block: the block that it sees, from 0; None: at two thirds of the depth.
        class_weights: weight of each class in cross-entropy and focal loss (K numbers); None: all 1.
        cross_entropy_weight: of the losses see :class:`exp.vision.dinov3.losses.Losses`; the auxiliary head has the
            cross-entropy alone.
        focal_weight: see there.
        focal_gamma: see there.
        dice_weight: see there.
        lovasz_weight: see there.
        inference: ``slide`` (windows, as large as training crops) or ``whole`` images.
        window: side of a window in pixels.
        overlap: share of a window that the next one covers again, below 1.
        tta_scales: images are also predicted at these scales; their probabilities are averaged.
        tta_flip: also mirrored.
        **backbone: see :class:`ImageModel`.

    Raises:
        ConfigError: the settings do not go together.
    """

    def __init__(
        self,
        num_classes: int,
        ignore_index: int = 255,
        head: str = "upsample",
        head_channels: int = 256,
        reassemble_channels: Sequence[int] | None = None,
        head_norm: str = "batch",
        dropout: float = 0.1,
        auxiliary_weight: float = 0.0,
        auxiliary_block: int | None = None,
        class_weights: Sequence[float] | None = None,
        cross_entropy_weight: float = 1.0,
        focal_weight: float = 0.0,
        focal_gamma: float = 2.0,
        dice_weight: float = 0.0,
        lovasz_weight: float = 0.0,
        inference: str = "slide",
        window: int = 512,
        overlap: float = 1 / 3,
        tta_scales: Sequence[float] = (1.0,),
        tta_flip: bool = False,
        **backbone: Any,
    ) -> None:
        super().__init__(**backbone)
        if head in OVER_LEVELS and backbone.get("blocks") is None:
            self.blocks = blocks_of_levels(self.size.depth)
        self.ignore_index = ignore_index
        self.losses = Losses(
            num_classes, ignore_index, class_weights, cross_entropy_weight, focal_weight, focal_gamma, dice_weight,
            lovasz_weight,
        )  # fmt: skip
        check_dropout(dropout)
        if auxiliary_weight < 0.0 or head_channels < 1:
            raise ConfigError(
                f"model.auxiliary_weight={auxiliary_weight} must not be negative, and "
                f"model.head_channels={head_channels} at least 1"
            )
        self.auxiliary_weight = auxiliary_weight
        dim = self.size.embed_dim
        self.head = build_head(
            head, dim, len(self.blocks), num_classes, head_channels, head_norm, dropout, reassemble_channels
        )
        self.auxiliary_block = (2 * self.size.depth - 1) // 3 if auxiliary_block is None else auxiliary_block
        if auxiliary_weight:
            if not 0 <= self.auxiliary_block < self.size.depth:
                raise ConfigError(f"model.auxiliary_block={auxiliary_block} is not from 0 to {self.size.depth - 1}")
            self.auxiliary_head = FcnHead(dim, num_classes, head_channels, head_norm, dropout)
        self.num_classes = num_classes
        self.tiling = Tiling(inference, window, overlap, tta_scales, tta_flip)
        self._use_blocks(*([self.auxiliary_block] if auxiliary_weight else []))

    def forward(
        self,
        image: torch.Tensor,
        label: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        label_sizes: Sequence[tuple[int, int]] | None = None,
        mode: str = "tensor",
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Scores, labels or the loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B, H, W), uint8; only for the loss.
            index: number of each sample; part of a batch, not used.
            sizes: (height, width) of each image, where smaller ones are padded at right and bottom.
            label_sizes: part of a batch, not used, as ``index``.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).

        Returns:
            ``"loss"``: 0-dim float32 tensors by name. ``"predict"``: labels (B, H, W), uint8, by way of windows and
            test-time augmentation; ``ignore_index`` in the padding. ``"tensor"``: logits (B, K, H, W) of one pass.

        Raises:
            ValueError: ``mode`` is unknown, or the loss is asked for without labels.
        """
        del index, label_sizes
        if mode == "tensor":
            return self._logits(image)
        if mode == "predict":
            return self.tiling.labels(self._logits, self.num_classes, image, sizes, self.ignore_index)
        if mode != "loss" or label is None:
            raise ValueError(f"mode={mode!r} must be 'loss' with labels, 'predict' or 'tensor'")
        return self._losses(image, label)

    def _logits(self, image: torch.Tensor) -> torch.Tensor:
        found = self.features(image, self.blocks)
        with autocast_disabled(image.device.type):
            return self._to_pixels(self._scores(found), image)

    def _losses(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = [*self.blocks, self.auxiliary_block] if self.auxiliary_weight else self.blocks
        found = self.features(image, blocks)
        with autocast_disabled(image.device.type):
            return self._losses_of(found, image, label)

    def _scores(self, found: Sequence[Features]) -> torch.Tensor:
        """(B, K, cells) of the features of ``self.blocks``."""
        maps = []
        for features in found:
            maps.append(_map(features.patches))
            if getattr(self.head, "sees_cls", False):
                maps.append(features.cls[:, :, None, None].expand_as(maps[-1]))
        return self.head(torch.cat(maps, dim=1))

    def _losses_of(self, found: list[Features], image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self._to_pixels(self._scores(found[: len(self.blocks)]), image)
        losses = self.losses(logits, label)
        if self.auxiliary_weight:
            scores = self._to_pixels(self.auxiliary_head(_map(found[-1].patches)), image)
            loss = cross_entropy(scores, label, self.ignore_index, self.losses.class_weights)
            losses["loss_auxiliary"] = self.auxiliary_weight * loss
        return named(losses)

    def settings_of(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Those of the backbone and of the heads."""
        settings = super().settings_of(state)
        last = state.get("head.classify.weight")
        if last is not None:
            settings["data.classes"] = f"<{last.shape[0]} names>"
            settings["model.auxiliary_weight"] = "<above 0>" if "auxiliary_head.classify.weight" in state else 0.0
            head = head_settings(state)
            settings.update({key: value for key, value in head.items() if key != "width"})
            settings.update(self._blocks_in(state, head["width"]))
        return settings

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
