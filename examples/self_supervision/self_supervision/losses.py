"""Losses of self-supervised training, as sums and means over samples: independent of the number of ranks.

Shapes below: B samples, K prototypes, D elements of a feature, N patches.
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F

_EPS = 1e-6


def sinkhorn(
    scores: torch.Tensor, temperature: float, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor], steps: int = 3
) -> torch.Tensor:
    """Assign samples to prototypes so that each prototype gets as many (Sinkhorn-Knopp, SwAV, arXiv 2006.09882).

    Args:
        scores: of the teacher, (B, K), from -1 to 1.
        temperature: divides the scores.
        sum_over_ranks: adds up a tensor over all ranks, in place.
        steps: normalizations of prototypes and samples.

    Returns:
        Probabilities, (B, K); each row has the sum 1.
    """
    shares = torch.exp(scores.float() / temperature)
    for _ in range(steps):
        shares = shares / (sum_over_ranks(shares.sum(dim=0)) + _EPS)
        shares = shares / (shares.sum(dim=1, keepdim=True) + 1e-30)
    return shares


def cross_entropy(target: torch.Tensor, scores: torch.Tensor, temperature: float) -> torch.Tensor:
    """The mean over all samples of -sum_k target[k] log softmax(scores / temperature)[k]; (..., K) each."""
    return -(target * torch.log_softmax(scores.float() / temperature, dim=-1)).sum(dim=-1).mean()


def koleo(features: torch.Tensor, group: int) -> torch.Tensor:
    """Minus the mean log distance to the nearest feature of the group (Sablayrolles et al., arXiv 1806.03198).

    Args:
        features: (B, D).
        group: consecutive samples that are compared; divides B.
    """
    groups = F.normalize(features.float(), dim=-1).view(-1, group, features.shape[-1])
    others = 1.0 - torch.eye(group, device=features.device)
    # The cosine of itself is left out; the nearest of unit vectors has the largest cosine.
    cosine = (groups @ groups.transpose(1, 2)) * others + (others - 1.0)
    squared = 2.0 - 2.0 * cosine.max(dim=-1)[0]
    return -0.5 * torch.log(squared.clamp(min=0.0) + _EPS).mean()


def gram_distance(student: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Mean squared difference of the cosines between the patches of an image (DINOv3, arXiv 2508.10104, section 4).

    Args:
        student: patches of its images, (B, N, D).
        anchor: those of the first weights.
    """
    ours, theirs = (F.normalize(patches.float(), dim=-1) for patches in (student, anchor))
    return (ours @ ours.transpose(1, 2) - theirs @ theirs.transpose(1, 2)).square().mean()
