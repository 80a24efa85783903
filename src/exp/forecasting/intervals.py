"""Intervals around forecasts: from the residuals of the validation split, or from the model's own spread.

They are calibrated by split conformal prediction, for any forecaster. The conformity score of each step and channel
depends on what the intervals are made of:

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
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from omegaconf import OmegaConf

from exp.config.resolve import create
from exp.data.base import Data
from exp.data.loader import move
from exp.engine.build import dataset_for
from exp.engine.evaluate import batch_outputs
from exp.engine.wrapper import forward, preprocessed, unwrapped
from exp.errors import ConfigError, DataError, qualified_name
from exp.forecasting.data.preflight import interval_levels
from exp.forecasting.metrics import WindowMetric

if TYPE_CHECKING:
    from exp.distributed import Distributed
    from exp.session import Session

__all__ = ["GRID", "Band", "IntervalMetrics", "Intervals", "Scores", "Spread", "bound", "calibrated", "check_count",
           "percent", "prepare", "quantile_levels"]  # fmt: skip


# Central intervals that CRPS and WQL are computed from, independent of `task.intervals`; with the median, 19 quantiles.
GRID = tuple(round(0.1 * step, 1) for step in range(1, 10))

# Smallest standard deviation (standardized) that errors are divided by: over a flat lookback a model gives 0.
LEAST_STD = 1e-6


def quantile_levels(levels: Sequence[float]) -> list[float]:
    """The two ends of each central interval, and the median, ascending: 0.1, 0.5 and 0.9 for 0.8."""
    ends = {round((1.0 + sign * level) / 2.0, 6) for level in levels for sign in (-1, 1)}
    return sorted(ends | {0.5})


def central_pairs(taus: Sequence[float]) -> list[tuple[float, float]]:
    """Quantile levels that are the two ends of a central interval: lower and upper, the narrowest first."""
    mirrored = {round(1.0 - tau, 6): tau for tau in taus}
    return [(mirrored[round(tau, 6)], tau) for tau in taus if tau > 0.5 and round(tau, 6) in mirrored]


def percent(level: float) -> str:
    """A level as text for names: 80, 97.5."""
    return f"{round(100.0 * level, 4):g}"


class Band(NamedTuple):
    """A central interval.

    Attributes:
        level: nominal coverage, between 0 and 1.
        lower: (B, H, C), standardized.
        upper: (B, H, C), standardized.
    """

    level: float
    lower: Any
    upper: Any


class Spread(NamedTuple):
    """A model's own spread: standard deviations, or quantiles.

    A model that has one sets the attribute ``spread`` to ``"std"`` or ``"quantiles"``. ``forward(..., mode="spread")``
    then returns standard deviations (B, H, C) of a Gaussian around its forecast, or quantiles (B, H, C, Q) at the
    levels of its attribute ``quantiles``, ascending and not crossing; the one at 0.5 is the forecast. All are
    standardized.

    Args:
        session: the session.
        model: on its device, not wrapped.
    """

    session: Session
    model: Any

    @torch.no_grad()
    def __call__(self, batch: dict[str, Any]) -> torch.Tensor:
        """The spread of a batch on any device; float32, on the device of the batch."""
        moved = move(batch, self.session.device)
        with self.session.backend.autocast(self.session.config.precision):
            found: torch.Tensor = forward(self.model, preprocessed(self.model, moved), "spread")
        return found.float().to(batch["x"].device)


class Intervals:
    """Quantiles of forecasts at some levels: ``base + offset * scale`` for each step and channel.

    ======================  ================  ==========================  =====================
    made of                 base              offset                      scale
    ======================  ================  ==========================  =====================
    residuals               the forecast      of the residuals            1
    standard deviations     the forecast      of a standard Gaussian, or  standard deviation
                                              of residuals / deviations
    quantiles               the model's       0, or of their errors       1
    ======================  ================  ==========================  =====================

    Quantiles do not cross, also where a correction is negative: from the median outwards each is at least as far out as
    the one before it.

    Args:
        kind: ``residuals``, ``std`` or ``quantiles``.
        levels: coverages asked for, ascending.
        taus: the K quantile levels, ascending: both ends of each interval, and the median.
        offsets: float32 (K, H, C), or (K, 1, 1) if they are the same for all steps and channels.
        spread: the model's own spread; None with residuals.
        record: entries for the result of a run.

    Attributes:
        scored: positions in ``taus`` of the levels that CRPS and WQL are computed from: those of :data:`GRID`, or with
            ``quantiles`` all.
    """

    def __init__(
        self,
        kind: str,
        levels: Sequence[float],
        taus: Sequence[float],
        offsets: torch.Tensor,
        spread: Spread | None = None,
        record: dict[str, Any] | None = None,
    ) -> None:
        self.kind, self.levels, self.taus, self.offsets = kind, list(levels), list(taus), offsets
        self.record = record or {}
        self._spread = spread
        self._numbers = {round(tau, 6): number for number, tau in enumerate(self.taus)}
        scored = self._numbers if kind == "quantiles" else quantile_levels(GRID)
        self.scored = [self._numbers[tau] for tau in scored if tau in self._numbers]
        ends = [[round((1.0 + sign * level) / 2.0, 6) for sign in (-1, 1)] for level in self.levels]
        self._ends = [[self._numbers[tau] for tau in pair] for pair in ends]

    def spread(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """The model's spread for a batch (:class:`Spread`); None with residuals."""
        return None if self._spread is None else self._spread(batch)

    def quantiles(self, forecast: torch.Tensor, spread: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
        """All quantiles: the median, then those below it downwards, then those above it upwards.

        One at a time, since all together may not fit into the device's memory.

        Args:
            forecast: (B, H, C), standardized, float32.
            spread: of :meth:`spread`, on the same device.

        Yields:
            The position in ``taus``, and the quantile (B, H, C), standardized.
        """
        self.offsets = self.offsets.to(forecast.device)
        below, median = sum(tau < 0.5 for tau in self.taus), self._numbers.get(0.5)
        middle = forecast if self.kind == "quantiles" else self._raw(below, forecast, spread)
        if median is not None:
            yield median, middle
        above = range(below + (median is not None), len(self.taus))
        for numbers, outer in ((reversed(range(below)), torch.minimum), (above, torch.maximum)):
            last = middle
            for number in numbers:
                last = outer(last, self._raw(number, forecast, spread))
                yield number, last

    def _raw(self, number: int, forecast: torch.Tensor, spread: torch.Tensor | None) -> torch.Tensor:
        offset = self.offsets[number]
        if spread is None:
            return forecast + offset
        return spread[..., number] + offset if self.kind == "quantiles" else forecast + offset * spread

    def bands(self, quantiles: Mapping[int, torch.Tensor]) -> list[Band]:
        """The intervals of ``levels``.

        Args:
            quantiles: those of :meth:`quantiles`, by position in ``taus``.
        """
        return [Band(level, quantiles[low], quantiles[high]) for level, (low, high) in zip(self.levels, self._ends)]

    def is_end(self, number: int) -> bool:
        """Whether a position in ``taus`` is an end of an interval of ``levels``."""
        return any(number in ends for ends in self._ends)


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
        return Intervals(kind, levels, taus, offsets, spread, record)
    own = data if "val" in data.rows and len(data.val) > 0 else _trained_on(session, data)
    val = dataset_for(session, own, "val")
    scores = Scores(session, own, val, model, spread)
    offsets, windows = calibrated(scores, kind, levels, taus, task.intervals_symmetric)
    used = f" ({len(val)} of {len(own.val)} windows)" if len(val) < len(own.val) else ""
    record.update(symmetric=task.intervals_symmetric, calibrated_on=f"val of {own.path.name}{used}")
    record.update(windows=windows, of=len(val))
    if session.distributed.is_main:
        session.say(f"intervals: calibrated on {windows} of {len(val)} validation windows of {own.path.name}")
    return Intervals(kind, levels, taus, offsets, spread, record)


def _kind(task: Any, model: Any, levels: Sequence[float]) -> tuple[str, bool]:
    """What the intervals are made of (:class:`Intervals`), and whether the validation split is needed."""
    offered, wanted = getattr(model, "spread", None), task.intervals_method
    if wanted == "model" and offered not in ("std", "quantiles"):
        raise ConfigError(
            f"task.intervals_method=model: {qualified_name(model)} has neither quantiles nor standard deviations; set "
            f"model.quantiles for the training, or task.intervals_method=conformal"
        )
    kind = str(offered) if wanted == "model" or (wanted is None and offered == "quantiles") else "residuals"
    if kind == "quantiles":
        there = {round(2.0 * tau - 1.0, 6) for _, tau in central_pairs(model.quantiles)}
        missing = sorted(set(levels) - there)
        if missing:
            raise ConfigError(
                f"task.intervals: {missing[0]:g} needs two levels that model.quantiles={list(model.quantiles)} lacks; "
                f"these give {sorted(there)}; or set task.intervals_method=conformal"
            )
    rescaled = kind == "residuals" or (kind == "std" if task.intervals_calibrate is None else task.intervals_calibrate)
    if not task.intervals_symmetric and (kind == "quantiles" or not rescaled):
        raise ConfigError(
            "task.intervals_symmetric=false needs residuals of the validation split: set "
            "task.intervals_method=conformal, or correct standard deviations by task.intervals_calibrate=true"
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
        own: Any = create(keys, Data, "data")
        len(own.val)  # reads the file
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
    given: Scores, kind: str, levels: Sequence[float], taus: Sequence[float], symmetric: bool = True
) -> tuple[torch.Tensor, int]:
    """Compute the offsets of :class:`exp.forecasting.intervals.Intervals` from the validation split.

    Args:
        given: the validation split.
        kind: as for :class:`exp.forecasting.intervals.Intervals`.
        levels: coverages, for which there must be enough windows. The other central intervals of ``taus`` use the
            largest score if there are too few windows.
        taus: the K quantile levels, ascending.
        symmetric: whether both ends use the same quantile of the absolute residual; false: separate quantiles of the
            signed residual.

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
        return [error.abs() if symmetric else error]

    scores = given.collect(score, len(pairs) if kind == "quantiles" else 1)
    offsets = np.zeros((len(taus), *scores.shape[2:]), dtype=np.float32)
    asked = max(levels) if symmetric else (1.0 + max(levels)) / 2.0
    check_count(scores[0], asked, given.data.names, given.data.scored)
    for number, (low, high) in enumerate(pairs):
        ordered = scores[number if kind == "quantiles" else 0]
        offsets[high] = bound(ordered, round(taus[high] - taus[low], 6) if symmetric else taus[high])
        offsets[low] = -offsets[high] if symmetric else bound(ordered, taus[high], lower=True)
    if not symmetric:
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


class IntervalMetrics(WindowMetric):
    """Metrics of intervals and quantiles, over all windows, steps and channels whose truth is known.

    - ``coverage_80``: share of true values within the interval of 80 %, and ``width_80``: its mean width;
    - ``crps``: continuous ranked probability score (Gneiting and Raftery, JASA 102(477), 2007), ``2 * integral of the
      pinball loss over quantile levels``, by the trapezoidal rule over the 19 levels of :data:`GRID` and the median,
      with 0 at levels 0 and 1;
    - ``wql``: mean weighted quantile loss, as in GluonTS (Alexandrov et al., JMLR 21(116), 2020): the mean over
      the same levels of ``2 * sum of pinball losses / sum of |truth|``, in the units of the file;
    - ``crps_own_levels`` and ``wql_own_levels`` instead, if the quantiles are the model's own: the same over its own
      levels. They are other quantities (over 5 levels the score of a Gaussian is 12 % smaller).

    Args:
        intervals: the intervals that are measured.
        series: names of the C series, for tables per channel and step; None: only the totals.
        mean: of the series in the units of the file, float64 (C,).
        std: standard deviation of the series in the units of the file, float64 (C,).
        scored: positions of the series that are forecast, which the tables show; None: all.
    """

    def __init__(
        self,
        intervals: Intervals,
        series: Sequence[str] | None,
        mean: torch.Tensor,
        std: torch.Tensor,
        scored: Sequence[int] | None = None,
    ) -> None:
        self.intervals = intervals
        self.scored = list(range(len(std)) if scored is None else scored)
        self.series = series
        levels = [percent(level) for level in intervals.levels]
        self._of_level = [f"{what}_{level}" for level in levels for what in ("coverage", "width")]
        in_file = [f"width_{level}_file_units" for level in levels]
        ending = "_own_levels" if intervals.kind == "quantiles" else ""
        self._crps, self._wql = f"crps{ending}", f"wql{ending}"
        self.names = [*self._of_level, *in_file, self._crps, f"{self._crps}_file_units", self._wql]
        self.units = dict.fromkeys((self._crps, *(f"width_{level}" for level in levels)), "standardized")
        # Relative to the largest deviation: sums of large units would overflow float32.
        self._largest = float(std[self.scored].max())
        self._scale, self._shift = (std / self._largest).float(), (mean / self._largest).float()
        # Weights of the trapezoidal rule for twice the integral from 0 to 1; the losses are 0 at both ends.
        ends = [0.0, *(intervals.taus[number] for number in intervals.scored), 1.0]
        self._weights = {number: after - before for number, before, after in zip(intervals.scored, ends, ends[2:])}
        self.reset()

    def update(self, outputs: torch.Tensor, batch: dict[str, Any]) -> None:
        """Take in one batch.

        Args:
            outputs: forecasts (B, H, C), any floating dtype.
            batch: ``y`` (B, H, C) is the truth; NaN: not known.
        """
        forecast = outputs.float()
        self._scale, self._shift = self._scale.to(forecast.device), self._shift.to(forecast.device)
        given = batch["y"]
        known = (given == given).float()
        truth = torch.where(known > 0, given, forecast)
        spread = self.intervals.spread(batch)
        crps, losses, ends = torch.zeros_like(truth), torch.zeros_like(truth), {}
        for number, quantile in self.intervals.quantiles(forecast, spread):
            if number in self._weights:
                error, tau = truth - quantile, self.intervals.taus[number]
                loss = torch.maximum(tau * error, (tau - 1.0) * error)  # pinball
                crps, losses = crps + self._weights[number] * loss, losses + loss
            if self.intervals.is_end(number):
                ends[number] = quantile
        of_level, in_file = [], []
        for band in self.intervals.bands(ends):
            inside = ((band.lower <= truth) & (truth <= band.upper)).float()
            width = band.upper - band.lower
            of_level += [inside * known, width * known]
            in_file.append(width * self._scale * known)
        crps, losses = crps * known, losses * known * self._scale
        size = (truth * self._scale + self._shift).abs() * known
        values = [known, size, *of_level, *in_file, crps, crps * self._scale, losses]
        self._add([value.mean(dim=(1, 2)) for value in values], [known, *of_level, crps])

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks."""
        known, size, *sums = self._totals(len(self.names) + 2, distributed)
        if self.series is not None:
            cells, *figures = self._of_cells(distributed)[..., self.scored]  # (H, scored) each
            series = [self.series[position] for position in self.scored]
            self._tabulate("intervals_", series, cells, dict(zip([*self._of_level, self._crps], figures)))
        found = {name: total / known if known else math.nan for name, total in zip(self.names, sums)}
        for name in found:
            if name.endswith("_file_units"):
                found[name] *= self._largest
        found[self._wql] = 2.0 * sums[-1] / (len(self._weights) * size) if size else math.nan
        return found
