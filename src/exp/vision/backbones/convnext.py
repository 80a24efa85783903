"""ConvNeXt (Liu et al., arXiv 2201.03545), in the four sizes that DINOv3 distills (arXiv 2508.10104).

A stage halves the resolution, then adds blocks of a depthwise convolution and two linear layers for each cell. Weights
have the authors' names; those of transformers and timm are renamed.

Shapes below: B images, C channels, h x w cells of a stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Mapping, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.hardware.compat import autocast_disabled, recompute_in_backward
from exp.models.dropout import DropPath
from exp.vision.backbones.base import Backbone, Features, Published, State
from exp.vision.backbones.keys import ConvNextConfig
from exp.vision.backbones.published import (
    Names,
    check_config,
    check_size,
    count_blocks,
    find_size,
    pixel_statistics,
    rename_published,
)

__all__ = ["SIZES", "ConvNext", "Size"]

_EPS = 1e-6  # of all layer norms


class Size(NamedTuple):
    """A row of the paper's table.

    Attributes:
        depths: blocks of each stage.
        channels: of each stage.
    """

    depths: tuple[int, ...]
    channels: tuple[int, ...]


SIZES = {
    "atto": Size((2, 2, 6, 2), (40, 80, 160, 320)),
    "tiny": Size((3, 3, 9, 3), (96, 192, 384, 768)),
    "small": Size((3, 3, 27, 3), (96, 192, 384, 768)),
    "base": Size((3, 3, 27, 3), (128, 256, 512, 1024)),
    "large": Size((3, 3, 27, 3), (192, 384, 768, 1536)),
}
"""The sizes by name."""

_NAMES = Names.of(
    r"^(|.*?\.)(?:model\.)?stages\.0\.(?:0\.dwconv|layers\.0\.depthwise_conv|blocks\.0\.conv_dw)\.weight$",
    [
        (r"^model\.", ""), (r"^downsample_layers\.", "downsample."), (r"^stem\.", "downsample.0."),
        (r"^stages\.(\d+)\.downsample(?:_layers)?\.", r"downsample.\1."),
        (r"^stages\.(\d+)\.(?:layers\.|blocks\.)?(\d+)\.", r"blocks.\1.\2."),
        (r"\.(?:depthwise_conv|conv_dw)\.", ".dwconv."), (r"\.(?:pointwise_conv|mlp\.fc)", ".pwconv"),
        (r"^(?:norms\.3|head\.norm|layer_norm)\.", "norm."), (r"\.layer_norm\.", ".norm."),
    ],
)  # fmt: skip


class _MapNorm(nn.LayerNorm):
    """Layer norm over the channels of a map."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=_EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) -> (B, C, h, w), float32."""
        return super().forward(x.float().permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Block(nn.Module):
    """Depthwise convolution, norm, two linear layers with GELU, layer scale and a residual connection."""

    def __init__(self, channels: int, layer_scale_init: float, drop_path_rate: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, kernel_size=7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=_EPS)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), layer_scale_init))
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, h, w) -> (B, C, h, w), float32 also under autocast."""
        branch = self.norm(self.dwconv(x).float().permute(0, 2, 3, 1))
        branch = self.gamma * self.pwconv2(F.gelu(self.pwconv1(branch)))
        return x + self.drop_path(branch.permute(0, 3, 1, 2))


class ConvNext(Backbone):
    """The backbone. The map of the last stage is normalized, as DINOv3 evaluates it; the others are not.

    In place of a CLS token there is the mean of a map; that of the last stage is normalized.

    Args:
        in_channels: of the image.
        **keys: of :class:`exp.vision.backbones.keys.ConvNextConfig`.

    Raises:
        ConfigError: there is no such size.
    """

    has_cls = True
    input_weights = ("downsample.0.0.weight",)
    linear_groups: ClassVar[Mapping[str, Sequence[str]]] = {"attention": (), "mlp": ("pwconv1", "pwconv2")}

    def __init__(self, in_channels: int = 3, **keys: Any) -> None:
        config = ConvNextConfig(**keys)
        super().__init__(in_channels, config.out_indices)
        self.size = config.size
        depths, channels = find_size(config.size, SIZES)
        self.level_channels, self.level_strides = list(channels), [4, 8, 16, 32]
        self.activation_checkpointing = config.activation_checkpointing
        layers = [nn.Sequential(nn.Conv2d(in_channels, channels[0], 4, stride=4), _MapNorm(channels[0]))]
        for before, after in zip(channels, channels[1:]):
            layers.append(nn.Sequential(_MapNorm(before), nn.Conv2d(before, after, 2, stride=2)))
        self.downsample = nn.ModuleList(layers)
        rates = iter(torch.linspace(0, config.drop_path_rate, sum(depths)).tolist())
        self.blocks: Any = nn.ModuleList(  # of each level, the blocks
            nn.ModuleList(_Block(width, config.layer_scale_init, next(rates)) for _ in range(depth))
            for depth, width in zip(depths, channels)
        )
        self.norm = nn.LayerNorm(channels[-1], eps=_EPS)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        self.select_levels(None)

    def forward(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> Features:
        """See :meth:`exp.vision.backbones.base.Backbone.forward`."""
        indices = self.requested_levels(out_indices)
        x, maps, means = self.pad(image), {}, {}
        for level, (halve, blocks) in enumerate(zip(self.downsample[: max(indices) + 1], self.blocks)):
            x = halve(x).float()  # the residual stream is float32, also under autocast
            for block in blocks:
                if self.activation_checkpointing and block.training and x.requires_grad:
                    x = recompute_in_backward(block, x)
                else:
                    x = block(x)
            if level in indices:
                maps[level], means[level] = x, x.mean(dim=(2, 3))
        last = len(self.blocks) - 1
        if last in maps:
            with autocast_disabled(image.device.type):
                maps[last] = self.norm(maps[last].permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
                means[last] = self.norm(means[last])
        return Features([maps[level] for level in indices], [means[level] for level in indices])

    def stages(self) -> list[list[nn.Module]]:
        """See :meth:`exp.vision.backbones.base.Backbone.stages`; the first layers of all are the stem."""
        stages: list[list[nn.Module]] = [[blocks] for blocks in self.blocks]
        for stage, layers in zip(stages[1:], self.downsample[1:]):
            stage.append(layers)
        stages[-1].append(self.norm)
        return stages

    def adapt_state_dict(self, state: State, source: Path) -> Published | None:
        """Read weights by the names of the authors, transformers and timm."""
        renamed = rename_published(state, _NAMES, self._modules)
        if renamed is None:
            return None
        config = check_config(source, {"hidden_act": "gelu", "layer_norm_eps": _EPS}, "a ConvNeXt of DINOv3")
        options = {"act_layer": "gelu", "norm_eps": _EPS, **config.get("model_args", {})}  # of timm
        if options["act_layer"] != "gelu" or options["norm_eps"] != _EPS:
            raise ConfigError(
                f"init_from: {source} holds a ConvNeXt with act_layer={options['act_layer']} and "
                f"norm_eps={options['norm_eps']}, as config.json says; here these are gelu and {_EPS}"
            )
        return Published(*renamed, pixel_statistics(source))

    def check_state_dict(self, state: State, source: Path) -> None:
        """See :meth:`exp.vision.backbones.base.Backbone.check_state_dict`."""
        kernels = (state.get(f"blocks.{level}.0.dwconv.weight", ()) for level in range(len(self.blocks)))
        check_size(Size(count_blocks(state), tuple(map(len, kernels))), self.size, SIZES, source)
