"""The DINOv3 vision transformer (Siméoni et al., arXiv 2508.10104), written from the paper.

Pre-norm blocks over ``[CLS][storage tokens][patches]``. There is no learned position embedding: queries and keys of the
patches are rotated by their place in the image (axial RoPE), so images of any size go in. Names of weights are those of
the published checkpoints (:mod:`exp.vision.dinov3.weights` reads them).

Shapes below: B images, H x W pixels, h x w patches, N = 1 + storage tokens + h * w tokens, D elements per token.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ContextManager, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.hardware.compat import autocast_disabled, recompute_in_backward
from exp.vision.dinov3.blocks import NORM_EPS, Block, PatchEmbedding, RotaryEmbedding
from exp.vision.dinov3.lora import NO_UPDATES, LoraSettings, is_of_lora, merged
from exp.vision.dinov3.sizes import Size

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
        patch_size: pixels along each side of a patch.
        in_channels: of the image (C).
        layer_scale: initial value of the layer scales; the paper's 1e-5 wants long training from random weights.
        drop_path: probability of skipping a branch in the last block; it grows linearly from 0 in the first.
        freeze: ``none``, ``all``, or the number of first blocks that stay as they are, with all before them.
        activation_checkpointing: recompute each block in the backward pass instead of keeping its activations.
        rope_rescale: see :class:`RotaryEmbedding`.
        lora: low-rank updates, which are all that is trained then; frozen first blocks have none.

    Raises:
        ConfigError: the settings do not go together.
    """

    def __init__(
        self,
        size: Size,
        patch_size: int = 16,
        in_channels: int = 3,
        layer_scale: float = 1e-5,
        drop_path: float = 0.0,
        freeze: str | int = "none",
        activation_checkpointing: bool = False,
        rope_rescale: float | None = None,
        lora: LoraSettings = NO_UPDATES,
    ) -> None:
        super().__init__()
        _check(size, patch_size, in_channels, drop_path, rope_rescale)
        self.size = size
        self.patch_size = patch_size
        self.embed_dim = size.embed_dim
        self.activation_checkpointing = activation_checkpointing
        dim = size.embed_dim
        self.patch_embed = PatchEmbedding(patch_size, in_channels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.storage_tokens = nn.Parameter(torch.zeros(1, size.storage_tokens, dim))
        self.rope = RotaryEmbedding(dim // size.num_heads, rope_rescale)
        rates = [drop_path * index / max(size.depth - 1, 1) for index in range(size.depth)]
        self.frozen_blocks = _frozen_blocks(freeze, size.depth)
        if lora.rank and self.frozen_blocks == size.depth:
            raise ConfigError(f"model.freeze={freeze} leaves no block for model.lora.rank={lora.rank}; set freeze=none")
        self.blocks = nn.ModuleList(
            Block(size, layer_scale, rate, NO_UPDATES if index < self.frozen_blocks else lora)
            for index, rate in enumerate(rates)
        )
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        self._initialise()
        for parameter in self._frozen_parameters(freeze == "all"):
            parameter.requires_grad_(False)
        if lora.rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_of_lora(name))

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.storage_tokens, std=0.02)

    def _frozen_parameters(self, everything: bool) -> Iterator[nn.Parameter]:
        if everything:
            yield from self.parameters()
        elif self.frozen_blocks:
            yield from self.patch_embed.parameters()
            yield from (self.cls_token, self.storage_tokens)
            for block in self.blocks[: self.frozen_blocks]:
                yield from block.parameters()

    def train(self, mode: bool = True) -> VisionTransformer:
        """As torch's; frozen blocks never drop a branch."""
        super().train(mode)
        for block in self.blocks[: self.frozen_blocks]:
            block.eval()
        return self

    def forward(self, image: torch.Tensor, blocks: Sequence[int] | None = None) -> list[Features]:
        """Features of the image.

        Args:
            image: (B, C, H, W), normalised; padded with zeros at right and bottom where the patch size does not divide.
            blocks: which blocks' outputs, from 0; None: the last. Later blocks than the last of these are not run.

        Returns:
            One :class:`Features` for each of ``blocks``, in their order, float32 under autocast too; h = ceil(H / patch
            size).
        """
        wanted = [len(self.blocks) - 1] if blocks is None else list(blocks)
        frozen: ContextManager[None] = torch.no_grad() if self.frozen_blocks else contextlib.nullcontext()
        with frozen:
            tokens, height, width = self._embed(image)
        prefix = tokens.shape[1] - height * width
        cos, sin = self.rope(height, width, prefix, image.device)
        kept: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks[: max(wanted) + 1]):
            if index < self.frozen_blocks:
                with torch.no_grad():
                    tokens = block(tokens, cos, sin)
            elif self.activation_checkpointing and self.training:
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
    if freeze in ("none", "all"):
        return 0 if freeze == "none" else depth
    text = str(freeze)
    if not text.isdecimal() or int(text) > depth:
        raise ConfigError(f"model.freeze={freeze} is not one of none, all, or a number of blocks from 0 to {depth}")
    return int(text)


def _check(size: Size, patch_size: int, in_channels: int, drop_path: float, rope_rescale: float | None) -> None:
    least = {"embed_dim": size.embed_dim, "depth": size.depth, "num_heads": size.num_heads, "patch_size": patch_size,
             "in_channels": in_channels}  # fmt: skip
    for name, value in least.items():
        if value < 1:
            raise ConfigError(f"model.{name}={value} must be at least 1")
    if size.embed_dim % (4 * size.num_heads):
        unit = 4 * size.num_heads
        raise ConfigError(
            f"model.embed_dim={size.embed_dim} does not divide into num_heads={size.num_heads} heads of a multiple of "
            f"4 elements; the nearest is embed_dim={max(round(size.embed_dim / unit), 1) * unit}"
        )
    if not 0.0 <= drop_path < 1.0:
        raise ConfigError(f"model.drop_path={drop_path} is not a probability below 1")
    if rope_rescale is not None and rope_rescale <= 1.0:
        raise ConfigError(f"model.rope_rescale={rope_rescale} must be more than 1, or null")
