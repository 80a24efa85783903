"""Losses beside values derived in another way: from their papers' definitions, set by set and number by number."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from exp.vision.dinov3 import SceneClassifier
from exp.vision.dinov3.losses import Losses, cross_entropy, dice_loss, focal_loss, lovasz_softmax


def scores_and_labels(seed=0, size=(3, 4), classes=3):
    torch.manual_seed(seed)
    logits = torch.randn(2, classes, *size, requires_grad=True)
    label = torch.randint(0, classes, (2, *size)).to(torch.uint8)
    label[0, 0, :2] = 255
    return logits, label


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_is_the_paper_s_sum(gamma):
    logits, label = scores_and_labels()
    weights = torch.tensor([0.25, 1.0, 2.0])
    total = 0.0
    for image, row, column in product(range(2), range(3), range(4)):
        truth = int(label[image, row, column])
        if truth != 255:
            exponents = [math.exp(value) for value in logits[image, :, row, column].tolist()]
            p = exponents[truth] / sum(exponents)
            total -= float(weights[truth]) * (1 - p) ** gamma * math.log(p)
    assert focal_loss(logits, label, 255, gamma, weights).item() == pytest.approx(total / 24, rel=1e-5)
    if gamma == 0:
        torch.testing.assert_close(focal_loss(logits, label, 255, 0.0), cross_entropy(logits, label, 255))


def test_focal_loss_of_what_is_certain_has_a_finite_gradient():
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0]], requires_grad=True)
    loss = focal_loss(logits, torch.tensor([0, 0]), -1, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(100.0)
    assert torch.isfinite(logits.grad).all()


def jaccard(wrong, truth):
    """One minus intersection over union of the prediction that is wrong in these pixels."""
    predicted = truth ^ wrong
    return 1 - len(predicted & truth) / len(predicted | truth)


def lovasz_by_sets(errors, truth):
    """The Lovász extension of the Jaccard loss, by its definition over growing sets of the largest errors."""
    order = sorted(range(len(errors)), key=lambda pixel: -errors[pixel])
    total, wrong, before = 0.0, set(), 0.0
    for pixel in order:
        wrong = wrong | {pixel}
        after = jaccard(wrong, truth)
        total, before = total + errors[pixel] * (after - before), after
    return total


def lovasz_reference(logits, label):
    images = []
    for scores, labels in zip(logits, label):
        p = scores.softmax(0).flatten(1)
        known = [pixel for pixel, value in enumerate(labels.flatten().tolist()) if value != 255]
        of_classes = []
        for number in range(len(p)):
            truth = {place for place, pixel in enumerate(known) if int(labels.flatten()[pixel]) == number}
            errors = [abs((place in truth) - p[number, pixel].item()) for place, pixel in enumerate(known)]
            if truth:
                of_classes.append(lovasz_by_sets(errors, truth))
        images.append(sum(of_classes) / len(of_classes) if of_classes else 0.0)
    return sum(images) / len(images)


def test_lovasz_softmax_is_the_extension_of_the_jaccard_loss():
    logits, label = scores_and_labels()
    label[1][label[1] == 2] = 0  # a class that is not there
    assert lovasz_softmax(logits, label, 255).item() == pytest.approx(lovasz_reference(logits, label), rel=1e-5)


def test_lovasz_softmax_of_labels_that_are_certain_is_one_minus_their_mean_iou():
    label = torch.randint(0, 3, (1, 8, 8))
    guess = torch.randint(0, 3, (1, 8, 8))
    sure = torch.nn.functional.one_hot(guess, 3).permute(0, 3, 1, 2).float() * 1000
    iou = [float(((label == k) & (guess == k)).sum() / ((label == k) | (guess == k)).sum()) for k in range(3)]
    assert lovasz_softmax(sure, label, 255).item() == pytest.approx(1 - sum(iou) / 3, abs=1e-6)


def test_lovasz_gradient_is_that_of_the_loss():
    logits, label = scores_and_labels(5)
    lovasz_softmax(logits, label, 255).backward()
    step = 1e-3
    for place in ((0, 0, 1, 1), (1, 2, 2, 3), (0, 1, 0, 0)):  # the last is ignored
        values = []
        for sign in (1, -1):
            moved = logits.detach().clone()
            moved[place] += sign * step
            values.append(lovasz_reference(moved, label))
        assert logits.grad[place].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=2e-4)


@pytest.mark.parametrize("loss", [cross_entropy, dice_loss, focal_loss, lovasz_softmax])
def test_ignored_pixels_and_the_spread_of_a_batch_do_not_matter(loss):
    logits, label = scores_and_labels(1)
    other = logits.detach().clone()
    other[0, :, 0, :2] = torch.randn(3, 2)
    torch.testing.assert_close(loss(other, label, 255), loss(logits.detach(), label, 255))
    # Divided by all pixels or images, so that the mean over ranks is that of the whole batch.
    assert loss(logits, torch.full_like(label, 255), 255).item() == 0.0
    halves = (loss(logits[:1], label[:1], 255) + loss(logits[1:], label[1:], 255)) / 2
    torch.testing.assert_close(loss(logits, label, 255), halves)


def test_a_sum_of_losses():
    logits, label = scores_and_labels()
    losses = Losses(3, 255, [1.0, 2.0, 0.5], 0.5, focal_weight=2.0, focal_gamma=1.5, dice_weight=1.0, lovasz_weight=3.0)
    found = losses(logits, label)
    assert set(found) == {"loss_ce", "loss_focal", "loss_dice", "loss_lovasz"}
    weights = torch.tensor([1.0, 2.0, 0.5])
    torch.testing.assert_close(found["loss_ce"], 0.5 * cross_entropy(logits, label, 255, weights))
    torch.testing.assert_close(found["loss_focal"], 2.0 * focal_loss(logits, label, 255, 1.5, weights))
    torch.testing.assert_close(found["loss_lovasz"], 3.0 * lovasz_softmax(logits, label, 255))
    small = {"embed_dim": 16, "depth": 1, "num_heads": 1, "layer_scale": 0.5}
    scenes = SceneClassifier(3, **small, cross_entropy_weight=0.0, focal_weight=1.0)
    image = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    label = torch.tensor([0, 2, -1, 1])
    loss = scenes(image=image, label=label, mode="loss")
    assert list(loss) == ["loss"]
    torch.testing.assert_close(loss["loss"], focal_loss(scenes(image=image), label, -1))


def test_dice_of_a_perfect_prediction_is_nothing():
    label = torch.randint(0, 3, (2, 8, 8)).to(torch.uint8)
    sure = torch.nn.functional.one_hot(label.long(), 3).permute(0, 3, 1, 2).float() * 100
    assert dice_loss(sure, label, 255).item() == pytest.approx(0.0, abs=1e-5)
    assert dice_loss(-sure, label, 255).item() > 0.5


def test_a_class_that_an_image_has_not_does_not_enter_its_dice_loss():
    """Even scores of three classes, two of which are there: 1 - (2 * 2/3 + 1) / (4/3 + 2 + 1) of each."""
    labels = torch.tensor([[[0, 0], [1, 1]], [[255, 255], [255, 255]]])
    assert dice_loss(torch.zeros(1, 3, 2, 2), labels[:1], 255).item() == pytest.approx(6 / 13)
    assert dice_loss(torch.zeros(2, 3, 2, 2), labels, 255).item() == pytest.approx(3 / 13)  # one without a known pixel
