"""What goes by number: rows, counts, and the largest elements of pooling by maxima."""

from __future__ import annotations

from typing import Any, Callable

import torch

from exp.hardware.operators.wide import wide

__all__ = ["KERNELS"]

Tensor = torch.Tensor


def embedding_dense_backward(
    grad_output: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Each row's gradients in sum, over how often it was looked up where ``scale_grad_by_freq``; 0 for the padding.

    Args:
        grad_output: (..., D).
        indices: (...), integers below ``num_weights``.
        num_weights: rows.
        padding_idx: row without a gradient; none where it is below 0.
        scale_grad_by_freq: see above.

    Returns:
        (num_weights, D), of the dtype of ``grad_output``.
    """
    width = grad_output.shape[-1]
    rows, grad = indices.reshape(-1), wide(grad_output).reshape(-1, width)
    result = grad.new_zeros(num_weights, width).index_add_(0, rows, grad)
    if scale_grad_by_freq:
        counts = grad.new_zeros(num_weights).index_add_(0, rows, grad.new_ones(rows.shape))
        result.div_(counts.clamp_min_(1.0).unsqueeze(1))
    if padding_idx >= 0:
        result[padding_idx].zero_()
    return result.to(grad_output.dtype)


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How often each number occurs, or its weights in sum (float64, as torch's; float32 where weights are).

    Args:
        self: (N,), integers from 0.
        weights: (N,), or None.
        minlength: least length of the result.

    Returns:
        (largest number + 1,), or longer.
    """
    if not self.numel():
        return self.new_zeros(minlength, dtype=torch.int64)
    length = max(minlength, int(self.max()) + 1)
    if self.dtype not in (torch.int32, torch.int64):  # narrower ones cannot be indices
        self = self.int()
    if weights is None:
        return self.new_zeros(length, dtype=torch.int64).index_add_(0, self, torch.ones_like(self, dtype=torch.int64))
    if weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(length).index_add_(0, self, weights)


def _scatter(grad_output: Tensor, self: Tensor, indices: Tensor, axes: int) -> Tensor:
    """Add gradients up at ``indices``, which count through the last axes of ``self``."""
    grad = wide(grad_output).flatten(-axes)
    zeros = grad.new_zeros(self.shape).flatten(-axes)
    return zeros.scatter_add_(-1, indices.flatten(-axes), grad).view(self.shape).to(self.dtype)


def _max_pool_backward(name: str, axes: int) -> Callable[..., Tensor]:
    def backward(grad_output: Tensor, self: Tensor, *geometry: Any) -> Tensor:
        return _scatter(grad_output, self, geometry[-1], axes)  # the last of them: indices

    backward.__name__ = name
    backward.__doc__ = "Of the maximum of each window; ``self``: ([N,] C, ...), as the result."
    return backward


KERNELS = (
    embedding_dense_backward,
    bincount,
    _max_pool_backward("max_pool2d_with_indices_backward", 2),
    _max_pool_backward("max_pool3d_with_indices_backward", 3),
    _max_pool_backward("adaptive_max_pool2d_backward", 2),
    _max_pool_backward("adaptive_max_pool3d_backward", 3),
)
