"""Softmax, its logarithm, and the loss that takes the latter."""

from __future__ import annotations

import torch

from exp.hardware.operators.wide import wide

__all__ = ["KERNELS"]

Tensor = torch.Tensor
_MEAN = 1
"""``reduction`` of torch's losses: 0 none, 1 mean, 2 sum."""


def _softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Gives y (g - sum g y), y the softmax; any shape, of ``input_dtype``."""
    product = wide(grad_output) * wide(output)
    return product.addcmul_(wide(output), product.sum(dim, keepdim=True), value=-1.0).to(input_dtype)


def _log_softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Gives g - exp(y) sum g, y the logarithm of the softmax; any shape, of ``input_dtype``."""
    grad = wide(grad_output)
    probabilities = torch.exp(wide(output))
    return torch.addcmul(grad, probabilities, grad.sum(dim, keepdim=True), value=-1.0).to(input_dtype)


def nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Gives -g w[t] at [t], over the sum of the weights for the mean; 0 elsewhere and where t is ``ignore_index``.

    Args:
        grad_output: 0-dim, or of the shape of ``target`` without a reduction.
        self: log-probabilities, (N, K, ...) or (K,).
        target: integers below K, (N, ...) or 0-dim.
        weight: (K,), or None.
        reduction: 0 none, 1 mean, 2 sum.
        ignore_index: target of what does not count.
        total_weight: 0-dim, sum of the weights of what counts.

    Returns:
        Of the shape and dtype of ``self``.
    """
    classes = 0 if self.dim() == 1 else 1
    index = target.unsqueeze(classes)
    ignored = index == ignore_index
    index = index.masked_fill(ignored, 0)
    grad = wide(grad_output).neg()
    if reduction == _MEAN:
        grad = grad / wide(total_weight)
    grad = grad.unsqueeze(classes) if grad.dim() else grad.expand(index.shape)
    if weight is not None:
        grad = grad * wide(weight).index_select(0, index.reshape(-1)).view(index.shape)
    grad = grad.masked_fill(ignored, 0.0).to(self.dtype)
    return torch.zeros_like(self, memory_format=torch.contiguous_format).scatter_(classes, index, grad)


def nll_loss2d_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """The same for (N, K, H, W) and targets (N, H, W)."""
    return nll_loss_backward(grad_output, self, target, weight, reduction, ignore_index, total_weight)


KERNELS = (_softmax_backward_data, _log_softmax_backward_data, nll_loss_backward, nll_loss2d_backward)
