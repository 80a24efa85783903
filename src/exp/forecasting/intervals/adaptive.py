"""Intervals whose width follows the errors that have become known: for evaluation in the order of time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from exp.forecasting.intervals.conformal import percent
from exp.metrics import Metric

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.forecasting.intervals.intervals import Intervals

__all__ = ["AdaptiveMetrics", "adapted"]


def adapted(scores: np.ndarray, first: np.ndarray, level: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Coverage and half width of intervals that adapt, window after window.

    For each step and channel the half width goes up by ``rate * level * first`` after a truth that lay outside, and
    down by ``rate * (1 - level) * first`` after one inside: adaptive conformal inference (Gibbs and Candes, NeurIPS
    2021) on the quantile itself, as in Angelopoulos, Candes and Tibshirani (NeurIPS 2023, quantile tracking). Nothing
    is used before it is known: the truth at step h of a window counts from the h-th window after it on.

    Args:
        scores: absolute residuals of all windows in the order of time, float32 (N, H, C); nan: not known.
        first: half width at the beginning, (H, C).
        level: coverage to aim at.
        rate: how fast.

    Returns:
        Windows inside and half widths, summed over the windows whose truth is known, (H, C) each, float64.
    """
    horizon = scores.shape[1]
    half = first.astype(np.float64).copy()
    inside = np.zeros(first.shape)
    widths = np.zeros(first.shape)
    step = rate * first
    # By how much each score, once known, moves the half width.
    moves = np.zeros((horizon, *first.shape), dtype=np.float64)  # the last H windows, round and round
    places = np.arange(horizon)
    for window, score in enumerate(scores):
        known = ~np.isnan(score)
        covered = known & (score <= half)
        inside += covered
        widths += np.where(known, half, 0.0)
        moves[window % horizon] = np.where(known, np.where(covered, level - 1.0, level), 0.0) * step
        # Step h (from 0) of window - h is known when the next window is forecast.
        half = np.maximum(half + moves[(window - places) % horizon, places], 0.0)
    return inside, widths


class AdaptiveMetrics(Metric):
    """``coverage_80_adaptive`` and ``width_80_adaptive`` of intervals that adapt (:func:`adapted`).

    Beside those that stay as they were calibrated, never instead of them. All test windows, in the order of time and
    the same for any number of ranks; each rank keeps its residuals, in the host's memory.

    Args:
        intervals: from absolute residuals; where the half widths begin.
        rate: ``task.intervals_adapt``.
        budget: bytes for residuals of all windows, of as many channels at a time as fit.
    """

    greater_is_better = False

    def __init__(self, intervals: Intervals, rate: float, budget: int) -> None:
        self.rate, self.budget = rate, budget
        self.first = {
            level: intervals.offsets[intervals.number((1.0 + level) / 2.0)].cpu().numpy() for level in intervals.levels
        }
        titles = [percent(level) for level in intervals.levels]
        self.names = [f"{what}_{title}_adaptive" for title in titles for what in ("coverage", "width")]
        self.units = {f"width_{title}_adaptive": "standardised" for title in titles}
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._scores: list[torch.Tensor] = []
        self._index: list[torch.Tensor] = []

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in one batch; its ``index`` (B,) are the numbers of the windows."""
        self._scores.append((outputs.float() - batch["y"]).abs().cpu())
        self._index.append(batch["index"].cpu().long())

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks."""
        index = torch.cat(self._index) if self._index else torch.zeros(0, dtype=torch.int64)
        windows = max(distributed.gather(int(index.max()) + 1 if len(index) else 0))
        horizon, channels = next(iter(self.first.values())).shape
        found = dict.fromkeys(self.names, 0.0)
        count = 0
        together = max(self.budget // (4 * max(windows, 1) * horizon), 1)
        for begin in range(0, channels, together):
            some = slice(begin, begin + together)
            width = min(begin + together, channels) - begin
            # Plus 1, so that what no rank has is 0.
            whole = torch.zeros(windows, horizon, width)
            place = 0
            for part in self._scores:
                whole[index[place : place + len(part)]] = part[..., some] + 1.0
                place += len(part)
            scores = distributed.sum(whole).numpy() - 1.0
            scores[scores < 0.0] = np.nan
            count += int((~np.isnan(scores)).sum())
            for level, first in self.first.items():
                inside, widths = adapted(scores, first[:, some], level, self.rate)
                found[f"coverage_{percent(level)}_adaptive"] += float(inside.sum())
                found[f"width_{percent(level)}_adaptive"] += float(2.0 * widths.sum())
        return {name: total / count if count else math.nan for name, total in found.items()}
