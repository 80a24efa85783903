"""Backward operators of activations and of softmax. All tensors of one operator, and its result, have one shape.

``grad_output`` is the gradient of the output; a docstring gives the derivative that it is multiplied with. At points
without a derivative, the value is the one that torch uses.
"""

from __future__ import annotations

import math

import torch

from exp.hardware.operators.wide import to_float32

__all__ = [
    "_log_softmax_backward_data", "_prelu_kernel_backward", "_softmax_backward_data", "gelu_backward", "glu_backward",
    "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "leaky_relu_backward", "log_sigmoid_backward",
    "log_sigmoid_forward", "sgn", "sigmoid_backward", "silu_backward", "softplus_backward", "tanh_backward",
    "threshold_backward",
]  # fmt: skip

Tensor = torch.Tensor


def gelu_backward(grad_output: Tensor, self: Tensor, *, approximate: str = "none") -> Tensor:
    """(x Phi(x))' = Phi(x) + x phi(x), or that of the tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    x = to_float32(self)
    if approximate == "tanh":
        slope, cubic = math.sqrt(2.0 / math.pi), 0.044715
        square = x * x
        tanh = (square * (slope * cubic)).add_(slope).mul_(x).tanh_()
        inner = square.mul_(3.0 * slope * cubic).add_(slope).mul_(x)
        factor = inner.addcmul_(inner * tanh, tanh, value=-1.0).add_(tanh).add_(1.0)
        del square, tanh, inner
    else:
        # 2 Phi(x) = 1 + erf(x / sqrt 2), and 2 phi(x) = sqrt(2 / pi) exp(-x**2 / 2)
        density = (x * x).mul_(-0.5).exp_()
        factor = (x * math.sqrt(0.5)).erf_().addcmul_(x, density, value=math.sqrt(2.0 / math.pi)).add_(1.0)
        del density
    del x  # a float32 copy for half types: keep one of them at a time
    return factor.mul_(to_float32(grad_output)).mul_(0.5).to(self.dtype)


def silu_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    """(x s)' = s (1 + x (1 - s)), with s = sigmoid(x)."""
    x = to_float32(self)
    sigmoid = torch.sigmoid(x)
    factor = (1.0 - sigmoid).mul_(x).add_(1.0).mul_(sigmoid)
    del x, sigmoid
    return factor.mul_(to_float32(grad_output)).to(self.dtype)


def sigmoid_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    """Slope s (1 - s), with s = ``output``."""
    grad, sigmoid = to_float32(grad_output), to_float32(output)
    return (1.0 - sigmoid).mul_(sigmoid).mul_(grad).to(output.dtype)


def tanh_backward(grad_output: Tensor, output: Tensor) -> Tensor:
    """Slope 1 - t**2, with t = ``output``."""
    grad, tanh = to_float32(grad_output), to_float32(output)
    return torch.addcmul(grad, grad * tanh, tanh, value=-1.0).to(output.dtype)


def threshold_backward(grad_output: Tensor, self: Tensor, threshold: float) -> Tensor:
    """0 up to the threshold, 1 above it; with threshold 0 the derivative of ReLU."""
    return grad_output.masked_fill(self <= threshold, 0.0)


def leaky_relu_backward(grad_output: Tensor, self: Tensor, negative_slope: float, self_is_result: bool) -> Tensor:
    """1 above 0, else the slope. ``self`` may be the result: its sign is that of the input if the slope is >= 0."""
    del self_is_result
    return torch.where(self > 0, grad_output, grad_output * negative_slope)


def hardtanh_backward(grad_output: Tensor, self: Tensor, min_val: float, max_val: float) -> Tensor:
    """1 between the bounds, else 0, also at the bounds."""
    return grad_output.masked_fill((self <= min_val).logical_or_(self >= max_val), 0.0)


def hardsigmoid_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    """1 / 6 between -3 and 3, else 0 (Howard et al., arXiv 1905.02244)."""
    return (grad_output / 6.0).masked_fill_((self <= -3.0).logical_or_(self >= 3.0), 0.0)


def hardswish_backward(grad_output: Tensor, self: Tensor) -> Tensor:
    """Slope x / 3 + 1 / 2 between -3 and 3, 0 below, 1 above (Howard et al., arXiv 1905.02244)."""
    x, grad = to_float32(self), to_float32(grad_output)
    inner = (x / 3.0).add_(0.5).mul_(grad)
    return torch.where(x <= -3.0, torch.zeros_like(grad), torch.where(x < 3.0, inner, grad)).to(self.dtype)


def softplus_backward(grad_output: Tensor, self: Tensor, beta: float, threshold: float) -> Tensor:
    """(log(1 + exp(b x)) / b)' = sigmoid(b x); 1 if b x is above the threshold, where torch's softplus is linear."""
    x, grad = to_float32(self) * beta, to_float32(grad_output)
    return torch.where(x > threshold, grad, grad * torch.sigmoid(x)).to(self.dtype)


def log_sigmoid_forward(self: Tensor) -> tuple[Tensor, Tensor]:
    """Log s(x) = min(x, 0) - log(1 + exp(-|x|)), with s = sigmoid.

    Returns:
        The result, and the buffer exp(-|x|), which the CPU's backward operator needs.
    """
    x = to_float32(self)
    buffer = torch.abs(x).neg_().exp_()
    return (x.clamp_max(0.0) - torch.log1p(buffer)).to(self.dtype), buffer.to(self.dtype)


def log_sigmoid_backward(grad_output: Tensor, self: Tensor, buffer: Tensor) -> Tensor:
    """(log s(x))' = s(-x), with s = sigmoid."""
    del buffer  # not used: it is empty on some devices
    x, grad = to_float32(self), to_float32(grad_output)
    return torch.sigmoid(-x).mul_(grad).to(self.dtype)


def glu_backward(grad_output: Tensor, self: Tensor, dim: int) -> Tensor:
    """Gradients of a s(b) with respect to a and b, the halves of ``self`` along ``dim``, with s = sigmoid.

    Source: Dauphin et al., arXiv 1612.08083.
    """
    first, second = to_float32(self).chunk(2, dim)
    grad, sigmoid = to_float32(grad_output), torch.sigmoid(second)
    of_first = grad * sigmoid
    of_second = (1.0 - sigmoid).mul_(of_first).mul_(first)
    return torch.cat([of_first, of_second], dim).to(self.dtype)


def _prelu_kernel_backward(grad_output: Tensor, self: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of max(x, 0) + w min(x, 0) with respect to x and to w; w has the shape of x."""
    positive = self > 0
    return torch.where(positive, grad_output, grad_output * weight), (grad_output * self).masked_fill_(positive, 0.0)


def sgn(self: Tensor) -> Tensor:
    """Sign x / |x|, and 0 at 0, for real or complex x."""
    if not self.is_complex():
        return torch.sign(self)
    size = torch.abs(self)
    return torch.where(size == 0, torch.zeros_like(self), self / size)


def _softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Gradient y (g - sum(g y)), with softmax y = ``output`` and g = ``grad_output``; of dtype ``input_dtype``."""
    product = to_float32(grad_output) * to_float32(output)
    return product.addcmul_(to_float32(output), product.sum(dim, keepdim=True), value=-1.0).to(input_dtype)


def _log_softmax_backward_data(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """Gradient g - exp(y) sum(g), with log-softmax y = ``output`` and g = ``grad_output``; of dtype ``input_dtype``."""
    grad = to_float32(grad_output)
    probabilities = torch.exp(to_float32(output))
    return torch.addcmul(grad, probabilities, grad.sum(dim, keepdim=True), value=-1.0).to(input_dtype)
