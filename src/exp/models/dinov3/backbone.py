"""The DINOv3 vision transformer (Siméoni et al., arXiv 2508.10104), written from the paper.

Pre-norm blocks over ``[CLS][storage tokens][patches]``. There is no learned position embedding: queries and keys of the
patches are rotated by their place in the image (axial RoPE), so images of any size go in. Names of weights are those of
the published checkpoints (:mod:`exp.models.dinov3.weights` reads them).

Shapes below: B images, H x W pixels, h x w patches, N = 1 + storage tokens + h * w tokens, D elements per token.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import ContextManager, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.compat import has_fused_attention, recompute_in_backward
from exp.errors import ConfigError

__all__ = ["SIZES", "Features", "Size", "VisionTransformer"]


@dataclass(frozen=True)
class Size:
    """One row of the paper's table: what makes a model of the family.

    Attributes:
        embed_dim: elements of a token (D).
        depth: blocks.
        num_heads: attention heads.
        hidden_dim: width of the feed-forward part.
        gated: feed-forward part is SwiGLU (arXiv 2002.05202) instead of a GELU MLP.
        storage_tokens: register tokens (arXiv 2309.16588).
    """

    embed_dim: int
    depth: int
    num_heads: int
    hidden_dim: int
    gated: bool = False
    storage_tokens: int = 4


# SwiGLU "x6" and "x3" in the paper count both input projections and keep the parameters of an MLP: a third less wide.
SIZES = {
    "tiny": Size(192, 4, 3, 768),  # not published: for quick runs from random weights
    "vits16": Size(384, 12, 6, 1536),
    "vits16plus": Size(384, 12, 6, 1536, gated=True),
    "vitb16": Size(768, 12, 12, 3072),
    "vitl16": Size(1024, 24, 16, 4096),
    "vitl16plus": Size(1024, 24, 16, 4096, gated=True),
    "vith16plus": Size(1280, 32, 20, 5120, gated=True),
    "vit7b16": Size(4096, 40, 32, 8192, gated=True),
}
"""The sizes by name."""

_ROPE_BASE = 100.0
_EPS = 1e-5


@dataclass
class Features:
    """What one block gives, after the final norm.

    Attributes:
        cls: (B, D).
        patches: (B, h, w, D), row by row from the top left.
    """

    cls: torch.Tensor
    patches: torch.Tensor


class RotaryEmbedding(nn.Module):
    """Angles by which queries and keys are rotated (RoFormer, arXiv 2104.09864, along both axes of the image).

    Patch centres are scaled to [-1, 1] along each axis; a head's elements form pairs, half of them turned by the row's
    coordinate, half by the column's, with periods from 1 to (nearly) 100. Computed in float32 at any precision.

    Args:
        head_dim: elements of a head; a multiple of 4.
        rescale: in training, coordinates are multiplied by exp(u), u uniform in [-log rescale, log rescale]; None: not.
    """

    def __init__(self, head_dim: int, rescale: float | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.rescale = rescale
        self._kept: dict[tuple[int, int, int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, height: int, width: int, prefix: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the angles of all tokens.

        Args:
            height: patches along the height (h).
            width: patches along the width (w).
            prefix: tokens before the patches; their angle is zero, so that no token needs to be set apart.
            device: where the result is to be.

        Returns:
            Two tensors (N, head_dim / 2), float32: pairs are (i, i + head_dim / 2).
        """
        if self.training and self.rescale is not None:
            bound = math.log(self.rescale)
            return self._tables(height, width, prefix, device, math.exp(float(torch.empty(()).uniform_(-bound, bound))))
        key = (height, width, prefix, str(device))
        if key not in self._kept:
            if len(self._kept) >= 16:  # images of many sizes
                self._kept.clear()
            self._kept[key] = self._tables(height, width, prefix, device, 1.0)
        return self._kept[key]

    def _tables(
        self, height: int, width: int, prefix: int, device: torch.device, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # On the CPU, then moved: it is small, and the same on every device.
        quarter = self.head_dim // 4
        periods = _ROPE_BASE ** (torch.arange(quarter, dtype=torch.float32) / quarter)
        rows, columns = (
            2.0 * (torch.arange(0.5, count, dtype=torch.float32) / count) - 1.0 for count in (height, width)
        )
        turns = torch.cat(
            [
                (rows[:, None, None] / periods).expand(height, width, quarter),
                (columns[None, :, None] / periods).expand(height, width, quarter),
            ],
            dim=-1,
        )
        angles = F.pad((2.0 * math.pi * scale * turns).flatten(0, 1), (0, 0, prefix, 0))
        return angles.cos().to(device), angles.sin().to(device)


class Attention(nn.Module):
    """Multi-head self-attention with rotated queries and keys; keys have no bias.

    Args:
        dim: elements of a token (D).
        num_heads: heads.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.bias_mask: torch.Tensor
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        # Published weights hold a bias for keys as well, and a mask that zeroes it.
        mask = torch.ones(3, dim)
        mask[1] = 0.0
        self.register_buffer("bias_mask", mask.flatten(), persistent=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            x: (B, N, D).
            cos: (N, D / heads / 2), of :class:`RotaryEmbedding`.
            sin: the same shape.

        Returns:
            (B, N, D).
        """
        batch, tokens, dim = x.shape
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias * self.bias_mask)
        # (3, B, heads, N, D / heads)
        query, key, value = qkv.view(batch, tokens, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        query, key = (_rotate(part, cos, sin).to(value.dtype) for part in (query, key))
        if has_fused_attention():
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            weights = torch.softmax((query * (dim // self.num_heads) ** -0.5) @ key.transpose(-2, -1), dim=-1)
            mixed = weights.to(value.dtype) @ value
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + half) of the last axis; in float32, as the tables are."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Mlp(nn.Module):
    """GELU feed-forward part: D -> hidden -> D."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGlu(nn.Module):
    """Gated feed-forward part (Shazeer, arXiv 2002.05202): D -> 2 x hidden -> D."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(dim, hidden)
        self.w3 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


class LayerScale(nn.Module):
    """A factor per element on a residual branch (CaiT, arXiv 2103.17239)."""

    def __init__(self, dim: int, init: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        return x * self.gamma


class Block(nn.Module):
    """Attention and feed-forward part, each with norm, layer scale, drop path and a residual connection.

    Args:
        size: of the model.
        layer_scale: initial value of the layer scales.
        drop_path: probability with which a sample skips a branch in training (arXiv 1603.09382).
    """

    def __init__(self, size: Size, layer_scale: float, drop_path: float) -> None:
        super().__init__()
        dim = size.embed_dim
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(dim, eps=_EPS)
        self.attn = Attention(dim, size.num_heads)
        self.ls1 = LayerScale(dim, layer_scale)
        self.norm2 = nn.LayerNorm(dim, eps=_EPS)
        self.mlp: nn.Module = (SwiGlu if size.gated else Mlp)(dim, size.hidden_dim)
        self.ls2 = LayerScale(dim, layer_scale)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = x + self._dropped(self.ls1(self.attn(self.norm1(x), cos, sin)))
        return x + self._dropped(self.ls2(self.mlp(self.norm2(x))))

    def _dropped(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training or self.drop_path == 0.0:
            return branch
        keep = 1.0 - self.drop_path
        kept = torch.empty((branch.shape[0], 1, 1), device=branch.device, dtype=branch.dtype).bernoulli_(keep)
        return branch * (kept / keep)


class PatchEmbedding(nn.Module):
    """Non-overlapping patches of the image, each mapped to one token."""

    def __init__(self, patch_size: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B, D, h, w)."""
        return self.proj(image)


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
        self.blocks = nn.ModuleList(Block(size, layer_scale, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, eps=_EPS)
        self._initialise()
        self.frozen_blocks = _frozen_blocks(freeze, size.depth)
        for parameter in self._frozen_parameters(freeze == "all"):
            parameter.requires_grad_(False)

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
            One :class:`Features` for each of ``blocks``, in their order; h = ceil(H / patch size).
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
            normed = self.norm(kept[index])
            features.append(Features(normed[:, 0], normed[:, prefix:].unflatten(1, (height, width))))
        return features

    def _embed(self, image: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """Tokens (B, N, D), and the patches along height and width."""
        bottom, right = (-extent % self.patch_size for extent in image.shape[-2:])
        if bottom or right:
            image = F.pad(image, (0, right, 0, bottom))
        patches = self.patch_embed(image)
        batch, _, height, width = patches.shape
        prefix = [token.to(patches.dtype).expand(batch, -1, -1) for token in (self.cls_token, self.storage_tokens)]
        return torch.cat([*prefix, patches.flatten(2).transpose(1, 2)], dim=1), height, width

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
