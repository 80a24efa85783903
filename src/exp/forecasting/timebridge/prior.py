"""TimeBridge as a variational model whose latents have a learned transition prior."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import nn

from exp.errors import ConfigError
from exp.forecasting.config import TimeBridgePriorConfig
from exp.forecasting.timebridge.density import gaussian_log_density
from exp.forecasting.timebridge.hmm import Regimes
from exp.forecasting.timebridge.loss import TimeFrequencyLoss
from exp.forecasting.timebridge.model import STD_EPS, TimeBridge, head, in_float32, standardized
from exp.forecasting.timebridge.transition import ChangingPrior, StationaryPrior

__all__ = ["FARTHEST", "TimeBridgePrior"]

# Values of the horizon are clamped to this many standard deviations (of the lookback) before the regimes see them.
#
# Over a flat lookback any change is 1e5 standard deviations; squared in an emission, a few steps would dominate the
# loss. Values of the lookback itself are at most sqrt(L) standard deviations away (Samuelson, JASA 63(324), 1968).
FARTHEST = 30.0


class TimeBridgePrior(TimeBridge):
    """TimeBridge whose series are latents of a state-space model (the variant hao405/tb96-xianyan_big).

    There is one latent for each channel and each of the L + H time steps of lookback and horizon. One TimeBridge gives
    the mean of q(z | x), another its log-variance. Training draws latents from q, with

        loss = forecast(z over the horizon) + reconstruction(z over the lookback)
             + KL of the stationary latents + KL of the changing latents - log p(x) of the regimes,

    each term with its weight. A KL term is the mean over steps of log q(z_t) - log p(z_t | ...) at the latents drawn.
    p is a :class:`StationaryPrior` for the first channels, and for the rest a :class:`ChangingPrior` that depends on
    the step's most probable regime (:class:`Regimes`). The regimes learn from the data alone during the first
    ``regime_epochs`` epochs, and are then frozen; they see values of the horizon up to :data:`FARTHEST`. A forecast is
    the mean, without drawing. It does not need the prior, so weights of a plain TimeBridge fit unchanged.

    Args:
        **keys: of :class:`exp.forecasting.config.TimeBridgePriorConfig`, which documents them.

    Raises:
        ConfigError: a key is unknown or out of range, or keys contradict each other.
    """

    log_variance_shift: torch.Tensor

    config: TimeBridgePriorConfig
    config_class: ClassVar[Any] = TimeBridgePriorConfig

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys)
        self._check(self.config)
        config, channels = self.config, self.config.channels
        self.prior, self.sampling = config.prior, config.sampling
        self.draws_by_itself = config.sampling  # latents, from the device's generator
        self.stationary = int(channels * config.stationary_share + 1e-9)
        terms = ("reconstruction", "stationary_kl", "changing_kl", "hmm")
        self.weights = {term: getattr(config, f"{term}_weight") for term in terms}
        self._frozen = False
        self.past_decoder = head(self.token_elements, config.lookback)
        self.past_loss = TimeFrequencyLoss(config.lookback, config.alpha)
        if config.prior or config.sampling:
            self.spread = "std"
            own = {field.name for field in fields(TimeBridge.config_class)} - {"_target_"}
            self.scale = TimeBridge(**{key: getattr(config, key) for key in own})
            self.past_scale = head(self.token_elements, config.lookback)
            self.register_buffer("log_variance_shift", torch.tensor(float(config.initial_log_variance)))
        if not config.prior:
            return
        layers = config.prior_layers
        if self.stationary:
            hidden = (3 if channels >= 100 else 384) if config.prior_hidden is None else config.prior_hidden
            context = 10 if self.stationary > 100 and config.prior_context is None else config.prior_context
            self.stationary_prior = StationaryPrior(self.stationary, config.lags, hidden, layers, context)
        if self.stationary < channels:
            hidden = config.changing_hidden or config.prior_hidden or 384
            self.changing_prior = ChangingPrior(channels - self.stationary, config.regime_embedding, hidden, layers)
            self.regimes = Regimes(config.regimes, min(config.regime_channels, channels))
            self.regime_embedding = nn.Embedding(config.regimes, config.regime_embedding)

    @staticmethod
    def _check(config: TimeBridgePriorConfig) -> None:
        if config.quantiles is not None:
            raise ConfigError(
                "model.quantiles: the variant with a prior has standard deviations, not quantiles; leave them out, or "
                "use model=timebridge"
            )
        if config.stationary_share > 1.0:
            raise ConfigError(f"model.stationary_share={config.stationary_share} is not a share; set one from 0 to 1")
        if config.lags >= config.lookback:
            raise ConfigError(f"model.lags={config.lags} must be less than lookback={config.lookback}")

    def may_start_anew(self, name: str) -> bool:
        """Whether weights may be missing in a checkpoint: all but the forecaster's, so that a plain TimeBridge fits."""
        return not name.startswith(("embedding.", "encoder."))

    def no_weight_decay(self) -> list[str]:
        """Names of the regimes' parameters: only their likelihood may change them."""
        return [name for name, _ in self.named_parameters() if name.startswith("regimes.")]

    def start_epoch(self, epoch: int) -> None:
        """Freeze the regimes once their epochs are over."""
        self._frozen = epoch >= self.config.regime_epochs
        if self._frozen and self.prior and self.stationary < self.channels:
            self.regimes.freeze()

    def spread_of(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """Standard deviation of each latent of the horizon around the forecast, (B, H, C), in the units of ``x``.

        It is that of q(z | x), which no term of the loss fits to residuals: it may be far from them.
        """
        series, _, std = standardized(x)
        log_variance = in_float32(self.scale.decoder, self.scale.encode(series, marks)).transpose(1, 2)
        return torch.exp(0.5 * (log_variance + self.log_variance_shift)) * std

    def losses(
        self, x: torch.Tensor, marks: torch.Tensor, y: torch.Tensor, known: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The weighted terms of the loss by name, 0-dim each; arguments as for :meth:`forward`.

        ``loss_forecast``, ``loss_reconstruction`` and, with the prior, ``loss_stationary_kl``, ``loss_changing_kl`` and
        ``loss_hmm``. Where ``y`` has no truth, the regimes see the last value of the lookback. The reconstruction
        counts filled cells of the lookback, too.
        """
        if known is not None:
            y = torch.where(known > 0, y, x[:, -1:].expand_as(y))
        series, mean, std = standardized(x)
        tokens = self.encode(series, marks)
        heads = (self.past_decoder, self.decoder)
        latent_mean = torch.cat([in_float32(head, tokens) for head in heads], dim=-1).transpose(1, 2)
        z, log_variance = latent_mean, None
        if self.prior or self.sampling:
            spread = self.scale.encode(series, marks)
            heads = (self.past_scale, self.scale.decoder)
            log_variance = torch.cat([in_float32(head, spread) for head in heads], dim=-1).transpose(1, 2)
            log_variance = log_variance + self.log_variance_shift
        if self.sampling and log_variance is not None:
            z = latent_mean + torch.exp(0.5 * log_variance) * torch.randn_like(latent_mean)
        observed = z * std + mean
        lookback = x.shape[1]
        terms = {
            "forecast": self.loss(observed[:, lookback:], y, known),
            "reconstruction": self.past_loss(observed[:, :lookback], x),
        }
        if self.prior and log_variance is not None:
            ahead = ((y - mean) / (std + STD_EPS)).clamp(-FARTHEST, FARTHEST)
            whole = torch.cat([series, ahead], dim=1)
            terms.update(self._divergences(z, latent_mean, log_variance, whole))
        return {f"loss_{name}": term * self.weights.get(name, 1.0) for name, term in terms.items()}

    def _divergences(
        self, z: torch.Tensor, mean: torch.Tensor, log_variance: torch.Tensor, series: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The KL terms and the negative log-likelihood of the regimes, unweighted, 0-dim each."""
        split = self.stationary
        terms = {}
        if split:
            density = gaussian_log_density(z[..., :split], mean[..., :split], log_variance[..., :split])
            terms["stationary_kl"] = (density - self.stationary_prior(z[..., :split])).mean()
        if split < self.channels:
            embeddings = self.regime_embedding(self.regimes.path(series, self._frozen))
            density = gaussian_log_density(z[..., split:], mean[..., split:], log_variance[..., split:])
            terms["changing_kl"] = (density - self.changing_prior(z[..., split:], embeddings)).mean()
            if self._frozen:
                # DDP waits for a gradient of every parameter: frozen regimes get zeros.
                terms["hmm"] = sum((p.sum() for p in self.regimes.parameters()), z.new_zeros(())) * 0.0
            else:
                terms["hmm"] = self.regimes.negative_log_likelihood(series)
        return terms
