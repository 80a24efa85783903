"""Metrics of classes, over scenes or pixels, all from one confusion matrix of integers; and of values."""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Mapping, NamedTuple, Sequence

import torch
import torch.nn.functional as F

from exp.errors import DataError
from exp.metrics import Metric, SampleMetric, Table
from exp.vision.data.masks import IGNORED

if TYPE_CHECKING:
    from exp.distributed import Distributed

__all__ = ["ConfusionMatrix", "CosineSimilarity", "FeatureSimilarity", "PixelAccuracy", "SceneMetrics",
           "SegmentationMetrics", "SourceMetric", "TrueClassProbability", "labels_at_mask_size",
           "nan_mean"]  # fmt: skip


class ConfusionMatrix:
    """Confusion matrix; exact for any batch size and world size.

    Args:
        num_classes: classes (K).
    """

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.counts = torch.zeros((num_classes, num_classes), dtype=torch.int64)
        """(K, K), on the CPU: rows are the truth, columns the prediction."""

    def update(self, predicted: torch.Tensor, truth: torch.Tensor) -> None:
        """Count pairs of labels.

        Args:
            predicted: labels of any shape and integer type, below K where the truth is known.
            truth: the same shape; labels that are no class (below 0, or K and more) are left out.
        """
        # On the CPU: some accelerators narrow integers.
        truth, predicted = (labels.detach().cpu().reshape(-1).to(torch.int64) for labels in (truth, predicted))
        valid = (truth >= 0) & (truth < self.num_classes)
        pairs = truth[valid] * self.num_classes + predicted[valid]
        self.counts += torch.bincount(pairs, minlength=self.num_classes**2).view(self.num_classes, self.num_classes)

    def per_class(self) -> dict[str, list[float]]:
        """``iou``, ``fscore`` (Dice), ``precision`` and ``recall`` of each class; NaN where undefined (0 / 0)."""
        counts = self.counts.double()
        hits, truth, predicted = counts.diagonal(), counts.sum(dim=1), counts.sum(dim=0)
        denominators = {"iou": truth + predicted - hits, "fscore": (truth + predicted) / 2, "precision": predicted,
                 "recall": truth}  # fmt: skip
        return {name: (hits / denominator).tolist() for name, denominator in denominators.items()}

    def accuracy(self) -> float:
        """Share of labels that are predicted right."""
        return float(self.counts.diagonal().sum().double() / self.counts.sum())


def labels_at_mask_size(outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Predicted labels at the pixels of the masks, (B, H, W); ``data.eval_pipeline`` may resize images.

    Args:
        outputs: labels (B, H, W), or logits (B, K, h, w) of the images, which are interpolated first.
        batch: the batch, with ``label`` (B, H, W).

    Raises:
        ValueError: the outputs are neither.
    """
    truth = batch["label"]
    if outputs.dim() == truth.dim() + 1:
        labels = torch.full(truth.shape, IGNORED, dtype=torch.uint8, device=outputs.device)
        sizes = batch.get("sizes") or [outputs.shape[-2:]] * len(outputs)
        for row, logits, (height, width), size in zip(labels, outputs, sizes, batch.get("label_sizes") or sizes):
            part = logits[None, :, :height, :width].float()
            part = part if size == (height, width) else F.interpolate(part, size=tuple(size), mode="bilinear")
            row[: size[0], : size[1]] = part[0].argmax(dim=0)
        return labels
    if outputs.shape != truth.shape:
        raise ValueError(  # the engine adds the model
            f"the shape of predictions must be that of the masks, {tuple(truth.shape)} (label_sizes, if images are "
            f"resized), or they must be logits (B, K, h, w) of the images, not {tuple(outputs.shape)}"
        )
    return outputs


class _ClassMetrics(Metric):
    """Base class of the metrics of scenes and of pixels.

    Args:
        classes: names of the classes.
    """

    greater_is_better = True
    means: ClassVar[Mapping[str, str]] = {}
    """For each metric the figure per class that it is the mean of, over the classes that occur; or ``accuracy``."""
    nothing: ClassVar[str] = ""
    """Possible reasons why no label counts, for the error message."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = list(classes)
        self.reset()

    def reset(self) -> None:
        """Start a new evaluation."""
        self.confusion = ConfusionMatrix(len(self.classes))

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks.

        Raises:
            DataError: no label counts on any rank.
        """
        distributed.sum(self.confusion.counts)
        if not self.confusion.counts.any():
            raise DataError(f"{self.names[0]} cannot be measured: {self.nothing}")
        values = self.confusion.per_class()
        return {name: nan_mean(values[of]) if of in values else self.confusion.accuracy()
                for name, of in self.means.items()}  # fmt: skip

    def tables(self) -> list[Table]:
        """Metrics of each class, and the confusion matrix; after ``compute``."""
        counts = self.confusion.counts
        per_class: dict[str, list[float]] = {**self.confusion.per_class(), "count": counts.sum(dim=1).tolist()}
        confused = {f"as {name}": column for name, column in zip(self.classes, counts.t().tolist())}
        return [
            Table("per_class", "class", self.classes, per_class),
            Table("confusion", "class", self.classes, confused),
        ]


class SegmentationMetrics(_ClassMetrics):
    """Mean intersection over union and F score (Dice) over classes, and pixel accuracy; ignored pixels do not count."""

    means = MappingProxyType({"mIoU": "iou", "mFscore": "fscore", "pixel_accuracy": "accuracy"})
    names = tuple(means)
    nothing = (
        "no pixel of these masks has a class; all are ignored (data.ignore_values, data.ignore_colors), of unknown "
        "colors, or without data"
    )

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in predictions (:func:`labels_at_mask_size`); ``label`` (B, H, W) of the batch is the truth."""
        self.confusion.update(labels_at_mask_size(outputs, batch), batch["label"])


class SceneMetrics(_ClassMetrics):
    """Accuracy and macro F1 of scene classification."""

    means = MappingProxyType({"accuracy": "accuracy", "macro_f1": "fscore"})
    names = tuple(means)
    nothing = "no image has a class; all were left out (data.on_error=skip)"

    def expected_shape(self, batch: Mapping[str, Any]) -> Sequence[int]:
        """Logits (B, K)."""
        return len(batch["label"]), len(self.classes)

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in logits (B, K); ``label`` (B,) of the batch is the truth."""
        self.confusion.update(outputs.argmax(dim=-1), batch["label"])


class PixelAccuracy(SampleMetric):
    """Share of an image's pixels that are predicted right; ignored pixels are left out.

    Args:
        num_classes: classes (K).
    """

    names = ("pixels_right",)
    greater_is_better = True

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def per_sample(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """The share for each image, (B,), of predictions (:func:`labels_at_mask_size`); NaN where no pixel counts."""
        truth = batch["label"]
        valid = truth < self.num_classes
        correct = valid & (labels_at_mask_size(outputs, batch).to(truth.dtype) == truth)
        return correct.flatten(1).float().sum(dim=1) / valid.flatten(1).float().sum(dim=1)


class TrueClassProbability(SampleMetric):
    """The probability that a model assigns to an image's true class."""

    names = ("true_class_probability",)
    greater_is_better = True

    def per_sample(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """The probability for each image, (B,), of logits (B, K); NaN where the class is not known."""
        truth = batch["label"].to(torch.int64)
        shares = torch.softmax(outputs.float(), dim=-1).gather(1, truth.clamp(min=0).unsqueeze(1)).squeeze(1)
        return torch.where(truth < 0, torch.full_like(shares, float("nan")), shares)


class RegressionErrors(Metric):
    """Mean absolute error, root of the mean squared error, and mean error (bias) over all pixels with a value.

    Exact for any batch size and world size up to the rounding of float64 sums.

    Args:
        unit: of the values; empty: not known.
    """

    names: Sequence[str] = ("MAE", "RMSE", "bias")
    greater_is_better = False

    def __init__(self, unit: str = "") -> None:
        self.units = dict.fromkeys(self.names, unit) if unit else {}
        self.reset()

    def expected_shape(self, batch: Mapping[str, Any]) -> Sequence[int]:
        """The shape of the targets, (B, H, W)."""
        return tuple(batch["label"].shape)

    def reset(self) -> None:
        """Start a new evaluation."""
        self.sums = torch.zeros(6, dtype=torch.float64)  # of 1, |e|, e**2, e, y, y**2

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in values; ``label`` (B, H, W) of the batch is the truth, NaN where it has none."""
        predicted, truth = (values.detach().cpu().double() for values in (outputs, batch["label"]))
        counted = ~truth.isnan()
        truth, error = truth[counted], (predicted - truth)[counted]
        parts = (torch.ones_like(error), error.abs(), error.square(), error, truth, truth.square())
        self.sums += torch.stack([part.sum() for part in parts])

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks.

        Raises:
            DataError: no pixel has a value on any rank.
        """
        count, *totals = distributed.sum(self.sums).tolist()
        if not count:
            raise DataError(f"{self.names[0]} cannot be measured: no pixel of these targets has a value")
        absolute, squared, error, truth, truth_squared = (total / count for total in totals)
        return self._figures(absolute, squared, error, truth_squared - truth**2)

    def _figures(self, absolute: float, squared: float, error: float, variance: float) -> dict[str, float]:
        del variance
        return {"MAE": absolute, "RMSE": squared**0.5, "bias": error}


class RSquared(RegressionErrors):
    """Coefficient of determination: 1 minus squared error over variance of the truth; NaN if all values are equal."""

    names = ("R2",)
    greater_is_better = True

    def _figures(self, absolute: float, squared: float, error: float, variance: float) -> dict[str, float]:
        return {"R2": 1.0 - squared / variance if variance > 1e-12 * squared else float("nan")}


class AbsoluteError(SampleMetric):
    """Mean absolute error of an image."""

    names = ("image_MAE",)
    greater_is_better = False

    def per_sample(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        """The error of each image, (B,); NaN where no pixel has a value."""
        target = batch["label"]
        valid = target == target  # False for NaN
        error = torch.where(valid, outputs - target, torch.zeros_like(target)).abs()
        return error.flatten(1).sum(dim=1) / valid.flatten(1).sum(dim=1)


class SourceMetric(Metric):
    """A metric over the samples of one source; NaN if the split has none.

    Args:
        metric: of all samples.
        source: name of the source, which is added to the names.
        number: of the source, as in ``source`` of the batches.
    """

    def __init__(self, metric: Metric, source: str, number: int) -> None:
        self.metric, self.number, self.greater_is_better = metric, number, metric.greater_is_better
        self._names = {name: f"{name}_{source}" for name in metric.names}
        self.names = list(self._names.values())

    def reset(self) -> None:
        """Start a new evaluation."""
        self.metric.reset()

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in the rows of the source."""
        rows = [row for row, number in enumerate(batch["source"]) if number == self.number]
        if not rows:
            return
        part = {
            key: value[rows] if isinstance(value, torch.Tensor) else [value[row] for row in rows]
            for key, value in batch.items()
            if isinstance(value, (torch.Tensor, list)) and len(value) == len(batch["source"])
        }
        self.metric.update(outputs[rows], part)

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks."""
        values: dict[str, float] = {}
        with contextlib.suppress(DataError):  # no sample of the source counts
            values = self.metric.compute(distributed)
        return {own: values.get(name, float("nan")) for name, own in self._names.items()}


class CosineSimilarity(NamedTuple):
    """Cosine similarity of projected student and teacher, for each image.

    Attributes:
        cls: (B,), cosine of the CLS tokens.
        patches: (B,), mean cosine of the patches.
    """

    cls: torch.Tensor
    patches: torch.Tensor


class FeatureSimilarity(SampleMetric):
    """The mean cosine between projected student and teacher over images.

    Args:
        part: field of :class:`CosineSimilarity`: ``cls`` or ``patches``.
    """

    greater_is_better = True

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.names = [f"cosine_{part}"]

    def per_sample(self, outputs: Any, batch: dict[str, Any]) -> torch.Tensor:
        """The cosine for each image, (B,)."""
        values: torch.Tensor = getattr(outputs, self.part)
        return values


def nan_mean(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    finite = [value for value in values if value == value]  # False for NaN
    return sum(finite) / len(finite) if finite else float("nan")
