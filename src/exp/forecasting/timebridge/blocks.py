"""Hidden units of one MLP per latent, some latents and rows at a time, and the gradients through them by hand."""

from __future__ import annotations

from typing import Iterator, Sequence

import torch
import torch.nn.functional as F

__all__ = ["ShallowBlock", "latents_of_a_block", "limits", "shallow_blocks", "slices", "takes_shallow_blocks"]

_CPU_COLUMNS, _CPU_ELEMENTS = 256, 2**18
"""Hidden units of a block on the CPU: columns that make a matrix product fast, elements that fit into a cache.

Forward and backward for 160 latents, 64 hidden units, 13,040 rows, context 10, on one thread of a server CPU, in ms:
128 columns 560, 192 columns 485, 256 columns 440, 512 columns 440; 2**17 and 2**18 elements alike.
"""

_DEVICE_COLUMNS, _DEVICE_ELEMENTS = 1024, 2**25
"""Elsewhere: few large kernels, of 128 MiB each. Chosen, not measured."""

_MOST_LATENTS = 32
"""Latents of a block: products per latent are done as block-diagonal ones, which this many times more work takes."""


class ShallowBlock:
    """Some latents of MLPs with one hidden layer, whose hidden units are the columns of one matrix.

    With ``inputs`` = [1, context, own latents] the hidden units are ``inputs @ first``, where the own latents' weights
    are block-diagonal; so are those of the output. One matrix product each does all latents.

    Args:
        inputs: (N, 1 + K + c); the last c columns are the latents'.
        scratch: memory for hidden units: freed, it would go back to the system, and getting it again costs more than
            filling it.
        latents: which of all C they are.
        parameters: weights and biases of both layers, of all C latents.
        negative_slope: of LeakyReLU.
    """

    def __init__(
        self,
        inputs: torch.Tensor,
        scratch: torch.Tensor,
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

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and derivatives, (N, c) each.

        The slope is ``negative_slope`` everywhere, and what is missing to 1 where the hidden unit is positive.
        """
        product = self.own * self.last
        out, positive_out = self._diagonal(self.last).t(), self._diagonal((1.0 - self.slope) * product).t()
        everywhere = self.slope * product.sum(1)
        value, derivative = self.last_bias.repeat(len(self.inputs), 1), everywhere.repeat(len(self.inputs), 1)
        for inputs, of_value, of_derivative in self._by_rows(self.inputs, value, derivative):
            hidden = F.leaky_relu_(self._hidden_units(inputs), self.slope)
            of_value.addmm_(hidden, out)
            of_derivative.addmm_(hidden.gt_(0), positive_out)
        return value, derivative

    def backward(self, value_grad: torch.Tensor, derivative_grad: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """Fill in the latents' share of the gradients of all arguments; add it for the context.

        With s the slope of a hidden unit, g and d the gradients of value and derivative, all of them follow from the
        sums over rows of s g inputs and of s d, since the hidden unit is itself linear in the inputs. Both are sums
        over the positive units, to which the part of the slope that is everywhere is added at the end.

        Args:
            value_grad: (N, c).
            derivative_grad: (N, c).
            grads: of the context (N, K), of all own latents (N, C) and of all parameters.
        """
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
        most = max(limits(self.inputs)[1] // self.first.shape[1], 1)
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


def shallow_blocks(
    context: torch.Tensor, own: torch.Tensor, parameters: Sequence[torch.Tensor], negative_slope: float
) -> Iterator[ShallowBlock]:
    """All latents, some at a time; a block is done with before the next one overwrites its inputs."""
    shared = 1 + context.shape[1]
    most = latents_of_a_block(own, parameters[0].shape[1])
    inputs = own.new_ones(len(own), shared + most)
    inputs[:, 1:shared] = context
    scratch = own.new_empty(max(limits(own)[1], most * parameters[0].shape[1]))
    for latents in slices(own.shape[1], most):
        chosen = own[:, latents]
        block_inputs = inputs[:, : shared + chosen.shape[1]]
        block_inputs[:, shared:] = chosen
        yield ShallowBlock(block_inputs, scratch, latents, parameters, negative_slope)


def takes_shallow_blocks(own: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether :class:`ShallowBlock` does it: one hidden layer, on the CPU.

    There it was measured 7 to 11 times as fast as the plain batched product, computed again in the backward pass (7 and
    21 latents, one thread). On cards, where nobody has measured it, the plain one runs.
    """
    return len(parameters) == 4 and own.device.type == "cpu"


def limits(tensor: torch.Tensor) -> tuple[int, int]:
    """Columns to aim at and most elements of a block's hidden units, on the tensor's device."""
    on_cpu = tensor.device.type == "cpu"
    return (_CPU_COLUMNS, _CPU_ELEMENTS) if on_cpu else (_DEVICE_COLUMNS, _DEVICE_ELEMENTS)


def latents_of_a_block(own: torch.Tensor, hidden: int) -> int:
    """How many of the latents ``own`` (N, C) with ``hidden`` units each are worked on together."""
    return min(max(limits(own)[0] // hidden, 1), _MOST_LATENTS, own.shape[1])


def slices(length: int, most: int) -> Iterator[slice]:
    """Cut 0 ... length - 1 into stretches of ``most``."""
    return (slice(start, min(start + most, length)) for start in range(0, length, most))
