"""Metrics of classes, against counting by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from exp.distributed import Distributed
from exp.vision.metrics import PixelAccuracy, SceneMetrics, SegmentationMetrics

CLASSES = ["water", "road", "snow"]


def segmentation():
    metrics = SegmentationMetrics(CLASSES)
    truth = torch.tensor([[[0, 0, 0, 1], [1, 1, 255, 255]]], dtype=torch.uint8)
    predicted = torch.tensor([[[0, 0, 1, 1], [1, 0, 2, 0]]], dtype=torch.uint8)
    metrics.update(predicted, {"label": truth})
    return metrics


def test_pixels_by_hand():
    metrics = segmentation()
    values = metrics.compute(Distributed())
    # water: 2 hits, 1 missed, 1 false; road: 2 hits, 1 missed, 1 false; snow: seen on an ignored pixel only.
    assert values == pytest.approx({"mIoU": 0.5, "mFscore": 2 / 3, "pixel_accuracy": 4 / 6})
    per_class, confusion = metrics.tables()
    assert per_class.rows == CLASSES
    assert per_class.columns["iou"][:2] == [0.5, 0.5]
    assert math.isnan(per_class.columns["iou"][2])
    assert per_class.columns["count"] == [3, 3, 0]
    assert confusion.columns == {"as water": [2, 1, 0], "as road": [1, 2, 0], "as snow": [0, 0, 0]}


def test_precision_is_of_what_is_predicted_and_recall_of_what_is_there():
    metrics = SegmentationMetrics(["a", "b"])
    metrics.update(torch.tensor([[[0, 1, 1, 1]]]), {"label": torch.tensor([[[0, 0, 0, 1]]])})
    values = metrics.compute(Distributed())
    per_class, confusion = metrics.tables()
    assert per_class.columns["precision"] == pytest.approx([1.0, 1 / 3])
    assert per_class.columns["recall"] == pytest.approx([1 / 3, 1.0])
    assert per_class.columns["count"] == [3, 1]
    assert confusion.columns == {"as a": [1, 0], "as b": [2, 1]}
    assert values == pytest.approx({"mIoU": 1 / 3, "mFscore": 0.5, "pixel_accuracy": 0.5})


def test_logits_of_resized_images_are_enlarged_before_a_class_is_chosen():
    """A border after the third of eight pixels, at half the size; the second image is padded, and no smaller."""
    truth = torch.tensor([[[0, 0, 0, 1, 1, 1, 1, 1]], [[2, 2, 255, 255, 255, 255, 255, 255]]], dtype=torch.uint8)
    logits = torch.zeros(2, 3, 1, 4)
    logits[0, 0], logits[0, 1] = torch.tensor([1.0, 0.5, 0, 0]), torch.tensor([0, 0.5, 1.0, 1.0])
    logits[1, 2, 0, :2] = 1.0
    batch = {"label": truth, "sizes": [(1, 4), (1, 2)], "label_sizes": [(1, 8), (1, 2)]}
    metrics = SegmentationMetrics(CLASSES)
    metrics.update(logits, batch)
    assert metrics.confusion.counts.tolist() == [[3, 0, 0], [0, 5, 0], [0, 0, 2]]
    assert PixelAccuracy(3).per_sample(logits, batch).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"(?s)\(2, 1, 8\).*\(2, 1, 4\)"):
        metrics.update(logits.argmax(dim=1), batch)


def test_scenes_by_hand():
    metrics = SceneMetrics(CLASSES)
    logits = torch.tensor([[3.0, 0, 0], [0, 2.0, 1], [1, 0, 4.0], [5.0, 1, 1]])
    metrics.update(logits, {"label": torch.tensor([0, 1, 1, -1])})
    values = metrics.compute(Distributed())
    assert values["accuracy"] == pytest.approx(2 / 3)
    assert values["macro_f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


def test_a_rank_without_a_sample_has_what_the_others_counted():
    other, without = SceneMetrics(["a", "b"]), SceneMetrics(["a", "b"])
    for metrics, label in ((other, torch.tensor([0, 1, 1])), (without, torch.empty(0, dtype=torch.int64))):
        metrics.update(torch.eye(2)[label], {"label": label})
    both = SimpleNamespace(sum=lambda counts: counts.add_(other.confusion.counts))
    assert without.compute(both) == {"accuracy": 1.0, "macro_f1": 1.0}
