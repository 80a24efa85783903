"""The interface of a backbone: from normalized images to feature maps, one for each level.

A backbone computes its levels one after another: the blocks of a vision transformer, all at one resolution, or the
stages of a convolutional network, each at half the resolution of the one before. A head gets the maps of some of them.

Shapes below: B images of H x W pixels, C_i channels and h_i x w_i cells of level i.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Mapping, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError

__all__ = ["Backbone", "FeatureInfo", "Features", "Published"]

State = Mapping[str, torch.Tensor]


@dataclass
class Features:
    """What a backbone returns: float32 also under autocast.

    Attributes:
        maps: (B, C_i, h_i, w_i) for each level, in the order of ``out_indices``.
        cls: the CLS token of each level, (B, C_i); None: the backbone has no such token.
    """

    maps: list[torch.Tensor]
    cls: list[torch.Tensor] | None = None

    def means(self) -> list[torch.Tensor]:
        """For each level the mean over the cells, (B, C_i)."""
        return [level.permute(0, 2, 3, 1).mean(dim=(1, 2)) for level in self.maps]

    def tokens(self) -> list[torch.Tensor]:
        """For each level the CLS token, (B, C_i); without such a token the mean over the cells."""
        return self.means() if self.cls is None else self.cls

    def vectors(self) -> list[torch.Tensor]:
        """For each level the CLS token, if there is one, and the mean over the cells, (B, C_i) each."""
        means = self.means()
        return means if self.cls is None else [vector for pair in zip(self.cls, means) for vector in pair]

    def split(self, count: int) -> tuple[Features, Features]:
        """The first ``count`` levels, and the others."""
        first, rest = (None, None) if self.cls is None else (self.cls[:count], self.cls[count:])
        return Features(self.maps[:count], first), Features(self.maps[count:], rest)


class FeatureInfo(NamedTuple):
    """What a head knows about the maps that it gets.

    Attributes:
        channels: of each map (C_i).
        strides: pixels of the image along a side of a cell of each map.
        has_cls: whether there is a CLS token for each map.
    """

    channels: Sequence[int]
    strides: Sequence[int]
    has_cls: bool = False

    @property
    def is_flat(self) -> bool:
        """Whether all maps have one resolution, so that they are no pyramid."""
        return len(set(self.strides)) == 1


class Published(NamedTuple):
    """The content of a published file.

    Attributes:
        weights: tensors by the names of the backbone.
        others: further tensors of the file, such as those of a head, by their names in the file.
        statistics: mean and standard deviation of each channel of the pretraining images, 0..255, or their name in
            ``model.normalization``; None: not known.
        bands_of_data: whether input channels are bands of the data already, in their order (``task=export`` of exp).
    """

    weights: dict[str, torch.Tensor]
    others: dict[str, torch.Tensor]
    statistics: str | tuple[Sequence[float], Sequence[float]] | None = None
    bands_of_data: bool = False


class Backbone(nn.Module):
    """Base class of backbones.

    A subclass takes ``in_channels`` (set by the model) and its keys of ``model.backbone`` as arguments, creates its
    layers, and sets ``level_channels`` and ``level_strides``. It writes :meth:`forward` and :meth:`stages`; it may
    write the other methods. Its keys are a dataclass with ``_target_`` (see :class:`exp.plugins.Plugin`), among them
    ``out_indices``.

    Attributes:
        in_channels: channels of the image.
        level_channels: channels of the map of every level (C_i).
        level_strides: pixels of the image along a side of a cell, for every level.
        out_indices: levels that :meth:`forward` returns unless it is asked for others, from 0.
        unverifiable_keys: keys of ``model.backbone`` that the names and shapes of weights do not confirm.
    """

    has_cls: ClassVar[bool] = False
    """Whether features have a CLS token."""
    input_weights: ClassVar[Sequence[str]] = ()
    """Names of the tensors whose axis 1 are the channels of the image; converted for data with other bands."""
    linear_groups: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Names for sets of linear layers, each by the last part of its name, for ``model.lora.targets``."""

    level_channels: list[int]
    level_strides: list[int]
    out_indices: list[int]

    def __init__(self, in_channels: int, out_indices: Sequence[int] | None = None) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.unverifiable_keys: Sequence[str] = ()
        self._requested = out_indices
        self._layers: dict[str, int] = {}  # by the paths of the modules of stages

    # What a subclass writes

    def forward(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> Features:
        """Features of an image.

        Args:
            image: (B, C, H, W), normalized, of any size; call :meth:`pad` first.
            out_indices: levels from 0, in any order; None: those of the attribute. Later levels are not computed.

        Returns:
            Maps of h_i x w_i cells: height and width of the padded image divided by the stride.
        """
        raise NotImplementedError

    def stages(self) -> list[list[nn.Module]]:
        """The modules of each level, from input to output: what freezing, layer decay and sharding count.

        Modules before the first level, such as a stem, belong to none.
        """
        raise NotImplementedError

    def adapt_state_dict(self, state: State, source: Path) -> Published | None:
        """Read a published file, by the tensors' names; also as a part of another model.

        Args:
            state: tensors by name.
            source: the file; files beside it may say more.

        Returns:
            The content; None if the names are not those of a publication.

        Raises:
            ConfigError: the weights are known to be those of another network.
        """
        del state, source
        return None

    def check_state_dict(self, state: State, source: Path) -> None:
        """Refuse weights of another size, naming the keys to set. Without this the caller lists names and shapes.

        Args:
            state: tensors by the names of the backbone, without low-rank updates; possibly none.
            source: the file.

        Raises:
            ConfigError: the weights are those of another backbone.
        """

    def attention(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Attention weights (B, heads, N, M) of levels, for distillation; each row has the sum 1.

        Raises:
            ConfigError: the backbone has none.
        """
        raise self.lacks("attention")

    def write_huggingface(self, folder: Path, image_size: int, band_names: Sequence[str]) -> Sequence[str]:
        """Write ``model.safetensors`` and ``config.json`` for transformers.

        Args:
            folder: exists.
            image_size: side of the training images in pixels.
            band_names: of the image's channels; empty: not known.

        Returns:
            Names of tensors that transformers computes, and which may differ in the last digits.

        Raises:
            ConfigError: transformers has no such network.
        """
        raise self.lacks("write_huggingface")

    # What every backbone has

    @property
    def channels(self) -> list[int]:
        """Channels of the maps that :meth:`forward` returns."""
        return list(self.info(self.out_indices).channels)

    @property
    def strides(self) -> list[int]:
        """Strides of the maps that :meth:`forward` returns."""
        return list(self.info(self.out_indices).strides)

    def info(self, levels: Sequence[int]) -> FeatureInfo:
        """What a head knows about the maps of these levels."""
        channels = [self.level_channels[level] for level in levels]
        return FeatureInfo(channels, [self.level_strides[level] for level in levels], self.has_cls)

    @property
    def multiple(self) -> int:
        """Height and width of images are padded to a multiple of this: the largest stride."""
        return max(self.level_strides)

    def pad(self, image: torch.Tensor) -> torch.Tensor:
        """Pad with zeros at right and bottom to a multiple of the largest stride."""
        bottom, right = (-extent % self.multiple for extent in image.shape[-2:])
        return F.pad(image, (0, right, 0, bottom)) if bottom or right else image

    def select_levels(self, count: int | None) -> None:
        """Set ``out_indices``: those of the configuration, else the last levels of ``count`` equal parts.

        Args:
            count: number of maps that a head needs; None: any, by default the last.

        Raises:
            ConfigError: the configuration names another number of levels, or levels that do not exist.
        """
        total, requested = len(self.level_channels), self._requested
        if requested is None:
            parts = count or 1  # below `parts` levels some repeat
            self.out_indices = [-(-total * (part + 1) // parts) - 1 for part in range(parts)]
            return
        self.out_indices = self.level_numbers(requested, "model.backbone.out_indices")
        if count is not None and len(requested) != count:
            raise ConfigError(f"model.backbone.out_indices={list(requested)}: the head needs {count} levels")

    def level_numbers(self, levels: Sequence[int], key: str) -> list[int]:
        """Numbers of levels from 0; negative ones count from the end.

        Raises:
            ConfigError: there is none, or no such level; ``key`` is for the message.
        """
        total = len(self.level_channels)
        if not levels or not all(-total <= level < total for level in levels):
            raise ConfigError(f"{key}={list(levels)} must name at least one level from 0 to {total - 1}")
        return [level % total for level in levels]

    def freeze_unused(self, out_indices: Sequence[int]) -> None:
        """Freeze what these levels do not need: it gets no gradient, and DDP must not wait for one."""
        for stage in self.stages()[max(out_indices) + 1 :]:
            for module in stage:
                module.requires_grad_(False)

    @property
    def num_layers(self) -> int:
        """Number of layers as :meth:`layer_of` counts them."""
        return len(self.stages()) + 2

    def layer_of(self, name: str) -> int:
        """The layer of a parameter, for learning rates and freezing by depth.

        Args:
            name: as in ``named_parameters()``.

        Returns:
            0 for parameters before the first level, i + 1 for level i, ``num_layers - 1`` for those after the last.
        """
        if not self._layers:
            numbers = {id(module): number for number, stage in enumerate(self.stages(), 1) for module in stage}
            self._layers = {path: numbers[id(each)] for path, each in self.named_modules() if id(each) in numbers}
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((self._layers[path] for path in paths if path in self._layers), 0)

    def requested_levels(self, out_indices: Sequence[int] | None) -> list[int]:
        """The levels that :meth:`forward` returns; None: those of the attribute."""
        return self.out_indices if out_indices is None else list(out_indices)

    def lacks(self, member: str) -> ConfigError:
        """The error for an optional method that this class does not have."""
        return ConfigError(f"model.backbone: {type(self).__name__} has no method {member}, which this needs")
