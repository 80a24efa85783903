"""Segmentation heads: from maps of a backbone to a score for each class and cell.

UPerNet and DPT need a pyramid: four maps, each of half the resolution of the one before. A backbone with stages gives
one; from the maps of a vision transformer, which all have one resolution, they make one at 4, 2, 1 and 1/2 times that
resolution. All but the mask transformer consist of convolutions, pooling and bilinear interpolation alone, for which
:mod:`exp.hardware.operators` has portable forms for devices that lack their derivatives.

Shapes below: B images, C_i channels and h_i x w_i cells of map i, C channels of the head, K classes.
"""

from __future__ import annotations

from typing import ClassVar, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.models.dropout import Dropout2d
from exp.vision.backbones.base import FeatureInfo
from exp.vision.backbones.vit import attend

__all__ = ["Dpt", "Fcn", "Head", "Linear", "MaskTransformer", "Segformer", "UperNet", "Upsample"]

_LEVELS = 4  # maps of a pyramid
_POOLED = (1, 2, 3, 6)  # cells along each side of UPerNet's pooled maps (PSPNet, arXiv 1612.01105)


class Head(nn.Module):
    """Base class of heads; one of yours: ``model.head={_target_: <its path>, <its keys>}``.

    A subclass takes ``info`` and ``num_classes``, which the model sets, and its own keys, and creates its layers.

    Args:
        info: channels and strides of the maps, in the order in which :meth:`forward` gets them.
        num_classes: classes of the data (K).
    """

    num_levels: ClassVar[int | None] = None
    """Number of maps that the head needs; None: any number, by default the last map of the backbone alone."""
    owns_loss: ClassVar[bool] = False
    """Whether :meth:`loss` replaces ``model.losses``."""

    def __init__(self, info: FeatureInfo, num_classes: int) -> None:
        super().__init__()
        self.info, self.num_classes = info, num_classes

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores of the classes.

        Args:
            maps: (B, C_i, h_i, w_i) each.
            cls: the CLS token of each map, (B, C_i); None: the backbone has none.

        Returns:
            (B, K, h', w') of any resolution; the model interpolates them to the pixels.
        """
        raise NotImplementedError

    def loss(
        self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None, label: torch.Tensor, ignore_index: int
    ) -> dict[str, torch.Tensor]:
        """With ``owns_loss``: the losses by name, each a mean over samples; ``label``: (B, H, W)."""
        raise NotImplementedError

    def _add_classifier(self, channels: int, dropout: float) -> None:
        """Create dropout of whole channels and a linear layer; call at the end of the constructor."""
        self.dropout = Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, self.num_classes, 1)

    def _classify(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.dropout(x))

    def _concatenate(self, maps: list[torch.Tensor]) -> torch.Tensor:
        """All maps at the resolution of the first, (B, sum of C_i, h_0, w_0)."""
        return torch.cat(maps, dim=1) if self.info.is_flat else _joined(maps)


def _norm(kind: str, channels: int) -> nn.Module:
    """The norm that a head's ``norm`` names.

    ``batch`` uses statistics of the batch (synchronize them over devices with ``wrapper.sync_batchnorm``); ``group``
    does not, so results do not depend on how a batch is distributed over devices.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        # At most 32 groups (Wu and He, arXiv 1803.08494), with at least 8 channels each.
        groups = next(count for count in (32, 16, 8, 4, 2, 1) if count == 1 or channels % (8 * count) == 0)
        return nn.GroupNorm(groups, channels)
    raise ConfigError(f"model.head.norm={kind} is not one of batch, group")


class _ConvNorm(nn.Sequential):
    """Convolution without bias, norm, ReLU; height and width stay the same."""

    def __init__(self, channels_in: int, channels: int, kernel: int, norm: str) -> None:
        convolve = nn.Conv2d(channels_in, channels, kernel, padding=kernel // 2, bias=False)
        super().__init__(convolve, _norm(norm, channels), nn.ReLU())


def _resized(x: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Interpolate (bilinear) to this height and width."""
    return F.interpolate(x, size=list(size), mode="bilinear", align_corners=False)


def _joined(maps: list[torch.Tensor]) -> torch.Tensor:
    """All maps at the resolution of the first, (B, sum of C_i, h_0, w_0)."""
    return torch.cat([maps[0], *(_resized(feature_map, maps[0].shape[-2:]) for feature_map in maps[1:])], dim=1)


class Linear(Head):
    """One linear layer per cell: the usual linear probe."""

    def __init__(self, info: FeatureInfo, num_classes: int, dropout: float = 0.0) -> None:
        super().__init__(info, num_classes)
        self._add_classifier(sum(info.channels), dropout)

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores (B, K, h_0, w_0)."""
        return self._classify(self._concatenate(maps))


class Upsample(Head):
    """Two stages that double the resolution by a transposed and a plain convolution, then a linear layer."""

    def __init__(
        self, info: FeatureInfo, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.0
    ) -> None:
        super().__init__(info, num_classes)
        stages: list[nn.Module] = []
        for width in (sum(info.channels), channels):
            stages += [nn.ConvTranspose2d(width, channels, 2, stride=2), _norm(norm, channels), nn.GELU()]
            stages += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), _norm(norm, channels), nn.GELU()]
        self.stages = nn.Sequential(*stages)
        self._add_classifier(channels, dropout)

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores (B, K, 4 h_0, 4 w_0)."""
        return self._classify(self.stages(self._concatenate(maps)))


class Fcn(Head):
    """A convolution and a linear layer (FCN, arXiv 1411.4038): the auxiliary head on an inner level."""

    def __init__(
        self, info: FeatureInfo, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.0
    ) -> None:
        super().__init__(info, num_classes)
        self.convolve = _ConvNorm(sum(info.channels), channels, 3, norm)
        self._add_classifier(channels, dropout)

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores (B, K, h_0, w_0)."""
        return self._classify(self.convolve(self._concatenate(maps)))


class UperNet(Head):
    """UPerNet (Xiao et al., arXiv 1807.10221): pyramid pooling on the coarsest level, a feature pyramid over all.

    From maps of one resolution the pyramid is made as in BEiT (arXiv 2106.08254) and later studies: by two transposed
    convolutions, one, none, and max pooling. With a batch of one image, train with ``norm=group``: the map that is
    pooled to one cell has no batch statistics.
    """

    num_levels = _LEVELS

    def __init__(
        self, info: FeatureInfo, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.0
    ) -> None:
        super().__init__(info, num_classes)
        dim, widths = info.channels[0], info.channels
        if info.is_flat:
            finest = [nn.ConvTranspose2d(dim, dim, 2, stride=2), _norm(norm, dim), nn.GELU()]
            self.pyramid = nn.ModuleList(
                [
                    nn.Sequential(*finest, nn.ConvTranspose2d(dim, dim, 2, stride=2)),
                    nn.ConvTranspose2d(dim, dim, 2, stride=2),
                    nn.Identity(),
                    nn.MaxPool2d(2, ceil_mode=True),  # ceil_mode: a single patch must not vanish
                ]
            )
        self.pooled = nn.ModuleList(_ConvNorm(widths[-1], channels, 1, norm) for _ in _POOLED)
        self.bottleneck = _ConvNorm(widths[-1] + len(_POOLED) * channels, channels, 3, norm)
        self.lateral = nn.ModuleList(_ConvNorm(width, channels, 1, norm) for width in widths[:-1])
        self.smooth = nn.ModuleList(_ConvNorm(channels, channels, 3, norm) for _ in range(_LEVELS - 1))
        self.fuse = _ConvNorm(_LEVELS * channels, channels, 3, norm)
        self._add_classifier(channels, dropout)

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores (B, K, h, w) at the resolution of the finest level of the pyramid."""
        levels = [make(level) for make, level in zip(self.pyramid, maps)] if self.info.is_flat else maps
        coarsest = levels[-1]
        pooled = [
            _resized(convolve(F.adaptive_avg_pool2d(coarsest, cells)), coarsest.shape[-2:])
            for cells, convolve in zip(_POOLED, self.pooled)
        ]
        merged = [lateral(level) for lateral, level in zip(self.lateral, levels)]
        merged.append(self.bottleneck(torch.cat([coarsest, *pooled], dim=1)))
        for finer in range(_LEVELS - 2, -1, -1):
            merged[finer] = merged[finer] + _resized(merged[finer + 1], merged[finer].shape[-2:])
        merged[:-1] = [smooth(level) for smooth, level in zip(self.smooth, merged)]
        return self._classify(self.fuse(_joined(merged)))


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


class Dpt(Head):
    """DPT (Ranftl et al., arXiv 2103.13413): tokens of four blocks reassembled to maps, then fused by residual units.

    From maps of D channels at one resolution, the pyramid has D / 8, D / 4, D / 2 and D channels before the fusion, the
    paper's for D = 768. The CLS token, if there is one, is joined to every patch and projected ("readout"), as in the
    paper. Unlike there, interpolation does not align corners, so that scores do not depend on the position of a window
    in a larger image.
    """

    num_levels = _LEVELS

    def __init__(
        self, info: FeatureInfo, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.0
    ) -> None:
        super().__init__(info, num_classes)
        dim, widths = info.channels[0], list(info.channels)
        if info.is_flat:
            widths = [max(dim // part, 1) for part in (8, 4, 2, 1)]
            if info.has_cls:
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
        self._add_classifier(channels, dropout)

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores (B, K, h, w) at twice the resolution of the finest level of the pyramid."""
        if self.info.is_flat:
            if cls is not None:
                tokens = (token[:, :, None, None].expand_as(level) for token, level in zip(cls, maps))
                pairs = (torch.cat(pair, dim=1) for pair in zip(maps, tokens))
                maps = [readout(pair) for readout, pair in zip(self.readout, pairs)]
            stages = zip(self.project, self.resample, maps)
            maps = [resample(project(level)) for project, resample, level in stages]
        levels = [enter(level) for enter, level in zip(self.enter, maps)]
        sizes = [[2 * extent for extent in levels[0].shape[-2:]], *(level.shape[-2:] for level in levels[:-1])]
        fused: torch.Tensor | None = None
        for number in range(_LEVELS - 1, -1, -1):
            fused = self.fusion[number](levels[number], fused, sizes[number])
        return self._classify(self.finish(fused))


class Segformer(Head):
    """SegFormer's head (Xie et al., arXiv 2105.15203): a linear layer for each of four maps, and one over all."""

    num_levels = _LEVELS

    def __init__(
        self, info: FeatureInfo, num_classes: int, channels: int = 256, norm: str = "batch", dropout: float = 0.0
    ) -> None:
        super().__init__(info, num_classes)
        self.project = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in info.channels)
        self.fuse = _ConvNorm(_LEVELS * channels, channels, 1, norm)
        self._add_classifier(channels, dropout)

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores (B, K, h_0, w_0)."""
        return self._classify(self.fuse(self._concatenate([layer(level) for layer, level in zip(self.project, maps)])))


class _JointBlock(nn.Module):
    """Self-attention over queries and patches together, and feed-forward layers."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, C), the same shape."""
        batch, tokens, dim = x.shape
        packed = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        x = x + self.proj(attend(query, key, value).transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.mlp(self.norm2(x))


class MaskTransformer(Head):
    """A light head for frozen transformers: a query for each class, in the same few blocks as the patches.

    Queries and patches attend to each other, as in EoMT (Kerssies et al., arXiv 2503.19108); unlike there, in blocks of
    the head, so that the backbone may stay frozen. A class's map is the product of its query with the patches, which
    transposed convolutions enlarge first. One query per class (Segmenter, arXiv 2105.05633) needs no matching of
    queries and segments, so that losses are those of the other heads.
    """

    def __init__(
        self, info: FeatureInfo, num_classes: int, channels: int = 256, depth: int = 2, num_heads: int = 4,
        upscale: int = 2, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(info, num_classes)
        if channels % num_heads:
            raise ConfigError(f"model.head.channels={channels} must be a multiple of num_heads={num_heads}")
        self.project = nn.Conv2d(sum(info.channels), channels, 1)
        self.queries = nn.Parameter(torch.empty(1, num_classes, channels))
        nn.init.trunc_normal_(self.queries, std=0.02)
        self.blocks = nn.ModuleList(_JointBlock(channels, num_heads) for _ in range(depth))
        self.norm = nn.LayerNorm(channels)
        self.embed = nn.Sequential(nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, channels))
        self.dropout = Dropout2d(dropout)
        layers: list[nn.Module] = []
        for _ in range(upscale):
            layers += [nn.ConvTranspose2d(channels, channels, 2, stride=2), nn.GELU()]
        self.enlarge = nn.Sequential(*layers)

    def forward(self, maps: list[torch.Tensor], cls: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Scores (B, K, 2^upscale h_0, 2^upscale w_0)."""
        patches = self.project(self._concatenate(maps))
        batch, channels, height, width = patches.shape
        tokens = torch.cat([self.queries.expand(batch, -1, -1), patches.flatten(2).transpose(1, 2)], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        tokens = self.norm(tokens)
        queries = self.embed(tokens[:, : self.num_classes])
        cells = self.enlarge(tokens[:, self.num_classes :].transpose(1, 2).reshape(batch, channels, height, width))
        scores = queries @ self.dropout(cells).flatten(2) * channels**-0.5
        return scores.view(batch, self.num_classes, *cells.shape[-2:])
