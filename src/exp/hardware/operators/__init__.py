"""Portable kernels for devices that lack operators, made of products, elementwise operators, sums, gather and scatter.

A device whose plug-in has no kernel for an operator runs it on the CPU, tensor by tensor: correct, but far too slow for
training. :class:`PortableKernels` registers a kernel with ``torch.library``, at the dispatch key of the device.
Autograd and models do not change, and other devices are not affected.

Every kernel has the name, arguments and results of the ATen operator. For float16 and bfloat16 it accumulates in
float32. Formulas are derivatives of the definitions in torch's documentation, unless a source is given.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from typing import Any, Callable, Iterable

import torch

from exp.hardware.compat import autocast_disabled
from exp.hardware.operators import activations, convolution, indexing, losses, norms, separable

__all__ = ["KERNELS", "PortableKernels"]

logger = logging.getLogger(__name__)

KERNELS: dict[str, Callable[..., Any]] = {
    **{name: getattr(module, name)
       for module in (activations, convolution, indexing, losses, norms) for name in module.__all__},
    **separable.KERNELS,
}  # fmt: skip
"""Portable kernels by ATen name, without the overload."""


class PortableKernels(torch.library.Library):
    """Portable kernels for a device type, registered for as long as this object lives.

    A kernel that another library has registered from Python for the same operator and device stays.

    Args:
        device_type: ``device.type``.
        missing: ATen names of overloads (:attr:`exp.hardware.backend.Capabilities.lacking_operators`).

    Attributes:
        names: those of ``missing`` that have a portable kernel now.
    """

    def __init__(self, device_type: str, missing: Iterable[str]) -> None:
        super().__init__("aten", "IMPL")  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verriding a previously registered kernel")
            for name in sorted(name for name in missing if name in KERNELS and hasattr(torch.ops.aten, name)):
                try:
                    kernel = _without_autocast(KERNELS[name], device_type)
                    torch.library.impl(f"aten::{name}", device_type, kernel, lib=self)
                    self.names.add(name)
                except RuntimeError as error:
                    text = "aten::%s on %s keeps the kernel of another library: %s"
                    logger.info(text, name, device_type, error)

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Refuse to replace a kernel that another library has registered from Python, whatever torch's default is."""
        if "allow_override" in inspect.signature(super().impl).parameters:
            options["allow_override"] = False
        super().impl(op_name, fn, dispatch_key, **options)  # type: ignore[no-untyped-call]


def _without_autocast(kernel: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Turn autocast off inside a kernel: the dispatcher has applied it to the arguments already."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast_disabled(device_type):
            return kernel(*args, **kwargs)

    return run
