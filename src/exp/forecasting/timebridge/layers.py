"""The layers of TimeBridge. All work on tokens of the shape (B, C, P, D): batch, channels, patches, d_model."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from exp.forecasting.timebridge.attention import MultiHeadAttention, detrending_matrix
from exp.models.dropout import Dropout

__all__ = ["CointegratedAttention", "Encoder", "IntegratedAttention", "PatchDownsampling", "PatchEmbedding"]


class PatchEmbedding(nn.Module):
    """Cuts each series into patches and projects them (without bias).

    Args:
        period: time steps per patch.
        d_model: elements of a token.
        dropout: probability of dropping an element of a token.
    """

    def __init__(self, period: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.period = period
        self.proj = nn.Sequential(nn.Linear(period, d_model, bias=False), Dropout(dropout))

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        """``series``: (B, C, L); result: (B, C, L / period, d_model)."""
        return self.proj(series.unflatten(-1, (-1, self.period)))


class Encoder(nn.Module):
    """The layers in their order; a module of its own only for the names of the authors' weights."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.attn_layers = nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (B, C, P, D); result: (B, C, P', D), where P' differs from P after down-sampling."""
        for layer in self.attn_layers:
            tokens = layer(tokens)
        return tokens


class _Layer(nn.Module):
    """What every layer ends with: LayerNorm, two linear layers with GELU and a residual, LayerNorm.

    Args:
        d_model: elements of a token.
        d_ff: elements between the two linear layers.
        dropout: probability of dropping an element.
        **mixers: the modules that come first. They are arguments so that they are also initialised first: one seed then
            gives the initial weights of the authors' code.
    """

    def __init__(self, d_model: int, d_ff: int, dropout: float, **mixers: nn.Module) -> None:
        super().__init__()
        for name, module in mixers.items():
            self.add_module(name, module)
        self.fc1 = nn.Linear(d_model, d_ff)
        self.fc2 = nn.Linear(d_ff, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = Dropout(dropout)

    def _feed_forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.norm1(tokens)
        hidden = self.dropout(F.gelu(self.fc1(tokens)), slot=1)
        return self.norm2(tokens + self.dropout(self.fc2(hidden), slot=2))


class IntegratedAttention(_Layer):
    """Integrated Attention: within each channel over its patches, on detrended queries and keys.

    Args:
        d_model: elements of a token.
        num_heads: heads; divides ``d_model``.
        d_ff: width of the feed-forward part.
        stable_len: length of the moving average (:func:`~exp.forecasting.timebridge.attention.detrending_matrix`).
        attention_dropout: probability of dropping an attention weight.
        dropout: probability of dropping an element elsewhere.
    """

    attention: MultiHeadAttention
    detrend: torch.Tensor

    def __init__(
        self, d_model: int, num_heads: int, d_ff: int, stable_len: int, attention_dropout: float, dropout: float
    ) -> None:
        super().__init__(d_model, d_ff, dropout, attention=MultiHeadAttention(d_model, num_heads, attention_dropout))
        self.register_buffer("detrend", detrending_matrix(d_model, stable_len), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` and the result: (B, C, P, D)."""
        mixed = self.attention.detrended(tokens.flatten(0, 1), self.detrend)
        return self._feed_forward(tokens + self.dropout(mixed.view_as(tokens)))


class PatchDownsampling(_Layer):
    """Patch Down-sampling: within each channel, fewer patches as learned mixtures that attend to all patches.

    The authors' two 1x1 convolutions over the patch axis, with the mean token beside the first one's output and a
    residual, are linear: they are applied as one.

    Args:
        patches_in: patches before.
        patches_out: patches after.
        d_model: elements of a token.
        num_heads: heads; divides ``d_model``.
        d_ff: width of the feed-forward part.
        attention_dropout: probability of dropping an attention weight.
        dropout: probability of dropping an element elsewhere.
    """

    attention: MultiHeadAttention
    conv1: nn.Conv1d
    conv2: nn.Conv1d

    def __init__(
        self,
        patches_in: int,
        patches_out: int,
        d_model: int,
        num_heads: int,
        d_ff: int,
        attention_dropout: float,
        dropout: float,
    ) -> None:
        super().__init__(
            d_model,
            d_ff,
            dropout,
            attention=MultiHeadAttention(d_model, num_heads, attention_dropout),
            conv1=nn.Conv1d(patches_in, patches_out, 1, bias=False),
            conv2=nn.Conv1d(patches_out + 1, patches_out, 1, bias=False),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (B, C, patches_in, D); result: (B, C, patches_out, D)."""
        patches = tokens.flatten(0, 1)
        queries = F.conv1d(patches, self._mixture().unsqueeze(-1))
        mixed = self.attention.from_queries(queries, patches) + self.dropout(queries)
        return self._feed_forward(mixed.unflatten(0, tokens.shape[:2]))

    def _mixture(self) -> torch.Tensor:
        """(patches_out, patches_in): conv2([conv1 x, mean x]) + conv1 x, as one matrix for x."""
        first, second = self.conv1.weight.squeeze(-1), self.conv2.weight.squeeze(-1)
        return first + second[:, :-1] @ first + second[:, -1:] / first.shape[1]


class CointegratedAttention(_Layer):
    """Cointegrated Attention: within each patch over the channels, laid out as a square grid.

    Axial attention (Ho et al., arXiv 1912.12180): first within the rows of the grid, then within its columns. The grid
    is filled up with zero tokens, which take part, as in the authors' code.

    Args:
        channels: channels that meet, time features included.
        d_model: elements of a token.
        num_heads: heads; divides ``d_model``.
        d_ff: width of the feed-forward part.
        attention_dropout: probability of dropping an attention weight.
        dropout: probability of dropping an element elsewhere.
    """

    attention1: MultiHeadAttention
    attention2: MultiHeadAttention

    def __init__(
        self, channels: int, d_model: int, num_heads: int, d_ff: int, attention_dropout: float, dropout: float
    ) -> None:
        rows = MultiHeadAttention(d_model, num_heads, attention_dropout)
        super().__init__(d_model, d_ff, dropout, attention1=rows, attention2=copy.deepcopy(rows))
        # Part of the authors' checkpoints, but of no use in their forward pass. Without gradient, so that neither
        # data-parallel training waits for one nor weight decay touches it.
        self.norm0 = nn.LayerNorm(d_model).requires_grad_(False)
        self.side = math.ceil(math.sqrt(channels))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` and the result: (B, C, P, D)."""
        return self._feed_forward(tokens + self.dropout(self._axial_attention(tokens)))

    def _axial_attention(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, channels, patches, width = tokens.shape
        side = self.side
        grid = F.pad(tokens.transpose(1, 2), (0, 0, 0, side**2 - channels))
        rows = self.attention1(grid.reshape(-1, side, width)).view(batch * patches, side, side, width)
        columns = rows.transpose(1, 2).reshape(-1, side, width)
        columns = self.attention2(columns) + columns
        # (B, P, column, row, D) -> (B, row * column, P, D), the order in which the channels came in.
        grid = columns.view(batch, patches, side, side, width).permute(0, 3, 2, 1, 4)
        return grid.flatten(1, 2)[:, :channels]
