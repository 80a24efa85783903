"""The DINOv3 vision transformer (Siméoni et al., arXiv 2508.10104), written from the paper.

Pre-norm blocks over ``[CLS][storage tokens][patches]``. There is no learned position embedding: queries and keys of the
patches are rotated by their place in the image (axial RoPE), so images of any size go in. Names of weights are those of
the published checkpoints (:mod:`exp.vision.dinov3.weights` reads them).

Shapes below: B images, H x W pixels, h x w patches, N = 1 + storage tokens + h * w tokens, D elements per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.hardware.compat import autocast_disabled, recompute_in_backward
from exp.vision.dinov3.blocks import NORM_EPS, Block, PatchEmbedding, RotaryEmbedding
from exp.vision.dinov3.lora import is_of_lora, merged
from exp.vision.dinov3.sizes import Size
from exp.vision.model_config import ImageModelConfig, LoraConfig

__all__ = ["Features", "VisionTransformer"]


@dataclass
class Features:
    """What one block gives, after the final norm.

    Attributes:
        cls: (B, D).
        patches: (B, h, w, D), row by row from the top left.
    """

    cls: torch.Tensor
    patches: torch.Tensor


class VisionTransformer(nn.Module):
    """The backbone.

    Args:
        size: of the model.
        in_channels: of the image (C).
        config: the keys of ``model``; those of sizes play no part here. With low-rank updates these are all that is
            trained; frozen first blocks have none.

    Raises:
        ConfigError: the settings do not go together.
    """

    def __init__(self, size: Size, in_channels: int = 3, config: ImageModelConfig | None = None) -> None:
        super().__init__()
        config = config or ImageModelConfig()
        _check(size, config)
        self.size = size
        self.patch_size = config.patch_size
        self.embed_dim = dim = size.embed_dim
        self.activation_checkpointing = config.activation_checkpointing
        self.patch_embed = PatchEmbedding(config.patch_size, in_channels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.storage_tokens = nn.Parameter(torch.zeros(1, size.storage_tokens, dim))
        self.rope = RotaryEmbedding(dim // size.num_heads)
        self.frozen_blocks = _frozen_blocks(config.freeze, size.depth)
        if config.lora.rank and self.frozen_blocks == size.depth:
            raise ConfigError(
                f"model.freeze={config.freeze} leaves no block for model.lora.rank; set model.freeze=none"
            )
        blocks: list[nn.Module] = []
        for index in range(size.depth):
            lora = LoraConfig() if index < self.frozen_blocks else config.lora
            blocks.append(Block(size, config.layer_scale, config.drop_path * index / max(size.depth - 1, 1), lora))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for token in (self.cls_token, self.storage_tokens):
            nn.init.normal_(token, std=0.02)
        if self.frozen_blocks:
            for parameter in (self.cls_token, self.storage_tokens, *self.patch_embed.parameters()):
                parameter.requires_grad_(False)
            self.blocks[: self.frozen_blocks].requires_grad_(False)
            self.norm.requires_grad_(config.freeze != "all")
        if config.lora.rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_of_lora(name))
            if not any(map(is_of_lora, self.state_dict())):
                raise ConfigError(f"model.lora.targets={list(config.lora.targets)} names no layer of model.size")

    def train(self, mode: bool = True) -> VisionTransformer:
        """As torch's; frozen blocks never drop a branch."""
        super().train(mode)
        for block in self.blocks[: self.frozen_blocks]:
            block.eval()
        return self

    def forward(self, image: torch.Tensor, blocks: Sequence[int] | None = None) -> list[Features]:
        """Features of the image.

        Args:
            image: (B, C, H, W), normalized; padded with zeros at right and bottom where the patch size does not divide.
            blocks: which blocks' outputs, from 0; None: the last. Later blocks than the last of these are not run.

        Returns:
            One :class:`Features` for each of ``blocks``, in their order, float32 under autocast too; h = ceil(H / patch
            size).
        """
        wanted = [len(self.blocks) - 1] if blocks is None else list(blocks)
        tokens, height, width = self._embed(image)
        prefix = tokens.shape[1] - height * width
        cos, sin = self.rope(height, width, prefix, image.device)
        kept: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks[: max(wanted) + 1]):
            if self.activation_checkpointing and self.training and index >= self.frozen_blocks:
                tokens = recompute_in_backward(block, tokens, cos, sin)
            else:
                tokens = block(tokens, cos, sin)
            if index in wanted:
                kept[index] = tokens
        features = []
        for index in wanted:
            with autocast_disabled(image.device.type):  # elements of deep layers exceed what float16 carries
                normed = self.norm(kept[index].float())
            # Not unflatten, which torch 1.10 cannot trace; a split axis is a view all the same.
            patches = normed[:, prefix:].view(normed.shape[0], height, width, normed.shape[-1])
            features.append(Features(normed[:, 0], patches))
        return features

    def _embed(self, image: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """Tokens (B, N, D), and the patches along height and width."""
        bottom, right = (-extent % self.patch_size for extent in image.shape[-2:])
        if bottom or right:
            image = F.pad(image, (0, right, 0, bottom))
        # The sum that runs through all blocks is in float32 from the beginning, under autocast too.
        patches = self.patch_embed(image).float()
        batch, _, height, width = patches.shape
        prefix = [token.expand(batch, -1, -1) for token in (self.cls_token, self.storage_tokens)]
        return torch.cat([*prefix, patches.flatten(2).transpose(1, 2)], dim=1), height, width

    def merge_updates(self) -> None:
        """Add the low-rank updates to the layers' weights, and be without them; what is computed stays."""
        state = merged(self.state_dict())
        for module in self.modules():
            if hasattr(module, "lora"):
                module.lora = nn.ModuleDict()
        self.load_state_dict(state)

    def layer_of(self, name: str) -> int:
        """The layer that a parameter belongs to, for learning rates that fall with depth.

        Args:
            name: as in ``named_parameters()``.

        Returns:
            0 for what comes before the blocks, i + 1 for block i, depth + 1 for the final norm.
        """
        parts = name.split(".")
        if parts[0] == "blocks":
            return int(parts[1]) + 1
        return len(self.blocks) + 1 if parts[0] == "norm" else 0


def _frozen_blocks(freeze: str | int, depth: int) -> int:
    known = {"none": 0, "all": depth, **{str(count): count for count in range(depth + 1)}}
    if str(freeze) not in known:
        raise ConfigError(f"model.freeze={freeze} is not one of none, all, or a number of blocks from 0 to {depth}")
    return known[str(freeze)]


def _check(size: Size, config: ImageModelConfig) -> None:
    unit = 4 * size.num_heads
    if size.embed_dim % unit:
        raise ConfigError(
            f"model.embed_dim={size.embed_dim} does not divide into num_heads={size.num_heads} heads of a multiple of "
            f"4 elements; the nearest is embed_dim={max(round(size.embed_dim / unit), 1) * unit}"
        )
    rates = {"drop_path": config.drop_path, "dropout": config.dropout, "lora.dropout": config.lora.dropout}
    for key, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ConfigError(f"model.{key}={rate} is not a probability below 1")
