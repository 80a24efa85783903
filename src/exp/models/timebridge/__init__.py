"""TimeBridge (Liu et al., ICML 2025, arXiv 2410.04442), with the weights' names of the authors' code."""

from __future__ import annotations

from exp.models.timebridge.model import TimeBridge
from exp.models.timebridge.prior_model import TimeBridgePrior

__all__ = ["TimeBridge", "TimeBridgePrior"]
