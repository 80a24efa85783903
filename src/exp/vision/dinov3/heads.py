"""Segmentation heads: from maps of patch features to a score for each class and cell.

A vision transformer has one resolution, a patch, in all its blocks. UPerNet and DPT make a pyramid of four levels of
them, at 4, 2, 1 and 1/2 times that resolution, and join the levels from the coarsest to the finest. All heads are made
of convolutions, pooling and bilinear interpolation alone, for which devices that lack their derivatives have portable
forms (:mod:`exp.hardware.operators`).

Shapes below: B images, D channels of a block's map, h x w patches, C channels of the head, K classes.
"""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.config.explain import nearest
from exp.errors import ConfigError
from exp.models.dropout import Dropout2d
from exp.vision.model_config import SegmenterConfig

__all__ = ["LEVELS", "DptHead", "FcnHead", "Head", "LinearHead", "UperNetHead", "UpsampleHead", "blocks_of_levels",
           "build_head", "sees_levels"]  # fmt: skip


class Head(nn.Module):
    """A head of one's own: ``model.head={_target_: <path of a subclass>, <arguments of its constructor>}``."""

    def build(self, dim: int, num_classes: int) -> None:
        """Make the layers.

        Args:
            dim: channels of the features (D), of all ``model.blocks`` side by side.
            num_classes: of the data (K).
        """
        raise NotImplementedError

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> scores (B, K, h', w'), which are interpolated to the pixels."""
        raise NotImplementedError


def sees_levels(config: SegmenterConfig) -> bool:
    """Whether the head sees four blocks."""
    return isinstance(config.head, str) and config.head in ("upernet", "dpt")


def build_head(config: SegmenterConfig, dim: int, num_blocks: int, num_classes: int) -> nn.Module:
    """The head that ``model.head`` names.

    Args:
        config: the keys of ``model``.
        dim: channels of a block's map.
        num_blocks: maps that the head sees side by side.
        num_classes: of the data (K).

    Raises:
        ConfigError: there is no such head or norm, or it sees another number of blocks.
    """
    head, widths = config.head, config.reassemble_channels
    if isinstance(head, Head):
        head.build(dim * num_blocks, num_classes)
        return head
    if not isinstance(head, str) or head not in _HEADS:
        hint = nearest(head, list(_HEADS)) if isinstance(head, str) else ""
        raise ConfigError(
            f"model.head={head} is not one of {', '.join(_HEADS)}, nor {{_target_: <a subclass of {Head.__module__}."
            f"Head>}}{hint}"
        )
    if widths is not None and head != "dpt":
        raise ConfigError(f"model.reassemble_channels={list(widths)} is for model.head=dpt, not {head}; leave it out")
    if head == "linear":
        return LinearHead(dim * num_blocks, num_classes, config.dropout)
    rest = (num_classes, config.head_channels, config.head_norm, config.dropout)
    if head == "upsample":
        return UpsampleHead(dim * num_blocks, *rest)
    if num_blocks != LEVELS:
        raise ConfigError(
            f"model.head={head} sees {LEVELS} blocks, but model.blocks names {num_blocks}; name {LEVELS}, or set "
            "model.blocks=null for the ends of four equal parts of the backbone"
        )
    return UperNetHead(dim, *rest) if head == "upernet" else DptHead(dim, *rest, widths)


def norm_layer(kind: str, channels: int) -> nn.Module:
    """The norm that ``model.head_norm`` names.

    Args:
        kind: ``batch`` (statistics over the batch: synchronize them over devices with ``wrapper.sync_batchnorm``) or
            ``group`` (does not look at the batch, so results do not depend on how it is spread over devices).
        channels: of the map.

    Raises:
        ConfigError: there is no such norm.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        # At most 32 groups (Wu and He, arXiv 1803.08494), and no fewer than 8 channels in each.
        groups = next(count for count in (32, 16, 8, 4, 2, 1) if count == 1 or channels % (8 * count) == 0)
        return nn.GroupNorm(groups, channels)
    raise ConfigError(f"model.head_norm={kind} is not one of batch, group")


class LinearHead(nn.Module):
    """One linear layer per patch: the usual probe of what features hold."""

    def __init__(self, dim: int, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(dim, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, h, w)."""
        return self.classify(self.dropout(features))


class UpsampleHead(nn.Module):
    """Two stages that double the resolution by a transposed and a plain convolution, then a linear layer.

    Args:
        dim: channels of the feature map (D).
        num_classes: classes (K).
        channels: of both stages.
        norm: see :func:`norm_layer`.
        dropout: probability of dropping a channel before the linear layer.
    """

    def __init__(
        self, dim: int, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.1
    ) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for width in (dim, channels):
            stages += [nn.ConvTranspose2d(width, channels, 2, stride=2), norm_layer(norm, channels), nn.GELU()]
            stages += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm_layer(norm, channels), nn.GELU()]
        self.stages = nn.Sequential(*stages)
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, 4 h, 4 w)."""
        return self.classify(self.dropout(self.stages(features)))


class FcnHead(nn.Module):
    """A convolution and a linear layer (FCN, arXiv 1411.4038): the auxiliary head on an inner block."""

    def __init__(
        self, dim: int, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.convolve = nn.Sequential(nn.Conv2d(dim, channels, 3, padding=1, bias=False), norm_layer(norm, channels))
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, h, w)."""
        return self.classify(self.dropout(torch.relu(self.convolve(features))))


LEVELS = 4
"""Blocks that these heads see."""

_POOLED = (1, 2, 3, 6)
"""Cells along each side of the pooled maps (PSPNet, arXiv 1612.01105)."""


def blocks_of_levels(depth: int) -> list[int]:
    """The ends of four equal parts of a backbone: of 12 blocks 2, 5, 8, 11; of fewer than four some come again."""
    return [-(-depth * (level + 1) // LEVELS) - 1 for level in range(LEVELS)]


def _levels(features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return features.chunk(LEVELS, dim=1)


def _resized(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bilinear, to the height and width of another map."""
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


class _ConvNorm(nn.Sequential):
    """Convolution without bias, norm, ReLU; the size stays."""

    def __init__(self, channels_in: int, channels: int, kernel: int, norm: str) -> None:
        convolve = nn.Conv2d(channels_in, channels, kernel, padding=kernel // 2, bias=False)
        super().__init__(convolve, norm_layer(norm, channels), nn.ReLU())


class UperNetHead(nn.Module):
    """UPerNet (Xiao et al., arXiv 1807.10221): pyramid pooling on the coarsest level, a feature pyramid over all.

    The levels are made of the blocks' maps as BEiT (arXiv 2106.08254) and the studies after it do: two transposed
    convolutions, one, none, and pooling by maxima.

    Args:
        dim: channels of a block's map (D).
        num_classes: classes (K).
        channels: of the head's own layers (C).
        norm: see :func:`norm_layer`.
        dropout: probability of dropping a channel before the last layer.
    """

    def __init__(
        self, dim: int, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.1
    ) -> None:
        super().__init__()
        finest = [nn.ConvTranspose2d(dim, dim, 2, stride=2), norm_layer(norm, dim), nn.GELU()]
        self.pyramid = nn.ModuleList(
            [
                nn.Sequential(*finest, nn.ConvTranspose2d(dim, dim, 2, stride=2)),
                nn.ConvTranspose2d(dim, dim, 2, stride=2),
                nn.Identity(),
                nn.MaxPool2d(2, ceil_mode=True),  # of a single patch, too, something is left
            ]
        )
        self.pooled = nn.ModuleList(_ConvNorm(dim, channels, 1, norm) for _ in _POOLED)
        self.bottleneck = _ConvNorm(dim + len(_POOLED) * channels, channels, 3, norm)
        self.lateral = nn.ModuleList(_ConvNorm(dim, channels, 1, norm) for _ in range(LEVELS - 1))
        self.smooth = nn.ModuleList(_ConvNorm(channels, channels, 3, norm) for _ in range(LEVELS - 1))
        self.fuse = _ConvNorm(LEVELS * channels, channels, 3, norm)
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Scores of the cells.

        Args:
            features: (B, 4 D, h, w): the maps of four blocks, the first of them first.

        Returns:
            (B, K, 4 h, 4 w).

        Raises:
            ConfigError: a norm over the batch sees one value of a channel.
        """
        norm = self.pooled[0][1]  # type: ignore[index]
        if type(norm) is nn.BatchNorm2d and self.training and features.shape[0] == 1:  # not of several devices together
            raise ConfigError(
                "model.head=upernet with model.head_norm=batch pools an image to one value of a channel, and a batch "
                "of one image has no statistics of that; set model.head_norm=group, or batch_size=2 or more"
            )
        levels = [make(level) for make, level in zip(self.pyramid, _levels(features))]
        maps = [lateral(level) for lateral, level in zip(self.lateral, levels)]
        maps.append(self._pool(levels[-1]))
        for finer in range(LEVELS - 2, -1, -1):
            maps[finer] = maps[finer] + _resized(maps[finer + 1], maps[finer])
        maps[:-1] = [smooth(each) for smooth, each in zip(self.smooth, maps)]
        joined = torch.cat([maps[0], *(_resized(each, maps[0]) for each in maps[1:])], dim=1)
        return self.classify(self.dropout(self.fuse(joined)))

    def _pool(self, coarsest: torch.Tensor) -> torch.Tensor:
        pooled = [
            _resized(convolve(F.adaptive_avg_pool2d(coarsest, cells)), coarsest)
            for cells, convolve in zip(_POOLED, self.pooled)
        ]
        return self.bottleneck(torch.cat([coarsest, *pooled], dim=1))


class _ResidualUnit(nn.Module):
    """Two convolutions, each after a ReLU, beside a residual connection: the unit of DPT's (and RefineNet's) fusion."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(2):
            convolve = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            parts += [nn.ReLU(), convolve, norm_layer(norm, channels)]
        self.branch = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w), the same shape."""
        return x + self.branch(x)


class _Fusion(nn.Module):
    """Joins a level with what comes from the coarser ones, and brings both to the size of the next."""

    def __init__(self, channels: int, norm: str, coarsest: bool) -> None:
        super().__init__()
        self.own = None if coarsest else _ResidualUnit(channels, norm)
        self.joined = _ResidualUnit(channels, norm)
        self.project = nn.Conv2d(channels, channels, 1)

    def forward(self, level: torch.Tensor, coarser: torch.Tensor | None, size: Sequence[int]) -> torch.Tensor:
        """Both (B, C, h, w) -> (B, C, *size)."""
        joined = level if self.own is None or coarser is None else coarser + self.own(level)
        # The projection before the interpolation: the same result, on a quarter of the cells.
        projected = self.project(self.joined(joined))
        return F.interpolate(projected, size=list(size), mode="bilinear", align_corners=False)


class DptHead(nn.Module):
    """DPT (Ranftl et al., arXiv 2103.13413): tokens of four blocks reassembled to maps, then fused by residual units.

    The CLS token is joined to every patch and projected ("readout"), as in the paper. Interpolation does not align
    corners, other than there: so that scores do not depend on where in a larger image a window lies.

    Args:
        dim: channels of a block's map (D).
        num_classes: classes (K).
        channels: of the fusion (C).
        norm: see :func:`norm_layer`.
        dropout: probability of dropping a channel before the last layer.
        reassembled: channels of the four levels before the fusion; None: D / 8, D / 4, D / 2 and D, the paper's for
            D = 768.

    Raises:
        ConfigError: ``reassembled`` are not four positive numbers.
    """

    sees_cls = True
    """Wants the CLS token's channels after those of each map."""

    def __init__(
        self,
        dim: int,
        num_classes: int,
        channels: int = 256,
        norm: str = "batch",
        dropout: float = 0.1,
        reassembled: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        widths = [max(dim // part, 1) for part in (8, 4, 2, 1)] if reassembled is None else list(reassembled)
        if len(widths) != LEVELS or min(widths) < 1:
            raise ConfigError(
                f"model.reassemble_channels={widths} must be {LEVELS} numbers from 1 on, such as [96,192,384,768]"
            )
        self.readout = nn.ModuleList(nn.Sequential(nn.Conv2d(2 * dim, dim, 1), nn.GELU()) for _ in widths)
        self.project = nn.ModuleList(nn.Conv2d(dim, width, 1) for width in widths)
        self.resample = nn.ModuleList(
            [
                nn.ConvTranspose2d(widths[0], widths[0], 4, stride=4),
                nn.ConvTranspose2d(widths[1], widths[1], 2, stride=2),
                nn.Identity(),
                nn.Conv2d(widths[3], widths[3], 3, stride=2, padding=1),
            ]
        )
        self.enter = nn.ModuleList(nn.Conv2d(width, channels, 3, padding=1, bias=False) for width in widths)
        self.fusion = nn.ModuleList(_Fusion(channels, norm, level == LEVELS - 1) for level in range(LEVELS))
        self.finish = _ConvNorm(channels, channels, 3, norm)
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Scores of the cells.

        Args:
            features: (B, 4 * 2 D, h, w): of each of four blocks the map, and the CLS token in every cell.

        Returns:
            (B, K, 8 h, 8 w).
        """
        parts = zip(self.readout, self.project, self.resample, self.enter, _levels(features))
        levels = [enter(resample(project(readout(level)))) for readout, project, resample, enter, level in parts]
        sizes = [[2 * extent for extent in levels[0].shape[-2:]], *(level.shape[-2:] for level in levels[:-1])]
        fused: torch.Tensor | None = None
        for number in range(LEVELS - 1, -1, -1):
            fused = self.fusion[number](levels[number], fused, sizes[number])
        return self.classify(self.dropout(self.finish(fused)))


_HEADS = {"linear": LinearHead, "upsample": UpsampleHead, "upernet": UperNetHead, "dpt": DptHead}
"""What ``model.head`` may be."""
