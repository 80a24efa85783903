"""Intervals calibrated on the validation split: split conformal prediction for any forecaster.

The conformity score of each step and channel depends on what the intervals are made of:

- residuals: |y - forecast|, or y - forecast if both ends are separate (Lei et al., JASA 113(523), 2018);
- standard deviations: the residual divided by the standard deviation (normalized conformal prediction, Papadopoulos et
  al., ECML 2002);
- quantiles: how far y lies outside of an interval, negative inside (conformalized quantile regression, Romano et al.,
  NeurIPS 2019).

A new score is at most the ``ceil((n + 1) * level)``-th smallest of n scores with probability ``level`` or more, if all
scores are exchangeable (Vovk, Gammerman and Shafer 2005).
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Sequence

import numpy as np
import torch
from omegaconf import OmegaConf

from exp.config.resolve import create
from exp.data.base import Data
from exp.engine.building import split_in_use
from exp.engine.outputs import batch_outputs
from exp.engine.wrapper import unwrapped
from exp.errors import ConfigError, DataError, shown
from exp.forecasting.data.preflight import interval_levels
from exp.forecasting.intervals.intervals import GRID, LEAST_STD, Intervals, Spread, central_pairs, quantile_levels

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Scores", "bound", "calibrated", "check_count", "prepare"]

_Score = Callable[[torch.Tensor, torch.Tensor, Any], Sequence[torch.Tensor]]
_OF_FILE = ("name", "root", "file", "archive_folder", "split", "header", "date_column", "date_format", "allow_gaps")


def prepare(session: Session, data: Any, model: Any) -> Intervals | None:
    """The intervals that ``task.intervals`` asks for; None if it is empty. Every rank must call this.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        model: wrapped or not; moved to the session's device.

    Raises:
        ConfigError: the keys contradict each other or the model, or there are no rows to calibrate with.
    """
    task = session.config.task
    levels = interval_levels(task)
    if not levels:
        return None
    model = unwrapped(model).to(session.device).eval()
    kind, rescaled = _kind(task, model, levels)
    record: dict[str, Any] = {"from": kind, "levels": levels}
    spread = None if kind == "residuals" else Spread(session, model)
    taus = [float(tau) for tau in model.quantiles] if kind == "quantiles" else quantile_levels([*levels, *GRID])
    if not rescaled:  # the model's own spread, uncorrected
        said = [0.0 if kind == "quantiles" else NormalDist().inv_cdf(tau) for tau in taus]
        offsets = torch.tensor(said).view(-1, 1, 1)
        return Intervals(kind, levels, taus, offsets, spread, calibrated=False, record=record)
    own = data if "val" in data.rows and len(data.val) > 0 else _trained_on(session, data)
    val = split_in_use(session, own, "val")
    scores = Scores(session, own, val, model, spread)
    offsets, windows = calibrated(scores, kind, levels, taus, bool(task.intervals_signed))
    used = f" ({len(val)} of {len(own.val)} windows)" if len(val) < len(own.val) else ""
    record.update(signed=bool(task.intervals_signed), calibrated_on=f"val of {own.path.name}{used}")
    record.update(windows=windows, of=len(val))
    if session.distributed.is_main:
        session.say(f"intervals: calibrated on {windows} of {len(val)} validation windows of {own.path.name}")
    return Intervals(kind, levels, taus, offsets, spread, record=record)


def _kind(task: Any, model: Any, levels: Sequence[float]) -> tuple[str, bool]:
    """What the intervals are made of (:class:`Intervals`), and whether the validation split is needed."""
    offered, wanted = getattr(model, "spread", None), task.intervals_from
    if wanted == "model" and offered not in ("std", "quantiles"):
        raise ConfigError(
            f"task.intervals_from=model: {shown(model)} has neither quantiles nor standard deviations; set "
            f"model.quantiles for the training, or task.intervals_from=residuals"
        )
    kind = str(offered) if wanted == "model" or (wanted is None and offered == "quantiles") else "residuals"
    if kind == "quantiles":
        there = {round(2.0 * tau - 1.0, 6) for _, tau in central_pairs(model.quantiles)}
        missing = sorted(set(levels) - there)
        if missing:
            raise ConfigError(
                f"task.intervals: {missing[0]:g} needs two levels that model.quantiles={list(model.quantiles)} lacks; "
                f"these give {sorted(there)}; or set task.intervals_from=residuals"
            )
    rescaled = kind == "residuals" or (kind == "std" if task.intervals_rescaled is None else task.intervals_rescaled)
    if task.intervals_signed and (kind == "quantiles" or not rescaled):
        raise ConfigError(
            "task.intervals_signed=true needs residuals of the validation split: set task.intervals_from=residuals, or "
            "correct standard deviations by task.intervals_rescaled=true"
        )
    return kind, rescaled


def _trained_on(session: Session, data: Any) -> Any:
    """The data that the weights were trained on; used if the current data have no validation split.

    Raises:
        ConfigError: the weights do not come from a run, or the run's data file is missing or has changed.
    """
    problem = f"task.intervals: {data.path} has no validation split to calibrate with"
    run, files = session.config.record.trained_in, data.state_dict()["files"]
    if run is None or not files:
        raise ConfigError(f"{problem}, and the weights do not name the file that they were trained on; use a run's")
    theirs = OmegaConf.load(Path(run) / "config.yaml").data
    keys = session.config.data.copy()
    keys.update({key: theirs[key] for key in _OF_FILE}, inputs=list(data.names))  # in the order of the weights
    try:
        own = create(keys, Data, "data")
    except DataError as error:
        raise ConfigError(f"{problem}, and the data of {run} cannot be read: {error}") from error
    if list(own.fingerprint().values()) != list(files.values()):
        raise ConfigError(f"{problem}, and {own.path} has changed since the weights were trained on it")
    return own


class Scores(NamedTuple):
    """Conformity scores of the validation split.

    Attributes:
        session: the session; every rank takes part.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        val: the windows, indexed by a whole batch.
        model: on the session's device, in eval mode.
        spread: the model's own spread; None: not used.
        budget: most bytes of scores; if all windows need more, evenly spaced windows are used.
    """

    session: Session
    data: Any
    val: Any
    model: Any
    spread: Spread | None
    budget: int = 2**28

    def collect(self, score: _Score, parts: int) -> np.ndarray:
        """All scores in ascending order. Each rank computes a share; the result is the same on every rank.

        Args:
            score: takes forecast (B, H, C), truth (B, H, C) and spread on the CPU; returns ``parts`` tensors
                (B, H, C).
            parts: number of scores per cell.

        Returns:
            (parts, N, H, C), float32; NaN, where a truth is missing, comes last.
        """
        of = len(self.val)
        places = tuple(self.val[torch.zeros(1, dtype=torch.int64)]["y"].shape[1:])
        count = max(min(of, self.budget // (4 * parts * int(np.prod(places)))), 1)
        scores = torch.zeros(parts, count, *places)
        distributed = self.session.distributed
        for mine in torch.arange(distributed.rank, count, distributed.world_size).split(self.data.eval_batch_size):
            batch = self.val[mine * of // count]
            forecast = batch_outputs(self.session, self.model, batch).float()
            said = None if self.spread is None else self.spread(batch)
            scores[:, mine] = torch.stack(list(score(forecast, batch["y"], said)))
        return np.sort(distributed.sum(scores).numpy(), axis=1)  # exact: each element is non-zero on one rank only


def calibrated(
    given: Scores, kind: str, levels: Sequence[float], taus: Sequence[float], signed: bool = False
) -> tuple[torch.Tensor, int]:
    """Compute the offsets of :class:`exp.forecasting.intervals.intervals.Intervals` from the validation split.

    Args:
        given: the validation split.
        kind: as for :class:`exp.forecasting.intervals.intervals.Intervals`.
        levels: coverages, for which there must be enough windows. The other central intervals of ``taus`` use the
            largest score if there are too few windows.
        taus: the K quantile levels, ascending.
        signed: whether both ends use separate quantiles of the signed residual.

    Returns:
        Offsets, float32 (K, H, C), and the number of windows that they were computed from.

    Raises:
        ConfigError: there are too few windows.
    """
    numbers = {tau: number for number, tau in enumerate(taus)}
    pairs = [(numbers[low], numbers[high]) for low, high in central_pairs(taus)]

    def score(forecast: torch.Tensor, truth: torch.Tensor, spread: Any) -> Sequence[torch.Tensor]:
        if kind == "quantiles":
            return [torch.maximum(spread[..., low] - truth, truth - spread[..., high]) for low, high in pairs]
        error = truth - forecast
        if spread is not None:
            error = error / spread.clamp_min(LEAST_STD)
        return [error if signed else error.abs()]

    scores = given.collect(score, len(pairs) if kind == "quantiles" else 1)
    offsets = np.zeros((len(taus), *scores.shape[2:]), dtype=np.float32)
    asked = (1.0 + max(levels)) / 2.0 if signed else max(levels)
    check_count(scores[0], asked, given.data.names, given.data.scored)
    for number, (low, high) in enumerate(pairs):
        ordered = scores[number if kind == "quantiles" else 0]
        offsets[high] = bound(ordered, taus[high] if signed else round(taus[high] - taus[low], 6))
        offsets[low] = bound(ordered, taus[high], lower=True) if signed else -offsets[high]
    if signed:
        offsets[numbers[0.5]] = bound(scores[0], 0.5)
    return torch.from_numpy(offsets), scores.shape[1]


def bound(scores: np.ndarray, level: float, lower: bool = False) -> np.ndarray:
    """The bound, (H, C), that a new score does not exceed with probability ``level``.

    Args:
        scores: float32 (N, H, C), ascending, NaN last. With too few scores the bound is the largest one; with none
            but NaN it is 0.
        level: between 0 and 1.
        lower: return the bound that a new score does not fall below instead.
    """
    counts = len(scores) - np.isnan(scores).sum(axis=0)
    ranks = np.clip(np.ceil(np.round((counts + 1) * level, 6)).astype(np.int64), 1, counts)
    found = np.take_along_axis(scores, (counts - ranks if lower else ranks - 1)[None], axis=0)[0]
    return np.where(counts > 0, found, np.float32(0.0))


def check_count(scores: np.ndarray, level: float, names: Sequence[str], scored: Sequence[int]) -> None:
    """Refuse a level if, at some step of a forecast series, too few windows have a truth.

    Args:
        scores: as for :func:`bound`.
        level: between 0 and 1.
        names: names of the C series.
        scored: positions of the series that are forecast.

    Raises:
        ConfigError: there are too few windows; the message has their number and the number needed.
    """
    counts = len(scores) - np.isnan(scores[:, :, list(scored)]).sum(axis=0)
    step, number = np.unravel_index(counts.argmin(), counts.shape)
    fewest, needed = int(counts.min()), math.ceil(round(level / (1.0 - level), 6))
    if fewest < needed:
        raise ConfigError(
            f"task.intervals: {fewest} of {len(scores)} validation windows have a truth of {names[scored[number]]} at "
            f"step {step + 1}, and {needed} are needed for a quantile of {level:g}; ask for a lower level, or give the "
            "validation split more rows"
        )
