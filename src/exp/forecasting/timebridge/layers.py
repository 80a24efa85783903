"""The layers of TimeBridge. All work on tokens of the shape (B, C, P, D): batch, channels, patches, d_model."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from exp.forecasting.timebridge.keys import TimeBridgeConfig
from exp.hardware.compat import has_fused_attention
from exp.models.dropout import Dropout, per_sample_active, sample_mask


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, owner: nn.Module | None = None
) -> torch.Tensor:
    """Scaled dot-product attention (Vaswani et al., arXiv 1706.03762, eq. 1), with dropout on its weights.

    Accelerators use torch's fused kernel if there is one. The CPU does not: with this model's 30 or so tokens, plain
    batched products take about two thirds of the fused kernel's time there, forward and backward.

    Args:
        query: (B, heads, Q, width).
        key: (B, heads, K, width).
        value: (B, heads, K, width).
        dropout_p: probability in [0, 1) of dropping a weight; 0 when evaluating.
        owner: the module that the dropout masks belong to, if they are drawn per sample (:mod:`exp.models.dropout`).

    Returns:
        (B, heads, Q, width).
    """
    by_sample = dropout_p > 0.0 and owner is not None and per_sample_active(owner)
    if has_fused_attention() and query.device.type != "cpu" and not by_sample:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p)
    # bmm needs one batch axis. Scaling the queries costs less than scaling the scores, which are larger.
    flat_query = query.flatten(0, 1) * (1.0 / math.sqrt(query.shape[-1]))
    weights = torch.softmax(torch.bmm(flat_query, key.flatten(0, 1).transpose(1, 2)), dim=-1)
    if by_sample:
        assert owner is not None
        weights = weights * sample_mask(owner, weights, dropout_p)
    elif dropout_p > 0.0:
        weights = dropout(weights, dropout_p)
    # Here and below not unflatten, which torch 1.10 cannot trace.
    return torch.bmm(weights, value.flatten(0, 1)).view(*query.shape[:3], value.shape[-1])


def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout, faster than torch's on the CPU.

    torch draws one Bernoulli variable per element, which takes most of the time of attention on the CPU. Here one
    64-bit draw from torch's generator serves four elements, 16 bits each: ``p`` is rounded to a multiple of 2**-16, and
    kept elements are scaled by the reciprocal of the rounded probability of keeping, so that the mean is exact. Other
    devices use torch's dropout.

    Args:
        x: any shape.
        p: probability in [0, 1) of setting an element to zero.

    Returns:
        ``x * mask / (1 - p)``, of the shape and dtype of ``x``.
    """
    if x.device.type != "cpu":
        return F.dropout(x, p)
    threshold = min(round(p * 2**16), 2**16 - 1)
    draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    # Through numpy, since torch 1.10 cannot view integers of one width as another.
    bits = torch.from_numpy(draws.numpy().view(np.int16))[: x.numel()].view(x.shape)
    mask = (bits >= threshold - 2**15).to(x.dtype).mul_(2**16 / (2**16 - threshold))
    return x * mask


def detrending_matrix(size: int, length: int) -> torch.Tensor:
    """The matrix that subtracts a moving average along the embedding axis.

    The authors' ``PeriodNorm`` averages over the last axis of the tokens, which is the embedding, not time: element j
    loses the mean of the elements j - length + 1 ... j; the first length - 1 elements lose the first complete mean.

    Args:
        size: elements of a token.
        length: elements that are averaged (``stable_len``), at most ``size``.

    Returns:
        (size, size), float32; a row vector is detrended by ``x @ matrix``.
    """
    matrix = torch.eye(size)
    for column in range(size):
        last = max(column, length - 1)
        matrix[last - length + 1 : last + 1, column] -= 1.0 / length
    return matrix


class MultiHeadAttention(nn.Module):
    """Multi-head attention with separate projections (the authors' ``TSMixer``); ``config``: the keys of the model."""

    def __init__(self, config: TimeBridgeConfig) -> None:
        super().__init__()
        width = config.d_model
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(width, width) for _ in range(4))
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Self-attention; ``tokens`` and the result: (N, S, d_model)."""
        query, key, value = _project(tokens, self.q_proj, self.k_proj, self.v_proj)
        return self._attend(query, key, value)

    def from_queries(self, queries: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Attention of ``queries`` (N, Q, d_model) to ``tokens`` (N, S, d_model); result (N, Q, d_model)."""
        key, value = _project(tokens, self.k_proj, self.v_proj)
        return self._attend(self.q_proj(queries), key, value)

    def detrended(self, tokens: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """Self-attention with queries and keys from ``tokens @ matrix``, which pass no gradient to ``tokens``.

        The matrix is multiplied into the projections' weights, (x A) W' = x (A W'): weights are far fewer than tokens.

        Args:
            tokens: (N, S, d_model).
            matrix: (d_model, d_model), of :func:`detrending_matrix`.

        Returns:
            (N, S, d_model).
        """
        query, key = _project(tokens.detach(), self.q_proj, self.k_proj, matrix=matrix)
        return self._attend(query, key, self.v_proj(tokens))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2) for x in (query, key, value))
        mixed = attention(query, key, value, self.dropout if self.training else 0.0, owner=self)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _project(tokens: torch.Tensor, *layers: nn.Linear, matrix: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Apply several linear layers to the same tokens (or to ``tokens @ matrix``) as one product."""
    weight = torch.cat([layer.weight for layer in layers])
    if matrix is not None:
        weight = weight @ matrix.t()
    bias = torch.cat([layer.bias for layer in layers])
    return F.linear(tokens, weight, bias).chunk(len(layers), dim=-1)


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
        return self.proj(series.view(*series.shape[:-1], -1, self.period))


class Encoder(nn.Module):
    """Applies layers in order; a module of its own so that weights have the names of the authors' code."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.attn_layers = nn.ModuleList(layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (B, C, P, D); result: (B, C, P', D), where P' differs from P after down-sampling."""
        for layer in self.attn_layers:
            tokens = layer(tokens)
        return tokens


class _Layer(nn.Module):
    """Base class of the layers; its end is LayerNorm, two linear layers with GELU and a residual, LayerNorm.

    Args:
        config: the keys of the model.
        **mixers: the modules before that end. They are arguments so that they are initialized first: the same seed then
            gives the same initial weights as the authors' code.
    """

    def __init__(self, config: TimeBridgeConfig, **mixers: nn.Module) -> None:
        super().__init__()
        for name, module in mixers.items():
            self.add_module(name, module)
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.norm1 = nn.LayerNorm(config.d_model)
        self.norm2 = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)

    def _feed_forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = self.norm1(tokens)
        hidden = self.dropout(F.gelu(self.fc1(tokens)), slot=1)
        return self.norm2(tokens + self.dropout(self.fc2(hidden), slot=2))


class IntegratedAttention(_Layer):
    """Integrated Attention: within each channel over its patches, on queries and keys that are detrended
    (:func:`detrending_matrix`); ``config``: the keys of the model.
    """

    attention: MultiHeadAttention
    detrend: torch.Tensor

    def __init__(self, config: TimeBridgeConfig) -> None:
        super().__init__(config, attention=MultiHeadAttention(config))
        self.register_buffer("detrend", detrending_matrix(config.d_model, config.stable_len), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens`` and the result: (B, C, P, D)."""
        mixed = self.attention.detrended(tokens.flatten(0, 1), self.detrend)
        return self._feed_forward(tokens + self.dropout(mixed.view_as(tokens)))


class PatchDownsampling(_Layer):
    """Patch Down-sampling: within each channel, learned mixtures of the patches attend to all patches.

    The authors make the mixtures with two 1x1 convolutions over the patch axis, the second one on the first one's
    output and the mean token, with a residual. All of that is linear, so it is applied as one matrix.

    Args:
        config: the keys of the model.
        patches_in: number of patches before.
        patches_out: number of patches after.
    """

    attention: MultiHeadAttention
    conv1: nn.Conv1d
    conv2: nn.Conv1d

    def __init__(self, config: TimeBridgeConfig, patches_in: int, patches_out: int) -> None:
        super().__init__(
            config,
            attention=MultiHeadAttention(config),
            conv1=nn.Conv1d(patches_in, patches_out, 1, bias=False),
            conv2=nn.Conv1d(patches_out + 1, patches_out, 1, bias=False),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: (B, C, patches_in, D); result: (B, C, patches_out, D)."""
        patches = tokens.flatten(0, 1)
        queries = F.conv1d(patches, self._mixture().unsqueeze(-1))
        mixed = self.attention.from_queries(queries, patches) + self.dropout(queries)
        return self._feed_forward(mixed.view(*tokens.shape[:2], *mixed.shape[1:]))

    def _mixture(self) -> torch.Tensor:
        """(patches_out, patches_in): conv2([conv1 x, mean x]) + conv1 x, as one matrix for x."""
        first, second = self.conv1.weight.squeeze(-1), self.conv2.weight.squeeze(-1)
        return first + second[:, :-1] @ first + second[:, -1:] / first.shape[1]


class CointegratedAttention(_Layer):
    """Cointegrated Attention: within each patch over the channels, laid out as a square grid.

    Axial attention (Ho et al., arXiv 1912.12180): first within the rows of the grid, then within its columns. The grid
    is padded with zero tokens, which are not masked, as in the authors' code.

    Args:
        config: the keys of the model; the time features are further channels.
    """

    attention1: MultiHeadAttention
    attention2: MultiHeadAttention

    def __init__(self, config: TimeBridgeConfig) -> None:
        rows = MultiHeadAttention(config)
        super().__init__(config, attention1=rows, attention2=copy.deepcopy(rows))
        # The authors' checkpoints have it, their forward pass does not use it. Without gradient, so that DDP does not
        # wait for one and weight decay does not change it.
        self.norm0 = nn.LayerNorm(config.d_model).requires_grad_(False)
        self.side = math.ceil(math.sqrt(config.channels + config.time_features))

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
        # (B, P, column, row, D) -> (B, row * column, P, D): the original order of the channels.
        grid = columns.view(batch, patches, side, side, width).permute(0, 3, 2, 1, 4)
        return grid.flatten(1, 2)[:, :channels]
