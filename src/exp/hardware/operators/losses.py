"""Gradients of losses with respect to their input.

``reduction`` is 0 (none), 1 (mean) or 2 (sum); ``grad_output`` is 0-dim for mean and sum. Results have the shape and
dtype of ``self``. x is ``self``, t is ``target``.
"""

from __future__ import annotations

import torch

from exp.hardware.operators.wide import to_float32

__all__ = [
    "binary_cross_entropy_backward", "huber_loss_backward", "nll_loss2d_backward", "nll_loss_backward",
    "smooth_l1_loss_backward",
]  # fmt: skip

Tensor = torch.Tensor
_MEAN = 1


def _share(grad_output: Tensor, count: int, reduction: int) -> Tensor:
    grad = to_float32(grad_output)
    return grad / count if reduction == _MEAN else grad


def binary_cross_entropy_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN
) -> Tensor:
    """Slope (x - t) / (x (1 - x)) for probabilities x; the denominator is at least 1e-12, as in torch."""
    x = to_float32(self)
    slope = (x - to_float32(target)).div_((1.0 - x).mul_(x).clamp_min_(1e-12))
    if weight is not None:
        slope = slope * to_float32(weight)
    return (slope * _share(grad_output, x.numel(), reduction)).to(self.dtype)


def smooth_l1_loss_backward(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    """Slope d / beta if |d| < beta, else sign(d), with d = x - t (Girshick, arXiv 1504.08083, where beta is 1)."""
    distance = to_float32(self) - to_float32(target)
    slope = torch.where(torch.abs(distance) < beta, distance / beta, torch.sign(distance))
    return (slope * _share(grad_output, distance.numel(), reduction)).to(self.dtype)


def huber_loss_backward(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int, delta: float) -> Tensor:
    """Slope d = x - t, clamped to -delta ... delta (Huber, Ann. Math. Statist. 35(1), 1964)."""
    distance = to_float32(self) - to_float32(target)
    return (distance.clamp_(-delta, delta) * _share(grad_output, distance.numel(), reduction)).to(self.dtype)


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Gradient of the negative log-likelihood: -g w[t] at class t, else 0; for the mean divided by ``total_weight``.

    Args:
        grad_output: g: 0-dim, or of the shape of ``target`` without reduction.
        self: log-probabilities, (N, K, ...) or (K,).
        target: t: integers below K, (N, ...) or 0-dim.
        weight: w: (K,), or None.
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: target value of elements that are left out; their gradient is 0.
        total_weight: 0-dim, sum of the weights of the other elements.

    Returns:
        Of the shape and dtype of ``self``.
    """
    classes = 0 if self.dim() == 1 else 1
    index = target.unsqueeze(classes)
    ignored = index == ignore_index
    index = index.masked_fill(ignored, 0)
    grad = to_float32(grad_output).neg()
    if reduction == _MEAN:
        grad = grad / to_float32(total_weight)
    grad = grad.unsqueeze(classes) if grad.dim() else grad.expand(index.shape)
    if weight is not None:
        grad = grad * to_float32(weight).index_select(0, index.reshape(-1)).view(index.shape)
    grad = grad.masked_fill(ignored, 0.0).to(self.dtype)
    return torch.zeros_like(self, memory_format=torch.contiguous_format).scatter_(classes, index, grad)


nll_loss2d_backward = nll_loss_backward
