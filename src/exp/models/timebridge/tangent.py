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
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from exp.compat import autocast_disabled

__all__ = ["plain_value_and_tangent", "value_and_tangent"]

_CPU_COLUMNS, _CPU_ELEMENTS = 256, 2**18
"""Hidden units of a block on the CPU: columns that make a matrix product fast, elements that fit into a cache."""

_DEVICE_COLUMNS, _DEVICE_ELEMENTS = 1024, 2**25
"""Elsewhere: few large kernels, of 128 MiB each."""

_MOST_LATENTS = 32
"""Latents of a block: products per latent are done as block-diagonal ones, which this many times more work takes."""


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
        if len(parameters) == 4:
            for block in _shallow_blocks(context, own, parameters, negative_slope):
                block.forward(value, derivative)
            return value, derivative
        for rows, latents in _deep_blocks(own, parameters):
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
        of_outputs = (value_grad, derivative_grad)
        with autocast_disabled(own.device.type):
            if len(parameters) == 4:
                for block in _shallow_blocks(context, own, parameters, ctx.negative_slope):
                    block.backward(*of_outputs, grads)
            else:
                _deep_backward(context, own, parameters, ctx.negative_slope, of_outputs, grads)
        return (None, *grads)


class _ShallowBlock:
    """Some latents of MLPs with one hidden layer, whose hidden units are the columns of one matrix.

    With ``inputs`` = [1, context, own latents] the hidden units are ``inputs @ first``, where the own latents' weights
    are block-diagonal; so are those of the output. One matrix product each does all latents.

    Args:
        inputs: (N, 1 + K + c); the last c columns are the latents'.
        scratch: memory for hidden units, or None where the allocator keeps freed memory: on the CPU it goes back to the
            system, and getting it again costs more than filling it.
        latents: which of all C they are.
        parameters: weights and biases of both layers, of all C latents.
        negative_slope: of LeakyReLU.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        scratch: torch.Tensor | None,
        latents: slice,
        parameters: Sequence[torch.Tensor],
        negative_slope: float,
    ) -> None:
        weight, bias, last_weight, last_bias = (parameter[latents] for parameter in parameters)
        self.inputs, self.scratch, self.latents, self.slope = inputs, scratch, latents, negative_slope
        self.shape = weight.shape[:2]  # c, h
        self.shared = inputs.shape[1] - weight.shape[0]  # 1 + K
        self.own, self.last, self.last_bias = weight[:, :, -1], last_weight.squeeze(1), last_bias.squeeze(1)
        context = weight[:, :, :-1].flatten(0, 1).t()
        self.first = torch.cat([bias.reshape(1, -1), context, self._diagonal(self.own)])

    def forward(self, value: torch.Tensor, derivative: torch.Tensor) -> None:
        """Fill in the latents' columns of both.

        The slope is ``negative_slope`` everywhere, and what is missing to 1 where the hidden unit is positive.
        """
        product = self.own * self.last
        out, positive_out = self._diagonal(self.last).t(), self._diagonal((1.0 - self.slope) * product).t()
        everywhere = self.slope * product.sum(1)
        block_value, block_derivative = (x.repeat(len(self.inputs), 1) for x in (self.last_bias, everywhere))
        for inputs, of_value, of_derivative in self._by_rows(self.inputs, block_value, block_derivative):
            hidden = F.leaky_relu_(self._hidden_units(inputs), self.slope)
            of_value.addmm_(hidden, out)
            of_derivative.addmm_(hidden.gt_(0), positive_out)
        value[:, self.latents], derivative[:, self.latents] = block_value, block_derivative

    def backward(self, value_grad: torch.Tensor, derivative_grad: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """Fill in the latents' share of the gradients; add it for the context.

        With s the slope of a hidden unit, g and d the gradients of value and derivative, all of them follow from the
        sums over rows of s g inputs and of s d, since the hidden unit is itself linear in the inputs. Both are sums
        over the positive units, to which the part of the slope that is everywhere is added at the end.
        """
        value_grad, derivative_grad = (grad[:, self.latents].contiguous() for grad in (value_grad, derivative_grad))
        back = self.first[1:] * self.last.reshape(-1)  # from value to context and own latent, through each hidden unit
        back_everywhere = self.slope * back.unflatten(1, self.shape).sum(2).t()
        back = (1.0 - self.slope) * back.t()
        by_value = torch.zeros_like(self.first)
        by_derivative = torch.zeros_like(self.first[: len(self.own)])
        of_inputs = value_grad @ back_everywhere
        for inputs, value, derivative, into in self._by_rows(self.inputs, value_grad, derivative_grad, of_inputs):
            positive = self._hidden_units(inputs).gt_(0)
            by_derivative.addmm_(derivative.t(), positive)
            positive.view(-1, *self.shape).mul_(value.unsqueeze(2))
            by_value.addmm_(inputs.t(), positive)
            into.addmm_(positive, back)
        grads[0].add_(of_inputs[:, : self.shared - 1])
        grads[1][:, self.latents] = of_inputs[:, self.shared - 1 :]

        everywhere = self.slope * (self.inputs.t() @ value_grad)
        of_shared = (1.0 - self.slope) * by_value[: self.shared].unflatten(1, self.shape)
        of_shared += everywhere[: self.shared].unsqueeze(2)
        of_own = (1.0 - self.slope) * self._undo_diagonal(by_value[self.shared :] + by_derivative)
        of_own += (everywhere[self.shared :].diagonal() + self.slope * derivative_grad.sum(0)).unsqueeze(1)
        weight_grad, bias_grad, last_grad, last_bias_grad = (grad[self.latents] for grad in grads[2:])
        weight_grad[:, :, :-1] = (of_shared[1:] * self.last).permute(1, 2, 0)
        weight_grad[:, :, -1] = of_own * self.last
        bias_grad.copy_(of_shared[0] * self.last)
        shared_weight = self.first[: self.shared].unflatten(1, self.shape)
        last_grad.copy_(((of_shared * shared_weight).sum(0) + of_own * self.own).unsqueeze(1))
        last_bias_grad.copy_(value_grad.sum(0).unsqueeze(1))

    def _by_rows(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        most = max(_limits(self.inputs)[1] // self.first.shape[1], 1)
        return zip(*(tensor.split(most) for tensor in tensors))

    def _hidden_units(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.scratch is None:
            return inputs @ self.first
        shape = (len(inputs), self.first.shape[1])
        return torch.mm(inputs, self.first, out=self.scratch[: shape[0] * shape[1]].view(shape))

    def _diagonal(self, rows: torch.Tensor) -> torch.Tensor:
        """(c, h) -> (c, c h), with row i in columns i h to (i + 1) h - 1."""
        identity = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        return (identity.unsqueeze(2) * rows).flatten(1)

    def _undo_diagonal(self, matrix: torch.Tensor) -> torch.Tensor:
        """(c, c h) -> (c, h), the blocks on the diagonal."""
        return matrix.unflatten(1, self.shape).diagonal(0, 0, 1).t()


def _shallow_blocks(
    context: torch.Tensor, own: torch.Tensor, parameters: Sequence[torch.Tensor], negative_slope: float
) -> Iterator[_ShallowBlock]:
    """All latents, some at a time; a block is done with before the next one overwrites its inputs."""
    shared = 1 + context.shape[1]
    most = _latents_of_a_block(own, parameters[0].shape[1])
    inputs = own.new_ones(len(own), shared + most)
    inputs[:, 1:shared] = context
    elements = max(_limits(own)[1], most * parameters[0].shape[1])
    scratch = own.new_empty(elements) if own.device.type == "cpu" else None
    for latents in _slices(own.shape[1], most):
        chosen = own[:, latents]
        block_inputs = inputs[:, : shared + chosen.shape[1]]
        block_inputs[:, shared:] = chosen
        yield _ShallowBlock(block_inputs, scratch, latents, parameters, negative_slope)


def _deep_blocks(own: torch.Tensor, parameters: Sequence[torch.Tensor]) -> Iterator[tuple[slice, slice]]:
    hidden = parameters[0].shape[1]
    most = _latents_of_a_block(own, hidden)
    for latents in _slices(own.shape[1], most):
        for rows in _slices(len(own), max(_limits(own)[1] // (most * hidden), 1)):
            yield rows, latents


def _deep_backward(
    context: torch.Tensor,
    own: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    negative_slope: float,
    of_outputs: tuple[torch.Tensor, torch.Tensor],
    grads: Sequence[torch.Tensor],
) -> None:
    for rows, latents in _deep_blocks(own, parameters):
        inputs = [context[rows], own[rows, latents], *(parameter[latents] for parameter in parameters)]
        inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            outputs = plain_value_and_tangent(inputs[0], inputs[1], inputs[2::2], inputs[3::2], negative_slope)
        block_grads = torch.autograd.grad(outputs, inputs, [grad[rows, latents] for grad in of_outputs])
        grads[0][rows] += block_grads[0]
        grads[1][rows, latents] = block_grads[1]
        for grad, block_grad in zip(grads[2:], block_grads[2:]):
            grad[latents] += block_grad


def _limits(tensor: torch.Tensor) -> tuple[int, int]:
    on_cpu = tensor.device.type == "cpu"
    return (_CPU_COLUMNS, _CPU_ELEMENTS) if on_cpu else (_DEVICE_COLUMNS, _DEVICE_ELEMENTS)


def _latents_of_a_block(own: torch.Tensor, hidden: int) -> int:
    return min(max(_limits(own)[0] // hidden, 1), _MOST_LATENTS, own.shape[1])


def _slices(length: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, length)) for start in range(0, length, most))
