"""The regimes of a multivariate series: a hidden Markov model with Gaussian emissions, learned first, then frozen."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from exp.forecasting.timebridge.hmm import log_likelihood, viterbi
from exp.hardware.compat import autocast_disabled

__all__ = ["LEAST_STD", "Regimes"]

LEAST_STD = 0.1
"""Lower bound of an emission's standard deviation."""
_STAY = 2.0
"""Initial logit of staying in a regime, relative to 0 for each other regime: with 0, initial paths would be noise."""


class Regimes(nn.Module):
    """Gaussian hidden Markov model over the time steps of standardized series.

    Only :meth:`negative_log_likelihood` trains it. :meth:`freeze` copies the parameters; from then on :meth:`path` uses
    the copy, so that further optimizer steps do not change paths.

    Args:
        count: number of regimes (K).
        channels: number of series, from the first on, that are observed (D).
    """

    frozen: torch.Tensor

    def __init__(self, count: int, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.means = nn.Parameter(torch.randn(count, channels))
        self.spreads = nn.Parameter(torch.zeros(count, channels))
        self.initial = nn.Parameter(torch.zeros(count))
        self.transition = nn.Parameter(_STAY * torch.eye(count))
        self.register_buffer("frozen", torch.zeros(()))  # 0 or 1; gloo of torch 1.10 carries no bool
        for name, parameter in self.named_parameters():
            self.register_buffer(f"frozen_{name}", parameter.detach().clone())

    def freeze(self) -> None:
        """Keep the regimes as they are now; a second call changes nothing."""
        if bool(self.frozen):
            return
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # sharded
                getattr(self, f"frozen_{name}").copy_(whole)
            self.frozen.fill_(1.0)

    def negative_log_likelihood(self, series: torch.Tensor) -> torch.Tensor:
        """-log p(series) per time step, mean over the batch.

        Args:
            series: float32 (B, T, C), C >= D.

        Returns:
            0-dim float32.
        """
        emissions = _emissions(series[..., : self.channels], self.means, self.spreads)
        chain = log_likelihood(emissions, self.initial.log_softmax(0), self.transition.log_softmax(1))
        return -chain.mean() / series.shape[1]

    @torch.no_grad()
    def path(self, series: torch.Tensor, frozen: bool) -> torch.Tensor:
        """The most probable regime of every step.

        Args:
            series: (B, T, C).
            frozen: whether :meth:`freeze` has been called; an argument, since reading the buffer would synchronize with
                the device.

        Returns:
            (B, T), int64.
        """
        names = ("means", "spreads", "initial", "transition")
        means, spreads, initial, transition = (getattr(self, f"frozen_{name}" if frozen else name) for name in names)
        emissions = _emissions(series[..., : self.channels], means, spreads)
        return viterbi(emissions, initial.log_softmax(0), transition.log_softmax(1))


def _emissions(x: torch.Tensor, means: torch.Tensor, spreads: torch.Tensor) -> torch.Tensor:
    """Log N(x; mean, std) of every regime, std = softplus(spread) + 0.1: (B, T, D) -> (B, T, K).

    In float32 under autocast, too: large products cancel here, and bfloat16 keeps only three digits of them.
    """
    with autocast_disabled(x.device.type):
        x = x.float()
        std = F.softplus(spreads) + LEAST_STD
        # The square is expanded into two matrix products, which avoids a tensor (B, T, K, D).
        precision = 1.0 / (std * std)
        quadratic = (x * x) @ precision.t() - 2.0 * (x @ (means * precision).t()) + (means * means * precision).sum(1)
        return -0.5 * quadratic - std.log().sum(1) - 0.5 * math.log(2.0 * math.pi) * x.shape[-1]
