"""TimeBridge written directly from its formulas (Liu et al., arXiv 2410.04442), as a reference for results and speed.

Every channel is computed, each averaging window is stacked, attention is einsum, the loss uses torch.fft. Parameters
have the names of the authors' checkpoints, so that weights can be exchanged with exp.forecasting.timebridge.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["PlainTimeBridge", "plain_loss"]


def plain_loss(prediction: torch.Tensor, target: torch.Tensor, alpha: float) -> torch.Tensor:
    """Mean absolute error in time, and of the complex spectrum in frequency; arguments (B, H, C) each."""
    in_time = (prediction - target).abs().mean()
    in_frequency = (torch.fft.rfft(prediction, dim=1) - torch.fft.rfft(target, dim=1)).abs().mean()
    return (1 - alpha) * in_time + alpha * in_frequency


def subtract_moving_average(x: torch.Tensor, length: int) -> torch.Tensor:
    """Trailing moving average along the last axis; the first mean is repeated to the left."""
    size = x.shape[-1]
    stacked = torch.stack([x[..., start : size - length + 1 + start] for start in range(length)], dim=-1)
    mean = stacked.mean(-1)
    return x - torch.cat([mean[..., :1]] * (length - 1) + [mean], dim=-1)


class PlainAttention(nn.Module):
    """Multi-head attention."""

    def __init__(self, d_model: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v_proj, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.num_heads, self.dropout = num_heads, nn.Dropout(dropout)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(N, Q, D), (N, S, D), (N, S, D) -> (N, Q, D)."""
        q = self.q_proj(query).unflatten(-1, (self.num_heads, -1))
        k = self.k_proj(key).unflatten(-1, (self.num_heads, -1))
        v = self.v_proj(value).unflatten(-1, (self.num_heads, -1))
        scores = torch.einsum("nqhe,nshe->nhqs", q, k) / math.sqrt(q.shape[-1])
        weights = self.dropout(torch.softmax(scores, dim=-1))
        return self.out(torch.einsum("nhqs,nshe->nqhe", weights, v).flatten(2))


class PlainLayer(nn.Module):
    """One layer of a given kind: ``integrated``, ``downsampling`` or ``cointegrated``."""

    def __init__(self, kind: str, d_model: int, d_ff: int, attention: PlainAttention, dropout: float, **sizes: int):
        super().__init__()
        self.kind, self.sizes, self.dropout = kind, sizes, nn.Dropout(dropout)
        if kind == "cointegrated":
            self.attention1, self.attention2 = attention, copy.deepcopy(attention)
            self.norm0 = nn.LayerNorm(d_model)
        else:
            self.attention = attention
        if kind == "downsampling":
            self.conv1 = nn.Conv1d(sizes["patches_in"], sizes["patches_out"], 1, bias=False)
            self.conv2 = nn.Conv1d(sizes["patches_out"] + 1, sizes["patches_out"], 1, bias=False)
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, P, D) -> (B, C, P', D)."""
        x = self.norm1(getattr(self, self.kind)(x))
        hidden = self.dropout(F.gelu(self.fc1(x)))
        return self.norm2(x + self.dropout(self.fc2(hidden)))

    def integrated(self, x: torch.Tensor) -> torch.Tensor:
        """Within each channel, over its patches."""
        series = x.flatten(0, 1)
        with torch.no_grad():
            detrended = subtract_moving_average(series, self.sizes["stable_len"])
        return x + self.dropout(self.attention(detrended, detrended, series).view_as(x))

    def downsampling(self, x: torch.Tensor) -> torch.Tensor:
        """Fewer patches."""
        series = x.flatten(0, 1)
        queries = self.conv1(series)
        queries = self.conv2(torch.cat([queries, series.mean(1, keepdim=True)], dim=1)) + queries
        mixed = self.attention(queries, series, series) + self.dropout(queries)
        return mixed.unflatten(0, x.shape[:2])

    def cointegrated(self, x: torch.Tensor) -> torch.Tensor:
        """Within each patch, over the channels in a square grid."""
        batch, channels, patches, width = x.shape
        side = math.ceil(math.sqrt(channels))
        padding = x.new_zeros(batch, side * side - channels, patches, width)
        grid = torch.cat([x, padding], dim=1).unflatten(1, (side, side))  # (B, row, column, P, D)
        rows = grid.permute(0, 3, 1, 2, 4).flatten(0, 2)
        rows = self.attention1(rows, rows, rows).view(batch, patches, side, side, width)
        columns = rows.permute(0, 1, 3, 2, 4).flatten(0, 2)
        columns = self.attention2(columns, columns, columns) + columns
        grid = columns.view(batch, patches, side, side, width).permute(0, 3, 2, 1, 4)  # (B, row, column, P, D)
        return x + self.dropout(grid.flatten(1, 2)[:, :channels])


class PlainEncoder(nn.Module):
    """The layers; a module so that parameters have the names of the authors' code."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.attn_layers = nn.ModuleList(layers)


class PlainEmbedding(nn.Module):
    """The projection of the patches; a module so that parameters have the names of the authors' code."""

    def __init__(self, period: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.proj = nn.Sequential(nn.Linear(period, d_model, bias=False), nn.Dropout(dropout))


class PlainTimeBridge(nn.Module):
    """The forecaster; arguments as for :class:`exp.forecasting.timebridge.model.TimeBridge`."""

    def __init__(
        self,
        channels: int,
        lookback: int,
        horizon: int,
        time_features: int = 4,
        period: int = 24,
        num_patches_out: int | None = None,
        d_model: int = 128,
        d_ff: int = 128,
        num_heads: int = 8,
        integrated_layers: int = 3,
        downsampling_layers: int = 1,
        cointegrated_layers: int = 0,
        stable_len: int = 6,
        attention_dropout: float = 0.15,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.channels, self.period = channels, period
        patches = lookback // period
        patches_out = num_patches_out or patches
        self.embedding = PlainEmbedding(period, d_model, dropout)

        def layer(kind: str, **sizes: int) -> PlainLayer:
            attention = PlainAttention(d_model, num_heads, attention_dropout)
            return PlainLayer(kind, d_model, d_ff, attention, dropout, **sizes)

        layers: list[nn.Module] = [layer("integrated", stable_len=stable_len) for _ in range(integrated_layers)]
        for index in range(downsampling_layers):
            patches_in = patches if index == 0 else patches_out
            layers.append(layer("downsampling", patches_in=patches_in, patches_out=patches_out))
        layers += [layer("cointegrated") for _ in range(cointegrated_layers)]
        self.encoder = PlainEncoder(layers)
        self.decoder = nn.Sequential(nn.Flatten(-2), nn.Linear(patches_out * d_model, horizon, bias=False))

    def forward(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """(B, L, C), (B, L, M) -> (B, H, C)."""
        mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True)
        series = torch.cat([(x - mean) / (std + 1e-5), marks], dim=-1).transpose(1, 2)
        tokens = self.embedding.proj(series.unflatten(-1, (-1, self.period)))
        for layer in self.encoder.attn_layers:
            tokens = layer(tokens)
        return self.decoder(tokens)[:, : self.channels].transpose(1, 2) * std + mean
