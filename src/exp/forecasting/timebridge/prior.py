"""TimeBridge as a variational model whose latents have a learned transition prior, by a change of variables.

An MLP f_c per latent maps the latent z_t^c to noise eps_t^c = f_c(context_t, z_t^c), which is standard normal. The
Jacobian of z_t -> eps_t is diagonal, so that

    log p(z_t | context_t) = sum over c of [log N(eps_t^c; 0, 1) + log |d eps_t^c / d z_t^c|]

(Yao et al., "Learning temporally causal latent processes from general temporal data", ICLR 2022, arXiv 2110.05428,
sec. 3.2). There are two kinds of context: the last L steps of all latents (:class:`StationaryPrior`), and an embedding
of the step's regime (:class:`NonstationaryPrior`).

A variational model adds weighted divergences between the posterior q, from which z is drawn, and the prior to its loss,
estimated at z (:func:`~exp.forecasting.timebridge.density.gaussian_log_density` gives log q):

    log q(z_t) - prior(z)_t, averaged over steps and batch.

It also adds a weighted -log p(x) of the hidden Markov model of the regimes (:mod:`exp.forecasting.timebridge.hmm`),
whose most probable path selects the embeddings. The priors return log-densities per step, (B, T). The first L steps of
a stationary prior have no complete past; they are standard normal.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import reduce
from operator import add
from typing import Any, ClassVar, Mapping

import torch
from torch import nn

from exp.errors import ConfigError
from exp.forecasting.model import STD_EPS, in_float32
from exp.forecasting.outputs import PosteriorDeviations, RawForecast
from exp.forecasting.timebridge.density import gaussian_log_density, noise_log_density
from exp.forecasting.timebridge.hmm import Regimes
from exp.forecasting.timebridge.keys import TimeBridgePriorConfig
from exp.forecasting.timebridge.loss import make_loss
from exp.forecasting.timebridge.model import TimeBridge, linear_head
from exp.hardware.compat import autocast_disabled

# Values of the horizon are clamped to this many standard deviations (of the lookback) before the regimes see them.
#
# Over a flat lookback any change is 1e5 standard deviations; squared in an emission, a few steps would dominate the
# loss. Values of the lookback itself are at most sqrt(L) standard deviations away (Samuelson, JASA 63(324), 1968).
MAX_DEVIATION = 30.0


class TimeBridgePrior(TimeBridge):
    """TimeBridge whose series are latents of a state-space model (the variant hao405/tb96-xianyan_big).

    There is one latent for each channel and each of the L + H time steps of lookback and horizon. One TimeBridge gives
    the mean of q(z | x), another its log-variance. Training draws latents from q, with

        loss = forecast(z over the horizon) + reconstruction(z over the lookback)
             + KL of the stationary latents + KL of the nonstationary latents - log p(x) of the regimes,

    each term with its weight. A KL term is the mean over steps of log q(z_t) - log p(z_t | ...) at the latents drawn.
    p is a :class:`StationaryPrior` for the first channels, and for the rest a :class:`NonstationaryPrior` that depends
    on the step's most probable regime (:class:`Regimes`). The regimes learn from the data alone during the first
    ``regime_epochs`` epochs, and are then frozen; they see values of the horizon up to :data:`MAX_DEVIATION`. A
    forecast is the mean, without drawing. It does not need the prior, so weights of a plain TimeBridge fit unchanged.

    Args:
        **keys: of :class:`exp.forecasting.timebridge.keys.TimeBridgePriorConfig`, which documents them.

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
        self.uses_global_rng = config.sampling  # latents, from the device's generator
        self.stationary = int(channels * config.stationary_ratio + 1e-9)
        terms = ("reconstruction", "stationary_kl", "nonstationary_kl", "hmm")
        self.weights = {term: getattr(config, f"{term}_weight") for term in terms}
        self._frozen = False
        self.past_decoder = linear_head(self.token_elements, config.lookback)
        self.past_loss = make_loss(config.loss, config.lookback, config.alpha)
        if config.prior or config.sampling:
            if keys.get("output") is None:
                self.output = PosteriorDeviations()
            backbone_keys = {field.name for field in fields(TimeBridge.config_class)} - {"_target_"}
            self.scale = TimeBridge(**{key: getattr(config, key) for key in backbone_keys})
            self.past_scale = linear_head(self.token_elements, config.lookback)
            self.register_buffer("log_variance_shift", torch.tensor(float(config.initial_log_variance)))
        if not config.prior:
            return
        layers = config.prior_layers
        if self.stationary:
            hidden = (3 if channels >= 100 else 384) if config.prior_hidden is None else config.prior_hidden
            context = 10 if self.stationary > 100 and config.prior_context is None else config.prior_context
            self.stationary_prior = StationaryPrior(self.stationary, config.lags, hidden, layers, context)
        if self.stationary < channels:
            hidden = config.nonstationary_hidden or config.prior_hidden or 384
            size = config.regime_embedding_dim
            self.nonstationary_prior = NonstationaryPrior(channels - self.stationary, size, hidden, layers)
            self.regimes = Regimes(config.regimes, min(config.regime_channels, channels))
            self.regime_embedding = nn.Embedding(config.regimes, size)

    @staticmethod
    def _check(config: TimeBridgePriorConfig) -> None:
        if config.stationary_ratio > 1.0:
            raise ConfigError(f"model.stationary_ratio={config.stationary_ratio} is not a share; set one from 0 to 1")
        if config.lags >= config.lookback:
            raise ConfigError(f"model.lags={config.lags} must be less than lookback={config.lookback}")

    def is_new_head(self, name: str) -> bool:
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

    def raw_forecast(self, x: torch.Tensor, marks: torch.Tensor) -> RawForecast:  # type: ignore[override]
        """See :meth:`exp.forecasting.model.Forecaster.raw_forecast`.

        Without ``model.output`` the standard deviations are those of q(z | x), in the units of ``x``; no term of the
        loss fits them to residuals: they may be far from them. They cost a second network, which runs if they are used.
        """
        raw = super().raw_forecast(x, marks)
        if not isinstance(self.output, PosteriorDeviations) or not self.gives_values:
            return raw
        series, _, std = self.standardize(x)
        log_variance = in_float32(self.scale.decoder, self.scale.encode(series, marks)).transpose(1, 2)
        return raw._replace(others=(torch.exp(0.5 * (log_variance + self.log_variance_shift)) * std).unsqueeze(-1))

    def _others(self, tokens: torch.Tensor) -> torch.Tensor | None:
        return None if isinstance(self.output, PosteriorDeviations) else super()._others(tokens)

    def losses(
        self, x: torch.Tensor, y: torch.Tensor, observed: torch.Tensor | None, inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """The weighted terms of the loss by name, 0-dim each.

        ``loss_forecast``, ``loss_reconstruction`` and, with the prior, ``loss_stationary_kl``,
        ``loss_nonstationary_kl`` and ``loss_hmm``. Where ``y`` has no truth, the regimes see the last value of the
        lookback. The reconstruction counts filled cells of the lookback, too.
        """
        if observed is not None:
            y = torch.where(observed > 0, y, x[:, -1:].expand_as(y))
        marks = inputs["marks"]
        series, mean, std = self.standardize(x)
        tokens = self.encode(series, marks)
        heads = (self.past_decoder, self.decoder)
        latent_mean = torch.cat([in_float32(head, tokens) for head in heads], dim=-1).transpose(1, 2)
        z, log_variance = latent_mean, None
        if self.prior or self.sampling:
            scale_tokens = self.scale.encode(series, marks)
            heads = (self.past_scale, self.scale.decoder)
            log_variance = torch.cat([in_float32(head, scale_tokens) for head in heads], dim=-1).transpose(1, 2)
            log_variance = log_variance + self.log_variance_shift
        if self.sampling and log_variance is not None:
            z = latent_mean + torch.exp(0.5 * log_variance) * torch.randn_like(latent_mean)
        decoded = z * std + mean
        lookback = x.shape[1]
        raw = RawForecast(decoded[:, lookback:], self._others(tokens), std)
        terms = {
            "forecast": reduce(add, self.output.losses(raw, y, observed, self.point_loss).values()),
            "reconstruction": self.past_loss(decoded[:, :lookback], x),
        }
        if self.prior and log_variance is not None:
            future = ((y - mean) / (std + STD_EPS)).clamp(-MAX_DEVIATION, MAX_DEVIATION)
            full_series = torch.cat([series, future], dim=1)
            terms.update(self._divergences(z, latent_mean, log_variance, full_series))
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
            terms["nonstationary_kl"] = (density - self.nonstationary_prior(z[..., split:], embeddings)).mean()
            if self._frozen:
                # DDP waits for a gradient of every parameter: frozen regimes get zeros.
                terms["hmm"] = sum((p.sum() for p in self.regimes.parameters()), z.new_zeros(())) * 0.0
            else:
                terms["hmm"] = self.regimes.negative_log_likelihood(series)
        return terms


class StackedLinear(nn.Module):
    """The parameters of one linear layer per latent; each is initialized like ``nn.Linear``.

    Args:
        latents: number of layers (C).
        inputs: inputs of each layer.
        outputs: outputs of each layer.
    """

    def __init__(self, latents: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(latents, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(latents, outputs))
        bound = 1.0 / math.sqrt(inputs)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)


class LatentMLPs(nn.Module):
    """One MLP with LeakyReLU per latent, from the context and the own latent to one number, all evaluated together.

    The parameters are ``layers.<i>.weight`` (C, outputs, inputs) and ``.bias`` (C, outputs), stacked over the latents.
    The own latent is the last input of the first layer.

    Args:
        latents: number of MLPs (C).
        context: size of the context (K), which all MLPs share.
        hidden: units of a hidden layer.
        num_layers: number of hidden layers.
    """

    def __init__(self, latents: int, context: int, hidden: int, num_layers: int = 1) -> None:
        super().__init__()
        sizes = [context + 1, *[hidden] * num_layers, 1]
        self.layers = nn.ModuleList(StackedLinear(latents, *pair) for pair in zip(sizes, sizes[1:]))

    def log_density(self, context: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Sum over the latents of log N(value; 0, 1) + log |derivative by its own latent|.

        Args:
            context: (..., K).
            latents: (..., C).

        Returns:
            (...), of the parameters' dtype, also under autocast.
        """
        weights, biases = ([getattr(layer, name) for layer in self.layers] for name in ("weight", "bias"))
        flat_context, flat_latents = (x.reshape(-1, x.shape[-1]).to(weights[0].dtype) for x in (context, latents))
        with autocast_disabled(latents.device.type):
            density = noise_log_density(flat_context, flat_latents, weights, biases)
        return density.view(latents.shape[:-1])


class StationaryPrior(nn.Module):
    """Prior of latents whose transition does not change: eps_t^c = f_c(z_{t-L}, ..., z_{t-1}, z_t^c).

    Args:
        latents: number of latents (C).
        lags: past steps that a step depends on (L).
        hidden: units of a hidden layer.
        num_layers: number of hidden layers.
        compressed: size to which a linear layer, common to all MLPs, compresses the L * C lagged latents; None: no
            compression. About 10 is enough for more than 100 latents.
    """

    def __init__(
        self, latents: int, lags: int = 1, hidden: int = 64, num_layers: int = 1, compressed: int | None = None
    ) -> None:
        super().__init__()
        self.lags = lags
        self.mlps = LatentMLPs(latents, lags * latents if compressed is None else compressed, hidden, num_layers)
        self.compress = nn.Identity() if compressed is None else nn.Linear(lags * latents, compressed)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Log-densities log p(z_t | z_<t), (B, T); the first L steps are standard normal. ``z``: (B, T, C), T > L."""
        steps = z.shape[1] - self.lags
        lagged = torch.cat([z[:, lag : lag + steps] for lag in range(self.lags)], dim=2)  # the oldest first
        with autocast_disabled(z.device.type):
            context = self.compress(lagged.to(next(self.mlps.parameters()).dtype))
        later = self.mlps.log_density(context, z[:, self.lags :])
        return torch.cat([gaussian_log_density(z[:, : self.lags]).to(later.dtype), later], dim=1)


class NonstationaryPrior(nn.Module):
    """Prior of latents whose distribution changes with the regime: eps_t^c = f_c(embedding_t, z_t^c).

    Args:
        latents: number of latents (C).
        embedding: size of a regime's embedding (D).
        hidden: units of a hidden layer.
        num_layers: number of hidden layers.
    """

    def __init__(self, latents: int, embedding: int, hidden: int = 64, num_layers: int = 1) -> None:
        super().__init__()
        self.mlps = LatentMLPs(latents, embedding, hidden, num_layers)

    def forward(self, z: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Log-densities log p(z_t | regime_t), (B, T); ``z``: (B, T, C), ``embeddings``: of each step, (B, T, D)."""
        return self.mlps.log_density(embeddings, z)
