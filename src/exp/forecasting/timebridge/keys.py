"""The typed keys of TimeBridge and of its variant with a transition prior; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from exp.forecasting.keys import OutputKeys

# OmegaConf reads these annotations at run time, on Python 3.8 too: hence typing's generics, not the builtin ones.


@dataclass
class TimeBridgeConfig(OutputKeys):
    """TimeBridge (:class:`exp.forecasting.timebridge.model.TimeBridge`; Liu et al., arXiv 2410.04442)."""

    _target_: str = "exp.forecasting.timebridge.model.TimeBridge"
    time_features: int = 4
    """Number of time-feature channels."""
    period: int = 24
    """Patch length in time steps if it divides the lookback L; otherwise the length is ``L // (L // period)``."""
    num_patches_out: Optional[int] = None
    """Patches after down-sampling (``num_p`` in the authors' code); null: no fewer than before."""
    d_model: int = 128
    """Elements of a token."""
    d_ff: int = 128
    """Hidden units of the feed-forward layers."""
    num_heads: int = 8
    """Attention heads; must divide ``d_model``."""
    integrated_layers: int = 3
    """Layers of integrated attention (``ia_layers``): within a channel, between its patches."""
    downsampling_layers: int = 1
    """Layers that reduce the patches to ``num_patches_out`` (``pd_layers``)."""
    cointegrated_layers: int = 0
    """Layers of cointegrated attention (``ca_layers``): between channels."""
    stable_len: int = 6
    """Length of the moving average that detrends queries and keys."""
    attention_dropout: float = 0.15
    """Dropout probability of the attention weights."""
    dropout: float = 0.0
    """Dropout probability of all other layers."""
    alpha: float = 0.35
    """Weight of the frequency part of the loss."""


@dataclass
class TimeBridgePriorConfig(TimeBridgeConfig):
    """TimeBridge with a transition prior (:class:`exp.forecasting.timebridge.prior.TimeBridgePrior`)."""

    _target_: str = "exp.forecasting.timebridge.prior.TimeBridgePrior"
    prior: bool = True
    """Whether the model has a transition prior and regimes."""
    stationary_ratio: float = 0.7
    """Fraction of the channels, in [0, 1], whose latents are stationary; their number is rounded down."""
    lags: int = 1
    """Past steps that a stationary latent depends on."""
    regimes: int = 4
    """Number of regimes (states of the hidden Markov model)."""
    regime_channels: int = 4
    """Number of channels, from the first on, that the hidden Markov model observes."""
    regime_epochs: int = 1
    """Epochs before the regimes are frozen."""
    regime_embedding_dim: int = 2
    """Elements of a regime's embedding."""
    prior_hidden: Optional[int] = None
    """Units of the hidden layer of a stationary latent's MLP; null: 384, and 3 from 100 channels on."""
    nonstationary_hidden: Optional[int] = None
    """Units of the hidden layer of a nonstationary latent's MLP; null: ``prior_hidden`` if set, else 384."""
    prior_layers: int = 1
    """Hidden layers of both kinds of MLP."""
    prior_context: Optional[int] = None
    """Size to which a linear layer compresses the lagged latents before the MLPs; null: no compression for up to 100
    stationary latents, 10 for more."""
    reconstruction_weight: float = 1.0
    """Weight of the loss over the lookback."""
    stationary_kl_weight: float = 1e-3
    """Weight of the KL term of the stationary latents, per time step."""
    nonstationary_kl_weight: float = 1e-3
    """Weight of the KL term of the nonstationary latents, per time step."""
    hmm_weight: float = 1.0
    """Weight of the regimes' negative log-likelihood per time step. No other term trains the regimes."""
    initial_log_variance: float = -4.0
    """Added to the network's log-variance, so that training begins with little noise. It is a buffer: a checkpoint
    restores its own value."""
    sampling: bool = True
    """Whether training draws the latents; false: it uses their mean. Each device draws from its own generator, as for
    dropout, so losses are the same for any number of devices only with false."""
