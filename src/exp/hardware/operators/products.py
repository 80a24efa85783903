"""Vector products."""

from __future__ import annotations

import torch

from exp.hardware.operators.wide import wide

__all__ = ["KERNELS"]

Tensor = torch.Tensor


def dot(self: Tensor, tensor: Tensor) -> Tensor:
    """Dot product of two vectors (N,); 0-dim."""
    product = wide(self) * wide(tensor)
    return product.sum(dtype=product.dtype).to(self.dtype)


KERNELS = (dot,)
