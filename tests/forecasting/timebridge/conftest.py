"""References for the models: the benchmarks' plain TimeBridge, and networks of a prior one after the other."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch.distributions import Normal

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
FLOOR = 1e-3  # of a derivative's magnitude; below it a parabola continues the logarithm


def log_density(networks, context, own):
    """Change of variables: the sum over latents of log N(value; 0, 1) + log |slope|, the slope by torch's autograd.

    Of one network per latent, whose last input the latent is.
    """
    own = own if own.requires_grad else own.requires_grad_()
    total = 0.0
    for latent, network in enumerate(networks):
        value = network(torch.cat([context, own[..., latent : latent + 1]], dim=-1)).squeeze(-1)
        size = torch.autograd.grad(value.sum(), own, create_graph=True)[0][..., latent].abs()
        log = torch.where(size > FLOOR, size.clamp_min(FLOOR).log(), ((size / FLOOR) ** 2 - 1) / 2 + math.log(FLOOR))
        total = total + Normal(0.0, 1.0).log_prob(value) + log
    return total
