"""The TimeBridge forecaster."""

from __future__ import annotations

from bisect import bisect
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from torch import nn

from exp.errors import ConfigError
from exp.forecasting.timebridge.layers import (
    CointegratedAttention,
    Encoder,
    IntegratedAttention,
    PatchDownsampling,
    PatchEmbedding,
)
from exp.forecasting.timebridge.loss import TimeFrequencyLoss
from exp.forecasting.timebridge.official import adapt_variant, variant_prefix
from exp.forecasting.timebridge.quantiles import MEDIAN, check_quantiles, quantile_loss, uncrossed
from exp.forecasting.timebridge.shapes import timebridge_settings
from exp.hardware.compat import autocast_disabled
from exp.models.base import Model

__all__ = ["STD_EPS", "TimeBridge", "in_float32", "require_at_least", "standardised"]

STD_EPS = 1e-5
"""Added to the standard deviation (not to the variance), as in the authors' code."""


class TimeBridge(Model):
    """TimeBridge (Liu et al., ICML 2025, arXiv 2410.04442), with the names of the weights of the authors' code.

    Each series is standardised over the lookback, cut into patches of one period and embedded. Integrated Attention
    works within each channel, Patch Down-sampling shortens the sequence of patches, Cointegrated Attention works across
    channels; a linear head gives the horizon. The time features are further channels, which only Cointegrated Attention
    lets meet the series and which the head drops: without such layers they are not computed at all.

    Args:
        channels: series C.
        lookback: time steps L that the model sees.
        horizon: time steps H that it predicts.
        time_features: time-feature channels M.
        period: time steps per patch; in the authors' code, and here, it gives their number ``L // period``, and a patch
            has ``L // (L // period)`` time steps, which divide the lookback.
        num_patches_out: patches after down-sampling; None: as many as before.
        d_model: elements of a token.
        d_ff: width of the feed-forward parts.
        num_heads: attention heads; divides ``d_model``.
        integrated_layers: Integrated Attention layers.
        downsampling_layers: Patch Down-sampling layers.
        cointegrated_layers: Cointegrated Attention layers.
        stable_len: length of the moving average that detrends queries and keys; at most ``d_model``.
        attention_dropout: probability of dropping an attention weight.
        dropout: probability of dropping an element elsewhere.
        alpha: weight of the frequency part of the loss.
        quantiles: levels, ascending, of heads beside the forecast, which is the one at 0.5; None: the forecast alone.

    Raises:
        ConfigError: the settings do not go together; the message gives the nearest ones that do.
    """

    changed_by_optimizer_alone = True

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
        alpha: float = 0.35,
        quantiles: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        require_at_least(1, channels=channels, horizon=horizon, time_features=time_features, period=period,
                          d_model=d_model, d_ff=d_ff, num_heads=num_heads, stable_len=stable_len)  # fmt: skip
        require_at_least(2, lookback=lookback)  # of one step there is no standard deviation
        require_at_least(0, integrated_layers=integrated_layers, downsampling_layers=downsampling_layers,
                          cointegrated_layers=cointegrated_layers)  # fmt: skip
        patches = max(lookback // period, 1)
        if lookback < period or lookback % patches:
            _require_multiple("lookback", lookback, "period", period)
        period = lookback // patches
        _require_multiple("d_model", d_model, "num_heads", num_heads)
        for name, rate in (("attention_dropout", attention_dropout), ("dropout", dropout)):
            if not 0.0 <= rate < 1.0:
                raise ConfigError(f"model.{name}={rate} is not a probability below 1; set 0 <= {name} < 1")
        if not 0.0 <= alpha <= 1.0:
            raise ConfigError(f"model.alpha={alpha} is not a weight between 0 and 1; set 0 <= alpha <= 1")
        if stable_len > d_model:
            raise ConfigError(f"model.stable_len={stable_len} is longer than a token; set at most d_model={d_model}")
        patches_out = patches if num_patches_out is None else num_patches_out
        if patches_out < 1 or (downsampling_layers == 0 and patches_out != patches):
            raise ConfigError(
                f"model.num_patches_out={patches_out} does not go with downsampling_layers={downsampling_layers}; set "
                f"num_patches_out=null (all {patches}), or at least 1 with downsampling_layers=1"
            )
        self.channels = channels
        self.taken_on_trust = ["num_heads", "stable_len"] + ["quantiles"] * (quantiles is not None)
        self.uses_time_features = cointegrated_layers > 0

        self.embedding = PatchEmbedding(period, d_model, dropout)
        common: dict[str, Any] = {"d_model": d_model, "num_heads": num_heads, "d_ff": d_ff}
        common.update(attention_dropout=attention_dropout, dropout=dropout)
        layers: list[nn.Module] = [
            IntegratedAttention(stable_len=stable_len, **common) for _ in range(integrated_layers)
        ]
        for index in range(downsampling_layers):
            layers.append(PatchDownsampling(patches if index == 0 else patches_out, patches_out, **common))
        for _ in range(cointegrated_layers):
            layers.append(CointegratedAttention(channels + time_features, **common))
        self.encoder = Encoder(layers)
        self.token_elements = patches_out * d_model
        self.decoder = nn.Sequential(nn.Flatten(-2), nn.Linear(self.token_elements, horizon, bias=False))
        self.loss = TimeFrequencyLoss(horizon, alpha)
        self.quantiles = None if quantiles is None else check_quantiles(quantiles)
        self.spread: str | None = None
        if self.quantiles is not None:
            self.spread = "quantiles"
            self.horizon = horizon
            heads = (len(self.quantiles) - 1) * horizon
            self.quantile_decoder = nn.Sequential(nn.Flatten(-2), nn.Linear(self.token_elements, heads, bias=False))

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Weights by our names, those of the users' variant, too; of one with a prior the forecaster alone."""
        prefix = variant_prefix(state)
        adapted = super().adapt_state_dict(state, source) if prefix is None else adapt_variant(state, prefix)
        if "past_decoder.1.weight" not in adapted or hasattr(self, "past_decoder"):
            return adapted
        return {key: value for key, value in adapted.items() if key.startswith(("embedding.", "encoder.", "decoder."))}

    def sharded_units(self) -> list[nn.Module]:
        """The encoder's layers; those of a second encoder, too (``wrapper=fsdp``)."""
        encoders = [module for module in self.modules() if isinstance(module, Encoder)]
        return [layer for encoder in encoders for layer in encoder.attn_layers]

    def forward(
        self,
        x: torch.Tensor,
        marks: torch.Tensor,
        y: torch.Tensor | None = None,
        index: torch.Tensor | None = None,
        known: torch.Tensor | None = None,
        future: torch.Tensor | None = None,
        mode: str = "tensor",
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Forecast, or its loss.

        Args:
            x: (B, L, C), the lookback.
            marks: (B, L, M), time features in [-0.5, 0.5]; not read without Cointegrated Attention.
            y: (B, H, C), the truth; only for the loss.
            index: (B,), number of each window; part of a batch, not used.
            known: (B, H, C), 1 where ``y`` has a truth, else 0; None: everywhere.
            future: (B, H, K), covariates and calendar of the horizon; part of a batch, not used: covariates are seen as
                further series over the lookback.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`); ``"spread"`` where
                ``spread`` is set (:class:`exp.forecasting.intervals.intervals.Spread`).

        Returns:
            ``{"loss": <0-dim float32 tensor>}``; the forecast (B, H, C); or how sure it is, such as quantiles
            (B, H, C, Q).

        Raises:
            ValueError: ``mode`` is unknown, or the loss is asked for without ``y``.
        """
        del index, future
        if mode in ("predict", "tensor"):
            return self._forecast(x, marks)
        if mode == "spread" and self.spread is not None:
            return self.spread_of(x, marks)
        if mode != "loss":
            raise ValueError(f"mode={mode!r} is not one of 'loss', 'predict', 'tensor'")
        if y is None:
            raise ValueError("mode='loss' needs y (B, H, C), and the batch has none")
        return self.losses(x, marks, y, known)

    def losses(
        self, x: torch.Tensor, marks: torch.Tensor, y: torch.Tensor, known: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The terms of the loss by name, 0-dim each; arguments as for :meth:`forward`."""
        if self.quantiles is None:
            return {"loss": self.loss(self._forecast(x, marks), y, known)}
        series, mean, std = standardised(x)
        forecast, others = self._heads(self.encode(series, marks), mean, std)
        levels = [tau for tau in self.quantiles if tau != MEDIAN]
        return {
            "loss_forecast": self.loss(forecast, y, known),
            "loss_quantiles": quantile_loss(others, y, levels, known),
        }

    def spread_of(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """Quantiles (B, H, C, Q) around the forecast, none across another; arguments as for :meth:`forward`."""
        assert self.quantiles is not None
        series, mean, std = standardised(x)
        forecast, others = self._heads(self.encode(series, marks), mean, std)
        return torch.stack(uncrossed(forecast, others, self.quantiles.index(MEDIAN)), dim=-1)

    def _heads(
        self, tokens: torch.Tensor, mean: torch.Tensor, std: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The forecast and the other quantiles, as they come, (B, H, C) each."""
        forecast = in_float32(self.decoder, tokens).transpose(1, 2) * std + mean
        others = in_float32(self.quantile_decoder, tokens).split(self.horizon, dim=-1)
        return forecast, [forecast + other.transpose(1, 2) * std for other in others]

    def _forecast(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        series, mean, std = standardised(x)
        return in_float32(self.decoder, self.encode(series, marks)).transpose(1, 2) * std + mean

    def encode(self, series: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """Tokens of standardised series.

        Args:
            series: (B, L, C).
            marks: (B, L, M); not read without Cointegrated Attention.

        Returns:
            (B, C, patches, d_model).
        """
        if self.uses_time_features:
            series = torch.cat([series, marks], dim=-1)
        tokens: torch.Tensor = self.encoder(self.embedding(series.transpose(1, 2)))
        return tokens[:, : self.channels]

    def may_start_anew(self, name: str) -> bool:
        """The layers that make forecasts of the tokens: they depend on the horizon."""
        return name.startswith(("decoder.", "quantile_decoder."))

    def settings_of(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Widths, layers, lookback and horizon; see :meth:`exp.models.base.Model.settings_of`."""
        return timebridge_settings(state)


def in_float32(head: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """What ``head`` gives without autocast, (..., steps), float32: a forecast is not rounded to half precision."""
    with autocast_disabled(tokens.device.type):
        output: torch.Tensor = head(tokens.float())
    return output


@torch.no_grad()
def standardised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each series with its mean and standard deviation over the lookback; no gradients flow through them.

    Args:
        x: (B, L, C).

    Returns:
        The standardised series (B, L, C), mean and standard deviation (B, 1, C).
    """
    mean = x.mean(1, keepdim=True)
    std = x.std(1, keepdim=True)
    return (x - mean) / (std + STD_EPS), mean, std


def require_at_least(least: int, **values: float | None) -> None:
    """Refuse settings below ``least``, by name; those that are None are left to their defaults.

    Raises:
        ConfigError: one is too small.
    """
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"model.{name}={value} is too small; set at least {least}")


def _require_multiple(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor == 0:
        return
    below = value // divisor * divisor
    multiples = [str(multiple) for multiple in (below, below + divisor) if multiple]
    divisors = [candidate for candidate in range(1, value + 1) if value % candidate == 0]
    nearest = divisors[bisect(divisors, divisor) - 1 :][:2]
    raise ConfigError(
        f"model.{name}={value} is not a multiple of {divisor_name}={divisor}; the nearest valid values are "
        f"{name}={' or '.join(multiples)}, or {divisor_name}={' or '.join(map(str, nearest))}"
    )
