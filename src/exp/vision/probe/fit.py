"""Probes of frozen features on the host: nearest neighbors, logistic regression, and SGD at many learning rates."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import StandardScaler, normalize

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
    """Columns less their mean, over their standard deviation; constant columns stay on their scale."""
    scaler = StandardScaler()
    for block in rows.blocks():
        scaler.partial_fit(block)
    transform: Change = scaler.transform
    return transform


def nearest(train: Rows, queries: Rows, most: int, metric: str = "cosine") -> tuple[np.ndarray, np.ndarray]:
    """The most similar training rows of each query.

    Args:
        train: what is searched.
        queries: n rows.
        most: neighbors of each (k), no more than there are training rows.
        metric: ``cosine``, or ``l2``.

    Returns:
        Similarities (n, k), descending: cosines, or distances below 0; and places in ``train``, int64 (n, k).
    """
    change = normalize if metric == "cosine" else np.asarray
    search = NearestNeighbors(n_neighbors=most, algorithm="brute").fit(train.table(change))
    distances, places = search.kneighbors(queries.table(change))
    return (1.0 - 0.5 * distances**2 if metric == "cosine" else -distances), places


def votes(similarities: np.ndarray, labels: np.ndarray, num_classes: int, temperature: float) -> np.ndarray:
    """Shares of the votes: each neighbor has the weight exp(similarity / temperature) (Wu et al., arXiv 1805.01978).

    Args:
        similarities: (n, k).
        labels: of the neighbors, (n, k).
        num_classes: classes (K).
        temperature: the paper's 0.07; inf: all votes are equal.

    Returns:
        (n, K), rounded to six digits: of two classes that have as many votes the first is the likelier.
    """
    # Relative to the nearest: the same shares, and no overflow.
    weights = np.exp((similarities - similarities[:, :1]) / temperature)[..., None]
    return np.round((weights * np.eye(num_classes)[labels]).sum(axis=1) / weights.sum(axis=1), _DIGITS)


def fit_logistic(
    table: np.ndarray, labels: np.ndarray, num_classes: int, strength: float, iterations: int
) -> tuple[np.ndarray, bool]:
    """scikit-learn's multinomial logistic regression.

    Args:
        table: rows of the training, float64 (n, D).
        labels: int64 (n,).
        num_classes: classes (K).
        strength: C: the larger, the less regularized.
        iterations: of L-BFGS, at most.

    Returns:
        Weights and, in the last row, biases: (D + 1, K); and whether the iterations were enough.
    """
    weights, known = np.zeros((table.shape[1] + 1, num_classes)), np.unique(labels)
    weights[-1] = _NEVER
    weights[-1, known] = 0.0
    if len(known) == 1:
        return weights, True
    model = LogisticRegression(C=strength, max_iter=iterations, tol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(table, labels)
    made = np.concatenate([model.coef_.T, model.intercept_[None]])
    # Of two classes scikit-learn has the weights of the second alone.
    weights[:, known] = made if len(known) > 2 else made * [[-0.5, 0.5]]
    return weights, bool(np.max(model.n_iter_) < iterations)


def fit_sgd(
    table: np.ndarray, labels: np.ndarray, num_classes: int, rates: Sequence[float], epochs: int, batch_size: int,
    seed: int,
) -> np.ndarray:  # fmt: skip
    """Heads of several learning rates, trained at once on the same batches, as the authors evaluate DINOv2 and DINOv3.

    Momentum 0.9, no weight decay, rates times batch / 256 and then along half a cosine to 0. Theirs see augmented
    images, these the features of the plain ones.

    Args:
        table: rows of the training, (n, D).
        labels: int64 (n,).
        num_classes: classes (K).
        rates: of the heads (G), before they are scaled.
        epochs: over all rows.
        batch_size: rows of a step.
        seed: of the first weights and of the order.

    Returns:
        float32 (G, D + 1, K), biases last.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, dim = len(rates), table.shape[1]
    weights = (torch.randn((dim, 1, num_classes), generator=generator) * 0.01).expand(-1, heads, -1).reshape(dim, -1)
    weights = torch.cat([weights, torch.zeros(1, heads * num_classes)])
    speed, truth = torch.zeros_like(weights), torch.eye(num_classes)[torch.from_numpy(labels)].unsqueeze(1)
    scaled = torch.tensor(rates).mul(batch_size / 256).repeat_interleave(num_classes)
    step, steps = 0, epochs * -(-len(table) // batch_size)
    for _ in range(epochs):
        for places in torch.randperm(len(table), generator=generator).split(batch_size):
            places = places.sort()[0]  # a mapped file is read forwards
            block = F.pad(torch.from_numpy(table[places.numpy()]).float(), (0, 1), value=1.0)
            found = torch.softmax((block @ weights).view(len(places), heads, num_classes), dim=-1)
            wrong = (found - truth[places]).flatten(1) / len(places)
            speed.mul_(0.9).add_(block.t() @ wrong)
            weights -= scaled * (0.5 * (1.0 + math.cos(math.pi * step / steps))) * speed
            step += 1
    return weights.view(dim + 1, heads, num_classes).transpose(0, 1).numpy()


def scores(rows: Rows, change: Change, weights: np.ndarray) -> np.ndarray:
    """Logits of all rows: (n, K)."""
    return np.concatenate([change(block) @ weights[:-1] + weights[-1] for block in rows.blocks()])


def of_images(found: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """``accuracy`` and ``macro_f1`` of scores (n, K), by labels int64 (n,)."""
    best = found.argmax(axis=1)
    return {"accuracy": float(accuracy_score(labels, best)), "macro_f1": float(f1_score(labels, best, average="macro"))}


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
