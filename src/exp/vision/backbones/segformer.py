"""SegFormer's encoder, the mix transformer (MiT; Xie et al., arXiv 2105.15203), written from the paper.

A stage is an overlapping patch embedding, blocks of attention and a feed-forward network with a depthwise convolution,
which stands in for a position embedding, and a norm. Keys and values of attention come from a smaller map.

Shapes below: B images, D elements of a token, N = h * w tokens of a stage, M of its smaller map.
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
from exp.vision.backbones.keys import MixTransformerConfig
from exp.vision.backbones.published import (
    Names,
    check_config,
    check_size,
    count_blocks,
    find_size,
    pixel_statistics,
    rename_published,
)
from exp.vision.backbones.vit import attend, attention_weights

__all__ = ["SIZES", "MixTransformer", "Size"]


class Size(NamedTuple):
    """A row of the paper's table.

    Attributes:
        depths: blocks of each stage.
        dim: elements of a token in the first stage; a multiple of it in the others.
    """

    depths: tuple[int, ...]
    dim: int


SIZES = {
    "b0": Size((2, 2, 2, 2), 32),
    "b1": Size((2, 2, 2, 2), 64),
    "b2": Size((3, 4, 6, 3), 64),
    "b3": Size((3, 4, 18, 3), 64),
    "b4": Size((3, 8, 27, 3), 64),
    "b5": Size((3, 6, 40, 3), 64),
}
"""The sizes by name."""
_HEADS = (1, 2, 5, 8)  # of each stage; each has as many elements as a token of the first stage
_REDUCTIONS = (8, 4, 2, 1)  # cells of the map along a side of a cell of the smaller one
_STRIDES = (4, 2, 2, 2)
_MLP_RATIO = 4  # hidden units of the feed-forward network for each element of a token

# What the code of a library computes with, by a part of its names. The authors' code has 1e-5 in embeddings and before
# keys and values, 1e-6 elsewhere: norm_eps has one value for all.
_EPS_BY_NAME = {"patch_embeddings.": ("transformers", 1e-5), ".0.projection.": ("mmsegmentation", 1e-6)}
_BLOCK = r"blocks.\1.\2."
_NAMES = Names.of(
    r"^(|.*?\.)(?:encoder\.patch_embeddings\.0\.proj|stages\.0\.patch_embeddings\.proj|layers\.0\.0\.projection"
    r"|patch_embed1\.proj)\.weight$",
    [
        # mmsegmentation
        (r"^layers\.(\d+)\.0\.projection\.", r"embeds.\1.proj."), (r"^layers\.(\d+)\.0\.norm\.", r"embeds.\1.norm."),
        (r"^layers\.(\d+)\.1\.(\d+)\.", _BLOCK), (r"^layers\.(\d+)\.2\.", r"norms.\1."),
        (r"\.attn\.attn\.in_proj_", ".attn.qkv."), (r"\.attn\.attn\.out_proj\.", ".attn.proj."),
        (r"\.ffn\.layers\.0\.", ".mlp.fc1."), (r"\.ffn\.layers\.1\.", ".mlp.dwconv."),
        (r"\.ffn\.layers\.4\.", ".mlp.fc2."),
        # transformers, files and modules
        (r"^encoder\.patch_embeddings\.(\d+)\.", r"embeds.\1."), (r"^stages\.(\d+)\.patch_embeddings\.", r"embeds.\1."),
        (r"^encoder\.block\.(\d+)\.(\d+)\.", _BLOCK), (r"^stages\.(\d+)\.blocks\.(\d+)\.", _BLOCK),
        (r"^encoder\.layer_norm\.(\d+)\.", r"norms.\1."), (r"^stages\.(\d+)\.layer_norm\.", r"norms.\1."),
        (r"\.(?:layer_norm_1|layernorm_before)\.", ".norm1."), (r"\.(?:layer_norm_2|layernorm_after)\.", ".norm2."),
        (r"\.attention\.output\.dense\.", ".attn.proj."), (r"\.attention\.(?:self\.)?", ".attn."),
        (r"\.attn\.(?:query|q_proj)\.", ".attn.q."), (r"\.attn\.(?:key|k_proj)\.", ".attn.k."),
        (r"\.attn\.(?:value|v_proj)\.", ".attn.v."), (r"\.attn\.o_proj\.", ".attn.proj."),
        (r"\.attn\.sequence_reduction\.sequence_reduction\.", ".attn.sr."),
        (r"\.attn\.sequence_reduction\.", ".attn."), (r"\.mlp\.dense", ".mlp.fc"), (r"\.layer_norm\.", ".norm."),
        # the authors' own
        (r"^patch_embed1\.", "embeds.0."), (r"^patch_embed2\.", "embeds.1."), (r"^patch_embed3\.", "embeds.2."),
        (r"^patch_embed4\.", "embeds.3."), (r"^block1\.", "blocks.0."), (r"^block2\.", "blocks.1."),
        (r"^block3\.", "blocks.2."), (r"^block4\.", "blocks.3."), (r"^norm1\.", "norms.0."), (r"^norm2\.", "norms.1."),
        (r"^norm3\.", "norms.2."), (r"^norm4\.", "norms.3."), (r"\.dwconv\.dwconv\.", ".dwconv."),
    ],
)  # fmt: skip


class _PatchEmbedding(nn.Module):
    """Overlapping patches of a map, each mapped to one token."""

    def __init__(self, channels: int, dim: int, stride: int, eps: float) -> None:
        super().__init__()
        kernel = 2 * stride - 1
        self.proj = nn.Conv2d(channels, dim, kernel, stride=stride, padding=kernel // 2)
        self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, H, W) -> (B, H / stride, W / stride, D), float32 also under autocast."""
        return self.norm(self.proj(x).float().permute(0, 2, 3, 1))


class _KeysAndValues(nn.Linear):
    parts = ("k", "v")  # which low-rank updates distinguish


class _Attention(nn.Module):
    """Multi-head attention to a smaller map."""

    def __init__(self, dim: int, num_heads: int, reduction: int, eps: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.kv = _KeysAndValues(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.sr: nn.Module | None = None
        if reduction > 1:
            self.sr = nn.Conv2d(dim, dim, reduction, stride=reduction)
            self.norm = nn.LayerNorm(dim, eps=eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        return self.proj(attend(*self._heads(x)).transpose(1, 2).reshape(x.shape))

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """(B, h, w, D) -> (B, heads, N, M); each row has the sum 1."""
        query, key, _ = self._heads(x)
        return attention_weights(query, key)

    def _heads(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, heads, N, D / heads), keys and values (B, heads, M, D / heads)."""
        batch, dim = x.shape[0], x.shape[-1]
        smaller = x
        if self.sr is not None:
            smaller = self.norm(self.sr(x.permute(0, 3, 1, 2)).float().permute(0, 2, 3, 1))
        query = self.q(x).view(batch, -1, self.num_heads, dim // self.num_heads).transpose(1, 2)
        pairs = self.kv(smaller).view(batch, -1, 2, self.num_heads, dim // self.num_heads)
        key, value = pairs.permute(2, 0, 3, 1, 4)
        return query, key, value


class _MixMlp(nn.Module):
    """Feed-forward layers with a depthwise convolution between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = _MLP_RATIO * dim
        self.fc1 = nn.Linear(dim, hidden)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, h, w, D) -> (B, h, w, D)."""
        hidden = self.dwconv(self.fc1(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return self.fc2(F.gelu(hidden))


class _Block(nn.Module):
    """Attention and feed-forward layers, each with a norm and a residual connection."""

    def __init__(self, dim: int, num_heads: int, reduction: int, eps: float, drop_path_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = _Attention(dim, num_heads, reduction, eps)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = _MixMlp(dim)
        self.drop_path = DropPath(drop_path_rate)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Attention weights for the block's input (B, h, w, D)."""
        return self.attn.weights(self.norm1(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, h, w, D) -> (B, h, w, D), float32 also under autocast."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)), slot=1)


class MixTransformer(Backbone):
    """The backbone: a map of each stage, after its norm.

    Args:
        in_channels: of the image.
        **keys: of :class:`exp.vision.backbones.keys.MixTransformerConfig`.

    Raises:
        ConfigError: there is no such size.
    """

    input_weights = ("embeds.0.proj.weight",)
    linear_groups: ClassVar[Mapping[str, Sequence[str]]] = {"attention": ("q", "k", "v", "proj"), "mlp": ("fc1", "fc2")}

    def __init__(self, in_channels: int = 3, **keys: Any) -> None:
        config = MixTransformerConfig(**keys)
        super().__init__(in_channels, config.out_indices)
        self.size, self.norm_eps = config.size, config.norm_eps
        eps = self.norm_eps
        depths, dim = find_size(config.size, SIZES)
        dims = [dim * heads for heads in _HEADS]
        self.level_channels, self.level_strides = dims, [4, 8, 16, 32]
        self.activation_checkpointing = config.activation_checkpointing
        self.embeds = nn.ModuleList(map(_PatchEmbedding, [in_channels, *dims], dims, _STRIDES, [eps] * len(dims)))
        rates = iter(torch.linspace(0, config.drop_path_rate, sum(depths)).tolist())
        self.blocks: Any = nn.ModuleList(  # of each level, the blocks
            nn.ModuleList(_Block(width, heads, reduction, eps, next(rates)) for _ in range(depth))
            for depth, width, heads, reduction in zip(depths, dims, _HEADS, _REDUCTIONS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=eps) for width in dims)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Conv2d):
                fan_out = module.weight[0, 0].numel() * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=(2.0 / fan_out) ** 0.5)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        self.select_levels(None)

    def forward(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> Features:
        """See :meth:`exp.vision.backbones.base.Backbone.forward`."""
        indices = self.requested_levels(out_indices)
        maps, _ = self._run(image, max(indices))
        return Features([maps[level] for level in indices])

    def attention(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Attention weights of the last block of each level, (B, heads, N, M)."""
        indices = self.requested_levels(out_indices)
        _, inputs = self._run(image, max(indices))
        return [self.blocks[level][-1].attention(inputs[level]) for level in indices]

    def _run(self, image: torch.Tensor, last: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Maps of the levels up to ``last``, (B, D, h, w), and the inputs of their last blocks, (B, h, w, D)."""
        x, maps, inputs = self.pad(image), [], []
        for embed, blocks, norm in zip(self.embeds[: last + 1], self.blocks, self.norms):
            x = embed(x)
            for block in blocks:
                before = x
                recomputes = self.activation_checkpointing and block.training and x.requires_grad
                x = recompute_in_backward(block, x) if recomputes else block(x)
            with autocast_disabled(image.device.type):
                x = norm(x).permute(0, 3, 1, 2)
            inputs.append(before)
            maps.append(x)
        return maps, inputs

    def stages(self) -> list[list[nn.Module]]:
        """See :meth:`exp.vision.backbones.base.Backbone.stages`; the first embedding belongs to none."""
        stages: list[list[nn.Module]] = [list(modules) for modules in zip(self.embeds, self.blocks, self.norms)]
        stages[0].pop(0)
        return stages

    def adapt_state_dict(self, state: State, source: Path) -> Published | None:
        """Read weights by the names of mmsegmentation, transformers and the authors."""
        renamed = rename_published(state, _NAMES, self._modules)
        if renamed is None:
            return None
        self._check_settings(state, source)
        weights, others = renamed
        for name in [name for name in weights if ".attn.qkv." in name]:  # mmsegmentation's
            packed = weights.pop(name)
            dim = len(packed) // 3
            weights[name.replace(".qkv.", ".q.")] = packed[:dim]
            weights[name.replace(".qkv.", ".kv.")] = packed[dim:]
        for name in [name for name in weights if ".attn.k." in name]:  # transformers'
            value = weights.pop(name.replace(".k.", ".v."), None)
            key = weights.pop(name)
            weights[name.replace(".k.", ".kv.")] = key if value is None else torch.cat([key, value])
        for name, tensor in weights.items():  # mmsegmentation's linear layers are convolutions
            if name.endswith((".fc1.weight", ".fc2.weight")):
                weights[name] = tensor.flatten(1)
        return Published(weights, others, pixel_statistics(source))

    def _check_settings(self, state: State, source: Path) -> None:
        """Refuse weights that were trained by other code than this model's settings.

        Not by ``layer_norm_eps`` of transformers' ``config.json``, which is 1e-6, and which its code does not read.
        """
        fixed = {"hidden_act": "gelu", "num_attention_heads": [*_HEADS], "sr_ratios": [*_REDUCTIONS]}
        check_config(source, fixed, "SegFormer's encoder")
        for part, (library, eps) in _EPS_BY_NAME.items():
            if any(part in name for name in state) and self.norm_eps != eps:
                raise ConfigError(
                    f"init_from: {source} has the names of {library}, which computes with {eps:g} in its layer norms, "
                    f"and the model has model.backbone.norm_eps={self.norm_eps:g}; set model.backbone.norm_eps={eps:g}"
                )

    def check_state_dict(self, state: State, source: Path) -> None:
        """See :meth:`exp.vision.backbones.base.Backbone.check_state_dict`."""
        check_size(Size(count_blocks(state), len(state.get("norms.0.weight", ()))), self.size, SIZES, source)
