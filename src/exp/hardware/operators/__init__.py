"""Operators for devices that lack them, made of what every device has: products, elementwise, sums, gather, scatter.

A device whose plug-in has no kernel for an operator runs it on the CPU, tensor by tensor: correct, and slow beyond use
in training. :func:`install` registers a kernel for it by torch's own extension point, at the dispatch key of the
device. Autograd's formulas, what it saves for the backward pass, and models stay as they are; other devices see nothing
of it.

Every kernel has the name of the ATen operator, takes its arguments in their order, and gives its results; it adds up in
float32 where the tensors are narrower. Formulas are derivatives of the definitions in torch's documentation, unless a
source is named.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from typing import Any, Callable, Iterable

import torch

from exp.hardware.compat import autocast_disabled
from exp.hardware.operators import activations, convolution, indexing, losses, norms, products, separable

__all__ = ["KERNELS", "install"]

logger = logging.getLogger(__name__)

KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for module in (activations, convolution, indexing, losses, norms, products, separable)
    for kernel in module.KERNELS
}
KERNELS["nll_loss2d_backward"] = losses.nll_loss_backward
"""By ATen name, without an overload: what there is a portable form of."""


class _Library(torch.library.Library):
    """One that refuses to replace a kernel which another has registered from Python; torch's own has done either."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        if "allow_override" in inspect.signature(super().impl).parameters:
            options["allow_override"] = False
        super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]


_library = _Library("aten", "IMPL")  # type: ignore[no-untyped-call]
"""For the rest of the process: one that is collected takes its kernels with it."""

_installed: dict[str, set[str]] = {}


def install(device_type: str, lacking: Iterable[str]) -> frozenset[str]:
    """Have a device take portable kernels for what it lacks; for the rest of the process, and once for each operator.

    A kernel that another library has registered from Python for the same operator and device stays.

    Args:
        device_type: torch's, such as ``device.type``.
        lacking: ATen names of overloads (:meth:`exp.hardware.backend.Backend.lacking_operators`).

    Returns:
        Those of ``lacking`` that have a portable kernel now.
    """
    done = _installed.setdefault(device_type, set())
    wanted = {name for name in lacking if name in KERNELS and hasattr(torch.ops.aten, name)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verriding a previously registered kernel")
        for name in sorted(wanted - done):
            try:
                kernel = _without_autocast(KERNELS[name], device_type)
                torch.library.impl(f"aten::{name}", device_type, kernel, lib=_library)
                done.add(name)
            except RuntimeError as error:
                logger.info("aten::%s on %s is another library's, and stays so: %s", name, device_type, error)
    return frozenset(wanted & done)


def _without_autocast(kernel: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """The dispatcher is below autocast here, but the operators in the kernel begin at its top."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast_disabled(device_type):
            return kernel(*args, **kwargs)

    return run
