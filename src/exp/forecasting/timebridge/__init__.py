"""TimeBridge (Liu et al., ICML 2025, arXiv 2410.04442); weights have the names of the authors' code."""

from __future__ import annotations

from exp.forecasting.timebridge.model import TimeBridge
from exp.forecasting.timebridge.prior import TimeBridgePrior

__all__ = ["TimeBridge", "TimeBridgePrior"]
