"""k nearest neighbours on frozen features: weighted votes by cosine similarity (Wu et al., arXiv 1805.01978)."""

from __future__ import annotations

import numpy as np
import torch

from exp.vision.probe.rows import Rows

__all__ = ["nearest", "votes"]

_QUERIES = 1024
_DIGITS = 6
"""Of a share of votes that mean anything: similarities are float32, and sums of the same votes differ in their last."""


def nearest(train: Rows, queries: Rows, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The most similar training rows of each query.

    Similarities are computed on the device, a block of queries against a block of training rows.

    Args:
        train: what is searched.
        queries: n rows.
        most: neighbours of each (k), no more than there are training rows.

    Returns:
        Cosine similarities, float32 (n, k), descending, and places in ``train``, int64 (n, k).
    """
    similarities = np.empty((len(queries), most), np.float32)
    places = np.empty((len(queries), most), np.int64)
    for block, where in queries.blocks(_QUERIES):
        wanted = _unit(block)
        best: torch.Tensor | None = None
        found: torch.Tensor | None = None
        for rows, there in train.blocks():
            alike = wanted @ _unit(rows).t()
            top, index = torch.topk(alike, min(most, alike.shape[1]), dim=1)
            index = index.cpu() + there.start  # whole numbers are added on the CPU: cards may narrow them
            if best is None or found is None:
                best, found = top, index
                continue
            best, kept = torch.topk(torch.cat([best, top], dim=1), min(most, best.shape[1] + top.shape[1]), dim=1)
            found = torch.cat([found, index], dim=1).gather(1, kept.cpu())
        assert best is not None
        assert found is not None
        similarities[where], places[where] = best.cpu().numpy(), found.numpy()
    return similarities, places


def votes(similarities: np.ndarray, labels: np.ndarray, num_classes: int, temperature: float) -> np.ndarray:
    """What the neighbours say: each votes for its class with the weight exp(similarity / temperature).

    Args:
        similarities: (n, k).
        labels: of the neighbours: (n, k), or (n, k, K) of several labels each.
        num_classes: classes (K).
        temperature: the paper's 0.07.

    Returns:
        Shares of the votes, (n, K), rounded: equal votes are equal, and of two classes that have as many the first is
        the likelier, whatever the order of the sums.
    """
    # Relative to the nearest: the same shares, and no overflow.
    weights = np.exp((similarities - similarities[:, :1]).astype(np.float64) / temperature)
    if labels.ndim == 3:
        scores = (weights[..., None] * labels).sum(axis=1)
    else:
        scores = np.zeros((len(labels), num_classes))
        for column in range(labels.shape[1]):
            np.add.at(scores, (np.arange(len(labels)), labels[:, column]), weights[:, column])
    return np.round(scores / weights.sum(axis=1, keepdims=True), _DIGITS)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    return rows / (rows * rows).sum(dim=1, keepdim=True).sqrt().clamp_min(1e-12)
