"""Learned transition priors of latent time series, by a change of variables.

An MLP f_c per latent maps the latent z_t^c to noise eps_t^c = f_c(context_t, z_t^c), which is standard normal. The
Jacobian of z_t -> eps_t is diagonal, so that

    log p(z_t | context_t) = sum over c of [log N(eps_t^c; 0, 1) + log |d eps_t^c / d z_t^c|]

(Yao et al., "Learning temporally causal latent processes from general temporal data", ICLR 2022, arXiv 2110.05428,
sec. 3.2). There are two kinds of context: the last L steps of all latents (:class:`StationaryPrior`), and an embedding
of the step's regime (:class:`ChangingPrior`).

A variational model adds weighted divergences between the posterior q, from which z is drawn, and the prior to its loss,
estimated at z (:func:`~exp.forecasting.timebridge.density.gaussian_log_density` gives log q):

    log q(z_t) - prior(z)_t, averaged over steps and batch.

It also adds a weighted -log p(x) of the hidden Markov model of the regimes (:mod:`exp.forecasting.timebridge.hmm`),
whose most probable path selects the embeddings. The priors return log-densities per step, (B, T). The first L steps of
a stationary prior have no complete past; they are standard normal.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from exp.forecasting.timebridge.density import gaussian_log_density, noise_log_density
from exp.hardware.compat import autocast_disabled

__all__ = ["ChangingPrior", "LatentMLPs", "StackedLinear", "StationaryPrior"]


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

    def log_density(self, context: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Sum over the latents of log N(value; 0, 1) + log |derivative by the own latent|.

        Args:
            context: (..., K).
            own: (..., C).

        Returns:
            (...), of the parameters' dtype, also under autocast.
        """
        weights, biases = ([getattr(layer, name) for layer in self.layers] for name in ("weight", "bias"))
        flat_context, flat_own = (x.reshape(-1, x.shape[-1]).to(weights[0].dtype) for x in (context, own))
        with autocast_disabled(own.device.type):
            density = noise_log_density(flat_context, flat_own, weights, biases)
        return density.view(own.shape[:-1])


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


class ChangingPrior(nn.Module):
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
