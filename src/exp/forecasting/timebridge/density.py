"""Densities of latents whose noise is standard normal: change of variables with one derivative per latent."""

from __future__ import annotations

import math
from typing import Any, Sequence

import torch
from torch.autograd.function import once_differentiable

from exp.forecasting.timebridge.blocks import shallow_blocks, takes_shallow_blocks
from exp.forecasting.timebridge.tangent import value_and_tangent
from exp.hardware.compat import autocast_disabled

__all__ = ["DERIVATIVE_FLOOR", "gaussian_log_density", "log_magnitude", "noise_log_density"]

DERIVATIVE_FLOOR = 1e-3
"""Derivatives of less than this magnitude have a guarded logarithm (:func:`log_magnitude`).

The gradient of log |d| is 1 / d. A derivative that adds up hundreds of float32 products is known to some 1e-7, and of
10**4 rows some come close to zero: with a floor of 1e-6 single rows decide over a whole step's gradient, the prior
learns more slowly for it, and runs on different devices drift apart within five steps. With 1e-3 neither was seen; one
row in a thousand is below it when training begins.
"""

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def log_magnitude(derivative: torch.Tensor) -> torch.Tensor:
    """Log |d|, exact down to the floor f and (d**2 / f**2 - 1) / 2 + log f below it: as smooth, and finite at 0.

    Its gradient d / max(d**2, f**2) is 1 / f at most, and 0 at d = 0.

    Args:
        derivative: any shape, float32.

    Returns:
        The same shape.
    """
    return 0.5 * _log_square(derivative)


def _log_square(derivative: torch.Tensor) -> torch.Tensor:
    """Twice the guarded log |d|."""
    floored = _floored_square(derivative.detach())  # where it is the square itself, both its gradients cancel
    return torch.log(floored) + (derivative * derivative / floored - 1.0)


def _floored_square(derivative: torch.Tensor) -> torch.Tensor:
    return (derivative * derivative).clamp_min(DERIVATIVE_FLOOR**2)


def gaussian_log_density(
    x: torch.Tensor, mean: torch.Tensor | None = None, log_variance: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-density of N(mean, exp(log_variance)) at x, in sum over the last axis.

    Args:
        x: (..., C).
        mean: broadcastable to ``x``; None: 0.
        log_variance: broadcastable to ``x``; None: 0.

    Returns:
        (...), of the dtype of ``x``.
    """
    centred = x if mean is None else x - mean
    square = centred * centred
    if log_variance is not None:
        square = square * torch.exp(-log_variance) + log_variance
    return -0.5 * square.sum(-1) - _HALF_LOG_TWO_PI * x.shape[-1]


def noise_log_density(
    context: torch.Tensor,
    own: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    negative_slope: float,
) -> torch.Tensor:
    """Sum over C latents of log N(value; 0, 1) + log |derivative|, of :func:`value_and_tangent`. Differentiable once.

    On the CPU, with one hidden layer, values and derivatives are taken up block by block, while they are in the cache.

    Args:
        context: (N, K), input of every MLP.
        own: (N, C), the latent of each MLP.
        weights: as for :func:`value_and_tangent`.
        biases: as for :func:`value_and_tangent`.
        negative_slope: as for :func:`value_and_tangent`.

    Returns:
        (N,).
    """
    parameters = [tensor for pair in zip(weights, biases) for tensor in pair]
    if not takes_shallow_blocks(own, parameters):
        value, derivative = value_and_tangent(context, own, weights, biases, negative_slope)
        return gaussian_log_density(value) + log_magnitude(derivative).sum(-1)
    result: torch.Tensor = _NoiseLogDensity.apply(negative_slope, context, own, *parameters)
    return result


class _NoiseLogDensity(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, negative_slope: float, context: torch.Tensor, own: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        doubled = own.new_zeros(len(own))
        kept = []
        for block in shallow_blocks(context, own, parameters, negative_slope):
            value, derivative = block.forward()
            logs = _log_square(derivative)
            doubled += logs.addcmul_(value, value, value=-1.0).sum(1)
            kept += [value, derivative]
        ctx.save_for_backward(context, own, *parameters, *kept)
        ctx.negative_slope, ctx.count = negative_slope, len(parameters)
        return 0.5 * doubled - _HALF_LOG_TWO_PI * own.shape[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, own, *others = ctx.saved_tensors
        parameters, kept = others[: ctx.count], others[ctx.count :]
        grads = [torch.zeros_like(context), torch.empty_like(own), *map(torch.zeros_like, parameters)]
        column = grad.unsqueeze(1)
        with autocast_disabled(own.device.type):
            blocks = shallow_blocks(context, own, parameters, ctx.negative_slope)
            for block, value, derivative in zip(blocks, kept[::2], kept[1::2]):
                of_log = derivative / _floored_square(derivative)
                block.backward(value * -column, of_log * column, grads)
        return (None, *grads)
