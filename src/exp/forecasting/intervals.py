"""Intervals around forecasts: from the residuals of the validation split, or from the model's own distribution.

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

import copy
import functools
import math
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import torch
from omegaconf import OmegaConf

from exp.config.resolve import create
from exp.data.base import Data
from exp.data.loader import to_device
from exp.engine.build import dataset_for
from exp.engine.evaluate import batch_outputs
from exp.engine.wrapper import forward, preprocessed, unwrapped
from exp.errors import ConfigError, DataError
from exp.forecasting.keys import interval_levels
from exp.forecasting.metrics import SeriesIds, WindowMetric
from exp.forecasting.model import Contract

if TYPE_CHECKING:
    from exp.distributed import Distributed
    from exp.session import Session

__all__ = ["SCORED_LEVELS", "ConformityScores", "Interval", "IntervalMetrics", "Intervals",
           "build_intervals", "calibrate", "check_num_scores", "conformal_bound", "percent",
           "predictive_distribution", "quantile_levels"]  # fmt: skip


# Central intervals that CRPS and WQL are computed from, independent of `task.intervals`; with the median, 19 quantiles.
SCORED_LEVELS = tuple(round(0.1 * step, 1) for step in range(1, 10))

_Distribution = Callable[[Dict[str, Any]], torch.Tensor]

# Smallest standard deviation (standardized) that errors are divided by: over a flat lookback a model gives 0.
MIN_STD = 1e-6


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


class Interval(NamedTuple):
    """A central interval.

    Attributes:
        level: nominal coverage, between 0 and 1.
        lower: (B, H, C), standardized.
        upper: (B, H, C), standardized.
    """

    level: float
    lower: Any
    upper: Any


def predictive_distribution(session: Session, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A model's own distribution (:attr:`exp.forecasting.model.Forecaster.distribution`) for a batch on any device.

    Args:
        session: the session.
        model: on its device, not wrapped.
        batch: of the data.

    Returns:
        float32, on the device of the batch.
    """
    moved = to_device(batch, session.device)
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        values: torch.Tensor = forward(model, preprocessed(model, moved), "distribution")
    return values.float().to(batch["x"].device)


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
        distribution: the model's own distribution; None with residuals.
        record: entries for the result of a run.

    Attributes:
        scored: positions in ``taus`` of the levels that CRPS and WQL are computed from: those of :data:`SCORED_LEVELS`,
            or with ``quantiles`` all.
        ends: positions in ``taus`` of the ends of ``levels``.
    """

    def __init__(
        self,
        kind: str,
        levels: Sequence[float],
        taus: Sequence[float],
        offsets: torch.Tensor,
        distribution: _Distribution | None = None,
        record: dict[str, Any] | None = None,
    ) -> None:
        self.kind, self.levels, self.taus, self.offsets = kind, list(levels), list(taus), offsets
        self.record = record or {}
        self._distribution = distribution
        self._index_of = {round(tau, 6): number for number, tau in enumerate(self.taus)}
        scored = self._index_of if kind == "quantiles" else quantile_levels(SCORED_LEVELS)
        self.scored = [self._index_of[tau] for tau in scored if tau in self._index_of]
        ends = [[round((1.0 + sign * level) / 2.0, 6) for sign in (-1, 1)] for level in self.levels]
        self._pairs = [[self._index_of[tau] for tau in pair] for pair in ends]
        self.ends = {number for pair in self._pairs for number in pair}

    def with_model(self, session: Session, model: Any) -> Intervals:
        """The same for another model of the same kind."""
        other = copy.copy(self)
        if self._distribution is not None:
            other._distribution = functools.partial(predictive_distribution, session, model)
        return other

    def distribution(self, batch: dict[str, Any]) -> torch.Tensor | None:
        """The model's distribution for a batch (:func:`predictive_distribution`); None with residuals."""
        return None if self._distribution is None else self._distribution(batch)

    def quantiles(
        self, forecast: torch.Tensor, distribution: torch.Tensor | None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """All quantiles: the median, then those below it downwards, then those above it upwards.

        One at a time, since all together may not fit into the device's memory.

        Args:
            forecast: (B, H, C), standardized, float32.
            distribution: of :meth:`distribution`, on the same device.

        Yields:
            The position in ``taus``, and the quantile (B, H, C), standardized.
        """
        self.offsets = self.offsets.to(forecast.device)
        below, median = sum(tau < 0.5 for tau in self.taus), self._index_of.get(0.5)
        middle = forecast if self.kind == "quantiles" else self._raw_quantile(below, forecast, distribution)
        if median is not None:
            yield median, middle
        above = range(below + (median is not None), len(self.taus))
        for numbers, outer in ((reversed(range(below)), torch.minimum), (above, torch.maximum)):
            last = middle
            for number in numbers:
                last = outer(last, self._raw_quantile(number, forecast, distribution))
                yield number, last

    def _raw_quantile(self, number: int, forecast: torch.Tensor, distribution: torch.Tensor | None) -> torch.Tensor:
        offset = self.offsets[number]
        if distribution is None:
            return forecast + offset
        return distribution[..., number] + offset if self.kind == "quantiles" else forecast + offset * distribution

    def central(self, quantiles: Mapping[int, torch.Tensor]) -> list[Interval]:
        """The intervals of ``levels``.

        Args:
            quantiles: those of :meth:`quantiles`, by position in ``taus``.
        """
        return [
            Interval(level, quantiles[low], quantiles[high]) for level, (low, high) in zip(self.levels, self._pairs)
        ]


_FILE_KEYS = (
    "name", "root", "file", "archive_folder", "split", "val_size", "test_size", "val_start", "test_start", "header",
    "date_column", "date_format", "allow_gaps", "id_column", "melt", "static", "missing",
)  # fmt: skip


def build_intervals(session: Session, data: Any, model: Any) -> Intervals | None:
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
    kind, is_calibrated = _choose_kind(task, model, levels)
    record: dict[str, Any] = {"from": kind, "levels": levels}
    distribution = None if kind == "residuals" else functools.partial(predictive_distribution, session, model)
    own_levels = model.quantiles if kind == "quantiles" else quantile_levels([*levels, *SCORED_LEVELS])
    taus = [float(tau) for tau in own_levels]
    if not is_calibrated:
        uncorrected = [0.0 if kind == "quantiles" else NormalDist().inv_cdf(tau) for tau in taus]
        return Intervals(kind, levels, taus, torch.tensor(uncorrected).view(-1, 1, 1), distribution, record)
    source = data if "val" in data.rows and len(data.val) > 0 else _load_training_data(session, data)
    val = dataset_for(session, source, "val")
    scores = ConformityScores(session, source, val, model, distribution)
    offsets, windows = calibrate(scores, kind, levels, taus, task.intervals_symmetric)
    subset = f" ({len(val)} of {len(source.val)} windows)" if len(val) < len(source.val) else ""
    record.update(symmetric=task.intervals_symmetric, calibrated_on=f"val of {source.path.name}{subset}")
    record.update(windows=windows, of=len(val))
    if session.distributed.is_main:
        session.print(f"intervals: calibrated on {windows} of {len(val)} validation windows of {source.path.name}")
    return Intervals(kind, levels, taus, offsets, distribution, record)


def _choose_kind(task: Any, model: Any, levels: Sequence[float]) -> tuple[str, bool]:
    """What the intervals are made of (:class:`Intervals`), and whether the validation split is needed."""
    contract, method = Contract.of(model), task.intervals_method
    own_kind = contract.distribution
    if method == "model" and own_kind not in ("std", "quantiles"):
        raise ConfigError(
            f"task.intervals_method=model: {contract.name} has neither quantiles nor standard deviations; set "
            f"model.quantiles for the training, or task.intervals_method=conformal"
        )
    kind = str(own_kind) if method == "model" or (method is None and own_kind == "quantiles") else "residuals"
    if kind == "quantiles":
        levels_of_model = list(contract.quantiles or ())
        available = {round(2.0 * tau - 1.0, 6) for _, tau in central_pairs(levels_of_model)}
        missing = sorted(set(levels) - available)
        if missing:
            raise ConfigError(
                f"task.intervals: {missing[0]:g} needs two levels that model.quantiles lacks; {levels_of_model} give "
                f"{sorted(available)}; or set task.intervals_method=conformal"
            )
    is_calibrated = task.intervals_calibrate
    if kind == "residuals" or is_calibrated is None:
        is_calibrated = kind != "quantiles"
    if not task.intervals_symmetric and (kind == "quantiles" or not is_calibrated):
        raise ConfigError(
            "task.intervals_symmetric=false needs residuals of the validation split: set "
            "task.intervals_method=conformal, or correct standard deviations by task.intervals_calibrate=true"
        )
    return kind, is_calibrated


def _load_training_data(session: Session, data: Any) -> Any:
    """The data that the weights were trained on; used if the current data have no validation split.

    Raises:
        ConfigError: the weights do not come from a run, or the run's data file is missing or has changed.
    """
    problem = f"task.intervals: {data.path} has no validation split to calibrate with"
    run, files = session.config.record.trained_in, data.state_dict()["files"]
    if run is None or not files:
        raise ConfigError(f"{problem}, and the weights do not name the file that they were trained on; use a run's")
    trained_keys = OmegaConf.load(Path(run) / "config.yaml").data
    keys = session.config.data.copy()
    keys.update({key: trained_keys[key] for key in _FILE_KEYS}, inputs=list(data.names))  # in the order of the weights
    try:
        training_data: Any = create(keys, Data, "data")
        len(training_data.val)  # reads the file
    except DataError as error:
        raise ConfigError(f"{problem}, and the data of {run} cannot be read: {error}") from error
    if list(training_data.fingerprint().values()) != list(files.values()):
        raise ConfigError(f"{problem}, and {training_data.path} has changed since the weights were trained on it")
    return training_data


class ConformityScores(NamedTuple):
    """Conformity scores of the validation split.

    Attributes:
        session: the session; every rank takes part.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        val: the windows, indexed by a whole batch.
        model: on the session's device, in eval mode.
        distribution: the model's own distribution; None: not used.
        budget: most bytes of scores; if all windows need more, evenly spaced windows are used.
    """

    session: Session
    data: Any
    val: Any
    model: Any
    distribution: _Distribution | None
    budget: int = 2**28

    def collect(self, kind: str, pairs: Sequence[tuple[int, int]], symmetric: bool) -> np.ndarray:
        """All scores in ascending order. Each rank computes a share; the result is the same on every rank.

        Args:
            kind: as for :class:`Intervals`.
            pairs: positions of the ends of central intervals among the model's quantiles, which have a score each.
            symmetric: whether residuals lose their sign.

        Returns:
            (pairs, N, H, C) with ``quantiles``, else (1, N, H, C), float32; NaN, where a truth is missing, comes last.
        """
        parts, num_windows = len(pairs) if kind == "quantiles" else 1, len(self.val)
        shape = tuple(self.val[torch.zeros(1, dtype=torch.int64)]["y"].shape[1:])
        count = max(min(num_windows, self.budget // (4 * parts * int(np.prod(shape)))), 1)
        scores = torch.zeros(parts, count, *shape)
        distributed = self.session.distributed
        for indices in torch.arange(distributed.rank, count, distributed.world_size).split(self.data.eval_batch_size):
            batch = self.val[indices * num_windows // count]
            error = batch["y"] - batch_outputs(self.session, self.model, batch).float()
            if self.distribution is None:
                scores[0, indices] = error
                continue
            values = self.distribution(batch)
            if kind == "std":
                scores[0, indices] = error / values.clamp_min(MIN_STD)
                continue
            for number, (low, high) in enumerate(pairs):
                scores[number, indices] = torch.maximum(values[..., low] - batch["y"], batch["y"] - values[..., high])
        if symmetric and kind != "quantiles":
            scores.abs_()
        return np.sort(distributed.sum(scores).numpy(), axis=1)  # exact: each element is non-zero on one rank only


def calibrate(
    scorer: ConformityScores, kind: str, levels: Sequence[float], taus: Sequence[float], symmetric: bool = True
) -> tuple[torch.Tensor, int]:
    """Compute the offsets of :class:`exp.forecasting.intervals.Intervals` from the validation split.

    Args:
        scorer: the validation split.
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
    index_of = {tau: number for number, tau in enumerate(taus)}
    pairs = [(index_of[low], index_of[high]) for low, high in central_pairs(taus)]
    scores = scorer.collect(kind, pairs, symmetric)
    offsets = np.zeros((len(taus), *scores.shape[2:]), dtype=np.float32)
    needed_level = max(levels) if symmetric else (1.0 + max(levels)) / 2.0
    check_num_scores(scores[0], needed_level, scorer.data.names, scorer.data.scored)
    for number, (low, high) in enumerate(pairs):
        ordered = scores[number if kind == "quantiles" else 0]
        offsets[high] = conformal_bound(ordered, round(taus[high] - taus[low], 6) if symmetric else taus[high])
        offsets[low] = -offsets[high] if symmetric else conformal_bound(ordered, taus[high], lower=True)
    if not symmetric:
        offsets[index_of[0.5]] = conformal_bound(scores[0], 0.5)
    return torch.from_numpy(offsets), scores.shape[1]


def conformal_bound(scores: np.ndarray, level: float, lower: bool = False) -> np.ndarray:
    """The conformal_bound, (H, C), that a new score does not exceed with probability ``level``.

    Args:
        scores: float32 (N, H, C), ascending, NaN last. With too few scores the conformal_bound is the largest one; with
            none but NaN it is 0.
        level: between 0 and 1.
        lower: return the conformal_bound that a new score does not fall below instead.
    """
    counts = len(scores) - np.isnan(scores).sum(axis=0)
    ranks = np.clip(np.ceil(np.round((counts + 1) * level, 6)).astype(np.int64), 1, counts)
    bounds = np.take_along_axis(scores, (counts - ranks if lower else ranks - 1)[None], axis=0)[0]
    return np.where(counts > 0, bounds, np.float32(0.0))


def check_num_scores(scores: np.ndarray, level: float, names: Sequence[str], scored: Sequence[int]) -> None:
    """Refuse a level if, at some step of a forecast series, too few windows have a truth.

    Args:
        scores: as for :func:`conformal_bound`.
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
      pinball loss over quantile levels``, by the trapezoidal rule over the 19 levels of :data:`SCORED_LEVELS` and the
      median, with 0 at levels 0 and 1;
    - ``wql``: mean weighted quantile loss, as in GluonTS (Alexandrov et al., JMLR 21(116), 2020): the mean over
      the same levels of ``2 * sum of pinball losses / sum of |truth|``, in the units of the file;
    - ``crps_own_levels`` and ``wql_own_levels`` instead, if the quantiles are the model's own: the same over its own
      levels. They are other quantities (over 5 levels the score of a Gaussian is 12 % smaller).

    Args:
        intervals: the intervals that are measured.
        series: names of the C series, for tables per channel and step; None: only the totals.
        mean: of the series in the units of the file, float64 (C,), of many series (S, C).
        std: standard deviation of the series in the units of the file, likewise.
        scored: positions of the series that are forecast, which the tables show; None: all.
        many: the series of a table; None: there is one.
    """

    def __init__(
        self,
        intervals: Intervals,
        series: Sequence[str] | None,
        mean: torch.Tensor,
        std: torch.Tensor,
        scored: Sequence[int] | None = None,
        many: SeriesIds | None = None,
    ) -> None:
        self.intervals, self.many = intervals, many
        self.scored = list(range(std.shape[-1]) if scored is None else scored)
        self.series = series
        levels = [percent(level) for level in intervals.levels]
        self._level_names = [f"{what}_{level}" for level in levels for what in ("coverage", "width")]
        in_file = [f"width_{level}_file_units" for level in levels]
        ending = "_own_levels" if intervals.kind == "quantiles" else ""
        self._crps, self._wql = f"crps{ending}", f"wql{ending}"
        self.names = [*self._level_names, *in_file, self._crps, f"{self._crps}_file_units", self._wql]
        self.units = dict.fromkeys((self._crps, *(f"width_{level}" for level in levels)), "standardized")
        # Relative to the largest deviation: sums of large units would overflow float32.
        self._largest = float(std[..., self.scored].max())
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
        scale, shift = (self._of_windows(values, batch) for values in (self._scale, self._shift))
        target = batch["y"]
        observed = (target == target).float()
        truth = torch.where(observed > 0, target, forecast)
        distribution = self.intervals.distribution(batch)
        crps, losses, ends = torch.zeros_like(truth), torch.zeros_like(truth), {}
        for number, quantile in self.intervals.quantiles(forecast, distribution):
            if number in self._weights:
                error, tau = truth - quantile, self.intervals.taus[number]
                loss = torch.maximum(tau * error, (tau - 1.0) * error)  # pinball
                crps, losses = crps + self._weights[number] * loss, losses + loss
            if number in self.intervals.ends:
                ends[number] = quantile
        per_level, in_file = [], []
        for interval in self.intervals.central(ends):
            inside = ((interval.lower <= truth) & (truth <= interval.upper)).float()
            width = interval.upper - interval.lower
            per_level += [inside * observed, width * observed]
            in_file.append(width * scale * observed)
        crps, losses = crps * observed, losses * observed * scale
        size = (truth * scale + shift).abs() * observed
        values = [observed, size, *per_level, *in_file, crps, crps * scale, losses]
        self._add([value.mean(dim=(1, 2)) for value in values], [observed, *per_level, crps])

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures over all ranks."""
        num_observed, size, *sums = self._totals(len(self.names) + 2, distributed)
        if self.series is not None:
            cells, *cell_sums = self._cell_sums(distributed)[..., self.scored]  # (H, scored) each
            series = [self.series[position] for position in self.scored]
            self._tabulate("intervals_", series, cells, dict(zip([*self._level_names, self._crps], cell_sums)))
        metrics = {name: total / num_observed if num_observed else math.nan for name, total in zip(self.names, sums)}
        for name in metrics:
            if name.endswith("_file_units"):
                metrics[name] *= self._largest
        metrics[self._wql] = 2.0 * sums[-1] / (len(self._weights) * size) if size else math.nan
        return metrics
