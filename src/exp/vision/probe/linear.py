"""Linear probes on frozen features: logistic regression by L-BFGS, and SGD at many learning rates at once.

What is computed for all rows runs on the device: products, softmax, sums. Gradients are written down, not recorded, so
the backward passes that some cards lack are not needed. Steps of the optimizer, on as many numbers as a probe has, run
on the CPU in float64.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import numpy as np
import torch

from exp.vision.probe.descent import factor, minimize
from exp.vision.probe.rows import Rows

__all__ = ["Scale", "Targets", "fit_logistic", "fit_sgd", "scores"]


class Scale:
    """Columns less their mean, over their standard deviation; of the training rows.

    Args:
        rows: of the training; None: rows stay as they are.
    """

    def __init__(self, rows: Rows | None) -> None:
        self.moments = None if rows is None else tuple(each.to(rows.device) for each in rows.moments())

    def __call__(self, block: torch.Tensor) -> torch.Tensor:
        """Rows as a probe sees them, (b, D)."""
        return block if self.moments is None else (block - self.moments[0]) / self.moments[1]


class Targets:
    """What is to be learned, as a matrix (n, K) of 0 and 1, a block at a time.

    Attributes:
        several: whether a row may have several labels: each class is then told by itself.

    Args:
        labels: of :class:`exp.vision.probe.rows.Rows`.
        num_classes: classes (K).
    """

    def __init__(self, labels: np.ndarray, num_classes: int) -> None:
        self.several = labels.ndim == 2
        self._labels = labels
        self._num_classes = num_classes

    def block(self, where: Any, device: torch.device) -> torch.Tensor:
        """float32 (b, K)."""
        labels = self._labels[where]
        if not self.several:
            labels = np.eye(self._num_classes, dtype=np.float32)[labels]
        return torch.from_numpy(np.ascontiguousarray(labels)).to(device)

    def wrong(self, logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss, summed over the rows (0-dim), and its derivative by the logits; both of (..., K)."""
        if self.several:
            # -log sigmoid(z) y - log sigmoid(-z) (1 - y) = max(z, 0) - z y + log(1 + exp(-|z|))
            loss = logits.clamp_min(0.0) - logits * target + torch.log(1.0 + torch.exp(-logits.abs()))
            return loss.sum(), torch.sigmoid(logits) - target
        top = logits.amax(dim=-1, keepdim=True)
        weights = torch.exp(logits - top)
        total = weights.sum(dim=-1, keepdim=True)
        loss = (torch.log(total) + top).sum() - (logits * target).sum()
        return loss, weights / total - target


def fit_logistic(
    rows: Rows, scale: Scale, num_classes: int, strength: float, iterations: int
) -> tuple[torch.Tensor, bool]:
    """Logistic regression: the minimum of 1/2 |W|^2 + C * (sum of the losses), the bias left out of |W|.

    Features are alike, and of different sizes, so steps are taken in the metric of the curvature where all classes are
    as likely: without it, weak regularisation takes tens of thousands of iterations.

    Args:
        rows: of the training (n).
        scale: of the columns.
        num_classes: classes (K).
        strength: C, as scikit-learn calls it: the larger, the less regularised.
        iterations: of L-BFGS, at most.

    Returns:
        Weights and, in the last row, biases: float32 (D + 1, K), on the CPU; and whether this is the minimum: a further
        step would gain less than 1e-8 of it.
    """
    targets = Targets(rows.labels, num_classes)
    share = 1.0 / len(rows)  # of all: sums of a million losses would leave no digits
    penalty = share / strength

    def objective(weights: torch.Tensor) -> tuple[float, torch.Tensor]:
        on_device = weights.float().to(rows.device)
        value, slope = 0.0, torch.zeros_like(weights)
        for block, where in rows.blocks():
            block = scale(block)
            loss, wrong = targets.wrong(block @ on_device[:-1] + on_device[-1], targets.block(where, rows.device))
            value += float(loss)
            slope[:-1] += (block.t() @ wrong).cpu().double()
            slope[-1] += wrong.sum(dim=0).cpu().double()
        slope *= share
        slope[:-1] += penalty * weights[:-1]
        return share * value + 0.5 * penalty * float((weights[:-1] * weights[:-1]).sum()), slope

    centre = torch.zeros(rows.dim) if scale.moments else rows.moments()[0]
    likely = share * (0.25 if targets.several else 1.0 / num_classes)
    curvature = _products(rows, scale, centre) * likely
    curvature.diagonal().add_(penalty)
    solve = factor(curvature)

    def inverse(right: torch.Tensor) -> torch.Tensor:
        """Of the curvature by weights and biases: what the mean of the columns adds to a score is the bias's."""
        solved = torch.empty_like(right)
        solved[:-1] = solve(right[:-1] - centre.double().unsqueeze(1) * right[-1])
        solved[-1] = right[-1] / (likely * len(rows)) - centre.double() @ solved[:-1]
        return solved

    start = torch.zeros((rows.dim + 1, num_classes), dtype=torch.float64)
    weights, converged = minimize(objective, start, inverse, iterations)
    return weights.float(), converged


def _products(rows: Rows, scale: Scale, centre: torch.Tensor) -> torch.Tensor:
    """Sums of the products of each two columns, less ``centre`` (D,): float64 (D, D), on the CPU."""
    found = torch.zeros((rows.dim, rows.dim), dtype=torch.float64)
    centre = centre.to(rows.device)
    for block, _ in rows.blocks():
        block = scale(block) - centre
        found += (block.t() @ block).cpu().double()
    return found


def fit_sgd(
    rows: Rows,
    scale: Scale,
    num_classes: int,
    rates: Sequence[float],
    epochs: int,
    batch_size: int,
    seed: int,
) -> torch.Tensor:
    """Heads of several learning rates, trained at once on the same batches, as the authors evaluate DINOv2 and DINOv3.

    Momentum 0.9, no weight decay, rates times batch / 256 and then along half a cosine to 0. Theirs see augmented
    images, these the features of the plain ones.

    Args:
        rows: of the training (n).
        scale: of the columns.
        num_classes: classes (K).
        rates: of the heads (G), before they are scaled.
        epochs: over all rows.
        batch_size: rows of a step.
        seed: of the first weights and of the order.

    Returns:
        float32 (G, D + 1, K), on the CPU, biases last.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, dim = len(rates), rows.dim
    first = torch.randn((dim, 1, num_classes), generator=generator) * 0.01
    weights = first.expand(dim, heads, num_classes).reshape(dim, -1).contiguous().to(rows.device)
    bias = torch.zeros(heads * num_classes).to(rows.device)
    speed, bias_speed = torch.zeros_like(weights), torch.zeros_like(bias)
    scaled = torch.tensor(rates).mul(batch_size / 256).repeat_interleave(num_classes).to(rows.device)
    targets = Targets(rows.labels, num_classes)
    steps_per_epoch = -(-len(rows) // batch_size)
    step, steps = 0, epochs * steps_per_epoch
    for _ in range(epochs):
        order = torch.randperm(len(rows), generator=generator).numpy()
        for begin in range(0, len(rows), batch_size):
            places = order[begin : begin + batch_size]
            block = scale(rows.read(places))
            target = targets.block(places, rows.device).unsqueeze(1)
            logits = (block @ weights + bias).reshape(len(places), heads, num_classes)
            wrong = targets.wrong(logits, target.expand_as(logits))[1].reshape(len(places), -1) / len(places)
            rate = scaled * (0.5 * (1.0 + math.cos(math.pi * step / steps)))
            speed.mul_(0.9).add_(block.t() @ wrong)
            bias_speed.mul_(0.9).add_(wrong.sum(dim=0))
            weights -= rate * speed
            bias -= rate * bias_speed
            step += 1
    whole = torch.cat([weights, bias.unsqueeze(0)], dim=0).cpu().reshape(dim + 1, heads, num_classes)
    return whole.permute(1, 0, 2).contiguous()


def scores(rows: Rows, scale: Scale, weights: torch.Tensor) -> np.ndarray:
    """Logits of all rows: float32 (n, K)."""
    on_device = weights.to(rows.device)
    found = np.empty((len(rows), weights.shape[-1]), np.float32)
    for block, where in rows.blocks():
        found[where] = (scale(block) @ on_device[:-1] + on_device[-1]).cpu().numpy()
    return found
