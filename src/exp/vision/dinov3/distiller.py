"""Knowledge distillation: a small backbone learns the features of a large one that stays as it is."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Mapping, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from exp.engine.fit import read_weights
from exp.errors import CheckpointError, ConfigError
from exp.hardware.compat import autocast_disabled
from exp.models.dropout import Dropout
from exp.vision.dinov3.backbone import Features
from exp.vision.dinov3.base import ImageModel
from exp.vision.dinov3.layers import check_dropout
from exp.vision.dinov3.sizes import SIZES

__all__ = ["Agreement", "Distiller", "TeacherSettings"]

_EPS = 1e-6


class Agreement(NamedTuple):
    """How alike projected student and teacher are, for each image.

    Attributes:
        cls: (B,), cosine of the CLS tokens.
        patches: (B,), mean cosine of the patches.
    """

    cls: torch.Tensor
    patches: torch.Tensor


@dataclass(frozen=True)
class TeacherSettings:
    """``model.teacher``; sizes as of :class:`exp.vision.dinov3.base.ImageModel`.

    Attributes:
        init_from: its weights.
        size: see there.
        patch_size: see there; other than the student's: maps are interpolated.
        embed_dim: see there.
        depth: see there.
        num_heads: see there.
    """

    init_from: str | None = None
    size: str = "vitl16"
    patch_size: int = 16
    embed_dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None


class _Teacher(ImageModel):
    """A backbone with the normalisation of its weights."""

    def forward(self, image: torch.Tensor) -> Features:
        """Features of the last block: (B, C, H, W), 0..255 in."""
        return self.features(image)[0]


class Distiller(ImageModel):
    """A student backbone, and two projections that bring its features to the teacher's width.

    The losses are those of AM-RADIO (Ranzinger et al., arXiv 2312.06709): one minus the cosine for the CLS token, and
    for the patches a mixture of that and the smooth L1 distance. What is compared with is the teacher's features after
    a layer norm without parameters (Wei et al., arXiv 2205.14141): teachers of any scale have the same weight.

    The teacher is no submodule: it is in no checkpoint, no optimizer, and no wrapper's hands. It is made and read when
    it is first needed; what does without it (``task=features``, another run's ``init_from``) does not need its file.

    Args:
        in_channels: of the image (C).
        teacher: the keys of :class:`TeacherSettings`.
        cls_weight: weight of the CLS token's loss.
        patch_weight: weight of the patches' loss.
        smooth_l1_share: of the smooth L1 distance in the patches' loss, from 0 to 1.
        dropout: probability of dropping a feature before the projections.
        **backbone: of the student, see :class:`ImageModel`.

    Raises:
        ConfigError: the settings do not go together.
    """

    def __init__(
        self,
        in_channels: int = 3,
        teacher: Mapping[str, Any] | None = None,
        cls_weight: float = 1.0,
        patch_weight: float = 1.0,
        smooth_l1_share: float = 0.1,
        dropout: float = 0.0,
        **backbone: Any,
    ) -> None:
        if "num_classes" in backbone:
            raise ConfigError(
                "model=dinov3_distillation learns features, not classes, and these data measure classes; set "
                "data=distillation, with data.root and data.layout as they are here"
            )
        super().__init__(in_channels=in_channels, **backbone)
        if backbone.get("blocks") is not None:
            raise ConfigError("model.blocks: a student is compared with its teacher after the last block; leave it out")
        if min(cls_weight, patch_weight) < 0.0 or cls_weight + patch_weight == 0.0:
            raise ConfigError(
                f"model.cls_weight={cls_weight} and model.patch_weight={patch_weight} must not be negative, nor both 0"
            )
        if not 0.0 <= smooth_l1_share <= 1.0:
            raise ConfigError(f"model.smooth_l1_share={smooth_l1_share} must be from 0 to 1")
        self.teacher_settings = _teacher_settings(teacher)
        self.cls_weight, self.patch_weight, self.smooth_l1_share = cls_weight, patch_weight, smooth_l1_share
        width = self.teacher_settings.embed_dim or SIZES[self.teacher_settings.size].embed_dim
        check_dropout(dropout)
        self.dropout = Dropout(dropout)
        self.project_cls = nn.Linear(self.size.embed_dim, width)
        self.project_patches = nn.Linear(self.size.embed_dim, width)
        if not cls_weight:
            self.project_cls.requires_grad_(False)
        if not patch_weight:
            self.project_patches.requires_grad_(False)
        self._made: list[_Teacher] = []  # a list hides it from nn.Module
        self._use_blocks()

    def start_epoch(self, epoch: int) -> None:
        """Read the teacher, before the first step.

        Raises:
            ConfigError: there is none, or it is of another size.
        """
        del epoch
        self._teacher(self.pixel_mean.device)

    def forward(
        self,
        image: torch.Tensor,
        label: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        mode: str = "tensor",
    ) -> torch.Tensor | Agreement | dict[str, torch.Tensor]:
        """Features, their agreement with the teacher's, or the losses.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: part of a batch, not used.
            index: likewise.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).

        Returns:
            ``"loss"``: ``loss_cls`` and ``loss_patches``, 0-dim float32. ``"predict"``: an :class:`Agreement`.
            ``"tensor"``: (B, 2 D), the CLS token beside the mean of the patches, as a classifier takes them.

        Raises:
            ValueError: ``mode`` is unknown.
        """
        del label, index
        if mode not in ("loss", "predict", "tensor"):
            raise ValueError(f"mode={mode!r} must be 'loss', 'predict' or 'tensor'")
        (student,) = self.features(image)
        if mode == "tensor":
            return torch.cat([student.cls, student.patches.mean(dim=(1, 2))], dim=-1)
        with torch.no_grad():
            target = self._teacher(image.device)(image)
        with autocast_disabled(image.device.type):
            cls, patches = (_whitened(each) for each in _matched(target, student))
            own_cls = self.project_cls(self.dropout(student.cls))
            own_patches = self.project_patches(self.dropout(student.patches))
            alike = Agreement(_cosine(own_cls, cls), _cosine(own_patches, patches).mean(dim=(1, 2)))
            if mode == "predict":
                return alike
            losses = {}
            if self.cls_weight:
                losses["loss_cls"] = self.cls_weight * (1.0 - alike.cls.mean())
            if self.patch_weight:
                share = self.smooth_l1_share
                loss = (1.0 - share) * (1.0 - alike.patches.mean())
                if share:
                    loss = loss + share * F.smooth_l1_loss(own_patches, patches)
                losses["loss_patches"] = self.patch_weight * loss
            return losses

    def _teacher(self, device: torch.device) -> _Teacher:
        if not self._made:
            # Its random weights are replaced; the run's random numbers are not to depend on when it is made.
            with torch.random.fork_rng(devices=[]):
                teacher = _make(self.teacher_settings, self.backbone.patch_embed.proj.in_channels)
            if device.type != "meta":  # task=estimate has no values, and needs no file
                _read(teacher, self.teacher_settings)
            self._made.append(teacher.eval())
        teacher = self._made[0]
        if teacher.pixel_mean.device != device:
            teacher.to(device)
        return teacher


def _teacher_settings(given: Mapping[str, Any] | None) -> TeacherSettings:
    given = dict(given or {})
    known = [field.name for field in fields(TeacherSettings)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ConfigError(f"model.teacher.{unknown[0]} is no key; there are {', '.join(known)}")
    settings = TeacherSettings(**given)
    if settings.size not in SIZES:
        raise ConfigError(f"model.teacher.size={settings.size} is not one of {', '.join(SIZES)}")
    return settings


def _make(settings: TeacherSettings, channels: int) -> _Teacher:
    return _Teacher(
        settings.size, settings.patch_size, channels, settings.embed_dim, settings.depth, settings.num_heads,
        freeze="all",
    )  # fmt: skip


def _read(teacher: _Teacher, settings: TeacherSettings) -> None:
    """Give it its weights.

    Raises:
        ConfigError: there are none, or not all of them fit.
    """
    if settings.init_from is None:
        raise ConfigError(
            "model.teacher.init_from must be set: published DINOv3 weights, or a run; a teacher of random weights "
            "teaches nothing"
        )
    try:
        weights = read_weights(Path(settings.init_from).expanduser())
        state = teacher.fit_state_dict(teacher.adapt_state_dict(weights.state, weights.path), weights.path)
    except (CheckpointError, ConfigError) as error:
        said = str(error).splitlines()[0]
        for word, instead in (
            ("init_from: ", ""),
            ("init_from=", "model.teacher.init_from="),
            (" model.", " model.teacher."),
        ):
            said = said.replace(word, instead)
        raise ConfigError(
            f"model.teacher: {said.replace('resume and init_from', 'model.teacher.init_from')}"
        ) from error
    own = teacher.state_dict()
    lacking = [key for key, value in own.items() if key not in state or state[key].shape != value.shape]
    if lacking:
        raise ConfigError(
            f"model.teacher: {weights.path} lacks {len(lacking)} of the {len(own)} tensors of a {settings.size}: "
            f"{', '.join(lacking[:3])}"
        )
    teacher.load_state_dict({key: state[key] for key in own})


def _matched(target: Features, student: Features) -> tuple[torch.Tensor, torch.Tensor]:
    """The teacher's CLS token (B, E), and its patches (B, h, w, E) on the student's grid."""
    patches = target.patches.float()
    size = student.patches.shape[1:3]
    if patches.shape[1:3] != size:
        moved = patches.permute(0, 3, 1, 2)
        moved = F.interpolate(moved, size=list(size), mode="bilinear", align_corners=False)
        patches = moved.permute(0, 2, 3, 1)
    return target.cls.float(), patches


def _whitened(features: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over the last axis."""
    return F.layer_norm(features, features.shape[-1:])


def _cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Over the last axis; of sums of products, which every device has."""
    norms = (a.square().sum(dim=-1) + _EPS) * (b.square().sum(dim=-1) + _EPS)
    return (a * b).sum(dim=-1) * norms.rsqrt()
