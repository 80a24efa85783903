"""Losses over images or pixels, some of which are ignored, and their weighted sum.

Means are over images, or over all labels, also ignored ones, so that a loss does not depend on how a batch is
distributed over devices. All is computed in float32, with operators that every device has
(:mod:`exp.hardware.operators`).
"""

from __future__ import annotations

from typing import Callable

import torch
import torch.nn.functional as F
from torch import nn

from exp.errors import ConfigError
from exp.vision.dinov3.keys import LossConfig

__all__ = ["Losses", "cross_entropy", "dice_loss", "focal_loss", "lovasz_softmax", "rename_single_loss"]

_LOSSES = {"cross_entropy": "loss_ce", "focal": "loss_focal", "dice": "loss_dice", "lovasz": "loss_lovasz"}


def _masked_probabilities(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> tuple[torch.Tensor, ...]:
    """Flatten logits (B, K, ...) and labels (B, ...) over P pixels.

    Returns:
        Probabilities and one-hot truth, float32 (B, K, P) each, 0 where ignored; and 1 where not, float32 (B, 1, P).
    """
    valid = (labels != ignore_index).flatten(1).unsqueeze(1)
    probabilities = torch.softmax(logits.float(), dim=1).flatten(2) * valid
    index = labels.long().flatten(1).unsqueeze(1) * valid  # ignored pixels: class 0, then masked away
    truth = torch.zeros_like(probabilities).scatter_(1, index, 1.0) * valid
    return probabilities, truth, valid.float()


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    class_weights: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross-entropy, summed over the known labels and divided by the number of all labels.

    Dividing by the number of known labels would give samples with few of them a larger weight, which would depend on
    how a batch is distributed over devices, and would divide by zero if all labels are ignored.

    Args:
        logits: (B, K) or (B, K, H, W).
        labels: (B,) or (B, H, W), integers below K, or ``ignore_index``.
        ignore_index: the label that is left out.
        class_weights: (K,); None: all 1.
        label_smoothing: share of the target that is distributed over all classes (arXiv 1512.00567).

    Returns:
        0-dim float32.
    """
    total = F.cross_entropy(logits.float(), labels.long(), class_weights, ignore_index=ignore_index, reduction="sum",
                            label_smoothing=label_smoothing)  # fmt: skip
    return total / labels.numel()


def dice_loss(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """One minus the soft Dice coefficient (V-Net, arXiv 1606.04797), averaged over the classes of each image, then over
    images.

    Classes without a pixel in an image are left out there: any small probability would count as a complete miss.

    Args:
        logits: (B, K, H, W).
        labels: (B, H, W), integers below K, or ``ignore_index``.
        ignore_index: the label that is left out.

    Returns:
        0-dim float32.
    """
    probabilities, truth, _ = _masked_probabilities(logits, labels, ignore_index)
    overlap, count = (probabilities * truth).sum(dim=2), truth.sum(dim=2)
    size = probabilities.sum(dim=2) + count
    present = count > 0
    loss = (1.0 - (2.0 * overlap + 1.0) / (size + 1.0)) * present  # smoothed by one pixel
    return (loss.sum(dim=1) / present.sum(dim=1).clamp(min=1)).mean()


def focal_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    gamma: float = 2.0,
    class_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Focal loss (Lin et al., arXiv 1708.02002) of softmax scores: -w[t] (1 - p[t]) ** gamma log p[t].

    Summed over the known labels and divided by the number of all labels, like :func:`cross_entropy`, to which it is
    equal with gamma 0.

    Args:
        logits: (B, K) or (B, K, H, W).
        labels: (B,) or (B, H, W), integers below K, or ``ignore_index``.
        ignore_index: the label that is left out.
        gamma: focusing parameter: the larger, the less well-classified examples count.
        class_weights: (K,), the paper's alpha; None: all 1.

    Returns:
        0-dim float32.
    """
    valid = labels != ignore_index
    index = labels.long() * valid  # ignored: class 0, then masked away
    log_probability = torch.log_softmax(logits.float(), dim=1).gather(1, index.unsqueeze(1)).squeeze(1)
    # 1 - p without cancellation, clamped above 0, where powers below 1 have no finite slope.
    error = -torch.expm1(log_probability)
    losses = -log_probability * error.clamp(min=1e-6) ** gamma
    if class_weights is not None:
        losses = losses * class_weights.index_select(0, index.flatten()).view_as(losses)
    return (losses * valid).sum() / labels.numel()


def lovasz_softmax(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Lovász-softmax (Berman et al., arXiv 1705.08790): the convex surrogate of one minus the mean IoU.

    The mean over the classes that occur in an image (the paper's "present" classes of single images), then over images;
    an image without a known pixel counts as 0.

    Args:
        logits: (B, K, H, W).
        labels: (B, H, W), integers below K, or ``ignore_index``.
        ignore_index: the label that is left out.

    Returns:
        0-dim float32.
    """
    probabilities, truth, valid = _masked_probabilities(logits, labels, ignore_index)
    errors = (truth - probabilities).abs()
    # The weights are constants of the subgradient: the gradient flows through the errors alone, not through the
    # sorting.
    with torch.no_grad():
        weights = _slopes(errors, truth, valid)
    present = (truth.sum(dim=2) > 0).float()
    by_class = (errors * weights).sum(dim=2) * present
    return (by_class.sum(dim=1) / present.sum(dim=1).clamp(min=1.0)).mean()


def _slopes(errors: torch.Tensor, truth: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Weights of the pixels' errors, the paper's algorithm 1.

    The weight of a pixel is how much the Jaccard loss grows if it becomes wrong after all pixels with larger errors. It
    is 0 for ignored pixels, which change neither intersection nor union.

    Args:
        errors: (B, K, P).
        truth: (B, K, P), 1 where a known pixel has the class.
        valid: (B, 1, P), 1 or 0.

    Returns:
        (B, K, P).
    """
    order = torch.sort(errors, dim=2, descending=True)[1]
    hit = truth.gather(2, order)
    others = (valid - truth).gather(2, order)
    count = truth.sum(dim=2, keepdim=True)
    intersection = count - hit.cumsum(dim=2)
    union = count + others.cumsum(dim=2)
    jaccard = 1.0 - intersection / union.clamp(min=1.0)
    before = torch.cat([torch.zeros_like(jaccard[..., :1]), jaccard[..., :-1]], dim=2)
    return torch.zeros_like(errors).scatter_(2, order, jaccard - before)


class Losses(nn.Module):
    """A weighted sum of losses.

    Args:
        config: the keys of ``model``; a weight that it does not have is 0.
        ignore_index: the label that is left out.

    Raises:
        ConfigError: all weights are 0.
    """

    class_weights: torch.Tensor | None

    def __init__(self, config: LossConfig, ignore_index: int) -> None:
        super().__init__()
        weights = config.class_weights
        self.weights = {name: getattr(config, f"{name}_weight", 0.0) for name in _LOSSES}
        if not any(self.weights.values()):
            raise ConfigError(
                f"model: no loss is left; set one of {', '.join(f'{name}_weight' for name in self.weights)} above 0"
            )
        self.gamma, self.label_smoothing = config.focal_gamma, getattr(config, "label_smoothing", 0.0)
        self.ignore_index = ignore_index
        class_weights = None if weights is None else torch.tensor(list(weights), dtype=torch.float32)
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The losses by name, each times its weight.

        Args:
            logits: (B, K) or (B, K, H, W).
            labels: (B,) or (B, H, W).

        Returns:
            0-dim float32 tensors whose sum is the loss: those of ``loss_ce``, ``loss_focal``, ``loss_dice`` and
            ``loss_lovasz`` whose weight is not 0.
        """
        arguments, class_weights = (logits, labels, self.ignore_index), self.class_weights
        compute: dict[str, Callable[[], torch.Tensor]] = {
            "cross_entropy": lambda: cross_entropy(*arguments, class_weights, self.label_smoothing),
            "focal": lambda: focal_loss(*arguments, self.gamma, class_weights),
            "dice": lambda: dice_loss(*arguments),
            "lovasz": lambda: lovasz_softmax(*arguments),
        }
        return {_LOSSES[name]: weight * compute[name]() for name, weight in self.weights.items() if weight}


def rename_single_loss(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename a single loss to ``loss``; several losses are returned unchanged."""
    return {"loss": next(iter(losses.values()))} if len(losses) == 1 else losses
