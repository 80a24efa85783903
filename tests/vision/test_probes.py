"""Stores of features, and probes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from exp.vision.feature_store import DONE, FeatureStore
from exp.vision.probe import (
    fit_logistic,
    fit_sgd,
    nearest_neighbors,
    patch_labels,
    pixel_metrics,
    read_labeled_features,
    vote_shares,
)

CLASSES = ["a", "b", "c", "d"]
COUNT = len(CLASSES)


def keep(folder, parts, classes=CLASSES, patch_size=8):
    """A store as task=features makes it, of ``{part: {name: array}}``."""
    about = {"experiment": "x", "classes": classes, "patch_size": patch_size, "fingerprint": {}, "weights": {}}
    counts = {part: len(values["labels"]) for part, values in parts.items()}
    store = FeatureStore.create(folder, about, parts["train"], counts)
    for part, values in parts.items():
        for first in range(0, counts[part], 100):
            some = {name: each[first : first + 100] for name, each in values.items()}
            store.write(
                part, range(first, first + len(some["labels"])), {**some, "state": np.full(len(some["labels"]), DONE)}
            )
    return store


def classes_that_overlap(*counts):
    """Features and labels of so many images in each part."""
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(COUNT, 24))
    for count in counts:
        kinds = generator.integers(0, COUNT, count)
        rows = (centres[kinds] + 1.6 * generator.normal(size=(count, 24))).astype(np.float32)
        yield {"cls": rows[:, :12], "mean": rows[:, 12:], "labels": kinds}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    train, test = classes_that_overlap(700, 300)
    return keep(tmp_path_factory.mktemp("probe"), {"train": train, "test": test})


def rows(store, part):
    return read_labeled_features(store, part, "cls+mean")


def objective(weights, table, labels, strength):
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(table @ weights[:-1] + weights[-1]), labels)
    return strength * len(labels) * loss + 0.5 * np.square(weights[:-1]).sum()


@pytest.mark.parametrize("strength", [1e-3, 100.0])
def test_logistic_regression_is_at_its_minimum(store, strength):
    train, test = rows(store, "train"), rows(store, "test")
    labels = torch.from_numpy(train.labels)
    weights, converged = fit_logistic(train.table, train.labels, COUNT, strength, 500)
    assert converged
    least = objective(weights, train.table, labels, strength)
    for _ in range(20):
        other = weights + 1e-2 * np.abs(weights).max() * np.random.default_rng(0).normal(size=weights.shape)
        assert objective(other, train.table, labels, strength) > least
    assert not fit_logistic(train.table, train.labels, COUNT, 100.0, 2)[1]
    assert ((test.table @ weights[:-1] + weights[-1]).argmax(axis=1) == test.labels).mean() > 0.6


def test_classes_that_no_training_row_has_are_never_predicted():
    table = np.random.default_rng(0).normal(size=(60, 3))
    for labels in (np.full(60, 2), (table[:, 0] > 0) * 2 + 1, np.arange(60) % 3 + 1):
        weights, _ = fit_logistic(table, labels, COUNT, 1.0, 200)
        predicted = (table @ weights[:-1] + weights[-1]).argmax(axis=1)
        assert set(predicted) <= set(labels)
        if len(set(labels)) == 2:
            assert (predicted == labels).mean() > 0.9


@pytest.mark.parametrize(("metric", "k", "temperature"), [("cosine", 5, 0.07), ("cosine", 20, 0.5), ("l2", 5, np.inf)])
def test_neighbours_are_scikit_learns(store, metric, k, temperature):
    train, test = rows(store, "train"), rows(store, "test")
    similarities, places = nearest_neighbors(train.table, test.table, k, metric)
    said = vote_shares(similarities, train.labels[places], COUNT, temperature)
    weights = (lambda far: np.exp((1 - far) / temperature)) if metric == "cosine" else "uniform"
    reference = KNeighborsClassifier(k, metric=metric, algorithm="brute", weights=weights)
    reference.fit(train.table, train.labels)
    np.testing.assert_allclose(said, reference.predict_proba(test.table), atol=1e-6)


def test_heads_of_many_rates_are_each_what_torch_s_sgd_makes_of_it(store):
    train, test, epochs = rows(store, "train"), rows(store, "test"), 4
    both = fit_sgd(train.table, train.labels, COUNT, epochs, seed=1, rates=[1e-3, 0.1])
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn((24, 1, COUNT), generator=generator) * 0.01)[:, 0].clone().requires_grad_(True)
    bias = torch.zeros(COUNT, requires_grad=True)
    solver = torch.optim.SGD([weights, bias], lr=0.1 * 128 / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(solver, epochs * 6)
    inputs, labels = torch.from_numpy(train.table).float(), torch.from_numpy(train.labels)
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), generator=generator).split(128):
            solver.zero_grad()
            torch.nn.functional.cross_entropy(inputs[chosen] @ weights + bias, labels[chosen]).backward()
            solver.step()
            schedule.step()
    np.testing.assert_allclose(both[1][:-1], weights.detach(), atol=1e-4)
    assert ((test.table @ both[1][:-1] + both[1][-1]).argmax(axis=1) == test.labels).mean() > 0.6


def test_patches_and_pixels(tmp_path):
    """Patches of two kinds, in masks with a border that does not count and one that is no whole patch."""
    generator, parts = np.random.default_rng(1), {}
    kinds = generator.integers(0, 2, (2, 20, 3, 3))
    for part, classes in zip(("train", "val"), kinds):
        mask = classes.repeat(4, 1).repeat(4, 2)[:, :10].astype(np.uint8)
        mask[:, :, 0] = 255
        mask[0, :4, :4] = 255
        patches = np.stack([classes * 2.0 - 1, generator.normal(size=classes.shape)], axis=-1).astype(np.float16)
        parts[part] = {"patches": patches, "labels": mask}
    store = keep(tmp_path, parts, ["a", "b"], patch_size=4)
    assert patch_labels(store, "train").tolist() == [-1, *kinds[0].reshape(-1)[1:]]
    known = read_labeled_features(store, "train", "patches", np.arange(1, 20))
    assert len(known.labels) == 19 * 9
    weights, _ = fit_logistic(known.table, known.labels, 2, 10.0, 100)
    val = read_labeled_features(store, "val", "patches")
    assert pixel_metrics(store, val, np.asarray, weights)["mIoU"] > 0.75
    assert pixel_metrics(store, val, np.asarray, -weights)["mIoU"] < 0.25
