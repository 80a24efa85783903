"""Distillation: a model learns the features of another one, on images without labels."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.engine.weights import read_weights
from exp.errors import CheckpointError, ConfigError
from exp.hardware.compat import autocast_disabled
from exp.models.dropout import Dropout
from exp.vision.backbones.base import Features
from exp.vision.keys import DistillerConfig, TeacherConfig
from exp.vision.metrics import CosineSimilarity
from exp.vision.models import ImageModel, typed_keys

__all__ = ["Distiller"]

_EPS = 1e-6


class _Teacher(ImageModel):
    """A backbone with the normalization of its weights."""

    def forward(self, image: torch.Tensor) -> Features:
        """Features of the last level; ``image``: (B, C, H, W), 0..255."""
        return self.features(image)


class Distiller(ImageModel):
    """A student backbone, and two projections of its features to the teacher's width.

    The losses are those of AM-RADIO (Ranzinger et al., arXiv 2312.06709): one minus the cosine for the CLS token, and
    for the patches a mixture of that and the smooth L1 distance. The targets are the teacher's features after a layer
    norm without parameters (Wei et al., arXiv 2205.14141), so that the losses do not depend on the teacher's scale. A
    backbone without CLS token gives the mean of its map instead.

    The teacher is not a submodule, so checkpoints, optimizers and wrappers do not see it. Its file is read when it is
    first needed: ``task=features`` and ``init_from`` of another run work without the file.

    Args:
        **keys: of :class:`exp.vision.keys.DistillerConfig`, and the arguments of :class:`ImageModel`.

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
        if len(self.out_indices) != 1:
            raise ConfigError("model.backbone.out_indices: student and teacher are compared after one level")
        if min(config.cls_token_weight, config.patch_weight) < 0.0 or not config.cls_token_weight + config.patch_weight:
            raise ConfigError("model.cls_token_weight and model.patch_weight must not be negative, nor both 0")
        self.teacher_keys = typed_keys(TeacherConfig, config.teacher)
        # In a fork of the generator: the teacher must not change the student's random numbers.
        with torch.random.fork_rng(devices=[]), _errors_of_teacher():
            teacher = _Teacher(self.in_channels, freeze="all", backbone=self.teacher_keys.backbone).eval()
        self._teachers = [teacher]  # a list hides it from nn.Module
        self._is_loaded = False
        ours, theirs = (model.backbone.channels[0] for model in (self, teacher))
        self.dropout = Dropout(config.dropout)
        self.project_cls = nn.Linear(ours, theirs).requires_grad_(config.cls_token_weight > 0.0)
        self.project_patches = nn.Linear(ours, theirs).requires_grad_(config.patch_weight > 0.0)
        self.backbone.freeze_unused(self.out_indices)

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
        student = self.features(image)
        if mode == "tensor":
            return torch.cat(student.vectors(), dim=-1)
        with torch.no_grad():
            target = self._teacher(image.device)(image)
        with autocast_disabled(image.device.type):
            patches, target_patches = (features.maps[0].permute(0, 2, 3, 1) for features in (student, target))
            target_cls = _normalize_features(target.tokens()[0].float())
            target_patches = _normalize_features(_resize_patches(target_patches, patches.shape[1:3]))
            student_cls = self.project_cls(self.dropout(student.tokens()[0]))
            student_patches = self.project_patches(self.dropout(patches))
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
        """Compile the submodules, and the teacher."""
        super().compile(*args, **kwargs)
        self._teachers[0].compile(*args, **kwargs)

    def _teacher(self, device: torch.device) -> _Teacher:
        (teacher,) = self._teachers
        if not self._is_loaded and device.type != "meta":  # task=estimate uses no values, so the file may be missing
            _load_teacher(teacher, self.teacher_keys.init_from)
            self._is_loaded = True
        if teacher.pixel_mean.device != device:
            teacher.to(device)
        return teacher


@contextlib.contextmanager
def _errors_of_teacher() -> Iterator[None]:
    """Errors name the keys of the teacher, not those of the student."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.", "model.teacher.")) from error


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
