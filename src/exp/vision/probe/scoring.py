"""What scores are worth: accuracy and macro F1, mean average precision, mean intersection over union."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from exp.vision.metrics import ConfusionMatrix

if TYPE_CHECKING:
    from exp.vision.probe.linear import Scale
    from exp.vision.probe.store import Store

__all__ = ["average_precision", "of_images", "of_pixels"]


def of_images(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Of one score for each class and image.

    Args:
        scores: (n, K); the largest counts, or with several labels their order.
        labels: int64 (n,), or (n, K) of 0 and 1.
    """
    if labels.ndim == 2:
        found = [average_precision(scores[:, column], labels[:, column]) for column in range(labels.shape[1])]
        there = [value for value in found if not math.isnan(value)]
        return {"mAP": float(np.mean(there)) if there else float("nan")}
    matrix = ConfusionMatrix(scores.shape[1])
    matrix.update(torch.from_numpy(scores.argmax(axis=1)), torch.from_numpy(labels))
    return {"accuracy": matrix.accuracy(), "macro_f1": _mean(matrix.per_class()["fscore"])}


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float:
    """Precision averaged over the steps of recall, without interpolation; nan where nothing is positive.

    Equal scores count as one step, as scikit-learn has it.

    Args:
        scores: (n,).
        truth: (n,) of 0 and 1.
    """
    positives = float(truth.sum())
    if positives == 0:
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    hits, ranked = np.cumsum(truth[order]), scores[order]
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    precision, recall = hits[ends] / (ends + 1.0), hits[ends] / positives
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def of_pixels(
    store: Store, part: str, images: np.ndarray, scale: Scale, weights: list[torch.Tensor], device: torch.device
) -> list[dict[str, float]]:
    """Of linear probes on patches: their logits are enlarged to the pixels of each image (bilinear).

    Args:
        store: has patches and masks.
        part: of it.
        images: numbers of those that count.
        scale: of the columns.
        weights: of each probe, (D + 1, K).
        device: that does it.

    Returns:
        For each probe.
    """
    features, masks = store.array(part, "patches"), store.array(part, "labels")
    patch = int(store.about["patch_size"])
    on_device = [each.to(device) for each in weights]
    matrices = [ConfusionMatrix(each.shape[1]) for each in weights]
    for number in images.tolist():
        tall, wide, dim = features.shape[1:]
        block = torch.from_numpy(np.array(features[number], np.float32).reshape(tall * wide, dim)).to(device)
        block = scale(block)
        mask = torch.from_numpy(np.array(masks[number]))
        for matrix, each in zip(matrices, on_device):
            logits = (block @ each[:-1] + each[-1]).t().reshape(1, -1, tall, wide)
            pixels = F.interpolate(logits, size=(tall * patch, wide * patch), mode="bilinear", align_corners=False)
            predicted = pixels[0, :, : mask.shape[0], : mask.shape[1]].argmax(dim=0)
            matrix.update(predicted, mask)
    return [{"mIoU": _mean(matrix.per_class()["iou"]), "pixel_accuracy": matrix.accuracy()} for matrix in matrices]


def _mean(values: list[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return float(np.mean(there)) if there else float("nan")
