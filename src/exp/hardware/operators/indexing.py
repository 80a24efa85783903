"""Operators that use integer indices: embedding gradients, bincount, and gradients of max pooling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from exp.hardware.operators.wide import to_float32

__all__ = [
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "bincount", "embedding_dense_backward",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
]  # fmt: skip

Tensor = torch.Tensor


def embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Gradient of an embedding table: the sum of the gradients of each row.

    Args:
        grad_output: (..., D).
        indices: (...), integers below ``num_weights``.
        num_weights: number of rows.
        padding_idx: row whose gradient is 0; no row if negative.
        scale_grad_by_freq: divide each row by the number of times that it was looked up.

    Returns:
        (num_weights, D), of the dtype of ``grad_output``.
    """
    width = grad_output.shape[-1]
    rows, grad = indices.reshape(-1), to_float32(grad_output).reshape(-1, width)
    result = grad.new_zeros(num_weights, width).index_add_(0, rows, grad)
    if scale_grad_by_freq:
        counts = grad.new_zeros(num_weights).index_add_(0, rows, grad.new_ones(rows.shape))
        result.div_(counts.clamp_min_(1.0).unsqueeze(1))
    if padding_idx >= 0:
        result[padding_idx].zero_()
    return result.to(grad_output.dtype)


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number occurs, or the sum of its weights.

    Args:
        self: (N,), integers from 0.
        weights: (N,), or None.
        minlength: minimum length of the result.

    Returns:
        (max(largest number + 1, minlength),): int64 counts; sums of float32 weights in float32, others in float64, as
        in torch.
    """
    if not self.numel():
        return self.new_zeros(minlength, dtype=torch.int64)
    length = max(minlength, int(self.max()) + 1)
    if self.dtype not in (torch.int32, torch.int64):  # narrower types cannot be indices
        self = self.int()
    if weights is None:
        return self.new_zeros(length, dtype=torch.int64).index_add_(0, self, torch.ones_like(self, dtype=torch.int64))
    if weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(length).index_add_(0, self, weights)


def _max_pool_backward(axes: int, grad_output: Tensor, self: Tensor, *geometry: Any) -> Tensor:
    """Gradient of max pooling over the last ``axes`` axes; ``self`` and the result: ([N,] C, ...)."""
    indices = geometry[-1].flatten(-axes)
    grad = to_float32(grad_output).flatten(-axes)
    zeros = grad.new_zeros(self.shape).flatten(-axes)
    return zeros.scatter_add_(-1, indices, grad).view(self.shape).to(self.dtype)


max_pool2d_with_indices_backward = adaptive_max_pool2d_backward = partial(_max_pool_backward, 2)
max_pool3d_with_indices_backward = adaptive_max_pool3d_backward = partial(_max_pool_backward, 3)
