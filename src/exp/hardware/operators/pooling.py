"""Derivatives of pooling by maxima: each gradient goes to the element that was the largest."""

from __future__ import annotations

from typing import Any, Callable

import torch

from exp.hardware.operators.wide import wide

__all__ = ["KERNELS"]

Tensor = torch.Tensor


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
    _max_pool_backward("max_pool2d_with_indices_backward", 2),
    _max_pool_backward("max_pool3d_with_indices_backward", 3),
    _max_pool_backward("adaptive_max_pool2d_backward", 2),
    _max_pool_backward("adaptive_max_pool3d_backward", 3),
)
