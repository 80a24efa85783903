"""Separable linear operators: interpolation, average pooling, and padding by reflection or replication.

Along one axis such an operator is a product with a matrix, and its gradient a product with the transposed matrix. The
matrix is the result of the CPU's forward operator for the unit vectors, in the dtype of the computation, so both agree
to the last bit. Matrices are small (input length x output length) and cached. A gradient element that is not finite
spreads along its row and column.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Sequence

import torch

from exp.hardware.operators.wide import wide

__all__ = ["KERNELS", "TELLING"]

Tensor = torch.Tensor


@functools.lru_cache(maxsize=64)
def _matrix(operator: str, size: int, arguments: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Matrix of a two-dimensional operator along its last axis: (output length, input length)."""
    units = torch.eye(size, dtype=dtype, device="cpu").view(1, size, 1, size)
    given = [list(argument) if isinstance(argument, tuple) else argument for argument in arguments]
    columns: Tensor = getattr(torch.ops.aten, operator)(units, *given)
    return columns.view(size, -1).t().contiguous().to(device)


def _adjoint(grad: Tensor, like: Tensor | None, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply the last axes of ``grad`` with the transposed matrices, one for each axis; dtype as ``like``'s."""
    result = wide(grad)
    for axis, matrix in zip(range(-1, -len(matrices) - 1, -1), reversed(matrices)):
        if axis == -1:
            result = torch.matmul(result, matrix)
        else:
            shape = (*result.shape[:axis], matrix.shape[1], *result.shape[axis + 1 :])
            result = torch.matmul(matrix.t(), result.flatten(axis + 1)).view(shape)
    return result.to(grad.dtype if like is None else like.dtype)


def _matrices(x: Tensor, sizes: Sequence[int], operator: str, arguments: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return [_matrix(operator, size, options, x.device, dtype) for size, options in zip(sizes, arguments)]


def _per_axis(values: Sequence[int], axes: int) -> list[int]:
    return list(values) * axes if len(values) == 1 else list(values)


# -- interpolation ----------------------------------------------------------------------------------------------------


def _interpolation(output_size: Sequence[int], options: Sequence[Any], with_corners: bool) -> list[tuple[Any, ...]]:
    """Arguments of the two-dimensional operator for each axis; ``options``: align_corners (if it has one), scales."""
    corners = tuple(options[:1]) if with_corners else ()
    scales = [*options[len(corners) :], *[None] * len(output_size)]
    return [((1, after), *corners, None, scale) for after, scale in zip(output_size, scales)]


def _interpolation_backward(name: str, operator: str, with_corners: bool) -> Callable[..., Tensor]:
    def backward(grad_output: Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: Any) -> Tensor:
        arguments = _interpolation(output_size, options, with_corners)
        return _adjoint(grad_output, None, _matrices(grad_output, input_size[2:], operator, arguments))

    backward.__name__ = f"{name}_backward"
    backward.__doc__ = f"Gradient of {name}; ``grad_output``: (N, C, *output_size), result: ``input_size``."
    return backward


def _upsample_bicubic2d_aa(
    self: Tensor,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Tensor:
    """Bicubic interpolation with antialiasing: (N, C, H, W) -> (N, C, *output_size); integers stay within 0 ... 255."""
    arguments = _interpolation(output_size, (align_corners, scales_h, scales_w), with_corners=True)
    rows, columns = _matrices(self, self.shape[2:], "_upsample_bicubic2d_aa", arguments)
    if self.is_floating_point():
        return _adjoint(self, None, [rows.t(), columns.t()])
    # Like torch's operator, round and clamp integers after each axis.
    across = torch.matmul(self.float(), columns.t()).round_().clamp_(0.0, 255.0)
    return torch.matmul(rows, across).round_().clamp_(0.0, 255.0).to(self.dtype)


def _nearest(name: str, operator: str) -> Callable[..., Tensor]:
    def forward(self: Tensor, output_size: Sequence[int], *scales: float | None) -> Tensor:
        arguments = _interpolation(output_size, scales, with_corners=False)
        for axis, matrix in enumerate(_matrices(self, self.shape[2:], operator, arguments), start=2):
            self = self.index_select(axis, matrix.argmax(1))
        return self

    forward.__name__ = name
    forward.__doc__ = "Nearest-neighbor interpolation: (N, C, ...) -> (N, C, *output_size)."
    return forward


# -- average pooling --------------------------------------------------------------------------------------------------


def _average_backward(name: str, axes: int) -> Callable[..., Tensor]:
    def backward(
        grad_output: Tensor,
        self: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Tensor:
        each = [_per_axis(values, axes) for values in (kernel_size, stride or kernel_size, padding)]
        divisor = None if divisor_override is None else 1
        arguments = [
            ((1, kernel), (1, step), (0, pad), ceil_mode, count_include_pad, divisor)
            for kernel, step, pad in zip(*each)
        ]
        result = _adjoint(grad_output, self, _matrices(self, self.shape[-axes:], "avg_pool2d", arguments))
        return result if divisor_override is None else result / divisor_override

    backward.__name__ = name
    backward.__doc__ = "Gradient of average pooling; ``self`` and the result: ([N,] C, ...)."
    return backward


def _adaptive(name: str, axes: int) -> Callable[..., Tensor]:
    def forward(self: Tensor, output_size: Sequence[int]) -> Tensor:
        arguments = [((1, after),) for after in output_size]
        matrices = _matrices(self, self.shape[-axes:], "_adaptive_avg_pool2d", arguments)
        return _adjoint(self, None, [matrix.t() for matrix in matrices])

    forward.__name__ = name
    forward.__doc__ = "Adaptive average pooling: ([N,] C, ...) -> ([N,] C, *output_size)."
    return forward


def _adaptive_backward(name: str, axes: int) -> Callable[..., Tensor]:
    def backward(grad_output: Tensor, self: Tensor) -> Tensor:
        arguments = [((1, after),) for after in grad_output.shape[-axes:]]
        return _adjoint(grad_output, self, _matrices(self, self.shape[-axes:], "_adaptive_avg_pool2d", arguments))

    backward.__name__ = name
    backward.__doc__ = "Gradient of adaptive average pooling; ``self`` and the result: ([N,] C, ...)."
    return backward


# -- padding ----------------------------------------------------------------------------------------------------------


def _padding_backward(kind: str, axes: int) -> Callable[..., Tensor]:
    def backward(grad_output: Tensor, self: Tensor, padding: Sequence[int]) -> Tensor:
        pairs = [tuple(padding[index : index + 2]) for index in range(0, 2 * axes, 2)][::-1]  # torch's: last axis first
        arguments = [((*pair, 0, 0),) for pair in pairs]
        return _adjoint(grad_output, self, _matrices(self, self.shape[-axes:], f"{kind}_pad2d", arguments))

    backward.__name__ = f"{kind}_pad{axes}d_backward"
    backward.__doc__ = f"Gradient of {kind} padding; ``self`` and the result: ([N,] C, ...)."
    return backward


def replication_pad1d(self: Tensor, padding: Sequence[int]) -> Tensor:
    """Replication padding: ([N,] C, L) -> ([N,] C, padding[0] + L + padding[1])."""
    length = self.shape[-1]
    index = torch.arange(-padding[0], length + padding[1], device=self.device).clamp_(0, length - 1)
    return self.index_select(-1, index)


KERNELS = (
    _interpolation_backward("upsample_linear1d", "upsample_bilinear2d", True),
    _interpolation_backward("upsample_bilinear2d", "upsample_bilinear2d", True),
    _interpolation_backward("upsample_trilinear3d", "upsample_bilinear2d", True),
    _interpolation_backward("upsample_bicubic2d", "upsample_bicubic2d", True),
    _interpolation_backward("_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa", True),
    _interpolation_backward("_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa", True),
    *(_interpolation_backward(f"upsample_nearest{n}d", "upsample_nearest2d", False) for n in (1, 2, 3)),
    *(_interpolation_backward(f"_upsample_nearest_exact{n}d", "_upsample_nearest_exact2d", False) for n in (1, 2, 3)),
    _nearest("upsample_nearest1d", "upsample_nearest2d"),
    _nearest("_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    _nearest("_upsample_nearest_exact3d", "_upsample_nearest_exact2d"),
    _upsample_bicubic2d_aa,
    _average_backward("avg_pool2d_backward", 2),
    _average_backward("avg_pool3d_backward", 3),
    _adaptive("_adaptive_avg_pool2d", 2),
    _adaptive("_adaptive_avg_pool3d", 3),
    _adaptive_backward("_adaptive_avg_pool2d_backward", 2),
    _adaptive_backward("_adaptive_avg_pool3d_backward", 3),
    *(_padding_backward(kind, axes) for kind in ("replication", "reflection") for axes in (1, 2, 3)),
    replication_pad1d,
)

TELLING = frozenset({"_adaptive_avg_pool2d", "_upsample_bicubic2d_aa"})
"""Kernels that call the CPU's operator of the same name for their matrices; never register these for the CPU itself."""
