"""What the DINOv3 vision transformer is made of: patch embedding, rotary embedding, and pre-norm blocks.

Shapes as in :mod:`exp.vision.dinov3.backbone`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from exp.hardware.compat import has_fused_attention
from exp.models.dropout import draws_by_sample, sample_mask
from exp.vision.dinov3.lora import updates
from exp.vision.dinov3.sizes import Size
from exp.vision.model_config import LoraConfig

__all__ = ["NORM_EPS", "ROPE_BASE", "Block", "PatchEmbedding", "RotaryEmbedding", "rope_periods"]

NORM_EPS = 1e-5
"""Of all layer norms."""

ROPE_BASE = 100.0
"""The longest period of the rotary embedding, nearly."""


def rope_periods(head_dim: int, base: float = ROPE_BASE) -> torch.Tensor:
    """(head_dim / 4,), float32: base ** (2 k / (head_dim / 2))."""
    quarter = head_dim // 4
    return base ** (torch.arange(quarter, dtype=torch.float32) / quarter)


class RotaryEmbedding(nn.Module):
    """Angles by which queries and keys are rotated (RoFormer, arXiv 2104.09864, along both axes of the image).

    Patch centers are scaled to [-1, 1] along each axis; a head's elements form pairs, half of them turned by the row's
    coordinate, half by the column's, with periods from 1 to (nearly) 100. Computed in float32 at any precision.

    The periods are part of the state, since the authors' weights were trained with periods rounded to bfloat16, up to
    0.4 % off; they hold them. A state without (Hugging Face, timm) gets them as these libraries make them, in float32.

    Args:
        head_dim: elements of a head; a multiple of 4.
    """

    periods: torch.Tensor

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("periods", rope_periods(head_dim))
        # On the CPU too: tables are made there, and asking a device for its copy would wait for it.
        self._periods = rope_periods(head_dim)
        self._kept: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def _load_from_state_dict(self, *args: Any, **more: Any) -> None:
        super()._load_from_state_dict(*args, **more)
        self._periods = self.periods.detach().cpu().float().clone()
        self._kept.clear()

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
        key = (height, width, prefix, str(device))
        if key not in self._kept:
            if len(self._kept) >= 16:  # images of many sizes
                self._kept.clear()
            # On the CPU, then moved: they are small, and the same on every device.
            centers = (2.0 * torch.arange(0.5, count, dtype=torch.float32) / count - 1.0 for count in (height, width))
            grid = torch.stack(torch.meshgrid(*centers, indexing="ij"), dim=-1).view(-1, 2, 1)
            angles = F.pad((2.0 * math.pi * (grid / self._periods)).flatten(1), (0, 0, prefix, 0))
            self._kept[key] = angles.cos().to(device), angles.sin().to(device)
        return self._kept[key]


class Attention(nn.Module):
    """Multi-head self-attention with rotated queries and keys; keys have no bias.

    Args:
        dim: elements of a token (D).
        num_heads: heads.
        lora: low-rank updates of its projections ``q``, ``k``, ``v`` and ``proj``.
    """

    def __init__(self, dim: int, num_heads: int, lora: LoraConfig) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.bias_mask: torch.Tensor
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        # Published weights hold a bias for keys as well, and a mask that zeroes it.
        mask = torch.ones(3, dim)
        mask[1] = 0.0
        self.register_buffer("bias_mask", mask.flatten(), persistent=False)
        self.lora = updates(lora, dict.fromkeys(("q", "k", "v", "proj"), (dim, dim)))

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
        if self.lora:
            parts = zip("qkv", qkv.chunk(3, dim=-1))
            qkv = torch.cat([_updated(self, name, x, part) for name, part in parts], dim=-1)
        # (3, B, heads, N, D / heads)
        query, key, value = qkv.view(batch, tokens, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        query, key = (_rotate(part, cos, sin).to(value.dtype) for part in (query, key))
        if has_fused_attention():
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            weights = torch.softmax((query * (dim // self.num_heads) ** -0.5) @ key.transpose(-2, -1), dim=-1)
            mixed = weights.to(value.dtype) @ value
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, dim)
        return _updated(self, "proj", mixed, self.proj(mixed))


def _updated(module: Any, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A layer's output ``y``, and its low-rank update's where it has one; ``x``: its input."""
    return y + module.lora[name](x) if name in module.lora else y


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + half) of the last axis; in float32, as the tables are."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Mlp(nn.Module):
    """GELU feed-forward part: D -> hidden -> D."""

    def __init__(self, dim: int, hidden: int, lora: LoraConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.lora = updates(lora, {"fc1": (dim, hidden), "fc2": (hidden, dim)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        hidden = F.gelu(_updated(self, "fc1", x, self.fc1(x)))
        return _updated(self, "fc2", hidden, self.fc2(hidden))


class SwiGlu(nn.Module):
    """Gated feed-forward part (Shazeer, arXiv 2002.05202): D -> 2 x hidden -> D."""

    def __init__(self, dim: int, hidden: int, lora: LoraConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(dim, hidden)
        self.w3 = nn.Linear(hidden, dim)
        self.lora = updates(lora, {"w1": (dim, hidden), "w2": (dim, hidden), "w3": (hidden, dim)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        gate, value = (_updated(self, name, x, layer(x)) for name, layer in (("w1", self.w1), ("w2", self.w2)))
        hidden = F.silu(gate) * value
        return _updated(self, "w3", hidden, self.w3(hidden))


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
        lora: low-rank updates of the linear layers.
    """

    def __init__(self, size: Size, layer_scale: float, drop_path: float, lora: LoraConfig) -> None:
        super().__init__()
        dim, feed_forward = size.embed_dim, SwiGlu if size.gated else Mlp
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, size.num_heads, lora)
        self.ls1 = LayerScale(dim, layer_scale)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp: nn.Module = feed_forward(dim, size.hidden_dim, lora)
        self.ls2 = LayerScale(dim, layer_scale)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = x + self._dropped(self.ls1(self.attn(self.norm1(x), cos, sin)))
        return x + self._dropped(self.ls2(self.mlp(self.norm2(x))), slot=1)

    def _dropped(self, branch: torch.Tensor, slot: int = 0) -> torch.Tensor:
        if not self.training or self.drop_path == 0.0:
            return branch
        if draws_by_sample():
            return branch * sample_mask(self, branch, self.drop_path, slot, per_sample=True)
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
