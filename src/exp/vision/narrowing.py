"""Features in the dtype that they are kept in."""

from __future__ import annotations

import numpy as np

from exp.errors import RunError

__all__ = ["FEATURE_DTYPES", "narrowed"]

FEATURE_DTYPES = ("float16", "float32")
"""Of ``task.feature_dtype``."""


def narrowed(name: str, value: np.ndarray, dtype: str) -> np.ndarray:
    """Features in ``dtype``.

    Args:
        name: what they are, for the error.
        value: float32, of any shape.
        dtype: one of :data:`FEATURE_DTYPES`.

    Raises:
        RunError: they are not finite, or too large for it.
    """
    if not np.isfinite(value).all():
        raise RunError(
            f"features ({name}) are not finite: values of the weights are not, or their training diverged; check "
            "init_from and precision"
        )
    with np.errstate(over="ignore"):
        narrow: np.ndarray = value.astype(dtype)
    if not np.isfinite(narrow).all():
        raise RunError(f"features ({name}) are too large for {dtype}; take task.feature_dtype=float32")
    return narrow
