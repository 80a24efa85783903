"""The DINOv3 vision transformer (Siméoni et al., arXiv 2508.10104), written from the paper.

Pre-norm blocks over ``[CLS][storage tokens][patches]``. There is no learned position embedding: queries and keys of the
patches are rotated by their position in the image (axial RoPE), so images may have any size. Weights have the names of
the published checkpoints (:mod:`exp.vision.backbones.vit_weights` reads them).

Shapes below: B images, H x W pixels, h x w patches, N = 1 + storage tokens + h * w tokens, D elements per token.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.hardware.compat import autocast_disabled, has_fused_attention, is_compiling, recompute_in_backward
from exp.models.dropout import drop_path
from exp.vision.backbones import vit_weights
from exp.vision.backbones.base import Backbone, Features, Published
from exp.vision.backbones.published import find_size
from exp.vision.backbones.vit_weights import NORM_EPS, SIZES, Size, rope_periods
from exp.vision.keys import VisionTransformerConfig

__all__ = ["Block", "PatchEmbedding", "VisionTransformer", "attend", "resolve_size"]


class RotaryEmbedding(nn.Module):
    """Angles by which queries and keys are rotated (RoFormer, arXiv 2104.09864, along both axes of the image).

    Patch centers are scaled to [-1, 1] along each axis. A head's elements form pairs: half of them are rotated by the
    row's coordinate, half by the column's, with periods from 1 to nearly 100. Always computed in float32.

    The periods are part of the state dict, since the authors' weights were trained with periods rounded to bfloat16 (up
    to 0.4 % off) and contain them. Weights without periods (Hugging Face, timm) get float32 periods, as these libraries
    compute them.

    Args:
        head_dim: elements of a head; a multiple of 4.
    """

    periods: torch.Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("periods", rope_periods(head_dim))
        # A copy on the CPU, where the tables are made: copying the buffer from a device would synchronize.
        self._periods = rope_periods(head_dim)
        self._cached_tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def _load_from_state_dict(self, *args: Any, **more: Any) -> None:
        super()._load_from_state_dict(*args, **more)
        self._periods = self.periods.detach().cpu().float().clone()
        self._cached_tables.clear()

    def forward(self, height: int, width: int, prefix: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the angles of all tokens.

        Args:
            height: patches along the height (h).
            width: patches along the width (w).
            prefix: tokens before the patches; their angle is zero, so that all tokens are treated alike.
            device: of the result.

        Returns:
            Two tensors (N, head_dim / 2), float32: pairs are (i, i + head_dim / 2).
        """
        if is_compiling():  # a look for what is kept would be compiled, once for each answer
            return self._tables(height, width, prefix, self.periods.float())
        key = (height, width, prefix, str(device))
        if key not in self._cached_tables:
            if len(self._cached_tables) >= 16:  # images of many sizes
                self._cached_tables.clear()
            # Computed on the CPU, then moved: the same values on every device.
            cos, sin = self._tables(height, width, prefix, self._periods)
            self._cached_tables[key] = cos.to(device), sin.to(device)
        return self._cached_tables[key]

    @staticmethod
    def _tables(height: int, width: int, prefix: int, periods: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kind: Any = {"dtype": torch.float32, "device": periods.device}
        centers = (2.0 * (torch.arange(count, **kind) + 0.5) / count - 1.0 for count in (height, width))
        grid = torch.stack(torch.meshgrid(*centers, indexing="ij"), dim=-1).view(-1, 2, 1)
        angles = F.pad((2.0 * math.pi * (grid / periods)).flatten(1), (0, 0, prefix, 0))
        return angles.cos(), angles.sin()


class PackedLinear(nn.Linear):
    """Projections to queries, keys and values; keys have no bias.

    Published weights hold a bias for keys as well, and a mask that zeroes it.

    Args:
        dim: elements of a token (D).
    """

    parts = ("q", "k", "v")

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 3 * dim)
        self.bias_mask: torch.Tensor
        mask = torch.ones(3, dim)
        mask[1] = 0.0
        self.register_buffer("bias_mask", mask.flatten(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, D) -> (B, N, 3 D)."""
        assert self.bias is not None
        return F.linear(x, self.weight, self.bias * self.bias_mask)


class Attention(nn.Module):
    """Multi-head self-attention with rotated queries and keys.

    Args:
        dim: elements of a token (D).
        num_heads: heads.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = PackedLinear(dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            x: (B, N, D).
            cos: (N, D / heads / 2), of :class:`RotaryEmbedding`.
            sin: the same shape.

        Returns:
            (B, N, D).
        """
        mixed = attend(*self._project(x, cos, sin))
        return self.proj(mixed.transpose(1, 2).reshape(x.shape))

    def weights(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The weights of all tokens for each token, (B, heads, N, N), float32; arguments as of :meth:`forward`."""
        query, key, _ = self._project(x, cos, sin)
        return torch.softmax(((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)).float(), dim=-1)

    def _project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rotated queries and keys, and values: (B, heads, N, D / heads) each."""
        batch, tokens, dim = x.shape
        packed = self.qkv(x).view(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        query, key = (_rotate(part, cos, sin).to(value.dtype) for part in (query, key))
        return query, key, value


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Scaled dot-product attention of (B, heads, N, E) each, fused where the device can."""
    if has_fused_attention():
        return F.scaled_dot_product_attention(query, key, value)
    return attention_weights(query, key).to(value.dtype) @ value


def attention_weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(B, heads, N, E) and (B, heads, M, E) -> (B, heads, N, M); each row has the sum 1."""
    return torch.softmax((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1), dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + half) of the last axis; the result is float32, like the tables."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Mlp(nn.Module):
    """GELU feed-forward layers: D -> hidden -> D."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        return self.fc2(F.gelu(self.fc1(x)))


class SwiGlu(nn.Module):
    """Gated feed-forward layers (Shazeer, arXiv 2002.05202): D -> 2 x hidden -> D."""

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
    """Attention and feed-forward layers, each with norm, layer scale, drop path and a residual connection.

    Args:
        size: of the model.
        layer_scale_init: initial value of the layer scales.
        drop_path_rate: probability with which a sample skips a branch in training (arXiv 1603.09382).
    """

    def __init__(self, size: Size, layer_scale_init: float = 1e-5, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        dim, feed_forward = size.embed_dim, SwiGlu if size.gated else Mlp
        self.drop_path_rate = drop_path_rate
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, size.num_heads)
        self.ls1 = LayerScale(dim, layer_scale_init)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp: nn.Module = feed_forward(dim, size.hidden_dim)
        self.ls2 = LayerScale(dim, layer_scale_init)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = x + drop_path(self, self.ls1(self.attn(self.norm1(x), cos, sin)), self.drop_path_rate)
        return x + drop_path(self, self.ls2(self.mlp(self.norm2(x))), self.drop_path_rate, slot=1)


class PatchEmbedding(nn.Module):
    """Non-overlapping patches of the image, each mapped to one token."""

    def __init__(self, patch_size: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B, D, h, w)."""
        return self.proj(image)


class VisionTransformer(Backbone):
    """The backbone; its levels are the blocks, all of one resolution.

    Args:
        in_channels: of the image (C).
        **keys: of :class:`exp.vision.keys.VisionTransformerConfig`.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    has_cls = True
    input_weights = ("patch_embed.proj.weight",)
    linear_groups: ClassVar[Mapping[str, Sequence[str]]] = {
        "attention": ("q", "k", "v", "proj"),
        "mlp": ("fc1", "fc2", "w1", "w2", "w3"),
    }

    def __init__(self, in_channels: int = 3, **keys: Any) -> None:
        config = VisionTransformerConfig(**keys)
        super().__init__(in_channels, config.out_indices)
        self.size = size = resolve_size(config)
        self.patch_size = config.patch_size
        self.embed_dim = dim = size.embed_dim
        self.activation_checkpointing = config.activation_checkpointing
        self.level_channels, self.level_strides = [dim] * size.depth, [config.patch_size] * size.depth
        self.select_levels(None)
        self.patch_embed = PatchEmbedding(config.patch_size, in_channels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.storage_tokens = nn.Parameter(torch.zeros(1, size.storage_tokens, dim))
        self.rope = RotaryEmbedding(dim // size.num_heads)
        rates = [config.drop_path_rate * index / max(size.depth - 1, 1) for index in range(size.depth)]
        self.blocks = nn.ModuleList(Block(size, config.layer_scale_init, rate) for rate in rates)
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for token in (self.cls_token, self.storage_tokens):
            nn.init.normal_(token, std=0.02)

    def stages(self) -> list[list[nn.Module]]:
        """The blocks."""
        return [[block] for block in self.blocks]

    def forward(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> Features:
        """See :class:`exp.vision.backbones.base.Backbone`; maps are after the final norm."""
        indices = self.requested_levels(out_indices)
        tokens, cos, sin, (height, width) = self._embed(image)
        outputs: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks[: max(indices) + 1]):
            if self.activation_checkpointing and block.training:
                tokens = recompute_in_backward(block, tokens, cos, sin)
            else:
                tokens = block(tokens, cos, sin)
            if index in indices:
                outputs[index] = tokens
        maps, cls = [], []
        for index in indices:
            with autocast_disabled(image.device.type):  # elements of deep layers exceed the range of float16
                normed = self.norm(outputs[index].float())
            # Not unflatten, which torch 1.10 cannot trace; not len, which is a constant of the trace.
            prefix = normed.shape[1] - height * width
            patches = normed[:, prefix:].view(normed.shape[0], height, width, self.embed_dim)
            maps.append(patches.permute(0, 3, 1, 2))
            cls.append(normed[:, 0])
        return Features(maps, cls)

    def _embed(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, int]]:
        """Tokens (B, N, D), tables of the rotary embedding, and the number of patches along height and width."""
        # The residual stream is float32 in all blocks, also under autocast.
        patches = self.patch_embed(self.pad(image)).float()
        batch, _, height, width = patches.shape
        prefix = [token.expand(batch, -1, -1) for token in (self.cls_token, self.storage_tokens)]
        tokens = torch.cat([*prefix, patches.flatten(2).transpose(1, 2)], dim=1)
        cos, sin = self.rope(height, width, tokens.shape[1] - height * width, image.device)
        return tokens, cos, sin, (height, width)

    def attention(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> list[torch.Tensor]:
        """See :class:`exp.vision.backbones.base.Backbone`: (B, heads, N, N) of blocks, of all tokens."""
        indices = self.requested_levels(out_indices)
        tokens, cos, sin, _ = self._embed(image)
        weights: dict[int, torch.Tensor] = {}
        block: Any
        for index, block in enumerate(self.blocks[: max(indices) + 1]):
            if index in indices:
                weights[index] = block.attn.weights(block.norm1(tokens), cos, sin)
            tokens = block(tokens, cos, sin)
        return [weights[index] for index in indices]

    def layer_of(self, name: str) -> int:
        """The base's layers; the final norm is after the last block."""
        return self.num_layers - 1 if name.startswith("norm.") else super().layer_of(name)

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> Published | None:
        """Read weights with the names of the authors, of transformers or of timm."""
        return vit_weights.read_published(self, state, source)

    def check_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> None:
        """Refuse weights of another size, patch size or kind."""
        vit_weights.check_backbone(state, self.state_dict(), source)

    def write_huggingface(self, folder: Path, image_size: int, band_names: Sequence[str]) -> Sequence[str]:
        """See :class:`exp.vision.backbones.base.Backbone`; transformers computes the periods."""
        vit_weights.write_huggingface(self, folder, image_size, band_names)
        return ["rope.periods"]


def resolve_size(config: VisionTransformerConfig) -> Size:
    """The size by its keys; another ``embed_dim`` scales the feed-forward layers in proportion.

    Raises:
        ConfigError: there is no such size, or elements do not divide into heads.
    """
    default = find_size(config.size, SIZES)
    values: dict[str, Any] = {"embed_dim": config.embed_dim, "depth": config.depth, "num_heads": config.num_heads}
    changed = {name: value for name, value in values.items() if value is not None}
    hidden = default.hidden_dim * changed.get("embed_dim", default.embed_dim) // default.embed_dim
    size = dataclasses.replace(default, **changed, hidden_dim=hidden)
    unit = 4 * size.num_heads
    if size.embed_dim % unit:
        raise ConfigError(
            f"model.backbone.embed_dim={size.embed_dim} does not divide into num_heads={size.num_heads} heads of a "
            f"multiple of 4 elements; the nearest is embed_dim={max(round(size.embed_dim / unit), 1) * unit}"
        )
    return size
