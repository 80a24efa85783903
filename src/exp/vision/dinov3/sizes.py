"""The sizes of the DINOv3 family (Siméoni et al., arXiv 2508.10104)."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SIZES", "Size"]


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
