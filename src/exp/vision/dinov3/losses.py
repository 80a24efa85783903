"""Losses over images or pixels of which some are ignored, and their weighted sum.

Means are over images, or over all labels, known or not: so a loss does not depend on how a batch is spread over
devices.
Operators are those that every device has (:mod:`exp.hardware.operators`), in float32.
"""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError

__all__ = ["Losses", "cross_entropy", "dice_loss", "focal_loss", "lovasz_softmax", "named"]


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    class_weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy, summed over the known labels and divided by the number of all.

    Dividing by the known ones alone would give samples with few of them a larger weight, and another one for each way
    of spreading a batch over devices; and nothing is divided by zero where all are ignored.

    Args:
        logits: (B, K) or (B, K, H, W).
        labels: (B,) or (B, H, W), integers below K, or ``ignore_index``.
        ignore_index: the label that is left out.
        class_weights: (K,); None: all 1.
        label_smoothing: share of the target that is spread over all classes (arXiv 1512.00567).

    Returns:
        0-dim float32.
    """
    total = F.cross_entropy(
        logits.float(),
        labels.long(),
        class_weights,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total / labels.numel()


def dice_loss(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """One minus the soft Dice coefficient (V-Net, arXiv 1606.04797), averaged over the classes of each image, then over
    images.

    A class without a pixel in an image is left out there: whatever little is predicted of it would count as a miss.

    Args:
        logits: (B, K, H, W).
        labels: (B, H, W), integers below K, or ``ignore_index``.
        ignore_index: pixels that count nowhere.

    Returns:
        0-dim float32.
    """
    known = (labels != ignore_index).unsqueeze(1)
    probabilities = torch.softmax(logits.float(), dim=1) * known
    index = labels.long().unsqueeze(1) * known  # ignored pixels: class 0, then masked away
    truth = torch.zeros_like(probabilities).scatter_(1, index, 1.0) * known
    overlap = (probabilities * truth).sum(dim=(2, 3))
    size = probabilities.sum(dim=(2, 3)) + truth.sum(dim=(2, 3))
    there = truth.sum(dim=(2, 3)) > 0
    loss = (1.0 - (2.0 * overlap + 1.0) / (size + 1.0)) * there  # smoothed by one pixel
    return (loss.sum(dim=1) / there.sum(dim=1).clamp(min=1)).mean()


def focal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    gamma: float = 2.0,
    class_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Focal loss (Lin et al., arXiv 1708.02002) of softmax scores: -w[t] (1 - p[t]) ** gamma log p[t].

    Summed over the known labels and divided by the number of all, as :func:`cross_entropy`, which it is with gamma 0.

    Args:
        logits: (B, K) or (B, K, H, W).
        labels: (B,) or (B, H, W), integers below K, or ``ignore_index``.
        ignore_index: the label that is left out.
        gamma: how much less is counted what is right already.
        class_weights: (K,), the paper's alpha; None: all 1.

    Returns:
        0-dim float32.
    """
    known = labels != ignore_index
    index = labels.long() * known  # ignored: class 0, then masked away
    log_right = torch.log_softmax(logits.float(), dim=1).gather(1, index.unsqueeze(1)).squeeze(1)
    # 1 - p without cancellation; above 0, where powers below 1 have no finite slope.
    wrong = -torch.expm1(log_right)
    losses = -log_right * wrong.clamp(min=1e-6) ** gamma
    if class_weights is not None:
        losses = losses * class_weights.index_select(0, index.flatten()).view_as(losses)
    return (losses * known).sum() / labels.numel()


def lovasz_softmax(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Lovász-softmax (Berman et al., arXiv 1705.08790): the convex surrogate of one minus the mean IoU.

    Of each image by itself, over the classes that are in it (the paper's "present" classes of single images), then
    averaged over images; one without a known pixel counts as 0.

    Args:
        logits: (B, K, H, W).
        labels: (B, H, W), integers below K, or ``ignore_index``.
        ignore_index: pixels that count nowhere.

    Returns:
        0-dim float32.
    """
    probabilities = torch.softmax(logits.float(), dim=1).flatten(2)
    known = (labels != ignore_index).flatten(1).unsqueeze(1).float()
    index = labels.long().flatten(1).unsqueeze(1) * known.long()
    truth = torch.zeros_like(probabilities).scatter_(1, index, 1.0) * known
    errors = (truth - probabilities).abs() * known
    # The weights are a constant of the subgradient: what depends on the scores are the errors' products alone, and no
    # derivative of a sorting is asked for.
    with torch.no_grad():
        weights = _slopes(errors, truth, known)
    present = (truth.sum(dim=2) > 0).float()
    by_class = (errors * weights).sum(dim=2) * present
    return (by_class.sum(dim=1) / present.sum(dim=1).clamp(min=1.0)).mean()


def _slopes(errors: torch.Tensor, truth: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """How much each pixel's error adds to the Jaccard loss, (B, K, P), once those with larger errors are wrong.

    The paper's algorithm 1. A pixel that does not count changes neither intersection nor union: its slope is 0.

    Args:
        errors: (B, K, P).
        truth: likewise, 1 where a known pixel has the class.
        known: (B, 1, P), 1 or 0.
    """
    order = torch.sort(errors, dim=2, descending=True)[1]
    hit = truth.gather(2, order)
    others = (known - truth).gather(2, order)
    count = truth.sum(dim=2, keepdim=True)
    intersection = count - hit.cumsum(dim=2)
    union = count + others.cumsum(dim=2)
    jaccard = 1.0 - intersection / union.clamp(min=1.0)
    before = torch.cat([torch.zeros_like(jaccard[..., :1]), jaccard[..., :-1]], dim=2)
    return torch.zeros_like(errors).scatter_(2, order, jaccard - before)


class Losses(nn.Module):
    """A weighted sum of losses.

    Args:
        num_classes: K.
        ignore_index: the label that is left out.
        class_weights: K numbers, of cross-entropy and focal loss; None: all 1.
        cross_entropy_weight: of :func:`cross_entropy`; 0: left out, as for the others.
        focal_weight: of :func:`focal_loss`.
        focal_gamma: see there.
        dice_weight: of :func:`dice_loss`.
        lovasz_weight: of :func:`lovasz_softmax`.
        label_smoothing: see :func:`cross_entropy`.

    Raises:
        ConfigError: a number is out of range, or no loss is left.
    """

    class_weights: torch.Tensor | None

    def __init__(
        self,
        num_classes: int,
        ignore_index: int,
        class_weights: Sequence[float] | None = None,
        cross_entropy_weight: float = 1.0,
        focal_weight: float = 0.0,
        focal_gamma: float = 2.0,
        dice_weight: float = 0.0,
        lovasz_weight: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if class_weights is not None and len(class_weights) != num_classes:
            raise ConfigError(
                f"model.class_weights has {len(class_weights)} numbers, but the data have {num_classes} classes"
            )
        if class_weights is not None and (min(class_weights) < 0.0 or max(class_weights) == 0.0):
            raise ConfigError(f"model.class_weights={list(class_weights)} must not be negative, nor all 0")
        numbers = {"cross_entropy_weight": cross_entropy_weight, "focal_weight": focal_weight,
                   "focal_gamma": focal_gamma, "dice_weight": dice_weight, "lovasz_weight": lovasz_weight}  # fmt: skip
        for name, value in numbers.items():
            if value < 0.0:
                raise ConfigError(f"model.{name}={value} must not be negative")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ConfigError(f"model.label_smoothing={label_smoothing} must be a share from 0 to 1")
        if not (cross_entropy_weight or focal_weight or dice_weight or lovasz_weight):
            raise ConfigError(
                "model: no loss is left; set one of cross_entropy_weight, focal_weight, dice_weight and lovasz_weight "
                "above 0"
            )
        self.ignore_index = ignore_index
        self.cross_entropy_weight, self.focal_weight, self.focal_gamma = cross_entropy_weight, focal_weight, focal_gamma
        self.dice_weight, self.lovasz_weight = dice_weight, lovasz_weight
        self.label_smoothing = label_smoothing
        weights = None if class_weights is None else torch.tensor(list(class_weights), dtype=torch.float32)
        self.register_buffer("class_weights", weights, persistent=False)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The losses by name, each times its weight.

        Args:
            logits: (B, K) or (B, K, H, W).
            labels: (B,) or (B, H, W).

        Returns:
            0-dim float32 tensors, whose sum is the loss: ``loss_ce``, ``loss_focal``, ``loss_dice``, ``loss_lovasz``,
            as far as they have a weight.
        """
        losses = {}
        if self.cross_entropy_weight:
            losses["loss_ce"] = self.cross_entropy_weight * cross_entropy(
                logits, labels, self.ignore_index, self.class_weights, self.label_smoothing
            )
        if self.focal_weight:
            focal = focal_loss(logits, labels, self.ignore_index, self.focal_gamma, self.class_weights)
            losses["loss_focal"] = self.focal_weight * focal
        if self.dice_weight:
            losses["loss_dice"] = self.dice_weight * dice_loss(logits, labels, self.ignore_index)
        if self.lovasz_weight:
            losses["loss_lovasz"] = self.lovasz_weight * lovasz_softmax(logits, labels, self.ignore_index)
        return losses


def named(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A single loss under the name ``loss``, which is that of the sum where there are several."""
    return {"loss": next(iter(losses.values()))} if len(losses) == 1 else losses
