"""How alike a student's features are to its teacher's."""

from __future__ import annotations

from typing import Any

import torch

from exp.metrics import SampleMetric

__all__ = ["FeatureAgreement"]


class FeatureAgreement(SampleMetric):
    """The mean cosine between projected student and teacher over images.

    Args:
        part: ``cls`` or ``patches``, of :class:`exp.vision.dinov3.distiller.Agreement`.
    """

    greater_is_better = True

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.names = [f"cosine_{part}"]

    def per_sample(self, outputs: Any, batch: dict[str, Any]) -> torch.Tensor:
        """(B,)."""
        values: torch.Tensor = getattr(outputs, self.part)
        return values
