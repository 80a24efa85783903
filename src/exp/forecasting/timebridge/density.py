"""Log-densities of latents whose noise is standard normal: change of variables with one derivative per latent.

MLP c maps the context, which all latents share, and its own latent z_c to one number. Its derivative d value_c / d z_c
is computed along with the value (forward-mode differentiation; Griewank and Walther, "Evaluating Derivatives", 2008,
ch. 3): a linear layer multiplies the tangent by its weight, LeakyReLU by its slope at the value,

    hidden_1 = W_1 [context, z_c] + b_1,          tangent_1 = last column of W_1,
    hidden_l = W_l (s * hidden_{l-1}) + b_l,      tangent_l = W_l (s * tangent_{l-1}),     s = slope at hidden_{l-1}.

The slope is piecewise constant, so no gradient flows through it, and first-order autograd gives the gradients of the
derivative.

The N x C x h hidden units do not fit into memory for some hundred latents, and are slow outside of the caches. They are
computed in blocks of rows and latents, and again in the backward pass. On the CPU, with one hidden layer, a block is a
few matrix products with hand-written gradients (:class:`_ShallowBlock`), 7 to 11 times as fast as the plain batched
product (7 and 21 latents, one thread). Cards use the plain product; the other was not measured there.
"""

from __future__ import annotations

import math
from typing import Any, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from exp.hardware.compat import autocast_disabled

# Slope of LeakyReLU for negative values, as in the variant.
NEGATIVE_SLOPE = 0.2

# Smallest magnitude of a derivative whose logarithm is exact (log_square).
#
# The gradient of log |d| is 1 / d. A derivative is a sum of hundreds of float32 products, with an error of about 1e-7,
# and of 10**4 rows some come close to zero. With a floor of 1e-6 single rows dominate the gradient of a step, the prior
# learns more slowly, and runs on different devices drift apart within five steps. With 1e-3 neither was seen; when
# training begins, one row in a thousand is below it.
DERIVATIVE_FLOOR = 1e-3

# Size of a block's hidden units on the CPU: columns for a fast matrix product, elements that fit into a cache.
#
# Forward and backward for 160 latents, 64 hidden units, 13,040 rows, context 10, on one thread of a server CPU, in ms:
# 128 columns 560, 192 columns 485, 256 columns 440, 512 columns 440; 2**17 and 2**18 elements alike.
_CPU_COLUMNS, _CPU_ELEMENTS = 256, 2**18

# The same on other devices: few large kernels, of 128 MiB each. Chosen, not measured.
_DEVICE_COLUMNS, _DEVICE_ELEMENTS = 1024, 2**25

# Most latents of a block: c latents in one block-diagonal product take c times the work of c separate products.
_MAX_LATENTS = 32

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def log_square(derivative: torch.Tensor) -> torch.Tensor:
    """Log d**2 for |d| >= f = ``DERIVATIVE_FLOOR``; below it d**2 / f**2 - 1 + log f**2, which is finite at 0.

    Value and gradient are continuous. The gradient 2 d / max(d**2, f**2) is at most 2 / f, and 0 at d = 0.

    Args:
        derivative: any shape, float32.

    Returns:
        The same shape.
    """
    floored = _floored_square(derivative.detach())  # detached: where it equals the square, its gradients cancel
    return torch.log(floored) + (derivative * derivative / floored - 1.0)


def _floored_square(derivative: torch.Tensor) -> torch.Tensor:
    return (derivative * derivative).clamp_min(DERIVATIVE_FLOOR**2)


def gaussian_log_density(
    x: torch.Tensor, mean: torch.Tensor | None = None, log_variance: torch.Tensor | None = None
) -> torch.Tensor:
    """Log-density of N(mean, exp(log_variance)) at x, summed over the last axis.

    Args:
        x: (..., C).
        mean: broadcastable to ``x``; None: 0.
        log_variance: broadcastable to ``x``; None: 0.

    Returns:
        (...), of the dtype of ``x``.
    """
    centered = x if mean is None else x - mean
    square = centered * centered
    if log_variance is not None:
        square = square * torch.exp(-log_variance) + log_variance
    return -0.5 * square.sum(-1) - _HALF_LOG_TWO_PI * x.shape[-1]


def noise_log_density(
    context: torch.Tensor, latents: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Sum over C latents of log N(value; 0, 1) + log |derivative by its own latent|. Differentiable once.

    Args:
        context: (N, K), input of every MLP.
        latents: (N, C), the latent of each MLP, its last input.
        weights: of two or more layers, (C, outputs, inputs) each; the first has K + 1 inputs, the last 1 output.
        biases: of each layer, (C, outputs).

    Returns:
        (N,), of the arguments' dtype, which must be the same for all.
    """
    parameters = [tensor for pair in zip(weights, biases) for tensor in pair]
    result: torch.Tensor = _NoiseLogDensity.apply(context, latents, *parameters)
    return result


class _NoiseLogDensity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: torch.Tensor, latents: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        doubled = latents.new_zeros(len(latents))
        saved = []
        for block in _blocks(context, latents, parameters):
            value, derivative = block.forward()
            logs = log_square(derivative)
            doubled[block.rows] += logs.addcmul_(value, value, value=-1.0).sum(1)
            saved += [value, derivative]
        ctx.save_for_backward(context, latents, *parameters, *saved)
        ctx.count = len(parameters)
        return 0.5 * doubled - _HALF_LOG_TWO_PI * latents.shape[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        context, latents, *others = ctx.saved_tensors
        parameters, saved = others[: ctx.count], others[ctx.count :]
        grads = [torch.zeros_like(context), torch.empty_like(latents), *map(torch.zeros_like, parameters)]
        with autocast_disabled(latents.device.type):
            for block, value, derivative in zip(_blocks(context, latents, parameters), saved[::2], saved[1::2]):
                column = grad[block.rows].unsqueeze(1)
                log_grad = derivative / _floored_square(derivative)
                block.backward(value * -column, log_grad * column, grads)
        return tuple(grads)


def _blocks(
    context: torch.Tensor, latents: torch.Tensor, parameters: Sequence[torch.Tensor]
) -> Iterator[_PlainBlock | _ShallowBlock]:
    """All rows and latents in blocks. Use up a block before taking the next one, which overwrites its inputs."""
    hidden, on_cpu = parameters[0].shape[1], latents.device.type == "cpu"
    columns, elements = (_CPU_COLUMNS, _CPU_ELEMENTS) if on_cpu else (_DEVICE_COLUMNS, _DEVICE_ELEMENTS)
    size = min(max(columns // hidden, 1), _MAX_LATENTS, latents.shape[1])
    if not _takes_shallow_blocks(latents, parameters):
        for latent_slice in _slices(latents.shape[1], size):
            for rows in _slices(len(latents), max(elements // (size * hidden), 1)):
                yield _PlainBlock(context, latents, rows, latent_slice, parameters)
        return
    shared = 1 + context.shape[1]
    inputs = latents.new_ones(len(latents), shared + size)
    inputs[:, 1:shared] = context
    scratch = latents.new_empty(max(elements, size * hidden))
    for latent_slice in _slices(latents.shape[1], size):
        block_latents = latents[:, latent_slice]
        block_inputs = inputs[:, : shared + block_latents.shape[1]]
        block_inputs[:, shared:] = block_latents
        yield _ShallowBlock(block_inputs, scratch, latent_slice, parameters)


def _takes_shallow_blocks(latents: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
    return len(parameters) == 4 and latents.device.type == "cpu"


def _slices(length: int, most: int) -> Iterator[slice]:
    """Slices of at most ``most`` positions that cover 0 ... length - 1."""
    return (slice(start, min(start + most, length)) for start in range(0, length, most))


class _PlainBlock:
    """A block of rows and latents, for any number of hidden layers, in plain operators.

    Args:
        context: (N, K).
        latents: (N, C).
        rows: the block's rows, out of N.
        latent_slice: the block's latents, out of C.
        parameters: weights and biases of all layers and all C latents.
    """

    def __init__(
        self,
        context: torch.Tensor,
        latents: torch.Tensor,
        rows: slice,
        latent_slice: slice,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        self.rows, self.latent_slice = rows, latent_slice
        self.inputs = [
            context[rows],
            latents[rows, latent_slice],
            *(parameter[latent_slice] for parameter in parameters),
        ]

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and derivatives with respect to the own latents, (rows, latents) each."""
        return self._value_and_tangent(*self.inputs)

    def backward(self, value_grad: torch.Tensor, derivative_grad: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """Write the gradient of the block's latents into ``grads``, and add those of context and parameters."""
        inputs = [tensor.detach().requires_grad_() for tensor in self.inputs]
        with torch.enable_grad():
            outputs = self._value_and_tangent(*inputs)
        input_grads = torch.autograd.grad(outputs, inputs, [value_grad, derivative_grad])
        grads[0][self.rows] += input_grads[0]
        grads[1][self.rows, self.latent_slice] = input_grads[1]
        for grad, share in zip(grads[2:], input_grads[2:]):
            grad[self.latent_slice] += share

    @staticmethod
    def _value_and_tangent(
        context: torch.Tensor, latents: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, bias = parameters[:2]
        own_weight = first[:, :, -1].unsqueeze(1)
        shared = context.expand(latents.shape[1], -1, -1)
        hidden = torch.baddbmm(bias.unsqueeze(1), shared, first[:, :, :-1].transpose(1, 2))
        hidden = hidden + latents.t().unsqueeze(2) * own_weight
        tangent = own_weight
        for weight, bias in zip(parameters[2::2], parameters[3::2]):
            slope = (hidden.detach() > 0).to(hidden.dtype) * (1.0 - NEGATIVE_SLOPE) + NEGATIVE_SLOPE
            hidden = torch.baddbmm(bias.unsqueeze(1), hidden * slope, weight.transpose(1, 2))
            tangent = torch.bmm(tangent * slope, weight.transpose(1, 2))
        return hidden.squeeze(2).t(), tangent.squeeze(2).t()


class _ShallowBlock:
    """A block of c latents of MLPs with one hidden layer; the hidden units of all c are columns of one matrix.

    With ``inputs`` = [1, context, own latents] the hidden units are ``inputs @ first``, in which the weights of the own
    latents are block-diagonal, as are those of the output. Each layer is one matrix product for all latents.

    Args:
        inputs: (N, 1 + K + c); the last c columns are the own latents.
        scratch: buffer for hidden units, reused: allocating it again would cost more than filling it.
        latent_slice: the block's latents, out of C.
        parameters: weights and biases of both layers and all C latents.
    """

    def __init__(
        self, inputs: torch.Tensor, scratch: torch.Tensor, latent_slice: slice, parameters: Sequence[torch.Tensor]
    ) -> None:
        weight, bias, last_weight, last_bias = (parameter[latent_slice] for parameter in parameters)
        self.inputs, self.scratch, self.latent_slice, self.rows = inputs, scratch, latent_slice, slice(None)
        self.shape = weight.shape[:2]  # c, h
        self.shared = inputs.shape[1] - weight.shape[0]  # 1 + K
        self.latent_weight, self.last, self.last_bias = weight[:, :, -1], last_weight.squeeze(1), last_bias.squeeze(1)
        context = weight[:, :, :-1].flatten(0, 1).t()
        self.first = torch.cat([bias.reshape(1, -1), context, self._diagonal(self.latent_weight)])

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and derivatives, (N, c) each.

        The slope is ``NEGATIVE_SLOPE`` everywhere, plus ``1 - NEGATIVE_SLOPE`` where the hidden unit is positive.
        """
        product = self.latent_weight * self.last
        out, positive_out = self._diagonal(self.last).t(), self._diagonal((1.0 - NEGATIVE_SLOPE) * product).t()
        everywhere = NEGATIVE_SLOPE * product.sum(1)
        value, derivative = self.last_bias.repeat(len(self.inputs), 1), everywhere.repeat(len(self.inputs), 1)
        for inputs, of_value, of_derivative in self._by_rows(self.inputs, value, derivative):
            hidden = F.leaky_relu_(self._hidden_units(inputs), NEGATIVE_SLOPE)
            of_value.addmm_(hidden, out)
            of_derivative.addmm_(hidden.gt_(0), positive_out)
        return value, derivative

    def backward(self, value_grad: torch.Tensor, derivative_grad: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """Write the latents' gradients into ``grads``, and add that of the context.

        Let s be the slope of a hidden unit, g and d the gradients of value and derivative. All gradients follow from
        the sums over rows of s g inputs and of s d, since a hidden unit is linear in the inputs. Both sums run over the
        positive units with ``1 - NEGATIVE_SLOPE``; the share of ``NEGATIVE_SLOPE``, for all units, is added at the end.

        Args:
            value_grad: (N, c).
            derivative_grad: (N, c).
            grads: gradients of the context (N, K), of all own latents (N, C) and of all parameters.
        """
        back = self.first[1:] * self.last.reshape(-1)  # from value to context and own latent, through each hidden unit
        back_everywhere = NEGATIVE_SLOPE * back.unflatten(1, self.shape).sum(2).t()
        back = (1.0 - NEGATIVE_SLOPE) * back.t()
        by_value = torch.zeros_like(self.first)
        by_derivative = torch.zeros_like(self.first[: len(self.latent_weight)])
        input_grad = value_grad @ back_everywhere
        for inputs, value, derivative, target in self._by_rows(self.inputs, value_grad, derivative_grad, input_grad):
            positive = self._hidden_units(inputs).gt_(0)
            by_derivative.addmm_(derivative.t(), positive)
            positive.view(-1, *self.shape).mul_(value.unsqueeze(2))
            by_value.addmm_(inputs.t(), positive)
            target.addmm_(positive, back)
        grads[0].add_(input_grad[:, : self.shared - 1])
        grads[1][:, self.latent_slice] = input_grad[:, self.shared - 1 :]

        everywhere = NEGATIVE_SLOPE * (self.inputs.t() @ value_grad)
        shared_grad = (1.0 - NEGATIVE_SLOPE) * by_value[: self.shared].unflatten(1, self.shape)
        shared_grad += everywhere[: self.shared].unsqueeze(2)
        latent_grad = (1.0 - NEGATIVE_SLOPE) * self._undo_diagonal(by_value[self.shared :] + by_derivative)
        latent_grad += (everywhere[self.shared :].diagonal() + NEGATIVE_SLOPE * derivative_grad.sum(0)).unsqueeze(1)
        weight_grad, bias_grad, last_grad, last_bias_grad = (grad[self.latent_slice] for grad in grads[2:])
        weight_grad[:, :, :-1] = (shared_grad[1:] * self.last).permute(1, 2, 0)
        weight_grad[:, :, -1] = latent_grad * self.last
        bias_grad.copy_(shared_grad[0] * self.last)
        shared_weight = self.first[: self.shared].unflatten(1, self.shape)
        last_grad.copy_(((shared_grad * shared_weight).sum(0) + latent_grad * self.latent_weight).unsqueeze(1))
        last_bias_grad.copy_(value_grad.sum(0).unsqueeze(1))

    def _by_rows(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        most = max(_CPU_ELEMENTS // self.first.shape[1], 1)
        return zip(*(tensor.split(most) for tensor in tensors))

    def _hidden_units(self, inputs: torch.Tensor) -> torch.Tensor:
        shape = (len(inputs), self.first.shape[1])
        return torch.mm(inputs, self.first, out=self.scratch[: shape[0] * shape[1]].view(shape))

    def _diagonal(self, rows: torch.Tensor) -> torch.Tensor:
        """(c, h) -> (c, c h), with row i in columns i h to (i + 1) h - 1."""
        identity = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
        return (identity.unsqueeze(2) * rows).flatten(1)

    def _undo_diagonal(self, matrix: torch.Tensor) -> torch.Tensor:
        """(c, c h) -> (c, h), the blocks on the diagonal."""
        return matrix.unflatten(1, self.shape).diagonal(0, 0, 1).t()
