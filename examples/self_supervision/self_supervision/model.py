"""A student and its teacher: two networks of one shape, of which one is trained and the other follows.

The teacher is ``backbone``, the network that exp evaluates, exports and starts others from; the student is a copy.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.vision.models import ImageModel
from self_supervision.keys import SelfSupervisedConfig
from self_supervision.losses import cross_entropy, gram_distance, koleo, sinkhorn

_PREFIX = "backbone."


class ProjectionHead(nn.Module):
    """DINO's head: two hidden layers, a bottleneck of length 1, and prototypes of length 1; (..., D) -> (..., K)."""

    def __init__(self, dim: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, bottleneck)
        )
        self.prototypes = nn.Parameter(torch.empty(prototypes, bottleneck))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02)
            else:
                nn.init.zeros_(parameter)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Cosines with the prototypes."""
        return F.normalize(self.layers(features), dim=-1) @ F.normalize(self.prototypes, dim=-1).t()


class SelfSupervised(ImageModel):
    """Learns from views of images without labels (DINOv2, arXiv 2304.07193; DINOv3, arXiv 2508.10104).

    Masked patches get the mean color, since any backbone of exp must do; DINO's own networks learn a token for them.
    The teacher is not in ``model.teacher``, whose network does not change.

    Args:
        **keys: of :class:`self_supervision.keys.SelfSupervisedConfig`, and the arguments of
            :class:`exp.vision.models.ImageModel`.
    """

    config_class = SelfSupervisedConfig
    loss_is_mean = False  # assignments and distances are those of the whole batch

    def __init__(self, num_classes: int = 0, ignore_index: int = -1, **keys: Any) -> None:
        del num_classes, ignore_index  # of data with labels, whose features are asked for
        super().__init__(**keys)
        config, dim = self.config, self.backbone.channels[-1]
        sizes = (dim, config.hidden, config.bottleneck, config.prototypes)
        self.student_heads = nn.ModuleDict({part: ProjectionHead(*sizes) for part in ("image", "patch")})
        self.backbone.freeze_unused(self.out_indices)
        self.student = copy.deepcopy(self.backbone)
        self.teacher_heads = copy.deepcopy(self.student_heads)
        if config.gram_weight:
            self.anchor = copy.deepcopy(self.backbone)
        if not config.ibot_weight:
            self.student_heads["patch"].requires_grad_(False)
        for module in self.fixed:
            module.requires_grad_(False)

    @property
    def fixed(self) -> list[nn.Module]:
        """The modules that are not trained: the teacher, and the first weights."""
        return [self.backbone, self.teacher_heads, *([self.anchor] if self.config.gram_weight else [])]

    def train(self, mode: bool = True) -> SelfSupervised:
        """Teacher and first weights stay in eval mode."""
        super().train(mode)
        for module in self.fixed:
            module.eval()
        return self

    def forward(self, mode: str = "tensor", **batch: torch.Tensor) -> Any:
        """Losses by name, or with ``image`` (B, C, H, W) the teacher's features (B, 2 D): CLS and mean of patches."""
        if mode != "loss":
            return torch.cat(self.features(batch["image"]).vectors()[-2:], dim=-1)
        if "global_views" not in batch:
            raise ConfigError("model=self_supervised learns from views, which these data do not give; set data=views")
        return self.losses(batch["global_views"], batch["local_views"], batch["masked"])

    def losses(self, global_views: torch.Tensor, local_views: torch.Tensor, masked: torch.Tensor) -> dict[str, Any]:
        """The losses, each times its weight.

        Args:
            global_views: (B, 2, C, S, S), 0..255.
            local_views: (B, V, C, s, s).
            masked: numbers of the masked patches of the first global view, (B, M).
        """
        config, count = self.config, len(masked)
        if config.koleo_weight and count % config.koleo_group:
            raise ConfigError(f"model.koleo_group={config.koleo_group} must divide the {count} samples of a rank")
        # View by view, so that the rows of a view are those of the batch: (2 B, ...) and (V B, ...).
        images = self.normalize(global_views.transpose(0, 1).flatten(0, 1))
        with torch.no_grad():
            theirs = self.backbone(images)
            scores = self.teacher_heads["image"](theirs.tokens()[-1])
            targets = sinkhorn(scores, config.teacher_temperature, self.sum_over_ranks).chunk(2)
            their_patches = _picked(theirs.maps[-1][:count], masked)
            patch_scores = self.teacher_heads["patch"](their_patches).flatten(0, 1)
            patch_targets = sinkhorn(patch_scores, config.teacher_temperature, self.sum_over_ranks)
        hidden = self._mask(theirs.maps[-1][:count], images[:count], masked)
        ours = self.student(torch.cat([hidden, images[count:]]))
        tokens = ours.tokens()[-1]
        views = [self.student_heads["image"](tokens).chunk(2)]
        if local_views.shape[1]:
            local_images = self.normalize(local_views.transpose(0, 1).flatten(0, 1))
            local_scores = self.student_heads["image"](self.student(local_images).tokens()[-1])
            views.append(local_scores.chunk(local_views.shape[1]))
        terms = [
            cross_entropy(target, view, config.student_temperature)
            for number, target in enumerate(targets)
            for group, members in enumerate(views)
            for other, view in enumerate(members)
            if group or other != number  # not a view with itself
        ]
        found = {"loss_dino": config.dino_weight * torch.stack(terms).mean()}
        if config.ibot_weight:
            patches = self.student_heads["patch"](_picked(ours.maps[-1][:count], masked)).flatten(0, 1)
            found["loss_ibot"] = config.ibot_weight * cross_entropy(patch_targets, patches, config.student_temperature)
        if config.koleo_weight:
            spread = [koleo(part, config.koleo_group) for part in tokens.chunk(2)]
            found["loss_koleo"] = config.koleo_weight * torch.stack(spread).mean()
        if config.gram_weight:
            with torch.no_grad():
                first = self.anchor(images[count:]).maps[-1]
            distance = gram_distance(_flat(ours.maps[-1][count:]), _flat(first))
            found["loss_gram"] = config.gram_weight * distance
        return found

    def _mask(self, grid: torch.Tensor, images: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """The images (B, C, H, W) with the mean color in the masked cells of a map (B, D, h, w)."""
        batch, _, height, width = grid.shape
        keep = torch.ones(batch, height * width, device=images.device).scatter_(1, masked, 0.0)
        stride = self.backbone.strides[-1]
        cells = keep.view(batch, 1, height, 1, width, 1).expand(-1, -1, -1, stride, -1, stride)
        pixels = cells.reshape(batch, 1, height * stride, width * stride)
        return images * pixels[..., : images.shape[-2], : images.shape[-1]]

    @torch.no_grad()
    def end_step(self, step: int, total: int) -> None:
        """Move the teacher towards the student."""
        momentum = 1.0 - (1.0 - self.config.momentum) * (math.cos(math.pi * step / total) + 1.0) / 2.0
        for teacher, student in ((self.backbone, self.student), (self.teacher_heads, self.student_heads)):
            for old, new in zip(teacher.parameters(), student.parameters()):
                old.mul_(momentum).add_(new, alpha=1.0 - momentum)

    def fit_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Given weights are those of the teacher; student and anchor start from the same."""
        fitted = super().fit_state_dict(state, source)
        backbone = {key[len(_PREFIX) :]: value for key, value in fitted.items() if key.startswith(_PREFIX)}
        for name in ("student", "anchor")[: 1 + bool(self.config.gram_weight)]:
            fitted.update({f"{name}.{key}": value for key, value in backbone.items()})
        return fitted

    def sharded_units(self) -> list[nn.Module]:
        """Refused: the teacher follows parameter by parameter."""
        raise ConfigError("self_supervision trains with wrapper=ddp or mmddp: its two networks are not sharded alike")

    def layer_of(self, name: str) -> int | None:
        """The student's layers, for learning rates by depth."""
        return self.student.layer_of(name[len("student.") :]) if name.startswith("student.") else None


def _flat(maps: torch.Tensor) -> torch.Tensor:
    """(B, D, h, w) -> (B, h w, D)."""
    return maps.flatten(2).transpose(1, 2)


def _picked(maps: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Cells of (B, D, h, w) by their numbers (B, M): (B, M, D)."""
    return _flat(maps).gather(1, numbers.unsqueeze(-1).expand(-1, -1, maps.shape[1]))
