"""The loss scaler that a precision needs, and how fast a device multiplies in each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from exp.hardware.backend import Backend

__all__ = ["grad_scaler", "long_product", "matrix_rate"]

_LARGEST_MATRIX = 8192
_LONG_PRODUCT_S = 0.004


def grad_scaler(backend: Backend, precision: str) -> Any | None:
    """A loss scaler with the interface of ``torch.amp.GradScaler``, or None where none is needed.

    The vendor's where ``torch.<device_type>.amp`` has one: some cards overflow in a way of their own.
    """
    if precision != "fp16":
        return None
    import torch

    own = getattr(getattr(backend.module, "amp", None), "GradScaler", None)
    common: Any = getattr(torch.amp, "GradScaler", None)  # torch >= 2.3
    if own is not None and (common is None or not own.__module__.startswith("torch.")):
        return own()
    return common(backend.device_type)


def long_product(backend: Backend, device: torch.device) -> tuple[int, float]:
    """The side of square matrices whose product takes a few milliseconds, and how many seconds it takes.

    Args:
        backend: of the device.
        device: in whose precision (``backend.autocast``) the caller is.
    """
    import torch

    side = 256
    while True:
        matrix = torch.full((side, side), 1.0 / side, device=device)
        times = []
        for _ in range(3):
            started = time.monotonic()
            matrix = matrix @ matrix
            backend.synchronize()
            times.append(time.monotonic() - started)
        seconds = max(min(times[1:]), 1e-6)  # the first may compile
        if seconds > _LONG_PRODUCT_S or side >= _LARGEST_MATRIX:
            return side, seconds
        side *= 2


def matrix_rate(backend: Backend, device: torch.device, precision: str, seconds: float = 0.1) -> float:
    """Floating-point operations per second of products of square matrices; an addition is one, too.

    Args:
        backend: of the device.
        device: otherwise idle.
        precision: of :data:`exp.config.schema.PRECISIONS`.
        seconds: for how long to multiply.
    """
    import torch

    with torch.no_grad(), backend.autocast(precision):
        side, each = long_product(backend, device)
        matrix = torch.full((side, side), 1.0 / side, device=device)
        result = torch.ones(side, side, device=device)
        count = max(3, int(seconds / each))
        started = time.monotonic()
        for _ in range(count):
            result = matrix @ result
        backend.synchronize()
        return 2.0 * side**3 * count / (time.monotonic() - started)
