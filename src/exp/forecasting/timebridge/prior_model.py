"""TimeBridge as a variational model whose latents have a learned transition prior."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

import torch
from torch import nn

from exp.errors import ConfigError
from exp.forecasting.timebridge.density import gaussian_log_density
from exp.forecasting.timebridge.loss import TimeFrequencyLoss
from exp.forecasting.timebridge.model import STD_EPS, TimeBridge, in_float32, require_at_least, standardised
from exp.forecasting.timebridge.regimes import Regimes
from exp.forecasting.timebridge.shapes import prior_settings
from exp.forecasting.timebridge.transition import ChangingPrior, StationaryPrior

__all__ = ["FARTHEST", "TimeBridgePrior"]

FARTHEST = 30.0
"""How many standard deviations of the lookback the regimes see a value of the horizon away from its mean, at most.

Over a flat lookback any change is 1e5 of them, and squared in an emission the loss of a few steps would drown all else.
Values of the lookback itself are never further away than its length's square root (Samuelson, JASA 63(324), 1968).
"""


class TimeBridgePrior(TimeBridge):
    """TimeBridge whose series are latents of a state-space model (users' variant hao405/tb96-xianyan_big).

    One TimeBridge gives the mean, another the log-variance of a latent for each channel and each of the L + H time
    steps of lookback and horizon: q(z | x). In training latents are drawn from it, and

        loss = forecast(z over the horizon) + reconstruction(z over the lookback)
             + KL of the stationary latents + KL of the changing latents - log p(x) of the regimes,

    each term with its weight. A KL term is the mean over steps of log q(z_t) - log p(z_t | ...) at the latents drawn;
    p is a :class:`StationaryPrior` for the first channels, and for the rest a :class:`ChangingPrior` that is told the
    regime of the step, the most probable one by :class:`Regimes`. These learn from the data alone during the first
    ``regime_epochs`` epochs, and are frozen then; of the horizon they see values up to :data:`FARTHEST` away. A
    forecast is the mean, without drawing: nothing of the prior is needed for it, and weights of a plain TimeBridge fit
    as they are.

    Args:
        prior: whether there are a prior and regimes at all.
        stationary_share: share of the channels, rounded down, whose latents are stationary.
        lags: past steps that a stationary latent depends on.
        regimes: number of them.
        regime_channels: how many channels the regimes are seen in, from the first on.
        regime_epochs: epochs before the regimes are frozen.
        regime_embedding: elements of a regime's embedding.
        prior_hidden: units of the hidden layer of a stationary latent's MLP; None: 384, and 3 from 100 channels on.
        changing_hidden: of a changing latent's; None: ``prior_hidden``, or 384.
        prior_layers: hidden layers of both.
        prior_context: numbers to which the lagged latents are brought for the MLPs; None: all up to 100 stationary
            latents, 10 of more.
        reconstruction_weight: of the loss over the lookback.
        stationary_kl_weight: of the KL term of the stationary latents, per time step.
        changing_kl_weight: of that of the changing ones.
        hmm_weight: of the regimes' negative log-likelihood per time step. Nothing else trains them.
        initial_log_variance: added to the network's log-variance, so that training begins with little noise. It stays
            with the weights: those of a checkpoint bring their own.
        sampling: False: the mean instead of a draw. Draws come from each device's own generator, as dropout does, so
            that only without them losses are the same for any number of devices.
        **timebridge: arguments of :class:`TimeBridge`.

    Raises:
        ConfigError: the settings do not go together.
    """

    log_variance_shift: torch.Tensor

    changed_by_optimizer_alone = False  # regimes are frozen between two steps

    def __init__(
        self,
        *,
        prior: bool = True,
        stationary_share: float = 0.7,
        lags: int = 1,
        regimes: int = 4,
        regime_channels: int = 4,
        regime_epochs: int = 1,
        regime_embedding: int = 2,
        prior_hidden: int | None = None,
        changing_hidden: int | None = None,
        prior_layers: int = 1,
        prior_context: int | None = None,
        reconstruction_weight: float = 1.0,
        stationary_kl_weight: float = 1e-3,
        changing_kl_weight: float = 1e-3,
        hmm_weight: float = 1.0,
        initial_log_variance: float = -4.0,
        sampling: bool = True,
        **timebridge: Any,
    ) -> None:
        if timebridge.get("quantiles") is not None:
            raise ConfigError(
                "model.quantiles: the variant with a prior says by its variance how sure it is; leave them out, or use "
                "model=timebridge"
            )
        super().__init__(**timebridge)
        channels, lookback = timebridge["channels"], timebridge["lookback"]
        if not 0.0 <= stationary_share <= 1.0:
            raise ConfigError(f"model.stationary_share={stationary_share} is not a share; set one from 0 to 1")
        if not 1 <= lags < lookback:
            raise ConfigError(f"model.lags={lags} must be at least 1 and less than lookback={lookback}")
        require_at_least(1, regimes=regimes, regime_channels=regime_channels, regime_embedding=regime_embedding,
                         prior_hidden=prior_hidden, changing_hidden=changing_hidden, prior_layers=prior_layers,
                         prior_context=prior_context)  # fmt: skip
        require_at_least(0, regime_epochs=regime_epochs, reconstruction_weight=reconstruction_weight,
                         stationary_kl_weight=stationary_kl_weight, changing_kl_weight=changing_kl_weight,
                         hmm_weight=hmm_weight)  # fmt: skip
        self.prior, self.sampling = prior, sampling
        self.draws_by_itself = sampling  # latents, from the device's generator
        self.stationary = int(channels * stationary_share + 1e-9)
        self.regime_epochs = regime_epochs
        self.weights = {
            "reconstruction": reconstruction_weight,
            "stationary_kl": stationary_kl_weight,
            "changing_kl": changing_kl_weight,
            "hmm": hmm_weight,
        }
        self._frozen = False
        self.past_decoder = _head(self.token_elements, lookback)
        self.past_loss = TimeFrequencyLoss(lookback, self.loss.alpha)
        if prior or sampling:
            self.spread = "std"
            self.scale = TimeBridge(**timebridge)
            self.past_scale = _head(self.token_elements, lookback)
            self._initial_shift = torch.tensor(float(initial_log_variance))
            self.register_buffer("log_variance_shift", self._initial_shift.clone())
        if not prior:
            return
        if self.stationary:
            hidden = (3 if channels >= 100 else 384) if prior_hidden is None else prior_hidden
            context = 10 if self.stationary > 100 and prior_context is None else prior_context
            self.stationary_prior = StationaryPrior(self.stationary, lags, hidden, prior_layers, compressed=context)
        if self.stationary < channels:
            hidden = changing_hidden or prior_hidden or 384
            self.changing_prior = ChangingPrior(channels - self.stationary, regime_embedding, hidden, prior_layers)
            self.regimes = Regimes(regimes, min(regime_channels, channels))
            self.regime_embedding = nn.Embedding(regimes, regime_embedding)

    def may_start_anew(self, name: str) -> bool:
        """All but the forecaster: weights of a plain TimeBridge are a beginning."""
        return not name.startswith(("embedding.", "encoder."))

    def no_weight_decay(self) -> list[str]:
        """What the regimes are, learned from their likelihood alone."""
        return [name for name, _ in self.named_parameters() if name.startswith("regimes.")]

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """As those of TimeBridge, and the offset of the log-variance."""
        adapted = super().adapt_state_dict(state, source)
        self._add_shift(adapted, "")
        return adapted

    def _add_shift(self, state: dict[str, Any], prefix: str) -> None:
        """To weights from before it was kept: it was the configuration's."""
        if f"{prefix}past_scale.1.weight" in state and hasattr(self, "log_variance_shift"):
            state.setdefault(f"{prefix}log_variance_shift", self._initial_shift.clone())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self._add_shift(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def settings_of(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Those of TimeBridge, and of prior and regimes."""
        return {**super().settings_of(state), **prior_settings(state)}

    def start_epoch(self, epoch: int) -> None:
        """Freeze the regimes once their epochs are over."""
        self._frozen = epoch >= self.regime_epochs
        if self._frozen and self.prior and self.stationary < self.channels:
            self.regimes.freeze()

    def spread_of(self, x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        """Standard deviation of each latent of the horizon around the forecast, (B, H, C), in the units of ``x``.

        That is what q(z | x) says: of latents, which training keeps as close to the series as its loss asks. It is not
        fitted to the residuals, and may be far from them.
        """
        series, _, std = standardised(x)
        log_variance = in_float32(self.scale.decoder, self.scale.encode(series, marks)).transpose(1, 2)
        return torch.exp(0.5 * (log_variance + self.log_variance_shift)) * std

    def losses(
        self, x: torch.Tensor, marks: torch.Tensor, y: torch.Tensor, known: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The terms, weighted; arguments as for :meth:`forward`.

        Where there is no truth, the regimes see the last value of the lookback; the reconstruction is of the lookback
        as it is seen, filled cells included.

        ``loss_forecast``, ``loss_reconstruction`` and, with the prior, ``loss_stationary_kl``, ``loss_changing_kl`` and
        ``loss_hmm``, 0-dim each.
        """
        if known is not None:
            y = torch.where(known > 0, y, x[:, -1:].expand_as(y))
        series, mean, std = standardised(x)
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
        """The KL terms and the regimes' own, unweighted."""
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
                # DDP waits for a gradient of every parameter: these get zeros, and nothing looks at them any more.
                terms["hmm"] = sum((p.sum() for p in self.regimes.parameters()), z.new_zeros(())) * 0.0
            else:
                terms["hmm"] = self.regimes.negative_log_likelihood(series)
        return terms


def _head(tokens: int, steps: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(-2), nn.Linear(tokens, steps, bias=False))
