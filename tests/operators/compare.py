"""Run in a process of its own: every case by torch's own kernels, then by the portable ones, registered for the CPU.

Prints per case the largest difference by type of the numbers, relative to the largest number, and the kernels that ran.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from typing import Any, Callable

import torch
import torch.nn.functional as F

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Case:
    """A function of random tensors.

    Args:
        function: gives a tensor.
        *shapes: of its arguments.
        types: of the numbers, where torch's own kernel does not take all.
        twice: whether it can be differentiated twice.
    """

    def __init__(
        self, function: Callable[..., Any], *shapes: tuple[int, ...], types: str = "64 32 b16 16", twice: bool = True
    ) -> None:
        self.function, self.shapes, self.twice = function, shapes, twice
        names = {"64": "float64", "32": "float32", "b16": "bfloat16", "16": "float16"}
        self.types = [names[word] for word in types.split()]

    def inputs(self, dtype: torch.dtype) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes)
        return [tensor.to(dtype).requires_grad_() for tensor in drawn]

    def numbers(self, dtype: torch.dtype, permuted: bool = False) -> list[torch.Tensor]:
        """The result and all gradients, of a sum with weights that differ.

        Args:
            dtype: of all.
            permuted: whether arguments and the result's gradient lie in memory with their axes in the other order.
        """
        inputs = self.inputs(dtype)
        if permuted:
            inputs = [lying_the_other_way(each).requires_grad_() for each in inputs]
        result = self.function(*inputs)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        weights = lying_the_other_way(weights) if permuted else weights
        gradients = torch.autograd.grad(result, inputs, weights.to(result.dtype))
        return [result.detach(), *gradients]


def lying_the_other_way(tensor: torch.Tensor) -> torch.Tensor:
    axes = tuple(reversed(range(tensor.dim())))
    return tensor.detach().permute(axes).contiguous().permute(axes)


def difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    worst = 0.0
    for a, b in zip(first, second):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.isfinite(b).all():
            return math.inf
        scale = float(a.double().abs().max())
        worst = max(worst, float((a.double() - b.double()).abs().max()) / (scale or 1.0))
    return worst


def labels(*shape: int, classes: int = 5, ignored: int | None = -100) -> torch.Tensor:
    drawn = torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(3))
    if ignored is not None:
        drawn.view(-1)[::3] = ignored
    return drawn


WEIGHTS = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0], dtype=torch.float64)
MAP = (2, 3, 6, 7)


def nll(*shape: int, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cross-entropy, whose weights are of the scores' type."""
    target = labels(*shape, ignored=options.get("ignore_index", -100))

    def function(scores: torch.Tensor) -> torch.Tensor:
        given = {key: v.to(scores.dtype) if isinstance(v, torch.Tensor) else v for key, v in options.items()}
        return F.cross_entropy(scores, target, **given)

    return function


def embedded(**options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda table: F.embedding(labels(4, 6, ignored=None), table, **options)


def resized(mode: str, size: Any = None, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.interpolate(x, size=size, mode=mode, **options)


def batch_norm(training: bool) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mean, variance = torch.zeros(3, dtype=x.dtype), torch.full((3,), 2.0, dtype=x.dtype)
        return F.batch_norm(x, mean, variance, weight, bias, training)

    return function


NO_HALF = "64 32 b16"
CASES: dict[str, dict[str, Case]] = {
    "gelu_backward": {
        "erf": Case(F.gelu, (5, 7)),
        "tanh": Case(lambda x: F.gelu(x, approximate="tanh"), (5, 7)),
        "far": Case(lambda x: F.gelu(30.0 * x), (5, 7), twice=False),
    },
    "silu_backward": {"": Case(F.silu, (5, 7))},
    "sigmoid_backward": {"": Case(torch.sigmoid, (5, 7))},
    "tanh_backward": {"": Case(torch.tanh, (5, 7))},
    "threshold_backward": {"": Case(F.relu, (5, 7)), "at 0.3": Case(lambda x: F.threshold(x, 0.3, 2.0), (5, 7))},
    "leaky_relu_backward": {"": Case(lambda x: F.leaky_relu(x, 0.2), (5, 7))},
    "hardtanh_backward": {"": Case(lambda x: F.hardtanh(x, -0.5, 0.7), (5, 7))},
    "hardsigmoid_backward": {"": Case(lambda x: F.hardsigmoid(3.0 * x), (5, 7), types="32 b16 16", twice=False)},
    "hardswish_backward": {"": Case(lambda x: F.hardswish(3.0 * x), (5, 7), twice=False)},
    "mish_backward": {"": Case(F.mish, (5, 7), types=NO_HALF)},
    "softplus_backward": {"": Case(lambda x: F.softplus(x, 2.0, 1.5), (5, 7))},
    "log_sigmoid_forward": {"": Case(F.logsigmoid, (5, 7))},
    "log_sigmoid_backward": {"": Case(lambda x: F.logsigmoid(20.0 * x), (5, 7), twice=False)},
    "glu_backward": {"": Case(lambda x: F.glu(x, 1), (5, 8))},
    "_prelu_kernel_backward": {"": Case(F.prelu, (5, 4, 3), (4,))},
    "sgn": {
        "real": Case(lambda x: x.abs(), (5, 7)),
        "complex": Case(lambda x: torch.fft.rfft(x).abs(), (5, 7), types="64 32", twice=False),
    },
    "_softmax_backward_data": {
        "": Case(lambda x: F.softmax(x, 1), (3, 5, 4)),
        "to float32": Case(lambda x: F.softmax(x, -1, dtype=torch.float32), (3, 5), types="32 b16 16", twice=False),
    },
    "_log_softmax_backward_data": {"": Case(lambda x: F.log_softmax(x, 1), (3, 5, 4))},
    "nll_loss_backward": {
        "mean": Case(nll(6), (6, 5), types=NO_HALF),
        "weights": Case(nll(6, weight=WEIGHTS, ignore_index=2, label_smoothing=0.2), (6, 5), types=NO_HALF),
        "none": Case(nll(6, weight=WEIGHTS, reduction="none"), (6, 5), types=NO_HALF),
        "one sample": Case(nll(reduction="sum", ignore_index=-1), (5,), types=NO_HALF),
    },
    "nll_loss2d_backward": {
        "mean": Case(nll(2, 4, 3), (2, 5, 4, 3), types=NO_HALF),
        "weights": Case(nll(2, 4, 3, weight=WEIGHTS, ignore_index=1), (2, 5, 4, 3), types=NO_HALF),
        "none": Case(nll(2, 4, 3, reduction="none"), (2, 5, 4, 3), types=NO_HALF),
    },
    "native_layer_norm_backward": {
        "": Case(lambda x, w, b: F.layer_norm(x, (7,), w, b), (4, 5, 7), (7,), (7,)),
        "two axes": Case(lambda x, w: F.layer_norm(x, (5, 7), w), (4, 5, 7), (5, 7)),
        "plain": Case(lambda x: F.layer_norm(x, (7,)), (4, 7)),
        "mean far from 0": Case(lambda x, w, b: F.layer_norm(x + 3.0, (7,), w, b), (4, 7), (7,), (7,), types="64 32"),
    },
    "native_group_norm_backward": {
        "": Case(lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5, 2), (4,), (4,)),
        "plain": Case(lambda x: F.group_norm(x, 2), (3, 4, 5)),
    },
    "native_batch_norm_backward": {
        "batch": Case(batch_norm(True), MAP, (3,), (3,)),
        "running": Case(batch_norm(False), MAP, (3,), (3,)),
        "plain": Case(lambda x: F.batch_norm(x, None, None, training=True), (6, 3)),
    },
    "_weight_norm_interface_backward": {  # torch's own second derivative fails gradgradcheck, too
        "first axis": Case(lambda v, g: torch._weight_norm(v, g, 0), (4, 3, 2), (4, 1, 1), types=NO_HALF, twice=False),
        "last axis": Case(lambda v, g: torch._weight_norm(v, g, 2), (4, 3, 2), (1, 1, 2), types=NO_HALF, twice=False),
    },
    "dot": {"": Case(torch.dot, (7,), (7,))},
    "convolution_backward": {
        "patches": Case(lambda x, w, b: F.conv2d(x, w, b, 3), (2, 3, 7, 6), (4, 3, 3, 3), (4,)),
        "1x1": Case(F.conv2d, MAP, (4, 3, 1, 1), (4,)),
        "1x1 in one axis, many samples": Case(F.conv1d, (9, 6, 2), (8, 6, 1)),
        "3x3": Case(lambda x, w, b: F.conv2d(x, w, b, padding=1), MAP, (4, 3, 3, 3), (4,)),
        "stride": Case(lambda x, w: F.conv2d(x, w, stride=(2, 3), padding=(1, 0)), MAP, (4, 3, 3, 2)),
        "dilation and groups": Case(
            lambda x, w, b: F.conv2d(x, w, b, padding=2, dilation=2, groups=2), (2, 4, 6, 7), (6, 2, 3, 3), (6,)
        ),
        "depthwise": Case(lambda x, w: F.conv1d(x, w, groups=4), (2, 4, 9), (4, 1, 3)),
        "three axes": Case(lambda x, w: F.conv3d(x, w, padding=1), (1, 2, 3, 4, 3), (3, 2, 3, 3, 3), types="64 32"),
        "transposed": Case(lambda x, w, b: F.conv_transpose2d(x, w, b, 2), MAP, (3, 4, 2, 2), (4,)),
        "transposed, general": Case(
            lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2, 2), (2, 4, 5, 4), (4, 3, 3, 3), (6,), types="64 32"
        ),
    },
    "embedding_dense_backward": {
        "": Case(embedded(), (5, 3)),
        "options": Case(embedded(padding_idx=2, scale_grad_by_freq=True), (5, 3), twice=False),
    },
    "upsample_linear1d_backward": {"": Case(resized("linear", 9), (2, 3, 4))},
    "upsample_bilinear2d_backward": {
        "": Case(resized("bilinear", (24, 10)), MAP),
        "corners": Case(resized("bilinear", (11, 13), align_corners=True), MAP),
        "scale": Case(resized("bilinear", scale_factor=(1.7, 0.6)), MAP),
    },
    "upsample_trilinear3d_backward": {"": Case(resized("trilinear", (3, 5, 4)), (1, 2, 2, 3, 5), types="64 32")},
    "upsample_bicubic2d_backward": {
        "": Case(resized("bicubic", (13, 10)), MAP),
        "corners": Case(resized("bicubic", scale_factor=1.5, align_corners=True), MAP),
    },
    "_upsample_bilinear2d_aa_backward": {
        "": Case(resized("bilinear", (4, 10), antialias=True), MAP, types="64 32", twice=False)
    },
    "_upsample_bicubic2d_aa_backward": {
        "": Case(resized("bicubic", (4, 10), antialias=True), MAP, types="64 32", twice=False)
    },
    "upsample_nearest1d_backward": {"": Case(resized("nearest", 7), (2, 3, 4), types="64 32")},
    "upsample_nearest2d_backward": {"": Case(resized("nearest", (9, 4)), MAP, types="64 32")},
    "upsample_nearest3d_backward": {"": Case(resized("nearest", (3, 2, 7)), (1, 2, 2, 3, 5), types="64 32")},
    "_upsample_nearest_exact2d_backward": {"": Case(resized("nearest-exact", (9, 4)), MAP, types="64 32")},
    "upsample_nearest1d": {"": Case(resized("nearest", 7), (2, 3, 4))},
    "_upsample_nearest_exact1d": {"": Case(resized("nearest-exact", 7), (2, 3, 4))},
    "_upsample_nearest_exact1d_backward": {"": Case(resized("nearest-exact", 5), (2, 3, 9), types="64 32")},
    "_upsample_nearest_exact3d": {"": Case(resized("nearest-exact", (3, 2, 7)), (1, 2, 2, 3, 5))},
    "_upsample_nearest_exact3d_backward": {
        "": Case(resized("nearest-exact", (3, 2, 7)), (1, 2, 2, 3, 5), types="64 32")
    },
    "max_pool2d_with_indices_backward": {
        "": Case(lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), MAP),
        "one image": Case(lambda x: F.max_pool2d(x, 2), (3, 6, 7)),
    },
    "max_pool3d_with_indices_backward": {"": Case(lambda x: F.max_pool3d(x, 2, 1), (1, 2, 4, 3, 5), types="64 32")},
    "adaptive_max_pool2d_backward": {"": Case(lambda x: F.adaptive_max_pool2d(x, (4, 3)), MAP, types="64 32")},
    "adaptive_max_pool3d_backward": {"": Case(lambda x: F.adaptive_max_pool3d(x, 2), (1, 2, 4, 3, 5), types="64 32")},
    "avg_pool2d_backward": {
        "": Case(lambda x: F.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True), MAP),
        "options": Case(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), MAP),
        "divisor": Case(lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5), MAP),
        "one axis": Case(lambda x: F.avg_pool1d(x, 3), (2, 3, 9)),
    },
    "avg_pool3d_backward": {"": Case(lambda x: F.avg_pool3d(x, 2, 1), (1, 2, 4, 3, 5), types="64 32")},
    "_adaptive_avg_pool2d_backward": {"": Case(lambda x: F.adaptive_avg_pool2d(x, (4, 3)), MAP)},
    "_adaptive_avg_pool3d": {"": Case(lambda x: F.adaptive_avg_pool3d(x, 2), (1, 2, 4, 3, 5), types="64 32")},
    "_adaptive_avg_pool3d_backward": {"": Case(lambda x: F.adaptive_avg_pool3d(x, 2), (1, 2, 4, 3, 5), types="64 32")},
    **{
        f"{kind}_pad{axes}d_backward": {
            "": Case(lambda x, p=(1, 2, 2, 1, 1, 0)[: 2 * axes], k=mode: F.pad(x, p, k), (2, 3, 4, 5, 4)[: axes + 2])
        }
        for kind, mode in (("replication", "replicate"), ("reflection", "reflect"))
        for axes in (1, 2, 3)
    },
    "replication_pad1d": {"": Case(lambda x: F.pad(x, (-1, 3), "replicate"), (2, 3, 6), types="64 32")},
    "binary_cross_entropy_backward": {
        "": Case(lambda x: F.binary_cross_entropy(x.sigmoid(), torch.full_like(x, 0.3)), (5, 7)),
        "weights": Case(
            lambda x: F.binary_cross_entropy(x.sigmoid(), torch.ones_like(x), x.new_full((7,), 2.0), reduction="none"),
            (5, 7),
        ),
    },
    "smooth_l1_loss_backward": {"": Case(lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), beta=0.5), (5, 7))},
    "huber_loss_backward": {"": Case(lambda x: F.huber_loss(x, torch.zeros_like(x), delta=0.5), (5, 7), types="64 32")},
}  # fmt: skip
"""By kernel."""


def counted(kernels: dict[str, Callable[..., Any]], calls: Counter[str], permuted: set[bool]) -> None:
    """Count calls; while ``permuted`` is not empty, hand tensors over whose axes lie in memory in the other order.

    Which of them torch makes contiguous before it calls a kernel differs from version to version.
    """

    def counting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if permuted:
                args = tuple(lying_the_other_way(each) if isinstance(each, torch.Tensor) else each for each in args)
            return kernel(*args, **kwargs)

        return run

    for name, kernel in list(kernels.items()):
        kernels[name] = counting(name, kernel)


def main() -> None:
    torch.set_num_threads(1)
    every = {f"{kernel}: {name}": case for kernel, cases in CASES.items() for name, case in cases.items()}
    native: dict[str, dict[str, Any]] = {}
    for name, case in every.items():
        native[name] = {dtype: case.numbers(DTYPES[dtype]) for dtype in case.types}
        native[name][f"{case.types[0]} permuted"] = case.numbers(DTYPES[case.types[0]], permuted=True)

    from exp import operators
    from exp.operators import separable

    calls: Counter[str] = Counter()
    permuted: set[bool] = set()
    counted(operators.KERNELS, calls, permuted)
    operators.install("cpu", set(operators.KERNELS) - separable.TELLING)
    found = {}
    for name, case in every.items():
        calls.clear()
        differences = {}
        for kind, numbers in native[name].items():
            dtype, _, other_way = kind.partition(" ")
            permuted.update({True} if other_way else ())
            differences[kind] = difference(numbers, case.numbers(DTYPES[dtype], permuted=bool(other_way)))
            permuted.clear()
        ran = dict(calls)
        twice = None
        if case.twice:
            try:
                torch.autograd.gradgradcheck(case.function, case.inputs(torch.float64), fast_mode=True)
            except Exception as error:  # noqa: BLE001 - told by the test of this case
                twice = str(error)
        found[name] = {"differences": differences, "kernels": ran, "twice": twice}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
