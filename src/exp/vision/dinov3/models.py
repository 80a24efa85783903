"""The models: scene classification (a label per image), segmentation (one per pixel) and distillation of features."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.engine.weights import read_weights
from exp.errors import CheckpointError, ConfigError
from exp.hardware.compat import autocast_disabled
from exp.models.dropout import Dropout
from exp.vision.dinov3.backbone import Features
from exp.vision.dinov3.base import ImageModel, resolve_size, typed_keys
from exp.vision.dinov3.heads import FcnHead, build_head, create_head, level_out_indices
from exp.vision.dinov3.keys import DistillerConfig, SceneClassifierConfig, SegmenterConfig, TeacherConfig
from exp.vision.dinov3.losses import Losses, cross_entropy, rename_single_loss
from exp.vision.metrics import CosineSimilarity
from exp.vision.tiling import Tiling

__all__ = ["Distiller", "SceneClassifier", "Segmenter"]


class SceneClassifier(ImageModel):
    """A linear head on the CLS token and the mean of the patch tokens, as in the paper's evaluation.

    Args:
        num_classes: classes of the data (K).
        ignore_index: the label of samples that are ignored.
        **keys: of :class:`exp.vision.dinov3.keys.SceneClassifierConfig`, and the arguments of :class:`ImageModel`.
    """

    config_class = SceneClassifierConfig

    def __init__(self, num_classes: int, ignore_index: int = -1, **keys: Any) -> None:
        super().__init__(**keys)
        config = self.config
        self.losses = Losses(config, ignore_index)
        self.dropout = Dropout(config.dropout)
        self.head = nn.Linear(2 * self.size.embed_dim * len(self.out_indices), num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        self._freeze_unused_blocks()

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
        for features in self.features(image, self.out_indices):
            parts += [features.cls, features.patches.mean(dim=(1, 2))]
        with autocast_disabled(image.device.type):
            logits = self.head(self.dropout(torch.cat(parts, dim=-1)))
        return rename_single_loss(self.losses(logits, label)) if mode == "loss" else logits


class Segmenter(ImageModel):
    """A head on the patch tokens, whose scores are interpolated to the pixels.

    The loss of the auxiliary head, on an inner block, is the cross-entropy.

    Args:
        num_classes: classes of the data (K).
        ignore_index: the label of pixels that are ignored.
        **keys: of :class:`exp.vision.dinov3.keys.SegmenterConfig`, and the arguments of :class:`ImageModel`.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    config_class = SegmenterConfig

    def __init__(self, num_classes: int, ignore_index: int = 255, **keys: Any) -> None:
        super().__init__(**keys)
        config, depth, dim = self.config, self.size.depth, self.size.embed_dim
        head = create_head(config)
        if head.levels and config.out_indices is None:
            self.out_indices = level_out_indices(depth)
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.losses = Losses(config, ignore_index)
        build_head(head, dim, len(self.out_indices), num_classes)
        self.head = head
        self.auxiliary_weight, auxiliary_index = config.auxiliary_weight, config.auxiliary_out_index
        self.auxiliary_indices: list[int] = []
        if config.auxiliary_weight:
            index = (2 * depth - 1) // 3 if auxiliary_index is None else auxiliary_index
            self.auxiliary_indices = self._block_indices([index], "auxiliary_out_index")
            self.auxiliary_head = FcnHead(config)
            self.auxiliary_head.build(dim, num_classes)
        self.tiling = Tiling(config.inference, config.window, config.overlap, config.tta_scales, config.tta_flip)
        self._freeze_unused_blocks(self.auxiliary_indices)

    def forward(
        self,
        image: torch.Tensor,
        label: torch.Tensor | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        label_sizes: Sequence[tuple[int, int]] | None = None,
        mode: str = "tensor",
        **_: Any,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Scores, labels or the loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B, H, W), uint8; for the loss.
            sizes: (height, width) of each image without its padding at right and bottom; None: no image is padded.
            label_sizes: (height, width) at which each image is predicted; None: those of the image.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **_: further keys of a batch.

        Returns:
            ``"loss"``: 0-dim float32 tensors by name. ``"predict"``: labels (B, H, W), uint8, with windows and
            test-time augmentation, of ``label_sizes``; ``ignore_index`` in the padding. ``"tensor"``: logits
            (B, K, H, W) of one pass.
        """
        if mode == "loss":
            assert label is not None
            return self._losses(image, label)
        if mode == "predict":
            return self.tiling.labels(self._logits, self.num_classes, image, sizes, self.ignore_index, label_sizes)
        return self._logits(image)

    def _logits(self, image: torch.Tensor) -> torch.Tensor:
        features = self.features(image, self.out_indices)
        with autocast_disabled(image.device.type):
            return self._to_pixels(self._head_scores(features), image)

    def _losses(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.features(image, [*self.out_indices, *self.auxiliary_indices])
        with autocast_disabled(image.device.type):
            losses = self.losses(self._to_pixels(self._head_scores(features[: len(self.out_indices)]), image), label)
            if self.auxiliary_indices:
                scores = self._to_pixels(self.auxiliary_head(_to_map(features[-1].patches)), image)
                loss = cross_entropy(scores, label, self.ignore_index, self.losses.class_weights)
                losses["loss_auxiliary"] = self.auxiliary_weight * loss
            return rename_single_loss(losses)

    def _head_scores(self, block_features: Sequence[Features]) -> torch.Tensor:
        """Scores (B, K, h', w') of the features of ``self.out_indices``."""
        maps = []
        for features in block_features:
            maps.append(_to_map(features.patches))
            if self.head.uses_cls_token:
                maps.append(features.cls[:, :, None, None].expand_as(maps[-1]))
        return self.head(torch.cat(maps, dim=1))

    def _to_pixels(self, scores: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Interpolate (B, K, h', w') to whole patches, and crop to (B, K, H, W)."""
        height, width = image.shape[-2:]
        patch = self.backbone.patch_size
        padded = (-(-height // patch) * patch, -(-width // patch) * patch)
        pixels = F.interpolate(scores.float(), size=padded, mode="bilinear", align_corners=False)
        return pixels[..., :height, :width]


def _to_map(patches: torch.Tensor) -> torch.Tensor:
    """(B, h, w, D) -> (B, D, h, w)."""
    return patches.permute(0, 3, 1, 2)


_EPS = 1e-6


class _Teacher(ImageModel):
    """A backbone with the normalization of its weights."""

    def forward(self, image: torch.Tensor) -> Features:
        """Features of the last block; ``image``: (B, C, H, W), 0..255."""
        return self.features(image)[0]


class Distiller(ImageModel):
    """A student backbone, and two projections of its features to the teacher's width.

    The losses are those of AM-RADIO (Ranzinger et al., arXiv 2312.06709): one minus the cosine for the CLS token, and
    for the patches a mixture of that and the smooth L1 distance. The targets are the teacher's features after a layer
    norm without parameters (Wei et al., arXiv 2205.14141), so that the losses do not depend on the teacher's scale.

    The teacher is not a submodule, so checkpoints, optimizers and wrappers do not see it. It is built, and its file
    read, when it is first needed: ``task=features`` and ``init_from`` of another run work without the file.

    Args:
        **keys: of :class:`exp.vision.dinov3.keys.DistillerConfig`, and the arguments of :class:`ImageModel`.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    config_class = DistillerConfig

    def __init__(self, **keys: Any) -> None:
        if "num_classes" in keys:
            raise ConfigError(
                "model=dinov3_distillation learns features, not classes, and these data measure classes; set "
                "data=distillation, with data.root and data.layout as they are here"
            )
        super().__init__(**keys)
        config = self.config
        if config.out_indices is not None:
            raise ConfigError("model.out_indices: student and teacher are compared after the last block; leave it out")
        if min(config.cls_token_weight, config.patch_weight) < 0.0 or not config.cls_token_weight + config.patch_weight:
            raise ConfigError("model.cls_token_weight and model.patch_weight must not be negative, nor both 0")
        self.teacher_keys = typed_keys(TeacherConfig, config.teacher)
        width = resolve_size(self.teacher_keys, "model.teacher").embed_dim
        self.dropout = Dropout(config.dropout)
        self.project_cls = nn.Linear(self.size.embed_dim, width).requires_grad_(config.cls_token_weight > 0.0)
        self.project_patches = nn.Linear(self.size.embed_dim, width).requires_grad_(config.patch_weight > 0.0)
        self._teachers: list[_Teacher] = []  # a list hides it from nn.Module
        self._compiled: Any = None
        self._freeze_unused_blocks()

    def start_epoch(self, epoch: int) -> None:
        """Read the teacher's weights before the first step.

        Raises:
            ConfigError: there are no weights, or they are of another size.
        """
        del epoch
        self._teacher(self.pixel_mean.device)

    def forward(
        self, image: torch.Tensor, mode: str = "tensor", **_: Any
    ) -> torch.Tensor | CosineSimilarity | dict[str, torch.Tensor]:
        """Features, their agreement with the teacher's, or the losses.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **_: further keys of a batch.

        Returns:
            ``"loss"``: ``loss_cls`` and ``loss_patches``, 0-dim float32. ``"predict"``: a :class:`CosineSimilarity`.
            ``"tensor"``: (B, 2 D), the CLS token and the mean of the patches, the input of a linear classifier.
        """
        (student,) = self.features(image)
        if mode == "tensor":
            return torch.cat([student.cls, student.patches.mean(dim=(1, 2))], dim=-1)
        with torch.no_grad():
            target = self._teacher(image.device)(image)
        with autocast_disabled(image.device.type):
            target_cls = _normalize_features(target.cls.float())
            target_patches = _normalize_features(_resize_patches(target.patches, student.patches.shape[1:3]))
            student_cls = self.project_cls(self.dropout(student.cls))
            student_patches = self.project_patches(self.dropout(student.patches))
            patch_similarity = _cosine(student_patches, target_patches).mean(dim=(1, 2))
            similarity = CosineSimilarity(_cosine(student_cls, target_cls), patch_similarity)
            if mode == "predict":
                return similarity
            ratio = self.config.smooth_l1_ratio
            smooth_l1 = F.smooth_l1_loss(student_patches, target_patches)
            patch_loss = (1.0 - ratio) * (1.0 - similarity.patches.mean()) + ratio * smooth_l1
            weighted_losses = {
                "loss_cls": (self.config.cls_token_weight, 1.0 - similarity.cls.mean()),
                "loss_patches": (self.config.patch_weight, patch_loss),
            }
            return {name: weight * loss for name, (weight, loss) in weighted_losses.items() if weight}

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the submodules, and the teacher when it is built."""
        super().compile(*args, **kwargs)
        self._compiled = args, kwargs

    def _teacher(self, device: torch.device) -> _Teacher:
        if not self._teachers:
            keys = {name: value for name, value in vars(self.teacher_keys).items() if name != "init_from"}
            # In a fork of the generator: when the teacher is built must not change the run's random numbers.
            with torch.random.fork_rng(devices=[]):
                teacher = _Teacher(self.in_channels, freeze="all", **keys)
            if device.type != "meta":  # task=estimate uses no values, so the file may be missing
                _load_teacher(teacher, self.teacher_keys.init_from)
            self._teachers.append(teacher.eval())
            if self._compiled is not None:
                teacher.compile(*self._compiled[0], **self._compiled[1])
        teacher = self._teachers[0]
        if teacher.pixel_mean.device != device:
            teacher.to(device)
        return teacher


def _load_teacher(teacher: _Teacher, source: str | None) -> None:
    """Load the teacher's weights.

    Raises:
        ConfigError: there are no weights, or not all of them fit.
    """
    if source is None:
        raise ConfigError("model.teacher.init_from must be set: published DINOv3 weights, or a run")
    expected = teacher.state_dict()
    try:
        weights = read_weights(Path(source).expanduser())
        state = teacher.fit_state_dict(teacher.adapt_state_dict(weights.state, weights.path), weights.path)
        missing = [key for key, value in expected.items() if key not in state or state[key].shape != value.shape]
        if missing:
            raise ConfigError(f"the file lacks {len(missing)} tensors, such as {missing[0]}")
    except (CheckpointError, ConfigError) as error:
        reason = error.headline.replace(" model.", " model.teacher.")
        raise ConfigError(f"model.teacher.init_from={source}: {reason}") from error
    teacher.load_state_dict({key: state[key] for key in expected})


def _resize_patches(patches: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Interpolate the teacher's patches (B, h, w, E) to the student's grid, float32."""
    if patches.shape[1:3] == tuple(size):
        return patches.float()
    maps = patches.float().permute(0, 3, 1, 2)
    return F.interpolate(maps, size=list(size), mode="bilinear", align_corners=False).permute(0, 2, 3, 1)


def _normalize_features(features: torch.Tensor) -> torch.Tensor:
    """Normalize to mean 0 and variance 1 over the last axis."""
    return F.layer_norm(features, features.shape[-1:])


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine similarity over the last axis, from operators that every device has."""
    norms = (a.square().sum(dim=-1) + _EPS) * (b.square().sum(dim=-1) + _EPS)
    return (a * b).sum(dim=-1) * norms.rsqrt()
