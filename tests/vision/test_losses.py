"""Losses beside values derived in another way: from their papers' definitions, set by set and number by number."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from exp.vision.losses import Boundary, CrossEntropy, Dice, Focal, Lovasz, Ohem


def scores_and_labels(seed=0, size=(3, 4), classes=3):
    torch.manual_seed(seed)
    logits = torch.randn(2, classes, *size, requires_grad=True)
    label = torch.randint(0, classes, (2, *size)).to(torch.uint8)
    label[0, 0, :2] = 255
    return logits, label


@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_focal_loss_is_the_paper_s_sum(gamma):
    (logits, label), total = scores_and_labels(), 0.0
    weights = [0.25, 1.0, 2.0]
    for image, row, column in product(range(2), range(3), range(4)):
        truth = int(label[image, row, column])
        if truth != 255:
            exponents = [math.exp(value) for value in logits[image, :, row, column].tolist()]
            p = exponents[truth] / sum(exponents)
            total -= weights[truth] * (1 - p) ** gamma * math.log(p)
    assert Focal(gamma=gamma, class_weights=weights)(logits, label).item() == pytest.approx(total / 24, rel=1e-5)
    if gamma == 0:
        assert CrossEntropy(class_weights=weights)(logits, label).item() == pytest.approx(total / 24, rel=1e-5)


def lovasz_by_sets(errors, truth):
    """The Lovász extension of the Jaccard loss, by its definition over growing sets of the largest errors."""
    total, wrong, before = 0.0, set(), 0.0
    for pixel in sorted(errors, key=lambda pixel: -errors[pixel].item()):
        wrong.add(pixel)
        predicted = truth ^ wrong
        after = 1 - len(predicted & truth) / len(predicted | truth)
        total, before = total + errors[pixel] * (after - before), after
    return total


def lovasz_of_images(logits, label):
    total = 0.0
    for scores, labels in zip(logits.softmax(1).flatten(2), label.flatten(1).tolist()):
        known = [pixel for pixel, value in enumerate(labels) if value != 255]
        for number in set(labels) - {255}:
            truth = {pixel for pixel in known if labels[pixel] == number}
            errors = {pixel: (float(pixel in truth) - scores[number, pixel]).abs() for pixel in known}
            total = total + lovasz_by_sets(errors, truth) / len(set(labels) - {255})
    return total / len(logits)


def test_lovasz_softmax_is_the_extension_of_the_jaccard_loss_and_so_is_its_gradient():
    logits, label = scores_and_labels()
    label[1][label[1] == 2] = 0  # a class that is not there
    found, expected = Lovasz()(logits, label), lovasz_of_images(logits, label)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (found, expected)))


@pytest.mark.parametrize("kind", [CrossEntropy, Dice, Focal, Lovasz, Ohem, Boundary])
def test_ignored_pixels_and_the_spread_of_a_batch_do_not_matter(kind):
    loss = kind()
    logits, label = scores_and_labels(1)
    other = logits.detach().clone()
    other[0, :, 0, :2] = torch.randn(3, 2)
    # Divided by all pixels or images, so that the mean over ranks is that of the whole batch.
    halves = (loss(logits[:1], label[:1]) + loss(logits[1:], label[1:])) / 2
    torch.testing.assert_close([loss(other, label), halves], [loss(logits, label)] * 2)
    assert loss(logits, torch.full_like(label, 255)).item() == 0.0


def test_dice_is_of_the_classes_that_an_image_has():
    label = torch.randint(0, 3, (2, 8, 8)).to(torch.uint8)
    truth = torch.nn.functional.one_hot(label.long(), 3).permute(0, 3, 1, 2).float()
    assert Dice()(100 * truth, label).item() == pytest.approx(0.0, abs=1e-5)
    # A class that no image has costs nothing, however much of it is predicted.
    logits = torch.cat([100 * truth, torch.full((2, 1, 8, 8), 98.0)], dim=1)
    predicted = torch.softmax(logits, dim=1)[:, :3]
    dice = (2 * (predicted * truth).sum((2, 3)) + 1) / (predicted.sum((2, 3)) + truth.sum((2, 3)) + 1)
    assert Dice()(logits, label).item() == pytest.approx(1 - dice.mean().item(), abs=1e-6)


def test_only_the_hardest_pixels_of_each_image_and_only_borders_count():
    label = torch.zeros(2, 4, 4, dtype=torch.uint8)
    label[0, :, 3] = 1  # a border between the last two columns
    logits = torch.zeros(2, 2, 4, 4)
    logits[1, 1, 0, :2] = 10.0  # wrong, and sure
    each = torch.nn.functional.cross_entropy(logits, label.long(), reduction="none")
    assert Ohem(share=0.125)(logits, label).item() == pytest.approx((each[0, 0, 0] + each[1, 0, 0]).item() / 2)
    assert Boundary()(logits, label).item() == pytest.approx(each[0, :, 2:].sum().item() / 32)
