"""The DINOv3 vision transformer (Siméoni et al., arXiv 2508.10104), written from the paper.

Pre-norm blocks over ``[CLS][storage tokens][patches]``. There is no learned position embedding: queries and keys of the
patches are rotated by their position in the image (axial RoPE), so images may have any size. Weights have the names of
the published checkpoints (:mod:`exp.vision.dinov3.weights` reads them).

Shapes below: B images, H x W pixels, h x w patches, N = 1 + storage tokens + h * w tokens, D elements per token.

LoRA: low-rank updates of frozen linear layers (Hu et al., arXiv 2106.09685).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.hardware.compat import autocast_disabled, has_fused_attention, is_compiling, recompute_in_backward
from exp.models.dropout import Dropout, per_sample_active, sample_mask
from exp.vision.dinov3.keys import ImageModelConfig, LoraConfig

__all__ = ["NORM_EPS", "ROPE_BASE", "SIZES", "Block", "Features", "PatchEmbedding", "Size", "VisionTransformer",
           "is_lora", "merge_lora", "rope_periods"]  # fmt: skip


@dataclass(frozen=True)
class Size:
    """The dimensions of a model of the family, a row of the paper's table.

    Attributes:
        embed_dim: elements of a token (D).
        depth: blocks.
        num_heads: attention heads.
        hidden_dim: hidden units of the feed-forward layers.
        gated: whether these are SwiGLU (arXiv 2002.05202) instead of a GELU MLP.
        storage_tokens: register tokens (arXiv 2309.16588).
    """

    embed_dim: int
    depth: int
    num_heads: int
    hidden_dim: int
    gated: bool = False
    storage_tokens: int = 4


# The paper's "x6" and "x3" of SwiGLU count both input projections, with as many parameters as an MLP: x4 and x2 here.
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


_GROUPS = {"attention": ("q", "k", "v", "proj"), "mlp": ("fc1", "fc2", "w1", "w2", "w3")}
_NAME = re.compile(r"^(?:.*\.)?lora\.(\w+)\.(down|up|scale)$")


class LowRank(nn.Module):
    """A low-rank update, which is added to a linear layer's output: alpha / rank times up(down(x)); initially zero.

    The factor is part of the state dict, so that a checkpoint is enough to merge weights.

    Args:
        dim_in: inputs of the layer.
        dim_out: outputs of the layer.
        config: ``rank``, ``alpha`` and ``dropout`` are read.
    """

    scale: torch.Tensor

    def __init__(self, dim_in: int, dim_out: int, config: LoraConfig) -> None:
        super().__init__()
        self.dropout = Dropout(config.dropout)
        self.down = nn.Parameter(torch.empty(config.rank, dim_in))
        self.up = nn.Parameter(torch.zeros(dim_out, config.rank))
        self.register_buffer("scale", torch.tensor(config.alpha / config.rank))
        nn.init.kaiming_uniform_(self.down, a=5**0.5)  # like torch's nn.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim_in) -> (..., dim_out)."""
        # A 0-dim factor does not promote the dtype under autocast.
        return F.linear(F.linear(self.dropout(x), self.down), self.up) * self.scale


def build_updates(config: LoraConfig, layers: Mapping[str, tuple[int, int]]) -> nn.ModuleDict:
    """The updates of a module's layers, by name; empty if the rank is 0.

    Args:
        config: ``targets`` names the layers with an update.
        layers: inputs and outputs of each layer, by its name.

    Raises:
        ConfigError: ``targets`` names a layer that no size has.
    """
    if not config.rank:
        return nn.ModuleDict()
    selected = [name for target in config.targets for name in _GROUPS.get(target, (target,))]
    layer_names = [name for group in _GROUPS.values() for name in group]
    if not set(selected) <= set(layer_names):
        raise ConfigError(
            f"model.lora.targets={list(config.targets)} must name some of {', '.join([*_GROUPS, *layer_names])}"
        )
    return nn.ModuleDict({name: LowRank(*layers[name], config) for name in layer_names
                          if name in selected and name in layers})  # fmt: skip


def is_lora(name: str) -> bool:
    """Whether a tensor, by its name, belongs to a low-rank update."""
    return _NAME.match(name) is not None


def merge_lora(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge updates into the weights of their layers: W + scale * up @ down, in float32.

    Args:
        state: tensors by the names of :class:`exp.vision.dinov3.backbone.VisionTransformer`, with any prefix.

    Returns:
        The state without updates: new tensors for layers with an update, else the tensors of ``state``.
    """
    merged = {key: value for key, value in state.items() if not is_lora(key)}
    for down in [key for key in state if is_lora(key) and key.endswith(".down")]:
        prefix, _, name = down[: -len(".down")].rpartition("lora.")
        part = "qkv".find(name)
        layer = f"{prefix}{name if part < 0 else 'qkv'}.weight"
        up, scale = f"{down[:-4]}up", f"{down[:-4]}scale"
        update = state[scale].float() * (state[up].float() @ state[down].float())
        weight = merged[layer].float().clone()
        first = max(part, 0) * len(update)
        weight[first : first + len(update)] += update
        merged[layer] = weight.to(merged[layer].dtype)
    return merged


# Epsilon of all layer norms.
NORM_EPS = 1e-5

# Base of the periods of the rotary embedding; the longest period is slightly shorter.
ROPE_BASE = 100.0


def rope_periods(head_dim: int, base: float = ROPE_BASE) -> torch.Tensor:
    """Periods of the rotary embedding, float32 (head_dim / 4,): base ** (k / (head_dim / 4)) for k = 0, 1, ..."""
    quarter = head_dim // 4
    return base ** (torch.arange(quarter, dtype=torch.float32) / quarter)


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
        self.lora = build_updates(lora, dict.fromkeys(("q", "k", "v", "proj"), (dim, dim)))

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
            qkv = torch.cat([_add_update(self, name, x, part) for name, part in parts], dim=-1)
        # (3, B, heads, N, D / heads)
        query, key, value = qkv.view(batch, tokens, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        query, key = (_rotate(part, cos, sin).to(value.dtype) for part in (query, key))
        if has_fused_attention():
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            weights = torch.softmax((query * (dim // self.num_heads) ** -0.5) @ key.transpose(-2, -1), dim=-1)
            mixed = weights.to(value.dtype) @ value
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, dim)
        return _add_update(self, "proj", mixed, self.proj(mixed))


def _add_update(module: Any, name: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The output ``y`` of a layer plus its low-rank update, if it has one, of the layer's input ``x``."""
    return y + module.lora[name](x) if name in module.lora else y


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (i, i + half) of the last axis; the result is float32, like the tables."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Mlp(nn.Module):
    """GELU feed-forward layers: D -> hidden -> D."""

    def __init__(self, dim: int, hidden: int, lora: LoraConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.lora = build_updates(lora, {"fc1": (dim, hidden), "fc2": (hidden, dim)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        hidden = F.gelu(_add_update(self, "fc1", x, self.fc1(x)))
        return _add_update(self, "fc2", hidden, self.fc2(hidden))


class SwiGlu(nn.Module):
    """Gated feed-forward layers (Shazeer, arXiv 2002.05202): D -> 2 x hidden -> D."""

    def __init__(self, dim: int, hidden: int, lora: LoraConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(dim, hidden)
        self.w3 = nn.Linear(hidden, dim)
        self.lora = build_updates(lora, {"w1": (dim, hidden), "w2": (dim, hidden), "w3": (hidden, dim)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)."""
        gate, value = (_add_update(self, name, x, layer(x)) for name, layer in (("w1", self.w1), ("w2", self.w2)))
        hidden = F.silu(gate) * value
        return _add_update(self, "w3", hidden, self.w3(hidden))


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
        lora: low-rank updates of the linear layers.
    """

    def __init__(self, size: Size, layer_scale_init: float, drop_path_rate: float, lora: LoraConfig) -> None:
        super().__init__()
        dim, feed_forward = size.embed_dim, SwiGlu if size.gated else Mlp
        self.drop_path_rate = drop_path_rate
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.attn = Attention(dim, size.num_heads, lora)
        self.ls1 = LayerScale(dim, layer_scale_init)
        self.norm2 = nn.LayerNorm(dim, eps=NORM_EPS)
        self.mlp: nn.Module = feed_forward(dim, size.hidden_dim, lora)
        self.ls2 = LayerScale(dim, layer_scale_init)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = x + self._drop_path(self.ls1(self.attn(self.norm1(x), cos, sin)))
        return x + self._drop_path(self.ls2(self.mlp(self.norm2(x))), slot=1)

    def _drop_path(self, branch: torch.Tensor, slot: int = 0) -> torch.Tensor:
        if not self.training or self.drop_path_rate == 0.0:
            return branch
        if per_sample_active(self):
            return branch * sample_mask(self, branch, self.drop_path_rate, slot, per_sample=True)
        keep = 1.0 - self.drop_path_rate
        keep_mask = torch.empty((branch.shape[0], 1, 1), device=branch.device, dtype=branch.dtype).bernoulli_(keep)
        return branch * (keep_mask / keep)


class PatchEmbedding(nn.Module):
    """Non-overlapping patches of the image, each mapped to one token."""

    def __init__(self, patch_size: int, in_channels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B, D, h, w)."""
        return self.proj(image)


@dataclass
class Features:
    """Features of one block, after the final norm.

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
        config: the keys of ``model``, of which ``size`` and the like are not read here. With low-rank updates nothing
            else of the backbone is trained; frozen first blocks have no updates.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    def __init__(self, size: Size, in_channels: int = 3, config: ImageModelConfig | None = None) -> None:
        super().__init__()
        config = config or ImageModelConfig()
        _check(size)
        self.size = size
        self.patch_size = config.patch_size
        self.embed_dim = dim = size.embed_dim
        self.activation_checkpointing = config.activation_checkpointing
        self.patch_embed = PatchEmbedding(config.patch_size, in_channels, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.storage_tokens = nn.Parameter(torch.zeros(1, size.storage_tokens, dim))
        self.rope = RotaryEmbedding(dim // size.num_heads)
        self.frozen_blocks = _frozen_blocks(config.freeze, size.depth)
        blocks: list[nn.Module] = []
        for index in range(size.depth):
            lora = LoraConfig() if index < self.frozen_blocks else config.lora
            drop_path_rate = config.drop_path_rate * index / max(size.depth - 1, 1)
            blocks.append(Block(size, config.layer_scale_init, drop_path_rate, lora))
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
                parameter.requires_grad_(is_lora(name))
            if not any(map(is_lora, self.state_dict())):
                raise ConfigError(
                    f"model.lora.targets={list(config.lora.targets)} names no layer of model.size that "
                    f"model.freeze={config.freeze} leaves"
                )

    def train(self, mode: bool = True) -> VisionTransformer:
        """Like :meth:`torch.nn.Module.train`, but frozen blocks stay in eval mode: they never drop a branch."""
        super().train(mode)
        for block in self.blocks[: self.frozen_blocks]:
            block.eval()
        return self

    def forward(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> list[Features]:
        """Features of the image.

        Args:
            image: (B, C, H, W), normalized; padded with zeros at right and bottom to a multiple of the patch size.
            out_indices: numbers of the blocks whose outputs are returned, from 0; None: the last. Blocks after the last
                of these are not run.

        Returns:
            One :class:`Features` for each of ``out_indices``, in their order, float32 also under autocast; h = ceil(H /
            patch size).
        """
        indices = [len(self.blocks) - 1] if out_indices is None else list(out_indices)
        tokens, height, width = self._embed(image)
        prefix = tokens.shape[1] - height * width
        cos, sin = self.rope(height, width, prefix, image.device)
        outputs: dict[int, torch.Tensor] = {}
        for index, block in enumerate(self.blocks[: max(indices) + 1]):
            if self.activation_checkpointing and self.training and index >= self.frozen_blocks:
                tokens = recompute_in_backward(block, tokens, cos, sin)
            else:
                tokens = block(tokens, cos, sin)
            if index in indices:
                outputs[index] = tokens
        features = []
        for index in indices:
            with autocast_disabled(image.device.type):  # elements of deep layers exceed the range of float16
                normed = self.norm(outputs[index].float())
            # Not unflatten, which torch 1.10 cannot trace.
            patches = normed[:, prefix:].view(normed.shape[0], height, width, normed.shape[-1])
            features.append(Features(normed[:, 0], patches))
        return features

    def _embed(self, image: torch.Tensor) -> tuple[torch.Tensor, int, int]:
        """Tokens (B, N, D), and the number of patches along height and width."""
        bottom, right = (-extent % self.patch_size for extent in image.shape[-2:])
        if bottom or right:
            image = F.pad(image, (0, right, 0, bottom))
        # The residual stream is float32 in all blocks, also under autocast.
        patches = self.patch_embed(image).float()
        batch, _, height, width = patches.shape
        prefix = [token.expand(batch, -1, -1) for token in (self.cls_token, self.storage_tokens)]
        return torch.cat([*prefix, patches.flatten(2).transpose(1, 2)], dim=1), height, width

    def merge_updates(self) -> None:
        """Add the low-rank updates to the layers' weights, and remove them; outputs stay the same."""
        state = merge_lora(self.state_dict())
        for module in self.modules():
            if hasattr(module, "lora"):
                module.lora = nn.ModuleDict()
        self.load_state_dict(state)

    def layer_of(self, name: str) -> int:
        """The layer that a parameter belongs to, for layer-wise decay of learning rates.

        Args:
            name: as in ``named_parameters()``.

        Returns:
            0 for parameters before the blocks, i + 1 for block i, depth + 1 for the final norm.
        """
        parts = name.split(".")
        if parts[0] == "blocks":
            return int(parts[1]) + 1
        return len(self.blocks) + 1 if parts[0] == "norm" else 0


def _frozen_blocks(freeze: str | int, depth: int) -> int:
    counts = {"none": 0, "all": depth, **{str(count): count for count in range(depth + 1)}}
    if str(freeze) not in counts:
        raise ConfigError(f"model.freeze={freeze} is not one of none, all, or a number of blocks from 0 to {depth}")
    return counts[str(freeze)]


def _check(size: Size) -> None:
    unit = 4 * size.num_heads
    if size.embed_dim % unit:
        raise ConfigError(
            f"model.embed_dim={size.embed_dim} does not divide into num_heads={size.num_heads} heads of a multiple of "
            f"4 elements; the nearest is embed_dim={max(round(size.embed_dim / unit), 1) * unit}"
        )
