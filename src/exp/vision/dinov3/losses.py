"""Losses over pixels of which some are ignored."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["cross_entropy", "dice_loss"]


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
    """One minus the soft Dice coefficient of each image and class (V-Net, arXiv 1606.04797), averaged.

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
    # Smoothed by one pixel: a class that is neither there nor predicted has no loss.
    return (1.0 - (2.0 * overlap + 1.0) / (size + 1.0)).mean()
