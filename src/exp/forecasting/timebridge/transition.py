"""Learned transition priors of latent time series, by a change of variables.

The prior of a latent z_t^c is that of a noise eps_t^c, standard normal, which an MLP f_c per latent recovers from it:
eps_t^c = f_c(context_t, z_t^c). The Jacobian of z_t -> eps_t is diagonal, so that

    log p(z_t | context_t) = sum over c of [log N(eps_t^c; 0, 1) + log |d eps_t^c / d z_t^c|]

(Yao et al., "Learning temporally causal latent processes from general temporal data", ICLR 2022, arXiv 2110.05428,
sec. 3.2). There are two kinds of context: the last L steps of all latents (:class:`StationaryPrior`), and an embedding
of the step's regime (:class:`ChangingPrior`).

A variational model adds to its reconstruction losses weights times the divergences between the posterior q, from which
z was drawn, and the prior, estimated at z (:func:`~exp.forecasting.timebridge.density.gaussian_log_density`: log q),

    log q(z_t) - prior(z)_t, averaged over steps and batch,

and a weight times -log p(x) of the hidden Markov model of the regimes (:mod:`exp.forecasting.timebridge.hmm`), whose
most probable path chooses the embeddings. The priors give log-densities per step, (B, T): the first L steps of a
stationary prior, which have no complete past and are standard normal, are often summed and weighted apart.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from exp.forecasting.timebridge.density import gaussian_log_density, noise_log_density
from exp.hardware.compat import autocast_disabled

__all__ = ["ChangingPrior", "LatentMLPs", "StackedLinear", "StationaryPrior"]


class StackedLinear(nn.Module):
    """The parameters of one linear layer per latent; each is initialized as ``nn.Linear``.

    Args:
        latents: layers C.
        inputs: of each.
        outputs: of each.
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

    The parameters are ``layers.<i>.weight`` and ``.bias``, stacked over the latents: (C, outputs, inputs) and
    (C, outputs). Of the first layer's inputs the own latent is the last.

    Args:
        latents: MLPs C.
        context: numbers K that all MLPs see.
        hidden: units of a hidden layer.
        num_layers: hidden layers.
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
            (...), in the parameters' dtype, under autocast too.
        """
        weights, biases = ([getattr(layer, name) for layer in self.layers] for name in ("weight", "bias"))
        flat_context, flat_own = (x.reshape(-1, x.shape[-1]).to(weights[0].dtype) for x in (context, own))
        with autocast_disabled(own.device.type):
            density = noise_log_density(flat_context, flat_own, weights, biases)
        return density.view(own.shape[:-1])


class StationaryPrior(nn.Module):
    """Prior of latents whose transition does not change: eps_t^c = f_c(z_{t-L}, ..., z_{t-1}, z_t^c).

    Args:
        latents: C.
        lags: past steps L that a step depends on.
        hidden: units of a hidden layer.
        num_layers: hidden layers.
        compressed: numbers to which a linear layer common to all latents brings the L * C lagged latents, before the
            MLPs see them; None: they see all. Some 10 from 100 latents on.
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
        latents: C.
        embedding: elements D of a regime's embedding.
        hidden: units of a hidden layer.
        num_layers: hidden layers.
    """

    def __init__(self, latents: int, embedding: int, hidden: int = 64, num_layers: int = 1) -> None:
        super().__init__()
        self.mlps = LatentMLPs(latents, embedding, hidden, num_layers)

    def forward(self, z: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Log-densities log p(z_t | regime_t), (B, T); ``z``: (B, T, C), ``embeddings``: of each step, (B, T, D)."""
        return self.mlps.log_density(embeddings, z)
