"""Gradients of norms (Ioffe and Szegedy, arXiv 1502.03167; Ba et al., arXiv 1607.06450; Wu and He, arXiv 1803.08494).

Let n be the normalized input, w the weight, b the bias, g the gradient of the output w n + b, and mean() the mean over
the elements that are normalized together. The gradient of the input is (w g - mean(w g) - n mean(w g n)) / std, that of
the weight the sum of g n, and that of the bias the sum of g.
"""

from __future__ import annotations

import math
from typing import Sequence

import torch

from exp.hardware.operators.wide import to_float32

__all__ = [
    "_weight_norm_interface_backward", "native_batch_norm_backward", "native_group_norm_backward",
    "native_layer_norm_backward",
]  # fmt: skip

Tensor = torch.Tensor


def native_layer_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a layer norm over the last axes.

    Args:
        grad_out: (..., *normalized_shape).
        x: the same shape.
        normalized_shape: shape of the axes that are normalized together.
        mean: (...), or with trailing axes of size 1.
        rstd: 1 / sqrt(variance + eps), of the same shape.
        weight: ``normalized_shape``, or None.
        bias: likewise.
        output_mask: which results are needed; the others are None.

    Returns:
        Gradients of input, weight and bias.
    """
    width = math.prod(normalized_shape)
    grad, rows = to_float32(grad_out).reshape(-1, width), to_float32(x).reshape(-1, width)
    rstd = to_float32(rstd).reshape(-1, 1)
    normed = torch.addcmul(to_float32(mean).reshape(-1, 1) * -rstd, rows, rstd)
    product = grad * normed
    grad_input = grad_weight = grad_bias = None
    if weight is not None and output_mask[1]:
        grad_weight = product.sum(0).view(weight.shape).to(weight.dtype)
    if bias is not None and output_mask[2]:
        grad_bias = grad.sum(0).view(bias.shape).to(bias.dtype)
    if output_mask[0]:
        if weight is None:
            means, grad_input = (grad.mean(1), product.mean(1)), grad
        else:
            scale = to_float32(weight).reshape(-1)
            means = (torch.mv(grad, scale) / width, torch.mv(product, scale) / width)
            grad_input = torch.mul(grad, scale, out=product)
        grad_input = torch.addcmul(grad_input, normed, means[1].unsqueeze(1), value=-1.0, out=normed)
        grad_input = grad_input.sub_(means[0].unsqueeze(1)).mul_(rstd).view(x.shape).to(x.dtype)
    return grad_input, grad_weight, grad_bias


def native_group_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    samples: int,
    channels: int,
    elements: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a group norm.

    Args:
        grad_out: (N, C, ...).
        x: the same shape.
        mean: (N, groups).
        rstd: 1 / sqrt(variance + eps), (N, groups).
        weight: (C,), or None.
        samples: N.
        channels: C.
        elements: number of elements per channel.
        groups: number of channel groups.
        output_mask: which results are needed; the others are None.

    Returns:
        Gradients of input, weight and bias.
    """
    grad = to_float32(grad_out).reshape(samples, channels, elements)
    grouped = to_float32(x).reshape(samples * groups, channels // groups * elements)
    rstd = to_float32(rstd).reshape(-1, 1)
    normed = torch.addcmul(to_float32(mean).reshape(-1, 1) * -rstd, grouped, rstd)
    product = grad * normed.view(grad.shape)
    grad_input = grad_weight = grad_bias = None
    affine = grad_out.dtype if weight is None else weight.dtype
    if output_mask[1]:
        grad_weight = product.sum((0, 2)).to(affine)
    if output_mask[2]:
        grad_bias = grad.sum((0, 2)).to(affine)
    if output_mask[0]:
        if weight is not None:
            grad, product = grad * to_float32(weight).view(-1, 1), product.mul_(to_float32(weight).view(-1, 1))
        rows, products = grad.reshape(grouped.shape), product.reshape(grouped.shape)
        grad_input = torch.addcmul(rows, normed, products.mean(1, keepdim=True), value=-1.0, out=normed)
        grad_input = grad_input.sub_(rows.mean(1, keepdim=True)).mul_(rstd).view(x.shape).to(x.dtype)
    return grad_input, grad_weight, grad_bias


def native_batch_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of a batch norm.

    Args:
        grad_out: (N, C, ...).
        x: the same shape.
        weight: (C,), or None.
        running_mean: (C,); used if ``train`` is False.
        running_var: likewise.
        save_mean: (C,), mean of the batch; used if ``train`` is True.
        save_invstd: likewise, 1 / sqrt(variance + eps).
        train: whether statistics of the batch were used. Running statistics do not depend on the input, so that the
            terms with means are left out.
        eps: added to the variance.
        output_mask: which results are needed; the others are None.

    Returns:
        Gradients of input, weight and bias.
    """
    grad, values = to_float32(grad_out), to_float32(x)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.dim())]
    mean, spread = (save_mean, save_invstd) if train else (running_mean, running_var)
    assert mean is not None
    assert spread is not None
    rstd = to_float32(spread) if train else torch.rsqrt(to_float32(spread) + eps)
    normed = torch.addcmul((to_float32(mean) * -rstd).view(shape), values, rstd.view(shape))
    product = (grad * normed).sum(axes)
    total = grad.sum(axes)
    grad_input = None
    if output_mask[0]:
        scale = rstd if weight is None else rstd * to_float32(weight)
        if train:
            count = x.numel() // x.shape[1]
            grad_input = torch.addcmul(grad, normed, (product / count).view(shape), value=-1.0, out=normed)
            grad_input = grad_input.sub_((total / count).view(shape)).mul_(scale.view(shape)).to(x.dtype)
        else:
            grad_input = (grad * scale.view(shape)).to(x.dtype)
    affine = grad_out.dtype if weight is None else weight.dtype
    return grad_input, product.to(affine) if output_mask[1] else None, total.to(affine) if output_mask[2] else None


def _weight_norm_interface_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Gradients of w = g v / |v|, with the norm over all axes but ``dim`` (Salimans and Kingma, arXiv 1602.07868).

    Args:
        grad_w: gradient of w, of the shape of v.
        saved_v: v.
        saved_g: g, of size 1 in all axes but ``dim``.
        saved_norms: |v|, of the shape of g.
        dim: the first or the last axis.

    Returns:
        Gradients of v and g.
    """
    grad, v, norms = to_float32(grad_w), to_float32(saved_v), to_float32(saved_norms)
    axes = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    grad_g = (grad * v).sum(axes, keepdim=True) / norms
    grad_v = (grad - v * (grad_g / norms)) * (to_float32(saved_g) / norms)
    return grad_v.to(saved_v.dtype), grad_g.to(saved_g.dtype)
