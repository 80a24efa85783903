"""Separable linear operators: interpolation, average pooling, and padding by reflection or replication.

Along one axis such an operator is a product with a matrix, and its gradient a product with the transposed matrix. The
matrix is the result of the CPU's forward operator for the unit vectors, in the dtype of the computation, so both agree
to the last bit. Matrices are small (input length x output length) and cached. A gradient element that is not finite
spreads along its row and column.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, Callable, Sequence

import torch

from exp.hardware.operators.wide import per_axis, to_float32

__all__ = ["KERNELS", "SELF_REFERENTIAL"]

Tensor = torch.Tensor


@functools.lru_cache(maxsize=64)
def _matrix(operator: str, size: int, arguments: tuple[Any, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Matrix of a two-dimensional operator along its last axis: (output length, input length)."""
    units = torch.eye(size, dtype=dtype, device="cpu").view(1, size, 1, size)
    options = [list(argument) if isinstance(argument, tuple) else argument for argument in arguments]
    columns: Tensor = getattr(torch.ops.aten, operator)(units, *options)
    return columns.view(size, -1).t().contiguous().to(device)


def _apply_transpose(grad: Tensor, like: Tensor | None, matrices: Sequence[Tensor]) -> Tensor:
    """Multiply the last axes of ``grad`` with the transposed matrices, one for each axis; dtype as ``like``'s."""
    result = to_float32(grad)
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


# -- interpolation ----------------------------------------------------------------------------------------------------


def _interpolation(
    x: Tensor, sizes: Sequence[int], operator: str, output_size: Sequence[int], options: Sequence[Any]
) -> list[Tensor]:
    """A matrix for each axis; ``options``: align_corners (only the nearest-neighbor operators lack it), scales."""
    corners = () if "nearest" in operator else tuple(options[:1])
    scales = [*options[len(corners) :], *[None] * len(output_size)]
    arguments = [((1, after), *corners, None, scale) for after, scale in zip(output_size, scales)]
    return _matrices(x, sizes, operator, arguments)


def _interpolation_backward(
    operator: str, grad_output: Tensor, output_size: Sequence[int], input_size: Sequence[int], *options: Any
) -> Tensor:
    """Gradient of an interpolation; ``grad_output``: (N, C, *output_size), result: ``input_size``."""
    return _apply_transpose(
        grad_output, None, _interpolation(grad_output, input_size[2:], operator, output_size, options)
    )


def _upsample_bicubic2d_aa(self: Tensor, output_size: Sequence[int], *options: Any) -> Tensor:
    """Bicubic interpolation with antialiasing: (N, C, H, W) -> (N, C, *output_size); integers stay within 0 ... 255."""
    rows, columns = _interpolation(self, self.shape[2:], "_upsample_bicubic2d_aa", output_size, options)
    if self.is_floating_point():
        return _apply_transpose(self, None, [rows.t(), columns.t()])
    # Like torch's operator, round and clamp integers after each axis.
    across = torch.matmul(self.float(), columns.t()).round_().clamp_(0.0, 255.0)
    return torch.matmul(rows, across).round_().clamp_(0.0, 255.0).to(self.dtype)


def _nearest(operator: str, self: Tensor, output_size: Sequence[int], *scales: float | None) -> Tensor:
    """Nearest-neighbor interpolation: (N, C, ...) -> (N, C, *output_size)."""
    for axis, matrix in enumerate(_interpolation(self, self.shape[2:], operator, output_size, scales), start=2):
        self = self.index_select(axis, matrix.argmax(1))
    return self


# -- average pooling --------------------------------------------------------------------------------------------------


def _average_backward(
    axes: int,
    grad_output: Tensor,
    self: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    """Gradient of average pooling; ``self`` and the result: ([N,] C, ...)."""
    axis_sizes = (per_axis(values, axes) for values in (kernel_size, stride or kernel_size, padding))
    divisor = None if divisor_override is None else 1
    arguments = [
        ((1, kernel), (1, step), (0, pad), ceil_mode, count_include_pad, divisor)
        for kernel, step, pad in zip(*axis_sizes)
    ]
    result = _apply_transpose(grad_output, self, _matrices(self, self.shape[-axes:], "avg_pool2d", arguments))
    return result if divisor_override is None else result / divisor_override


def _adaptive(x: Tensor, sizes: Sequence[int], output_size: Sequence[int]) -> list[Tensor]:
    return _matrices(x, sizes, "_adaptive_avg_pool2d", [((1, after),) for after in output_size])


def _adaptive_forward(self: Tensor, output_size: Sequence[int]) -> Tensor:
    """Adaptive average pooling: ([N,] C, ...) -> ([N,] C, *output_size)."""
    matrices = _adaptive(self, self.shape[-len(output_size) :], output_size)
    return _apply_transpose(self, None, [matrix.t() for matrix in matrices])


def _adaptive_backward(axes: int, grad_output: Tensor, self: Tensor) -> Tensor:
    """Gradient of adaptive average pooling; ``self`` and the result: ([N,] C, ...)."""
    return _apply_transpose(grad_output, self, _adaptive(self, self.shape[-axes:], grad_output.shape[-axes:]))


# -- padding ----------------------------------------------------------------------------------------------------------


def _padding_backward(kind: str, grad_output: Tensor, self: Tensor, padding: Sequence[int]) -> Tensor:
    """Gradient of padding; ``self`` and the result: ([N,] C, ...)."""
    pairs = [padding[index : index + 2] for index in range(0, len(padding), 2)][::-1]  # torch's: last axis first
    arguments = [((*pair, 0, 0),) for pair in pairs]
    return _apply_transpose(grad_output, self, _matrices(self, self.shape[-len(pairs) :], f"{kind}_pad2d", arguments))


def replication_pad1d(self: Tensor, padding: Sequence[int]) -> Tensor:
    """Replication padding: ([N,] C, L) -> ([N,] C, padding[0] + L + padding[1])."""
    length = self.shape[-1]
    index = torch.arange(-padding[0], length + padding[1], device=self.device).clamp_(0, length - 1)
    return self.index_select(-1, index)


_INTERPOLATIONS = {  # the two-dimensional operator for each
    "upsample_linear1d": "upsample_bilinear2d",
    "upsample_bilinear2d": "upsample_bilinear2d",
    "upsample_trilinear3d": "upsample_bilinear2d",
    "upsample_bicubic2d": "upsample_bicubic2d",
    "_upsample_bilinear2d_aa": "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa": "_upsample_bicubic2d_aa",
    **{f"upsample_nearest{n}d": "upsample_nearest2d" for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": "_upsample_nearest_exact2d" for n in (1, 2, 3)},
}
_FORWARD = ("upsample_nearest1d", "_upsample_nearest_exact1d", "_upsample_nearest_exact3d")
"""Interpolations whose forward operator is missing on some card, too."""

KERNELS: dict[str, Callable[..., Tensor]] = {
    **{f"{name}_backward": partial(_interpolation_backward, operator) for name, operator in _INTERPOLATIONS.items()},
    **{name: partial(_nearest, _INTERPOLATIONS[name]) for name in _FORWARD},
    "_upsample_bicubic2d_aa": _upsample_bicubic2d_aa,
    **{f"avg_pool{axes}d_backward": partial(_average_backward, axes) for axes in (2, 3)},
    **{f"_adaptive_avg_pool{axes}d": _adaptive_forward for axes in (2, 3)},
    **{f"_adaptive_avg_pool{axes}d_backward": partial(_adaptive_backward, axes) for axes in (2, 3)},
    **{f"{kind}_pad{axes}d_backward": partial(_padding_backward, kind)
       for kind in ("replication", "reflection") for axes in (1, 2, 3)},
    "replication_pad1d": replication_pad1d,
}  # fmt: skip

SELF_REFERENTIAL = frozenset({"_adaptive_avg_pool2d", "_upsample_bicubic2d_aa"})
"""Kernels that call the CPU's operator of the same name for their matrices; never register these for the CPU itself."""
