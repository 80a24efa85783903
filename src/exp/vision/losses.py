"""Losses over images or pixels, of classes or of values; a model adds up those of ``model.losses``.

Means are over images, or over all labels, also ignored ones, so that a loss does not depend on how a batch is
distributed over devices. All is computed in float32, with operators that every device has
(:mod:`exp.hardware.operators`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from exp.config.resolve import create
from exp.errors import ConfigError

__all__ = ["Boundary", "CrossEntropy", "Dice", "Focal", "Loss", "Losses", "Lovasz", "Ohem"]


class Loss(nn.Module):
    """Base class of losses; one of yours: ``model.losses=[{_target_: <its path>, weight: 1.0, <its keys>}]``.

    A subclass passes ``ignore_index`` and ``class_weights``, which the model sets, and ``weight`` on, and writes
    :meth:`forward`.

    Args:
        weight: factor of the loss in the sum.
        ignore_index: the label that is left out.
        class_weights: one weight per class (K); None: all 1.
    """

    takes_shares: ClassVar[bool] = False
    """Whether labels may be shares of the classes (``data.mixup_alpha``, ``data.cutmix_alpha``)."""
    class_weights: torch.Tensor | None

    def __init__(
        self, weight: float = 1.0, ignore_index: int = 255, class_weights: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.weight, self.ignore_index = weight, ignore_index
        values = None if class_weights is None else torch.tensor(list(class_weights), dtype=torch.float32)
        self.register_buffer("class_weights", values, persistent=False)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss, without the factor.

        Args:
            logits: (B, K) or (B, K, H, W).
            labels: (B,) or (B, H, W), integers below K, or ``ignore_index``; with :attr:`takes_shares` also shares of
                the classes, float32 (B, K), all 0 where ignored.

        Returns:
            0-dim float32, a mean over images or over all labels.
        """
        raise NotImplementedError

    def _by_label(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of each label times the weight of its class, 0 where ignored; the shape of ``labels``."""
        return F.cross_entropy(logits.float(), labels.long(), self.class_weights, ignore_index=self.ignore_index,
                               reduction="none")  # fmt: skip

    def _probabilities(self, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Flatten logits (B, K, ...) and labels (B, ...) over P pixels.

        Returns:
            Probabilities and one-hot truth, float32 (B, K, P) each, 0 where ignored; 1 where not, float32 (B, 1, P).
        """
        valid = (labels != self.ignore_index).flatten(1).unsqueeze(1)
        probabilities = torch.softmax(logits.float(), dim=1).flatten(2) * valid
        index = labels.long().flatten(1).unsqueeze(1) * valid  # ignored pixels: class 0, then masked away
        truth = torch.zeros_like(probabilities).scatter_(1, index, 1.0) * valid
        return probabilities, truth, valid.float()


class CrossEntropy(Loss):
    """Cross-entropy, summed over the known labels and divided by the number of all labels.

    Dividing by the number of known labels would give samples with few of them a larger weight, which would depend on
    how a batch is distributed over devices, and would divide by zero if all labels are ignored.

    Args:
        label_smoothing: share of the target that is distributed over all classes (arXiv 1512.00567).
        **common: arguments of :class:`Loss`.
    """

    takes_shares = True

    def __init__(self, label_smoothing: float = 0.0, **common: Any) -> None:
        super().__init__(**common)
        self.label_smoothing = label_smoothing

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See :class:`Loss`."""
        if labels.is_floating_point():
            return self._of_shares(logits, labels) / len(labels)
        common: Any = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        if not self.label_smoothing:
            total = F.cross_entropy(logits.float(), labels.long(), self.class_weights, reduction="sum", **common)
        else:  # torch 1.10 smooths ignored labels, too, if ignore_index is negative
            losses = F.cross_entropy(logits.float(), labels.long(), self.class_weights, reduction="none", **common)
            total = (losses * (labels != self.ignore_index)).sum()
        return total / labels.numel()

    def _of_shares(self, logits: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The sum over samples of - sum_k w[k] q[k] log p[k], with the smoothed shares q (B, K)."""
        smoothing = self.label_smoothing
        smooth = (1.0 - smoothing) * shares + smoothing / shares.shape[1] * shares.sum(dim=1, keepdim=True)
        losses = -smooth * torch.log_softmax(logits.float(), dim=1)
        return (losses if self.class_weights is None else losses * self.class_weights).sum()


class Focal(Loss):
    """Focal loss (Lin et al., arXiv 1708.02002) of softmax scores: -w[t] (1 - p[t]) ** gamma log p[t].

    Summed over the known labels and divided by the number of all labels, like :class:`CrossEntropy`, to which it is
    equal with gamma 0. The class weights are the paper's alpha.

    Args:
        gamma: focusing parameter: the larger, the less well-classified examples count.
        **common: arguments of :class:`Loss`.
    """

    def __init__(self, gamma: float = 2.0, **common: Any) -> None:
        super().__init__(**common)
        self.gamma = gamma

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See :class:`Loss`."""
        valid = labels != self.ignore_index
        index = labels.long() * valid  # ignored: class 0, then masked away
        log_probability = torch.log_softmax(logits.float(), dim=1).gather(1, index.unsqueeze(1)).squeeze(1)
        # 1 - p without cancellation, clamped above 0, where powers below 1 have no finite slope.
        error = -torch.expm1(log_probability)
        losses = -log_probability * error.clamp(min=1e-6) ** self.gamma
        if self.class_weights is not None:
            losses = losses * self.class_weights.index_select(0, index.flatten()).view_as(losses)
        return (losses * valid).sum() / labels.numel()


class Dice(Loss):
    """One minus the soft Dice coefficient (V-Net, arXiv 1606.04797), averaged over the classes of each image, then over
    images.

    Classes without a pixel in an image are left out there: any small probability would count as a complete miss.
    """

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See :class:`Loss`."""
        probabilities, truth, _ = self._probabilities(logits, labels)
        overlap, count = (probabilities * truth).sum(dim=2), truth.sum(dim=2)
        size = probabilities.sum(dim=2) + count
        present = count > 0
        loss = (1.0 - (2.0 * overlap + 1.0) / (size + 1.0)) * present  # smoothed by one pixel
        return (loss.sum(dim=1) / present.sum(dim=1).clamp(min=1)).mean()


class Lovasz(Loss):
    """Lovász-softmax (Berman et al., arXiv 1705.08790): the convex surrogate of one minus the mean IoU.

    The mean over the classes that occur in an image (the paper's "present" classes of single images), then over images;
    an image without a known pixel counts as 0.
    """

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See :class:`Loss`."""
        probabilities, truth, valid = self._probabilities(logits, labels)
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


class Ohem(Loss):
    """Cross-entropy of the hardest pixels of each image (Shrivastava et al., arXiv 1604.03540).

    Chosen per image: the hardest of a batch would depend on how it is distributed over devices.

    Args:
        share: share of the pixels of an image that count, from 0 to 1.
        **common: arguments of :class:`Loss`.
    """

    def __init__(self, share: float = 0.25, **common: Any) -> None:
        super().__init__(**common)
        self.share = share

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See :class:`Loss`."""
        losses = self._by_label(logits, labels).flatten(1)
        count = max(round(self.share * losses.shape[1]), 1)
        return torch.sort(losses, dim=1, descending=True)[0][:, :count].mean()


class Boundary(Loss):
    """Cross-entropy of the pixels at borders of classes: of those that have a neighbor of another class.

    Summed over them and divided by the number of all pixels; add it to another loss, so that borders count more. An
    ignored pixel is a neighbor of another class.
    """

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See :class:`Loss`."""
        numbers = labels.float()
        highest, lowest = (sign * F.max_pool2d(sign * numbers, 3, stride=1, padding=1) for sign in (1.0, -1.0))
        return (self._by_label(logits, labels) * (highest != lowest)).sum() / labels.numel()


class ValueLoss(nn.Module):
    """Base class of the losses of dense regression; one of yours as with :class:`Loss`.

    Args:
        weight: factor of the loss in the sum.
        target_range: the lowest and the highest value; set by the model.
    """

    def __init__(self, target_range: Sequence[float], weight: float = 1.0) -> None:
        super().__init__()
        self.weight, self.target_range = weight, list(target_range)

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss, without the factor: 0-dim float32, a mean over images or pixels.

        Args:
            values: (B, H, W), float32.
            target: (B, H, W), float32; NaN where there is none.
        """
        return self._of_error(_error(values, target)).sum() / target.numel()

    def _of_error(self, error: torch.Tensor) -> torch.Tensor:
        """The loss of each pixel; 0 for an error of 0."""
        raise NotImplementedError


def _error(values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``values - target``; 0 where there is no target. Not a product: NaN times 0 is NaN."""
    return torch.where(target == target, values - target, torch.zeros_like(values))


class L1(ValueLoss):
    """Absolute error, in the unit of the targets, summed over the known pixels and divided by the number of all."""

    def _of_error(self, error: torch.Tensor) -> torch.Tensor:
        return error.abs()


class Huber(ValueLoss):
    """Squared error below ``delta``, absolute error above (Huber, 1964), over ``delta``; otherwise like :class:`L1`.

    Args:
        delta: in the unit of the targets.
        **common: arguments of :class:`ValueLoss`.
    """

    def __init__(self, delta: float = 1.0, **common: Any) -> None:
        super().__init__(**common)
        if delta <= 0.0:
            raise ConfigError(f"model.losses: delta={delta} of Huber must be above 0")
        self.delta = delta

    def _of_error(self, error: torch.Tensor) -> torch.Tensor:
        size = error.abs()
        near = size.clamp(max=self.delta)
        return near * (size - 0.5 * near) / self.delta


class ScaleInvariant(ValueLoss):
    """Scale-invariant error of logarithms (Eigen et al., arXiv 1406.2283, equation 4), the mean over images.

    For each image mean(d**2) - share * mean(d)**2 over its known pixels, with d the difference of log(value + offset).

    Args:
        share: how much of a common factor of all values of an image is forgiven, from 0 to 1.
        offset: is added to values, in their unit, so that 0 has a logarithm.
        **common: arguments of :class:`ValueLoss`.

    Raises:
        ConfigError: the lowest value has no logarithm.
    """

    def __init__(self, share: float = 0.5, offset: float = 1.0, **common: Any) -> None:
        super().__init__(**common)
        self.share, self.offset = share, offset
        if self.target_range[0] + offset <= 0.0:
            raise ConfigError(
                f"model.losses: ScaleInvariant.offset={offset} must be above {-self.target_range[0]:g}, since "
                f"data.target_range begins at {self.target_range[0]:g}"
            )

    def forward(self, values: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """See :class:`ValueLoss`."""
        lowest = 0.5 * (self.target_range[0] + self.offset)  # a prediction below the range has a logarithm, too
        error = _error((values + self.offset).clamp(min=lowest).log(), (target + self.offset).log()).flatten(1)
        count = (target == target).flatten(1).sum(dim=1).clamp(min=1)
        mean = error.sum(dim=1) / count
        return (error.square().sum(dim=1) / count - self.share * mean.square()).mean()


class Losses(nn.Module):
    """The sum of ``model.losses``.

    Args:
        configs: {_target_, weight, ...} each.
        kind: :class:`Loss` for classes, :class:`ValueLoss` for values.
        **common: arguments of every loss, which the model sets.

    Raises:
        ConfigError: there is no loss, or one is not of this kind.
    """

    def __init__(self, configs: Sequence[Any], kind: type[nn.Module], **common: Any) -> None:
        super().__init__()
        if not configs:
            raise ConfigError("model.losses is empty; name at least one, such as {_target_: exp.vision.losses.Dice}")
        self.terms: Any = nn.ModuleList(
            create(config, kind, f"model.losses[{number}]", **common) for number, config in enumerate(configs)
        )

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The losses by name, such as ``loss_dice``, each times its weight; see :class:`Loss`.

        Raises:
            ConfigError: labels are shares of classes, which a loss does not take.
        """
        losses: dict[str, torch.Tensor] = {}
        for term in self.terms:
            if isinstance(term, Loss) and labels.is_floating_point() and not term.takes_shares:
                raise ConfigError(
                    f"model.losses: {type(term).__name__} takes one class per image, but data.mixup_alpha and "
                    "data.cutmix_alpha give shares of classes; use CrossEntropy, or turn mixing off"
                )
            name = f"loss_{type(term).__name__.lower()}"
            loss = term.weight * term(logits, labels)
            losses[name] = losses[name] + loss if name in losses else loss
        return losses
