"""Probes of frozen features on the host: nearest neighbours, logistic regression, and SGD at many learning rates."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler

from exp.vision.metrics import ConfusionMatrix, mean_of_known

if TYPE_CHECKING:
    from exp.vision.probe.rows import Rows
    from exp.vision.probe.store import Store

__all__ = ["fit_logistic", "fit_sgd", "nearest", "of_images", "of_pixels", "scores", "standardizer", "votes"]

Change = Callable[[np.ndarray], np.ndarray]
"""From features, float64 (b, D), to what a probe sees."""
_DIGITS = 6  # of a share of votes: sums of the same votes differ in their last digits
_NEVER = -1e9  # the bias of a class that no training row has


def standardizer(rows: Rows) -> Change:
    """Columns less their mean, over their standard deviation; constant columns stay on their scale.

    A column is constant, too, where its values differ less than float32 can tell from the mean.
    """
    scaler = StandardScaler()
    for _, block in rows.blocks():
        scaler.partial_fit(block)
    scaler.scale_[scaler.var_ <= (np.finfo(np.float32).eps * scaler.mean_) ** 2] = 1.0
    transform: Change = scaler.transform
    return transform


def nearest(train: Rows, queries: Rows, most: int, metric: str = "cosine") -> tuple[np.ndarray, np.ndarray]:
    """The most similar training rows of each query.

    Args:
        train: what is searched.
        queries: n rows.
        most: neighbours of each (k), no more than there are training rows.
        metric: ``cosine``, or ``l2``.

    Returns:
        Similarities (n, k), descending: cosines, or distances below 0; and places in ``train``, int64 (n, k).
    """
    change = _unit if metric == "cosine" else np.asarray
    search = NearestNeighbors(n_neighbors=most, algorithm="brute").fit(train.table(change))
    distances, places = search.kneighbors(queries.table(change))
    return (1.0 - 0.5 * distances**2 if metric == "cosine" else -distances), places


def _unit(rows: np.ndarray) -> np.ndarray:
    unit: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit


def votes(similarities: np.ndarray, labels: np.ndarray, num_classes: int, temperature: float) -> np.ndarray:
    """Shares of the votes: each neighbour has the weight exp(similarity / temperature) (Wu et al., arXiv 1805.01978).

    Args:
        similarities: (n, k).
        labels: of the neighbours: (n, k), or (n, k, K) of several labels each.
        num_classes: classes (K).
        temperature: the paper's 0.07; inf: all votes are equal.

    Returns:
        (n, K), rounded to six digits: of two classes that have as many votes the first is the likelier.
    """
    # Relative to the nearest: the same shares, and no overflow.
    weights = np.exp((similarities - similarities[:, :1]) / temperature)
    if labels.ndim == 2:
        labels = np.eye(num_classes)[labels]
    return np.round((weights[..., None] * labels).sum(axis=1) / weights.sum(axis=1, keepdims=True), _DIGITS)


def fit_logistic(
    table: np.ndarray, labels: np.ndarray, num_classes: int, strength: float, iterations: int
) -> tuple[np.ndarray, bool]:
    """scikit-learn's logistic regression, multinomial, or by itself for each of several labels.

    Args:
        table: rows of the training, float64 (n, D).
        labels: of :class:`exp.vision.probe.rows.Rows`.
        num_classes: classes (K).
        strength: C: the larger, the less regularized.
        iterations: of L-BFGS, at most.

    Returns:
        Weights and, in the last row, biases: (D + 1, K); and whether the iterations were enough.
    """
    weights, converged = np.zeros((table.shape[1] + 1, num_classes)), True
    weights[-1] = _NEVER
    several = labels.ndim == 2
    for number, column in enumerate(labels.T if several else [labels]):
        known = np.unique(column).astype(np.int64)
        if len(known) == 1:
            weights[-1, number if several else known[0]] = 0.0
            continue
        model = LogisticRegression(C=strength, max_iter=iterations, tol=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(table, column)
        converged &= bool(np.max(model.n_iter_) < iterations)
        made = np.concatenate([model.coef_.T, model.intercept_[None]])
        if several:
            weights[:, number] = made[:, 0]
        else:  # of two classes scikit-learn has the weights of the second alone
            weights[:, known] = made if len(known) > 2 else made * [[-0.5, 0.5]]
    return weights, converged


def fit_sgd(
    table: np.ndarray, labels: np.ndarray, num_classes: int, rates: Sequence[float], epochs: int, batch_size: int,
    seed: int,
) -> np.ndarray:  # fmt: skip
    """Heads of several learning rates, trained at once on the same batches, as the authors evaluate DINOv2 and DINOv3.

    Momentum 0.9, no weight decay, rates times batch / 256 and then along half a cosine to 0. Theirs see augmented
    images, these the features of the plain ones.

    Args:
        table: rows of the training, (n, D).
        labels: of :class:`exp.vision.probe.rows.Rows`.
        num_classes: classes (K).
        rates: of the heads (G), before they are scaled.
        epochs: over all rows.
        batch_size: rows of a step.
        seed: of the first weights and of the order.

    Returns:
        float32 (G, D + 1, K), biases last.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, dim, several = len(rates), table.shape[1], labels.ndim == 2
    weights = (torch.randn((dim, 1, num_classes), generator=generator) * 0.01).expand(-1, heads, -1).reshape(dim, -1)
    weights = torch.cat([weights, torch.zeros(1, heads * num_classes)])
    speed = torch.zeros_like(weights)
    scaled = torch.tensor(rates).mul(batch_size / 256).repeat_interleave(num_classes)
    step, steps = 0, epochs * -(-len(table) // batch_size)
    for _ in range(epochs):
        order = torch.randperm(len(table), generator=generator).numpy()
        for begin in range(0, len(table), batch_size):
            places = np.sort(order[begin : begin + batch_size])  # a mapped file is read forwards
            block = F.pad(torch.from_numpy(table[places]).float(), (0, 1), value=1.0)
            chosen = labels[places] if several else np.eye(num_classes, dtype=np.float32)[labels[places]]
            logits = (block @ weights).view(len(places), heads, num_classes)
            found = torch.sigmoid(logits) if several else torch.softmax(logits, dim=-1)
            wrong = (found - torch.from_numpy(chosen).unsqueeze(1)).flatten(1) / len(places)
            speed.mul_(0.9).add_(block.t() @ wrong)
            weights -= scaled * (0.5 * (1.0 + math.cos(math.pi * step / steps))) * speed
            step += 1
    return weights.view(dim + 1, heads, num_classes).transpose(0, 1).numpy()


def scores(rows: Rows, change: Change, weights: np.ndarray) -> np.ndarray:
    """Logits of all rows: (n, K)."""
    return np.concatenate([change(block) @ weights[:-1] + weights[-1] for _, block in rows.blocks()])


def of_images(found: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """``accuracy`` and ``macro_f1``, or ``mAP`` of several labels.

    Args:
        found: scores, (n, K).
        labels: int64 (n,), or (n, K) of 0 and 1; classes without a 1 have no average precision.
    """
    if labels.ndim == 2:
        there = np.flatnonzero(labels.any(axis=0))
        return {"mAP": mean_of_known([average_precision_score(labels[:, k], found[:, k]) for k in there])}
    matrix = ConfusionMatrix(found.shape[1])
    matrix.update(torch.from_numpy(found.argmax(axis=1)), torch.from_numpy(labels))
    return {"accuracy": matrix.accuracy(), "macro_f1": mean_of_known(matrix.per_class()["fscore"])}


def of_pixels(
    store: Store, split: str, images: np.ndarray, change: Change, weights: Sequence[np.ndarray]
) -> list[dict[str, Any]]:
    """Of linear probes on patches: their logits are interpolated to the pixels of each image (bilinear).

    Args:
        store: has patches and masks.
        split: of it.
        images: numbers of those that count.
        change: of the features.
        weights: of each probe, (D + 1, K).

    Returns:
        ``mIoU`` and ``pixel_accuracy`` of each probe.
    """
    features, masks, patch = store.array(split, "patches"), store.array(split, "labels"), store.about["patch_size"]
    matrices = [ConfusionMatrix(each.shape[1]) for each in weights]
    tall, wide, dim = features.shape[1:]
    for number in images.tolist():
        block = change(np.array(features[number], np.float64).reshape(tall * wide, dim))
        mask = torch.from_numpy(np.array(masks[number]))
        for matrix, each in zip(matrices, weights):
            logits = torch.from_numpy(block @ each[:-1] + each[-1]).float().t().reshape(1, -1, tall, wide)
            pixels = F.interpolate(logits, size=(tall * patch, wide * patch), mode="bilinear", align_corners=False)
            matrix.update(pixels[0, :, : mask.shape[0], : mask.shape[1]].argmax(dim=0), mask)
    return [
        {"mIoU": mean_of_known(matrix.per_class()["iou"]), "pixel_accuracy": matrix.accuracy()} for matrix in matrices
    ]
