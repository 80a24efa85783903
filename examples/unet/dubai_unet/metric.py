"""The metric: mean intersection over union."""

from __future__ import annotations

from typing import Any, Sequence

import torch

from exp.distributed import Distributed
from exp.metrics import Metric, Table

__all__ = ["MeanIou"]


class MeanIou(Metric):
    """``iou``: mean intersection over union of the classes that occur; pixels with other labels are ignored.

    Args:
        classes: names of the classes (K).
    """

    names = ("iou",)
    greater_is_better = True

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = list(classes)
        self.reset()

    def reset(self) -> None:
        """Start a new evaluation."""
        self._counts: list[torch.Tensor] = []
        self._per_class: list[float] = []

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Count the pairs of a batch on its device; ``outputs`` and ``label``: class numbers (B, H, W)."""
        kinds = len(self.classes)
        truth, predicted = batch["label"].reshape(-1), outputs.reshape(-1)
        pairs = torch.where((truth >= 0) & (truth < kinds), truth * kinds + predicted, kinds**2)
        counts = torch.zeros(kinds**2 + 1, device=outputs.device)  # exact: a batch has fewer than 2**24 pixels
        self._counts.append(counts.scatter_add_(0, pairs, torch.ones_like(pairs, dtype=counts.dtype)))

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The metric over all ranks."""
        kinds = len(self.classes)
        total = torch.zeros(kinds**2, dtype=torch.float64)
        for counts in self._counts:
            total += counts[:-1].cpu()
        pairs = distributed.sum(total).view(kinds, kinds)
        iou = pairs.diagonal() / (pairs.sum(dim=0) + pairs.sum(dim=1) - pairs.diagonal())
        self._per_class = iou.tolist()
        return {"iou": float(iou[~iou.isnan()].mean())}

    def tables(self) -> list[Table]:
        """The intersection over union of each class."""
        return [Table("per_class", "class", self.classes, {"iou": self._per_class})]
