"""Probes against scikit-learn's, on the same features."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.errors import ConfigError
from exp.vision.probe.linear import Scale, fit_logistic, fit_sgd, scores
from exp.vision.probe.neighbours import nearest, votes
from exp.vision.probe.rows import Rows, check_sizes, per_class, rows_of
from exp.vision.probe.scoring import average_precision, of_images
from tests.vision.probe.conftest import CLASSES, make_store

linear_model = pytest.importorskip("sklearn.linear_model")
from sklearn.metrics import average_precision_score, f1_score  # noqa: E402
from sklearn.neighbors import KNeighborsClassifier  # noqa: E402

CPU = torch.device("cpu")
COUNT = len(CLASSES)


def rows(store, part, resident=2**30):
    return rows_of(store, part, "cls+mean", CPU, resident, COUNT)


def test_equal_votes_are_equal():
    """All neighbours say yes, or half of them, with whatever weights: no rounding ranks one image before the other."""
    similar = np.sort(np.random.default_rng(0).uniform(0.2, 1.0, (300, 7)).astype(np.float32))[:, ::-1]
    several = np.zeros((300, 7, 2), np.float32)
    several[..., 0] = 1.0
    for labels in (several, np.zeros((300, 7), np.int64)):
        said = votes(similar, labels, 2, 0.07)
        assert np.unique(said[:, 0]).tolist() == [1.0]
    assert average_precision(said[:, 0], np.arange(300) % 2) == 0.5
    pairs = np.repeat(similar[:, :3], 2, axis=1)  # each neighbour twice, once of either class
    labels = np.array([[1, 0, 0, 1, 1, 0]]).repeat(300, axis=0)
    noise = np.random.default_rng(1).normal(0.0, 3e-8, pairs.shape).astype(np.float32)
    tied = votes(pairs + noise, labels, 2, 0.07)
    assert (tied.argmax(axis=1) == 0).mean() > 0.95


def matrix(part):
    return next(part.blocks(10**6))[0].numpy().astype(np.float64)


@pytest.mark.parametrize("strength", [1e-3, 100.0])
def test_logistic_regression_is_scikit_learns(store, strength):
    train, test = rows(store, "train"), rows(store, "test", resident=0)
    scale = Scale(train)
    weights, converged = fit_logistic(train, scale, COUNT, strength, 500)
    assert converged
    mean, std = (each.numpy().astype(np.float64) for each in scale.moments)
    reference = linear_model.LogisticRegression(C=strength, max_iter=5000, tol=1e-8)
    reference.fit((matrix(train) - mean) / std, train.labels)
    ours = of_images(scores(test, scale, weights), test.labels)
    predicted = reference.predict((matrix(test) - mean) / std)
    theirs = {
        "accuracy": (predicted == test.labels).mean(),
        "macro_f1": f1_score(test.labels, predicted, average="macro"),
    }
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, abs=1e-3)
    theirs = reference.coef_.T - reference.coef_.T.mean(axis=1, keepdims=True)
    apart = np.abs(weights[:-1].numpy() - weights[:-1].numpy().mean(axis=1, keepdims=True) - theirs).max()
    assert apart < 1e-2 * np.abs(theirs).max(), "the same minimum"


def objective(made, weights, strength):
    """In float64."""
    logits = torch.from_numpy(matrix(made)) @ weights[:-1].double() + weights[-1].double()
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(made.labels), reduction="sum")
    return float(strength * loss + 0.5 * (weights[:-1].double() ** 2).sum())


def test_features_that_are_nearly_the_same_are_no_obstacle():
    """Columns of other sizes, far from zero, that the others nearly tell; and next to no regularisation."""
    generator = np.random.default_rng(0)
    hidden = generator.normal(size=(400, 6))
    labels = (hidden[:, :COUNT] + generator.normal(size=(400, COUNT))).argmax(axis=1)
    matrix = hidden @ generator.normal(size=(6, 24)) + 1e-2 * generator.normal(size=(400, 24))
    matrix = (matrix * np.logspace(-1, 1, 24) + 30.0).astype(np.float32)
    made = Rows([matrix], labels, np.arange(400), CPU, 2**30)
    weights, converged = fit_logistic(made, Scale(None), COUNT, 100.0, 1000)
    reference = linear_model.LogisticRegression(C=100.0, max_iter=10**5, tol=1e-10, solver="newton-cg")
    reference.fit(matrix.astype(np.float64), labels)
    theirs = torch.from_numpy(np.concatenate([reference.coef_.T, reference.intercept_[None]]))
    assert converged
    assert objective(made, weights, 100.0) == pytest.approx(objective(made, theirs, 100.0), rel=1e-5)
    assert not fit_logistic(made, Scale(None), COUNT, 100.0, 5)[1]


def test_neighbours_are_scikit_learns(store):
    train, test = rows(store, "train", resident=0), rows(store, "test")
    similarities, places = nearest(train, test, 20)
    for k, temperature in ((1, 0.07), (5, 0.07), (20, 0.5)):
        said = votes(similarities[:, :k], train.labels[places[:, :k]], COUNT, temperature)
        reference = KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda far, t=temperature: np.exp((1 - far) / t)
        ).fit(matrix(train), train.labels)
        assert np.abs(said - reference.predict_proba(matrix(test))).max() < 1e-3


def test_neighbours_are_found_in_several_blocks():
    values = np.random.default_rng(0).normal(size=(20000, 4)).astype(np.float32)
    made = Rows([values], np.zeros(20000, np.int64), np.arange(20000), CPU, 0)
    some = Rows([values[:5]], np.zeros(5, np.int64), np.arange(5), CPU, 0)
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    similarities, places = nearest(made, some, 3)
    assert places[:, 0].tolist() == [0, 1, 2, 3, 4]
    expected = np.sort(unit[:5] @ unit.T, axis=1)[:, :-4:-1]
    assert similarities == pytest.approx(expected, abs=1e-5)


def test_several_labels(tmp_path):
    store = make_store(tmp_path / "store", {"train": 400, "test": 300}, labels="several")
    train, test = rows(store, "train"), rows(store, "test")
    scale = Scale(train)
    said = scores(test, scale, fit_logistic(train, scale, COUNT, 1.0, 500)[0])
    inputs, others = (scale(torch.from_numpy(matrix(part)).float()).numpy() for part in (train, test))
    theirs = []
    for column in range(COUNT):
        reference = linear_model.LogisticRegression(C=1.0, max_iter=5000, tol=1e-8).fit(inputs, train.labels[:, column])
        theirs.append(average_precision_score(test.labels[:, column], reference.decision_function(others)))
    ours = [average_precision(said[:, column], test.labels[:, column]) for column in range(COUNT)]
    assert [*ours, of_images(said, test.labels)["mAP"]] == pytest.approx([*theirs, np.mean(theirs)], abs=1e-3)
    tied, truth = np.round(said[:, 0]), test.labels[:, 0]
    assert average_precision(tied, truth) == pytest.approx(average_precision_score(truth, tied), abs=1e-6)


def test_heads_of_many_rates_are_each_what_torch_s_sgd_makes_of_it(store):
    train, test, epochs = rows(store, "train"), rows(store, "test"), 4
    scale = Scale(train)
    both = fit_sgd(train, scale, COUNT, [1e-3, 0.1], epochs, 64, seed=1)
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn((train.dim, 1, COUNT), generator=generator) * 0.01)[:, 0].clone().requires_grad_(True)
    bias = torch.zeros(COUNT, requires_grad=True)
    solver = torch.optim.SGD([weights, bias], lr=0.1 * 64 / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(solver, epochs * 11)
    inputs, labels = scale(train.read(np.arange(len(train)))), torch.from_numpy(train.labels)
    for _ in range(epochs):
        for chosen in torch.randperm(len(train), generator=generator).split(64):
            solver.zero_grad()
            torch.nn.functional.cross_entropy(inputs[chosen] @ weights + bias, labels[chosen]).backward()
            solver.step()
            schedule.step()
    assert torch.allclose(both[1][:-1], weights.detach(), atol=1e-4)
    assert (scores(test, scale, both[1]).argmax(1) == test.labels).mean() > 0.6


def test_shots_are_drawn_by_seed(store):
    train = rows(store, "train")
    some, again, other = per_class(train, 5, 1), per_class(train, 5, 1), per_class(train, 5, 2)
    assert np.bincount(some.labels).tolist() == [5, 5, 5, 5]
    assert some.numbers.tolist() == again.numbers.tolist() != other.numbers.tolist()
    assert torch.equal(some.read(np.arange(20)), train.read(np.searchsorted(train.numbers, some.numbers)))


def test_columns_that_are_constant_are_not_scaled_by_their_rounding():
    """1.1 has no exact float32, and a column may waver in its last digit; what differs more is a feature."""
    generator = np.random.default_rng(0)
    matrix = generator.normal(size=(5000, 5)).astype(np.float32)
    matrix[:, 1] = 1.1
    matrix[:, 2] = np.where(matrix[:, 0] > 0, np.float32(1.1), np.nextafter(np.float32(1.1), np.float32(2)))
    matrix[:, 3] = 1000.0 + 0.01 * matrix[:, 4]
    made = Rows([matrix], np.zeros(5000, np.int64), np.arange(5000), CPU, 2**30)
    scale = Scale(made)
    assert scale.moments[1][1:3].tolist() == [1.0, 1.0]
    scaled = scale(torch.from_numpy(matrix))
    assert scaled[:, 1:3].abs().max() < 1e-6
    assert scaled[:, 3].std().item() == pytest.approx(1.0, abs=1e-2)
    exact = matrix.astype(np.float64)
    assert scale.moments[0].numpy() == pytest.approx(exact.mean(axis=0), rel=1e-5, abs=1e-6)
    assert scale.moments[1][[0, 4]].numpy() == pytest.approx(exact.std(axis=0)[[0, 4]], rel=1e-5)


def test_settings_beyond_the_data_are_refused_or_said(store):
    def checked(shots=(), k=(5,), probes=("knn",)):
        return check_sizes(SimpleNamespace(shots=list(shots), k=list(k), probes=list(probes)), train, CLASSES)

    train = rows(store, "train")
    few = int(np.bincount(train.labels).min()) + 1
    assert checked() == checked(k=[701], probes=["sgd"]) == []
    assert "task.k=[701]" in checked(k=[5, 701])[0]
    assert f"task.shots={few}" in checked(shots=[few])[0]
    for settings, key in (({"k": [701]}, r"task\.k"), ({"shots": [1]}, r"task\.k"), ({"shots": [900]}, r"task\.shots")):
        with pytest.raises(ConfigError, match=key):
            checked(**settings)
