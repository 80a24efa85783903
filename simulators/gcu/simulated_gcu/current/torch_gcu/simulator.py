"""What only the simulated card has: a look at the operators that a real one would send back to the CPU."""

from __future__ import annotations

from torch_gcu import _C

__all__ = ["fallbacks", "reset_fallbacks"]


def fallbacks() -> dict[str, int]:
    """How often each operator without a kernel was run on the CPU instead, by name such as ``aten::_fft_r2c``."""
    return dict(_C.fallbacks())


def reset_fallbacks() -> None:
    """Forget what :func:`fallbacks` has counted."""
    _C.reset_fallbacks()
