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
    """The parameters of one linear layer per latent; each is initialised as ``nn.Linear``.

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
        negative_slope: of LeakyReLU.

    Raises:
        ValueError: a size is below 1, or the slope is not in [0, 1].
    """

    def __init__(
        self, latents: int, context: int, hidden: int, num_layers: int = 1, negative_slope: float = 0.2
    ) -> None:
        super().__init__()
        for name, size in (("latents", latents), ("context", context), ("hidden", hidden), ("num_layers", num_layers)):
            if size < 1:
                raise ValueError(f"{name}={size} of a transition prior is too small; set at least 1")
        if not 0.0 <= negative_slope <= 1.0:
            raise ValueError(f"negative_slope={negative_slope} of a transition prior is not in [0, 1]; 0.2 is usual")
        sizes = [context + 1, *[hidden] * num_layers, 1]
        self.layers = nn.ModuleList(StackedLinear(latents, *pair) for pair in zip(sizes, sizes[1:]))
        self.negative_slope = negative_slope

    def log_density(self, context: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Sum over the latents of log N(value; 0, 1) + log |derivative by the own latent|.

        Args:
            context: (..., K).
            own: (..., C).

        Returns:
            (...), in the parameters' dtype, under autocast too.
        """
        layers = [layer for layer in self.layers if isinstance(layer, StackedLinear)]  # all are; says so to mypy
        weights: list[torch.Tensor] = [layer.weight for layer in layers]
        biases: list[torch.Tensor] = [layer.bias for layer in layers]
        flat_context, flat_own = (x.reshape(-1, x.shape[-1]).to(weights[0].dtype) for x in (context, own))
        with autocast_disabled(own.device.type):
            density = noise_log_density(flat_context, flat_own, weights, biases, self.negative_slope)
        return density.view(own.shape[:-1])


class StationaryPrior(nn.Module):
    """Prior of latents whose transition does not change: eps_t^c = f_c(z_{t-L}, ..., z_{t-1}, z_t^c).

    Args:
        latents: C.
        lags: past steps L that a step depends on.
        hidden: units of a hidden layer.
        num_layers: hidden layers.
        negative_slope: of LeakyReLU.
        compressed: numbers to which a linear layer common to all latents brings the L * C lagged latents, before the
            MLPs see them; None: they see all. Some 10 from 100 latents on.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        latents: int,
        lags: int = 1,
        hidden: int = 64,
        num_layers: int = 1,
        negative_slope: float = 0.2,
        compressed: int | None = None,
    ) -> None:
        super().__init__()
        if lags < 1:
            raise ValueError(f"lags={lags} of a stationary transition prior is too small; set at least 1")
        self.latents, self.lags = latents, lags
        context = lags * latents if compressed is None else compressed
        self.mlps = LatentMLPs(latents, context, hidden, num_layers, negative_slope)
        self.compress = nn.Identity() if compressed is None else nn.Linear(lags * latents, compressed)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """Log-densities log p(z_t | z_<t), (B, T); the first L steps are standard normal. ``z``: (B, T, C), T > L."""
        later = self.mlps.log_density(*self._past_and_present(z))
        return torch.cat([gaussian_log_density(z[:, : self.lags]).to(later.dtype), later], dim=1)

    def _past_and_present(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _check_latents(z, self.latents, self.lags)
        steps = z.shape[1] - self.lags
        lagged = torch.cat([z[:, lag : lag + steps] for lag in range(self.lags)], dim=2)  # the oldest first
        with autocast_disabled(z.device.type):
            return self.compress(lagged.to(next(self.mlps.parameters()).dtype)), z[:, self.lags :]


class ChangingPrior(nn.Module):
    """Prior of latents whose distribution changes with the regime: eps_t^c = f_c(embedding_t, z_t^c).

    Args:
        latents: C.
        embedding: elements D of a regime's embedding.
        hidden: units of a hidden layer.
        num_layers: hidden layers.
        negative_slope: of LeakyReLU.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self, latents: int, embedding: int, hidden: int = 64, num_layers: int = 1, negative_slope: float = 0.2
    ) -> None:
        super().__init__()
        self.latents = latents
        self.mlps = LatentMLPs(latents, embedding, hidden, num_layers, negative_slope)

    def forward(self, z: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        """Log-densities log p(z_t | regime_t) of every step.

        Args:
            z: (B, T, C).
            embeddings: (B, T, D), of the regime of each step.

        Returns:
            (B, T).

        Raises:
            ValueError: ``z`` has another number of latents, or the embeddings another number of steps.
        """
        _check_latents(z, self.latents)
        if embeddings.shape[:2] != z.shape[:2]:
            raise ValueError(
                f"embeddings {tuple(embeddings.shape)} and z {tuple(z.shape)} differ in batch or steps; "
                f"pass the embedding of every step's regime, (B, T, D)"
            )
        return self.mlps.log_density(embeddings, z)


def _check_latents(z: torch.Tensor, latents: int, lags: int = 0) -> None:
    if z.dim() != 3 or z.shape[2] != latents or z.shape[1] <= lags:
        steps = f"more than {lags} steps" if lags else "steps"
        raise ValueError(
            f"z of a transition prior has the shape {tuple(z.shape)}; pass (batch, {steps}, {latents} latents)"
        )
