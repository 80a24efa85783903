"""Intervals calibrated on the validation part: split conformal prediction for any forecaster.

Conformity scores are, at each step and channel,

- residuals: |y - forecast|, or y - forecast for the two ends apart (Lei et al., JASA 113(523), 2018);
- standard deviations: the same divided by them (normalized conformal prediction, Papadopoulos et al., ECML 2002);
- quantiles: how far y lies outside of an interval, negative inside (conformalized quantile regression, Romano et al.,
  NeurIPS 2019).

Of n of them the one of rank ``ceil((n + 1) * level)`` bounds a new one with probability ``level`` or more, if all are
exchangeable (Vovk, Gammerman and Shafer 2005).
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
from exp.engine import checkpoint
from exp.engine.debug import split_in_use
from exp.engine.outputs import batch_outputs
from exp.engine.wrapper import unwrapped
from exp.errors import ConfigError, DataError
from exp.forecasting.intervals.intervals import GRID, LEAST_STD, Intervals, Spread, quantile_levels
from exp.forecasting.intervals.keys import check_keys
from exp.runs.folder import RunFolder
from exp.user_code import shown

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["OrderedScores", "Scores", "calibrated", "prepare"]

_Score = Callable[[torch.Tensor, torch.Tensor, Any], Sequence[torch.Tensor]]
_OF_FILE = ("name", "root", "file", "archive_folder", "split", "header", "date_column", "date_format", "allow_gaps")


def prepare(session: Session, data: Any, model: Any) -> Intervals | None:
    """The intervals that ``task`` asks for; None: it asks for none.

    Args:
        session: the session; every rank calls.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        model: wrapped or not; moved to the session's device.

    Raises:
        ConfigError: the keys do not go together or with the model, or there is nothing to calibrate with.
    """
    task = session.config.task
    levels = check_keys(task)
    if not levels:
        return None
    model = unwrapped(model).to(session.device).eval()
    kind, rescaled, rate = _kind(task, model, levels)
    record: dict[str, Any] = {"from": kind, "levels": levels}
    spread = None if kind == "residuals" else Spread(session, model)
    taus = [float(tau) for tau in model.quantiles] if kind == "quantiles" else quantile_levels([*levels, *GRID])
    if not rescaled:  # as the model says
        said = [0.0 if kind == "quantiles" else NormalDist().inv_cdf(tau) for tau in taus]
        offsets = torch.tensor(said).view(-1, 1, 1)
        return Intervals(kind, levels, taus, offsets, spread, calibrated=False, record=record)
    own = data if "val" in data.rows and len(data.val) > 0 else _trained_on(session, data)
    session.wait_for("calibrating the intervals")
    val = split_in_use(session, own, "val")
    scores = Scores(session, own, val, model, int(task.intervals_memory_mb) * 2**20, spread)
    offsets, windows = calibrated(scores, kind, levels, taus, bool(task.intervals_signed))
    used = f" ({len(val)} of {len(own.val)} windows)" if len(val) < len(own.val) else ""
    record.update(signed=bool(task.intervals_signed), calibrated_on=f"val of {own.path.name}{used}")
    record.update(windows=windows, of=len(val), **({"adapts": rate} if rate else {}))
    if session.distributed.is_main:
        some = f", spread evenly over {len(val)} (task.intervals_memory_mb={task.intervals_memory_mb})"
        session.say(
            f"intervals: calibrated on {windows} validation windows of {own.path.name}{some * (windows < len(val))}"
        )
    return Intervals(kind, levels, taus, offsets, spread, record=record, adapts=rate)


def _kind(task: Any, model: Any, levels: Sequence[float]) -> tuple[str, bool, float]:
    """What the intervals are made of, whether the validation part makes or corrects them, and how fast they adapt."""
    offered, wanted = getattr(model, "spread", None), task.intervals_from
    if wanted == "model" and offered not in ("std", "quantiles"):
        raise ConfigError(
            f"task.intervals_from=model: {shown(model)} says nothing of how sure it is; set model.quantiles for the "
            f"training, or task.intervals_from=residuals"
        )
    kind = str(offered) if wanted == "model" or (wanted is None and offered == "quantiles") else "residuals"
    if kind == "residuals" and task.intervals_rescaled:
        raise ConfigError(
            "task.intervals_rescaled=true corrects what a model says of how sure it is: set task.intervals_from=model; "
            "intervals from residuals need no correction"
        )
    if kind == "quantiles":
        taus = {round(float(tau), 6) for tau in model.quantiles}
        there = sorted(round(2.0 * tau - 1.0, 6) for tau in taus if tau > 0.5 and round(1.0 - tau, 6) in taus)
        missing = [level for level in levels if level not in there]
        if missing:
            raise ConfigError(
                f"task.intervals: {missing[0]:g} is between no two of model.quantiles={sorted(taus)}; these give "
                f"{', '.join(f'{level:g}' for level in there) or 'none'}; or set task.intervals_from=residuals"
            )
    rescaled = kind == "residuals" or (kind == "std" if task.intervals_rescaled is None else task.intervals_rescaled)
    if task.intervals_signed and (kind == "quantiles" or not rescaled):
        raise ConfigError(
            "task.intervals_signed=true is for residuals of the validation part: set task.intervals_from=residuals, or "
            "correct standard deviations by task.intervals_rescaled=true"
        )
    rate = float(task.get("intervals_adapt") or 0.0)
    if rate and (kind != "residuals" or task.intervals_signed):
        raise ConfigError(
            f"task.intervals_adapt={rate:g} is for intervals from absolute residuals: set "
            f"task.intervals_from=residuals and task.intervals_signed=false"
        )
    return kind, rescaled, rate


def _trained_on(session: Session, data: Any) -> Any:
    """The data of the run that the weights are from: new rows have no validation part.

    Raises:
        ConfigError: the weights are of no run, or its file is not there any more, or not what it was.
    """
    problem = f"task.intervals: {data.path} has no validation part to calibrate with"
    run = session.config.record.trained_in
    files = None
    if run is not None and session.weights is not None:
        files = checkpoint.read(session.weights.path, mapped=True, whole=False).get("data_files")
    if not files:
        raise ConfigError(f"{problem}, and the weights do not tell which file they were trained on; use those of a run")
    theirs = OmegaConf.load(RunFolder(Path(str(run))).config).data
    keys = session.config.data.copy()
    keys.update({key: theirs[key] for key in _OF_FILE}, inputs=list(data.names))  # in the order of the weights
    try:
        own = create(keys, Data, "data")
    except DataError as error:
        raise ConfigError(f"{problem}, nor can those of {run} be read: {error}") from error
    if list(own.fingerprint().values()) != list(files.values()):
        raise ConfigError(f"{problem}, and {own.path} is not what the weights were trained on any more")
    return own


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

    def collect(self, score: _Score, parts: int) -> list[OrderedScores]:
        """Scores of windows spread evenly over the validation part, the same on every rank, which computes its share.

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
        return [  # sums of one number and zeros: exact
            OrderedScores(distributed.sum(part).numpy(), self.data.names, self.data.scored) for part in scores
        ]


def calibrated(
    given: Scores, kind: str, levels: Sequence[float], taus: Sequence[float], signed: bool = False
) -> tuple[torch.Tensor, int]:
    """Offsets of quantiles, float32 (K, H, C), and of how many windows they are made.

    Args:
        given: what scores are computed of.
        kind: of :class:`exp.forecasting.intervals.intervals.Intervals`.
        levels: coverages; there must be windows enough for them. Of the other central intervals of ``taus`` the largest
            score counts where there are too few.
        taus: the K quantile levels, ascending.
        signed: quantiles of each end by itself, not of the absolute residual.

    Raises:
        ConfigError: there are too few windows.
    """
    places = {round(tau, 6): place for place, tau in enumerate(taus)}
    pairs = [
        (places[round(1.0 - tau, 6)], place)
        for tau, place in places.items()
        if tau > 0.5 and round(1.0 - tau, 6) in places
    ]

    def score(forecast: torch.Tensor, truth: torch.Tensor, spread: Any) -> Sequence[torch.Tensor]:
        if kind == "quantiles":
            return [torch.maximum(spread[..., low] - truth, truth - spread[..., high]) for low, high in pairs]
        error = truth - forecast
        if spread is not None:
            error = error / spread.clamp_min(LEAST_STD)
        return [error if signed else error.abs()]

    scores = given.collect(score, len(pairs) if kind == "quantiles" else 1)
    offsets = np.zeros((len(taus), *scores[0].scores.shape[1:]), dtype=np.float32)
    for number, (low, high) in enumerate(pairs):
        ordered = scores[number if kind == "quantiles" else 0]
        level = round(taus[high] - taus[low], 6)
        exact = level in levels
        if signed:
            offsets[low] = ordered.bound(taus[high], exact, lower=True)
            offsets[high] = ordered.bound(taus[high], exact)
        else:
            offsets[high] = ordered.bound(level, exact)
            offsets[low] = -offsets[high]
    if signed:
        offsets[places[0.5]] = scores[0].bound(0.5, exact=False)
    return torch.from_numpy(offsets), len(scores[0].scores)


class OrderedScores:
    """Scores of windows at each place, in order.

    Args:
        scores: float32 (N, H, C); sorted in place; nan where the truth is missing.
        names: of the C channels.
        scored: positions of those that are forecast; the others do not count, and their bounds are 0 where they have no
            truth.

    Attributes:
        fewest: scores at the place that has the fewest.
    """

    def __init__(self, scores: np.ndarray, names: Sequence[str], scored: Sequence[int]) -> None:
        scores.sort(axis=0)  # nan last
        self.scores = scores
        self.counts = len(scores) - np.isnan(scores).sum(axis=0)  # (H, C)
        self.names, self.scored = names, list(scored)
        self.fewest = int(self.counts[:, self.scored].min())

    def bound(self, level: float, exact: bool = True, lower: bool = False) -> np.ndarray:
        """What a new score does not exceed with probability ``level``, (H, C).

        Args:
            level: between 0 and 1.
            exact: False: the largest score where there are too few of them.
            lower: what it does not fall below instead.

        Raises:
            ConfigError: there are too few.
        """
        if exact and math.ceil(round((self.fewest + 1) * level, 6)) > self.fewest:
            there = f"there are {self.fewest} validation windows"
            if self.fewest < len(self.scores):
                step, number = np.argwhere(self.counts[:, self.scored] == self.fewest)[0]
                name = self.names[self.scored[number]]
                there = (
                    f"{self.fewest} of {len(self.scores)} validation windows have a truth of {name} at step {step + 1}"
                )
            needed = math.ceil(round(level / (1.0 - level), 6))
            raise ConfigError(
                f"task.intervals: {there} to tell a quantile of {level:g} from, and {needed} are needed; ask for a "
                "lower level, or give the validation part more rows"
            )
        ranks = np.clip(np.ceil(np.round((self.counts + 1) * level, 6)).astype(np.int64), 1, self.counts)
        places = self.counts - ranks if lower else ranks - 1
        found: np.ndarray = np.take_along_axis(self.scores, places[None], axis=0)[0]
        return np.where(self.counts > 0, found, np.float32(0.0))
