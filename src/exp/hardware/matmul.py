"""The speed and the error of matrix products."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from exp.hardware.backend import Backend

_LARGEST_MATRIX = 8192
_LONG_PRODUCT_S = 0.004


def multiply(backend: Backend, device: torch.device, seconds: float) -> tuple[float, float]:
    """Measure products of square matrices; the caller has entered ``backend.autocast``.

    Args:
        backend: of the device.
        device: a device that is otherwise idle.
        seconds: minimum duration of the measurement.

    Returns:
        Floating-point operations per second (a multiply-add counts as two), and the largest absolute error of the
        products.
    """
    import torch

    side, duration = 128, 0.0
    while duration < _LONG_PRODUCT_S and side < _LARGEST_MATRIX:
        side *= 2
        # All entries are 1/n, with n a power of two, so that the product with ones is exactly ones in every precision.
        matrix = torch.full((side, side), 1.0 / side, device=device)
        result = torch.ones(side, side, device=device)
        for _ in range(3):  # the first product may compile a kernel; only the time of the last one is used
            started = time.monotonic()
            result = matrix @ result
            backend.synchronize()
            duration = time.monotonic() - started
    batch = max(1, int(min(0.05, seconds / 2) / max(duration, 1e-6)))
    count, elapsed, started = 0, 0.0, time.monotonic()
    while elapsed < seconds:
        for _ in range(batch):
            result = matrix @ result
        backend.synchronize()
        count += batch
        elapsed = time.monotonic() - started
    return 2.0 * side**3 * count / elapsed, float((result.float() - 1).abs().max().cpu())


def matrix_rate(backend: Backend, device: torch.device, precision: str, seconds: float = 0.1) -> float:
    """Floating-point operations per second of products of square matrices (:func:`multiply`) in ``precision``."""
    import torch

    with torch.no_grad(), backend.autocast(precision):
        return multiply(backend, device, seconds)[0]
