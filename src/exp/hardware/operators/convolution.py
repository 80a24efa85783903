"""Gradients of convolutions, as convolutions and products (Dumoulin and Visin, arXiv 1603.07285); the dot product.

In y = conv(x, w), y is called "small" and x "large"; in a transposed convolution, x is "small" and y "large". In both
cases the gradient of the weight is the same function of the two: for each position in the kernel, the product of the
small tensor with the part of the large tensor that this position is applied to.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Sequence

import torch
import torch.nn.functional as F

from exp.hardware.operators.wide import per_axis, to_float32

__all__ = ["convolution_backward", "dot"]

Tensor = torch.Tensor


def convolution_backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a convolution with any number of spatial axes.

    Args:
        grad_output: (N, C_out, ...).
        x: (N, C_in, ...).
        weight: (C_out, C_in / groups, ...); of a transposed convolution (C_in, C_out / groups, ...).
        bias_sizes: not used.
        stride: one number for each spatial axis, or one for all; likewise ``padding`` and ``dilation``.
        padding: number of zeros at both ends.
        dilation: distance between neighboring positions of the kernel.
        transposed: whether the convolution is a transposed one.
        output_padding: not used; the shapes imply it.
        groups: number of channel groups.
        output_mask: which results are needed; the others are None.

    Returns:
        Gradients of input, weight and bias.
    """
    del bias_sizes, output_padding  # the shapes imply both
    kernel = weight.shape[2:]
    axes = len(kernel)
    stride, padding, dilation = (per_axis(values, axes) for values in (stride, padding, dilation))
    grad_input = grad_weight = grad_bias = None
    small, large = (x, grad_output) if transposed else (grad_output, x)
    if output_mask[0]:
        if transposed:
            zeros = [0] * axes
            grad_input = torch.convolution(grad_output, weight, None, stride, padding, dilation, False, zeros, groups)
            for axis, extent in enumerate(x.shape[2:], start=2):  # too long if output_padding is a stride or more
                grad_input = grad_input.narrow(axis, 0, extent)
        else:
            # The adjoint of a convolution is a transposed convolution.
            geometry = zip(x.shape[2:], grad_output.shape[2:], stride, padding, dilation, kernel)
            output_pad = [
                want - ((have - 1) * step - 2 * pad + spread * (size - 1) + 1)
                for want, have, step, pad, spread, size in geometry
            ]
            grad_input = torch.convolution(
                grad_output, weight, None, stride, padding, dilation, True, output_pad, groups
            )
    if output_mask[1]:
        if any(padding):
            large = F.pad(large, [pad for amount in reversed(padding) for pad in (amount, amount)])
        grad_weight = _by_weight(small, large, kernel, stride, dilation, groups).view(weight.shape)
    if output_mask[2]:
        grad_bias = grad_output.sum([axis for axis in range(axes + 2) if axis != 1])
    return grad_input, grad_weight, grad_bias


def _by_weight(
    small: Tensor, large: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """Gradient of the weight: small (N, S, ...), large (N, L, ...) with padding -> (S, L / groups, *kernel).

    Sums over samples are in float32. For float16 and bfloat16, a product that is computed sample by sample is rounded
    once per sample.
    """
    batch, channels, cells = small.shape[0], small.shape[1] // groups, small.shape[2:]
    if list(stride) == list(kernel) and max(kernel) > 1 and max(dilation) == groups == 1:
        return _by_patches(small, large, kernel)
    positions = math.prod(cells)
    rows = small.reshape(batch, groups, channels, positions)
    parts = []
    for offset in product(*map(range, kernel)):
        window = large
        for axis, (start, step, spread, count) in enumerate(zip(offset, stride, dilation, cells), start=2):
            first = start * spread
            window = window[(slice(None),) * axis + (slice(first, first + (count - 1) * step + 1, step),)]
        parts.append(_product(rows, window.reshape(batch, groups, large.shape[1] // groups, positions)))
    return torch.stack(parts, -1)


def _by_patches(small: Tensor, large: Tensor, kernel: Sequence[int]) -> Tensor:
    """Like :func:`_by_weight`, if the stride equals the kernel size: one product with non-overlapping patches."""
    axes = len(kernel)
    for axis, (extent, count) in enumerate(zip(kernel, small.shape[2:])):
        at = 2 + 2 * axis
        large = large.narrow(at, 0, count * extent).unflatten(at, (count, extent))
    cells, offsets = range(2, 2 + 2 * axes, 2), range(3, 3 + 2 * axes, 2)
    patches = large.permute(0, *cells, 1, *offsets).reshape(-1, large.shape[1] * math.prod(kernel))
    return torch.mm(small.transpose(0, 1).reshape(small.shape[1], -1), patches)


def _product(small: Tensor, large: Tensor) -> Tensor:
    """(N, G, S, P), (N, G, L, P) -> (G * S, L): the product, summed over samples N and positions P."""
    groups, rows, positions = small.shape[1:]
    columns = large.shape[2]
    if groups == 1 and rows * columns > positions * (rows + columns):  # transposed copies need less memory
        return torch.mm(small.transpose(0, 2).reshape(rows, -1), large.transpose(0, 2).reshape(columns, -1).t())
    products = torch.matmul(small, large.transpose(2, 3))
    return products.sum(0, dtype=to_float32(products[:0]).dtype).to(products.dtype).view(groups * rows, columns)


def dot(self: Tensor, tensor: Tensor) -> Tensor:
    """Dot product of two vectors (N,); 0-dim."""
    product = to_float32(self) * to_float32(tensor)
    return product.sum(dtype=product.dtype).to(self.dtype)
