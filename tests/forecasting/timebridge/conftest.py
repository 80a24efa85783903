"""References for the models: the benchmarks' plain TimeBridge, and networks of a prior one after the other."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch.distributions import Normal

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
FLOOR = 1e-3  # of a derivative's magnitude; below it a parabola continues the logarithm


def values_and_slopes(networks, context, own):
    """Of one network per latent; torch differentiates each by its latent, the last input."""
    own = own if own.requires_grad else own.requires_grad_()
    values, slopes = [], []
    for latent, network in enumerate(networks):
        value = network(torch.cat([context, own[..., latent : latent + 1]], dim=-1))
        values.append(value)
        slopes.append(torch.autograd.grad(value.sum(), own, create_graph=True)[0][..., latent : latent + 1])
    return torch.cat(values, dim=-1), torch.cat(slopes, dim=-1)


def log_density(networks, context, own):
    """Change of variables: the sum over latents of log N(value; 0, 1) + log |slope|."""
    values, slopes = values_and_slopes(networks, context, own)
    sizes = slopes.abs()
    logs = torch.where(sizes > FLOOR, sizes.log(), ((sizes / FLOOR) ** 2 - 1) / 2 + math.log(FLOOR))
    return (Normal(0.0, 1.0).log_prob(values) + logs).sum(-1)
