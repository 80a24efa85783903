"""Conformity scores of the validation part: split conformal prediction for any forecaster.

- residuals: |y - forecast|, or y - forecast for the two ends apart (Lei et al., JASA 113(523), 2018);
- standard deviations: the same divided by them (normalised conformal prediction, Papadopoulos et al., ECML 2002);
- quantiles: how far y lies outside of an interval, negative inside (conformalised quantile regression, Romano et al.,
  NeurIPS 2019).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import numpy as np
import torch

from exp.engine.outputs import batch_outputs
from exp.engine.wrapper import unwrapped
from exp.forecasting.intervals.conformal import GRID, LEAST_STD, OrderedScores, quantile_levels
from exp.forecasting.intervals.intervals import Spread

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Calibration", "Scores", "calibrated_quantiles", "calibrated_residuals"]

_Score = Callable[[torch.Tensor, torch.Tensor, Any], Sequence[torch.Tensor]]


class Calibration(NamedTuple):
    """What the validation part has told.

    Attributes:
        taus: quantile levels, ascending.
        offsets: float32 (K, H, C).
        windows: that it is made of.
        of: windows of the part.
    """

    taus: list[float]
    offsets: np.ndarray
    windows: int
    of: int


class Scores(NamedTuple):
    """What scores are computed of.

    Attributes:
        session: the session; every rank takes part.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        val: the windows, indexed by a whole batch.
        model: on the session's device, in eval mode.
        budget: bytes of scores.
        spread: what the model says of how sure it is; None: nothing.
    """

    session: Session
    data: Any
    val: Any
    model: Any
    budget: int
    spread: Spread | None

    def ordered(self, scores: np.ndarray) -> OrderedScores:
        """Those of one part, in order."""
        return OrderedScores(scores, self.data.names, self.data.scored)

    def collect(self, score: _Score, parts: int) -> np.ndarray:
        """Scores (parts, N, H, C) of windows spread evenly over the validation part, the same on every rank.

        Each rank computes its share.

        Args:
            score: of forecast, truth and spread, each (B, H, C), on the CPU; gives ``parts`` of that shape.
            parts: how many.
        """
        of = len(self.val)
        places = tuple(self.val[torch.zeros(1, dtype=torch.int64)]["y"].shape[1:])
        count = max(min(of, self.budget // (4 * parts * int(np.prod(places)))), 1)
        scores = torch.zeros(parts, count, *places)
        distributed = self.session.distributed
        for mine in torch.arange(distributed.rank, count, distributed.world_size).split(self.data.eval_batch_size):
            batch = self.val[mine * of // count]
            forecast = batch_outputs(self.session, self.model, batch).float()
            said = None if self.spread is None else self.spread(batch).cpu()
            for part, found in zip(scores, score(forecast, batch["y"], said)):
                part[mine] = found
        for part in scores:
            distributed.sum(part)  # of one number and zeros: exact
        return scores.numpy()


def calibrated_residuals(given: Scores, levels: Sequence[float], signed: bool = False) -> Calibration:
    """Offsets from residuals, divided by the model's standard deviations where it says some.

    Args:
        given: what scores are computed of.
        levels: coverages; there must be windows enough for them. Those of
            :data:`exp.forecasting.intervals.conformal.GRID` come with them: the largest score where there are too few.
        signed: quantiles of each end by itself, not of the absolute residual.

    Raises:
        ConfigError: there are too few windows.
    """

    def score(forecast: torch.Tensor, truth: torch.Tensor, std: Any) -> Sequence[torch.Tensor]:
        error = truth - forecast
        if std is not None:
            error = error / std.clamp_min(LEAST_STD)
        return [error if signed else error.abs()]

    (scores,) = given.collect(score, 1)
    ordered = given.ordered(scores)
    wanted = {round(level, 6) for level in levels}
    taus = quantile_levels([*wanted, *GRID])
    offsets = []
    for tau in taus:
        level = round(abs(2.0 * tau - 1.0), 6)
        exact = level in wanted
        if signed:
            offsets.append(ordered.bound(tau, exact) if tau >= 0.5 else ordered.lower_bound(1.0 - tau, exact))
        else:
            offsets.append(np.sign(tau - 0.5) * ordered.bound(level, exact) if level else np.zeros_like(scores[0]))
    return Calibration(taus, np.stack(offsets).astype(np.float32), len(scores), len(given.val))


def calibrated_quantiles(given: Scores, levels: Sequence[float]) -> Calibration:
    """Offsets for both ends of each of the model's central intervals; arguments as for :func:`calibrated_residuals`."""
    model: Any = unwrapped(given.model)
    taus = [float(tau) for tau in model.quantiles]
    pairs = [
        (number, other)
        for number, tau in enumerate(taus)
        for other, upper in enumerate(taus)
        if tau < 0.5 and abs(tau + upper - 1.0) < 1e-6
    ]

    def score(forecast: torch.Tensor, truth: torch.Tensor, quantiles: Any) -> Sequence[torch.Tensor]:
        del forecast
        return [torch.maximum(quantiles[..., low] - truth, truth - quantiles[..., high]) for low, high in pairs]

    scores = given.collect(score, len(pairs))
    wanted = {round(level, 6) for level in levels}
    offsets = np.zeros((len(taus), *scores.shape[2:]), dtype=np.float32)
    for (low, high), part in zip(pairs, scores):
        level = round(taus[high] - taus[low], 6)
        bound = given.ordered(part).bound(level, exact=level in wanted)
        offsets[low], offsets[high] = -bound, bound
    return Calibration(taus, offsets, scores.shape[1], len(given.val))
