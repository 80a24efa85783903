"""Segmentation heads: from maps of patch features to a score for each class and cell.

All blocks of a vision transformer have the same resolution. UPerNet and DPT make a pyramid of four levels from four
blocks, at 4, 2, 1 and 1/2 times that resolution, and join the levels from the coarsest to the finest. Heads consist of
convolutions, pooling and bilinear interpolation alone, for which :mod:`exp.hardware.operators` has portable forms for
devices that lack their derivatives.

Shapes below: B images, D channels of a block's map, h x w patches, C channels of the head, K classes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError, nearest
from exp.models.dropout import Dropout2d
from exp.vision.dinov3.keys import SegmenterConfig

__all__ = ["FcnHead", "Head", "build_head", "create_head", "level_out_indices"]

_LEVELS = 4  # blocks whose features UPerNet and DPT get
_POOLED = (1, 2, 3, 6)  # cells along each side of UPerNet's pooled maps (PSPNet, arXiv 1612.01105)


class Head(nn.Module):
    """Base class of heads; one of yours: ``model.head={_target_: <its path>, <arguments of its constructor>}``.

    Args:
        config: the keys of ``model``, for the heads that ``model.head`` names by a word.
    """

    levels: ClassVar[bool] = False
    """Whether the head needs four blocks, whose maps have D channels each; else D is that of all maps together."""
    uses_cls_token: ClassVar[bool] = False
    """Whether each map is followed by the CLS token, repeated over its cells, as further channels."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config

    def build(self, dim: int, num_classes: int) -> None:
        """Create the layers.

        Args:
            dim: channels of the features (D), concatenated over ``model.out_indices``; with ``levels`` those of one.
            num_classes: classes of the data (K).
        """
        raise NotImplementedError

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> scores (B, K, h', w') of any resolution; the model interpolates them to the pixels."""
        raise NotImplementedError

    def _add_classifier(self, channels: int, num_classes: int) -> None:
        """Create dropout of whole channels and a linear layer; call at the end of :meth:`build`."""
        self.dropout = Dropout2d(self.config.dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def _classify(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.dropout(x))


def level_out_indices(depth: int) -> list[int]:
    """The last blocks of the four quarters of a backbone: 2, 5, 8, 11 of 12. Below four blocks some repeat."""
    return [-(-depth * (level + 1) // _LEVELS) - 1 for level in range(_LEVELS)]


def create_head(config: SegmenterConfig) -> Head:
    """The head that ``model.head`` names, without layers.

    Raises:
        ConfigError: there is no such head.
    """
    head = config.head
    if isinstance(head, Head):
        return head
    if not isinstance(head, str) or head not in _HEADS:
        raise ConfigError(
            f"model.head={head} is not one of {', '.join(_HEADS)}, nor {{_target_: <a subclass of {Head.__module__}."
            f"Head>}}{nearest(str(head), _HEADS)}"
        )
    return _HEADS[head](config)


def build_head(head: Head, dim: int, num_blocks: int, num_classes: int) -> None:
    """Create the layers of a head.

    Args:
        head: result of :func:`create_head`.
        dim: channels of a block's map.
        num_blocks: number of blocks whose maps the head gets.
        num_classes: classes of the data (K).

    Raises:
        ConfigError: there is no such norm, or the head needs another number of blocks.
    """
    if head.levels and num_blocks != _LEVELS:
        name = head.config.head if head.config else type(head).__name__
        raise ConfigError(f"model.head={name} sees {_LEVELS} blocks, but model.out_indices names {num_blocks}")
    head.build(dim if head.levels else dim * num_blocks, num_classes)


def _norm(kind: str, channels: int) -> nn.Module:
    """The norm that ``model.head_norm`` names.

    ``batch`` uses statistics of the batch (synchronize them over devices with ``wrapper.sync_batchnorm``); ``group``
    does not, so results do not depend on how a batch is distributed over devices.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        # At most 32 groups (Wu and He, arXiv 1803.08494), with at least 8 channels each.
        groups = next(count for count in (32, 16, 8, 4, 2, 1) if count == 1 or channels % (8 * count) == 0)
        return nn.GroupNorm(groups, channels)
    raise ConfigError(f"model.head_norm={kind} is not one of batch, group")


class _ConvNorm(nn.Sequential):
    """Convolution without bias, norm, ReLU; height and width stay the same."""

    def __init__(self, channels_in: int, channels: int, kernel: int, norm: str) -> None:
        convolve = nn.Conv2d(channels_in, channels, kernel, padding=kernel // 2, bias=False)
        super().__init__(convolve, _norm(norm, channels), nn.ReLU())


class LinearHead(Head):
    """One linear layer per patch: the usual linear probe."""

    def build(self, dim: int, num_classes: int) -> None:
        """See :class:`Head`."""
        self._add_classifier(dim, num_classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, h, w)."""
        return self._classify(features)


class UpsampleHead(Head):
    """Two stages that double the resolution by a transposed and a plain convolution, then a linear layer."""

    def build(self, dim: int, num_classes: int) -> None:
        """See :class:`Head`."""
        channels, norm, stages = self.config.head_channels, self.config.head_norm, []
        for width in (dim, channels):
            stages += [nn.ConvTranspose2d(width, channels, 2, stride=2), _norm(norm, channels), nn.GELU()]
            stages += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), _norm(norm, channels), nn.GELU()]
        self.stages = nn.Sequential(*stages)
        self._add_classifier(channels, num_classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, 4 h, 4 w)."""
        return self._classify(self.stages(features))


class FcnHead(Head):
    """A convolution and a linear layer (FCN, arXiv 1411.4038): the auxiliary head on an inner block."""

    def build(self, dim: int, num_classes: int) -> None:
        """See :class:`Head`."""
        self.convolve = _ConvNorm(dim, self.config.head_channels, 3, self.config.head_norm)
        self._add_classifier(self.config.head_channels, num_classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, D, h, w) -> (B, K, h, w)."""
        return self._classify(self.convolve(features))


def _resized(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Interpolate (bilinear) to this height and width."""
    return F.interpolate(x, size=list(size), mode="bilinear", align_corners=False)


class UperNetHead(Head):
    """UPerNet (Xiao et al., arXiv 1807.10221): pyramid pooling on the coarsest level, a feature pyramid over all.

    The levels are made from the blocks' maps as in BEiT (arXiv 2106.08254) and later studies: by two transposed
    convolutions, one, none, and max pooling. With a batch of one image, train with ``head_norm=group``: the map that is
    pooled to one cell has no batch statistics.
    """

    levels = True

    def build(self, dim: int, num_classes: int) -> None:
        """See :class:`Head`."""
        channels, norm = self.config.head_channels, self.config.head_norm
        finest = [nn.ConvTranspose2d(dim, dim, 2, stride=2), _norm(norm, dim), nn.GELU()]
        self.pyramid = nn.ModuleList(
            [
                nn.Sequential(*finest, nn.ConvTranspose2d(dim, dim, 2, stride=2)),
                nn.ConvTranspose2d(dim, dim, 2, stride=2),
                nn.Identity(),
                nn.MaxPool2d(2, ceil_mode=True),  # ceil_mode: a single patch must not vanish
            ]
        )
        self.pooled = nn.ModuleList(_ConvNorm(dim, channels, 1, norm) for _ in _POOLED)
        self.bottleneck = _ConvNorm(dim + len(_POOLED) * channels, channels, 3, norm)
        self.lateral = nn.ModuleList(_ConvNorm(dim, channels, 1, norm) for _ in range(_LEVELS - 1))
        self.smooth = nn.ModuleList(_ConvNorm(channels, channels, 3, norm) for _ in range(_LEVELS - 1))
        self.fuse = _ConvNorm(_LEVELS * channels, channels, 3, norm)
        self._add_classifier(channels, num_classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, 4 D, h, w), the maps of four blocks in ascending order -> (B, K, 4 h, 4 w)."""
        levels = [make(level) for make, level in zip(self.pyramid, features.chunk(_LEVELS, dim=1))]
        coarsest = levels[-1]
        pooled = [
            _resized(convolve(F.adaptive_avg_pool2d(coarsest, cells)), coarsest.shape[-2:])
            for cells, convolve in zip(_POOLED, self.pooled)
        ]
        maps = [lateral(level) for lateral, level in zip(self.lateral, levels)]
        maps.append(self.bottleneck(torch.cat([coarsest, *pooled], dim=1)))
        for finer in range(_LEVELS - 2, -1, -1):
            maps[finer] = maps[finer] + _resized(maps[finer + 1], maps[finer].shape[-2:])
        maps[:-1] = [smooth(feature_map) for smooth, feature_map in zip(self.smooth, maps)]
        joined = torch.cat([maps[0], *(_resized(feature_map, maps[0].shape[-2:]) for feature_map in maps[1:])], dim=1)
        return self._classify(self.fuse(joined))


class _ResidualUnit(nn.Module):
    """Two convolutions, each after a ReLU, beside a residual connection: the unit of DPT's (and RefineNet's) fusion."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            convolve = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            layers += [nn.ReLU(), convolve, _norm(norm, channels)]
        self.branch = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w), the same shape."""
        return x + self.branch(x)


class _Fusion(nn.Module):
    """Joins a level with the result of the coarser levels, and resizes both to the next finer level."""

    def __init__(self, channels: int, norm: str, coarsest: bool) -> None:
        super().__init__()
        self.level_unit = None if coarsest else _ResidualUnit(channels, norm)
        self.fused_unit = _ResidualUnit(channels, norm)
        self.project = nn.Conv2d(channels, channels, 1)

    def forward(self, level: torch.Tensor, coarser: torch.Tensor | None, size: Sequence[int]) -> torch.Tensor:
        """Both (B, C, h, w) -> (B, C, *size)."""
        joined = level if self.level_unit is None or coarser is None else coarser + self.level_unit(level)
        # Project before the interpolation: the same result, computed on a quarter of the cells.
        return _resized(self.project(self.fused_unit(joined)), size)


class DptHead(Head):
    """DPT (Ranftl et al., arXiv 2103.13413): tokens of four blocks reassembled to maps, then fused by residual units.

    The levels have D / 8, D / 4, D / 2 and D channels before the fusion, the paper's for D = 768. The CLS token is
    joined to every patch and projected ("readout"), as in the paper. Unlike there, interpolation does not align
    corners, so that scores do not depend on the position of a window in a larger image.
    """

    levels = True
    uses_cls_token = True

    def build(self, dim: int, num_classes: int) -> None:
        """See :class:`Head`."""
        channels, norm = self.config.head_channels, self.config.head_norm
        widths = [max(dim // part, 1) for part in (8, 4, 2, 1)]
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
        self.fusion = nn.ModuleList(_Fusion(channels, norm, level == _LEVELS - 1) for level in range(_LEVELS))
        self.finish = _ConvNorm(channels, channels, 3, norm)
        self._add_classifier(channels, num_classes)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """(B, 4 * 2 D, h, w), for each of four blocks its map and its CLS token in every cell -> (B, K, 8 h, 8 w)."""
        stages = zip(self.readout, self.project, self.resample, self.enter, features.chunk(_LEVELS, dim=1))
        levels = [enter(resample(project(readout(level)))) for readout, project, resample, enter, level in stages]
        sizes = [[2 * extent for extent in levels[0].shape[-2:]], *(level.shape[-2:] for level in levels[:-1])]
        fused: torch.Tensor | None = None
        for number in range(_LEVELS - 1, -1, -1):
            fused = self.fusion[number](levels[number], fused, sizes[number])
        return self._classify(self.finish(fused))


# The names that `model.head` may have.
_HEADS = {"linear": LinearHead, "upsample": UpsampleHead, "upernet": UperNetHead, "dpt": DptHead}
