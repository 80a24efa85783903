"""One small MLP per latent, all evaluated together: value and derivative with respect to the own latent in one pass.

MLP c maps the context, which all latents share, and its own latent z_c to one number. The derivative d value_c / d z_c
is the tangent carried along: a linear layer multiplies it by its weight, LeakyReLU by its slope at the value,

    hidden_1 = W_1 [context, z_c] + b_1,          tangent_1 = last column of W_1,
    hidden_l = W_l (s * hidden_{l-1}) + b_l,      tangent_l = W_l (s * tangent_{l-1}),     s = slope at hidden_{l-1}.

The slope is constant but for its steps, so that no gradient flows through it, and plain first-order autograd gives the
derivative's gradients (forward-mode differentiation; Griewank and Walther, "Evaluating Derivatives", 2008, ch. 3).

N x C x h hidden units would not fit into memory for some hundred latents, and beyond the caches not be fast: they are
worked through in blocks of rows and latents, and computed again in the backward pass, which keeps the inputs only.
"""

from __future__ import annotations

from typing import Any, Iterator, Sequence

import torch
from torch.autograd.function import once_differentiable

from exp.forecasting.timebridge.blocks import latents_of_a_block, limits, slices
from exp.hardware.compat import autocast_disabled

__all__ = ["plain_value_and_tangent", "value_and_tangent"]


def value_and_tangent(
    context: torch.Tensor,
    own: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    negative_slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and derivatives of C MLPs with LeakyReLU between the layers. Differentiable once.

    Args:
        context: (N, K), input of every MLP.
        own: (N, C), the latent of each MLP, its last input.
        weights: for each of two or more layers (C, outputs, inputs), from K + 1 inputs to 1 output.
        biases: for each layer (C, outputs).
        negative_slope: of LeakyReLU, at least 0; at 0 itself the slope is this one, as in torch.

    Returns:
        Values and derivatives with respect to ``own``, (N, C) each, in the dtype of the arguments, which is one.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _ValueAndTangent.apply(
        negative_slope, context, own, *(tensor for pair in zip(weights, biases) for tensor in pair)
    )
    return result


def plain_value_and_tangent(
    context: torch.Tensor,
    own: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    negative_slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as :func:`value_and_tangent`, in plain operators on all C x N x h hidden units at once."""
    size = context.shape[1]
    own_weight = weights[0][:, :, size].unsqueeze(1)
    shared = context.expand(own.shape[1], -1, -1)
    hidden = torch.baddbmm(biases[0].unsqueeze(1), shared, weights[0][:, :, :size].transpose(1, 2))
    hidden = hidden + own.t().unsqueeze(2) * own_weight
    tangent = own_weight
    for weight, bias in zip(weights[1:], biases[1:]):
        slope = (hidden.detach() > 0).to(hidden.dtype) * (1.0 - negative_slope) + negative_slope
        hidden = torch.baddbmm(bias.unsqueeze(1), hidden * slope, weight.transpose(1, 2))
        tangent = torch.bmm(tangent * slope, weight.transpose(1, 2))
    return hidden.squeeze(2).t(), tangent.squeeze(2).t()


class _ValueAndTangent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, negative_slope: float, context: torch.Tensor, own: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(context, own, *parameters)
        ctx.negative_slope = negative_slope
        value, derivative = torch.empty_like(own), torch.empty_like(own)
        for rows, latents in _plain_blocks(own, parameters):
            chosen = [parameter[latents] for parameter in parameters]
            value[rows, latents], derivative[rows, latents] = plain_value_and_tangent(
                context[rows], own[rows, latents], chosen[::2], chosen[1::2], negative_slope
            )
        return value, derivative

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, value_grad: torch.Tensor, derivative_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, own, *parameters = ctx.saved_tensors
        grads = [torch.zeros_like(context), torch.empty_like(own), *map(torch.zeros_like, parameters)]
        with autocast_disabled(own.device.type):
            _plain_backward(context, own, parameters, ctx.negative_slope, (value_grad, derivative_grad), grads)
        return (None, *grads)


def _plain_blocks(own: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[slice, slice]]:
    hidden = parameters[0].shape[1]
    most = latents_of_a_block(own, hidden)
    for latents in slices(own.shape[1], most):
        for rows in slices(len(own), max(limits(own)[1] // (most * hidden), 1)):
            yield rows, latents


def _plain_backward(
    context: torch.Tensor,
    own: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    negative_slope: float,
    of_outputs: tuple[torch.Tensor, torch.Tensor],
    grads: Sequence[torch.Tensor],
) -> None:
    for rows, latents in _plain_blocks(own, parameters):
        inputs = [context[rows], own[rows, latents], *(parameter[latents] for parameter in parameters)]
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            outputs = plain_value_and_tangent(inputs[0], inputs[1], inputs[2::2], inputs[3::2], negative_slope)
        block_grads = torch.autograd.grad(outputs, inputs, [grad[rows, latents] for grad in of_outputs])
        grads[0][rows] += block_grads[0]
        grads[1][rows, latents] = block_grads[1]
        for grad, block_grad in zip(grads[2:], block_grads[2:]):
            grad[latents] += block_grad
