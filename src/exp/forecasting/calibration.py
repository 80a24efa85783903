"""Corrections of intervals by split conformal prediction; ``task=calibrate`` keeps them with the weights.

The conformity score of a central interval, for each step and column, is how far y lies outside of it in units of the
output's spread, negative inside:

- of points, whose intervals have no width: |y - forecast| (Lei et al., JASA 113(523), 2018);
- of a Gaussian: |y - forecast| / deviation, up to a constant (normalized conformal prediction, Papadopoulos et al.,
  ECML 2002);
- of quantiles and other distributions: conformalized quantile regression (Romano et al., NeurIPS 2019).

A new score is at most the ``ceil((n + 1) * level)``-th smallest of n scores with probability ``level`` or more, if all
scores are exchangeable (Vovk, Gammerman and Shafer 2005).
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import numpy as np
import torch
from omegaconf import OmegaConf

from exp.config.resolve import create
from exp.data.base import Data
from exp.engine.build import build_data, build_evaluator, build_model, data_record, dataset_for
from exp.engine.checkpoint.reader import BEST_NAME, read_checkpoint
from exp.engine.checkpoint.writer import write_checkpoint
from exp.engine.evaluate import batch_outputs
from exp.engine.result import make_result
from exp.engine.wrapper import unwrapped
from exp.errors import ConfigError, DataError
from exp.forecasting.intervals import SCORED_LEVELS, Intervals, central_pairs, quantile_levels
from exp.forecasting.keys import FILE_KEYS, interval_levels
from exp.forecasting.model import Contract
from exp.forecasting.outputs import Output, Points

if TYPE_CHECKING:
    from exp.session import Session


def build_intervals(session: Session, data: Any, model: Any) -> Intervals | None:
    """The quantiles and intervals that ``task.intervals`` asks for. Every rank must call this.

    A model whose loss fits a distribution has its quantiles scored also without ``task.intervals``.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        model: wrapped or not; moved to the session's device. From now on it predicts the values of its output.

    Returns:
        None: there are none.

    Raises:
        ConfigError: the keys contradict each other or the model, or there are no rows to calibrate with.
    """
    task = session.config.task
    model = unwrapped(model)
    contract, levels = Contract.of(model), interval_levels(task)
    is_fitted = contract.output.is_fitted and not isinstance(contract.output, Points)
    if not levels and not is_fitted:
        return None
    method = task.get("intervals_method")
    if method == "model" and isinstance(contract.output, Points):
        raise ConfigError(
            f"task.intervals_method=model: {contract.name} gives points only; train it with model/output=quantiles or "
            "another output, or set task.intervals_method=conformal"
        )
    takes_own = method == "model" or (method is None and is_fitted)
    output = contract.output if takes_own else Points()
    if output.levels is not None:
        _check_levels(levels, output.levels)
    model.gives_values = takes_own
    taus = [float(tau) for tau in output.levels or quantile_levels([*levels, *SCORED_LEVELS])]
    record: dict[str, Any] = {"from": type(output).__name__ if takes_own else "residuals", "levels": levels}
    is_calibrated = task.get("intervals_calibrate")
    if not takes_own or is_calibrated is None:
        is_calibrated = not takes_own or not output.is_fitted
    if not levels or not is_calibrated:
        return Intervals(output, levels, taus, None, record)
    saved = data.calibration
    if saved is not None and saved["from"] == record["from"] and set(levels) <= set(saved["levels"]):
        number_of = {tau: number for number, tau in enumerate(saved["taus"])}
        offsets = saved["offsets"][[number_of[tau] for tau in taus]]
        record.update({key: saved[key] for key in ("calibrated_on", "windows", "of")}, stored_with_weights=True)
        return Intervals(output, levels, taus, offsets, record)
    source = data if "val" in data.rows and len(data.val) > 0 else _load_training_data(session, data)
    val = dataset_for(session, source, "val")
    model = model.to(session.device).eval()
    offsets, windows = calibrate(ConformityScores(session, source, val, model, output), levels, taus)
    subset = f" ({len(val)} of {len(source.val)} windows)" if len(val) < len(source.val) else ""
    record.update(calibrated_on=f"val of {source.path.name}{subset}", windows=windows, of=len(val))
    if session.distributed.is_main:
        session.print(f"intervals: calibrated on {windows} of {len(val)} validation windows of {source.path.name}")
    return Intervals(output, levels, taus, offsets, record)


def _check_levels(levels: Sequence[float], own_levels: Sequence[float]) -> None:
    available = {round(2.0 * tau - 1.0, 6) for _, tau in central_pairs(own_levels)}
    missing = sorted(set(levels) - available)
    if missing:
        raise ConfigError(
            f"task.intervals: {missing[0]:g} needs two levels that model.output.levels lacks; {list(own_levels)} give "
            f"{sorted(available)}; or set task.intervals_method=conformal"
        )


def write_calibrated(session: Session) -> dict[str, Any]:
    """Do ``task=calibrate``: write the weights of ``init_from`` with their corrections, as those of this run.

    Args:
        session: the session; called on every rank.

    Returns:
        The content of ``result.json``.

    Raises:
        ConfigError: see :func:`build_intervals`; or nothing is to be corrected.
    """
    data: Any = build_data(session)
    build_model(session, data)
    session.start_run()
    intervals, weights = data.intervals, session.weights
    assert weights is not None
    if intervals is None or intervals.offsets is None:
        raise ConfigError(
            "task=calibrate: the model's loss fits its quantiles; correct them all the same with "
            "task.intervals_calibrate=true, or take residuals with task.intervals_method=conformal"
        )
    files = [f"{session.folder.checkpoints.name}/{BEST_NAME}"]
    if session.distributed.is_main:
        content = dict(read_checkpoint(weights.path, trusted=session.config.checkpoint.trusted))
        if not isinstance(content.get("data"), dict):
            raise ConfigError(f"task=calibrate: {weights.path} was not written by exp, so it has no state of the data")
        calibration = {**intervals.record, "taus": intervals.taus, "offsets": intervals.offsets.cpu()}
        copied = {key: content[key] for key in ("meta", "state_dict", "config", "data_files") if key in content}
        copied["data"] = {**content["data"], "calibration": calibration}
        session.folder.checkpoints.mkdir(exist_ok=True)
        write_checkpoint(session.folder.checkpoints / BEST_NAME, copied, session.run_id)
        session.print(f"calibrated weights: {session.folder.checkpoints / BEST_NAME}")
    session.distributed.barrier()
    return make_result(session, {}, build_evaluator(session, data), files=files, data=data_record(session, data))


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
    keys.update({key: trained_keys[key] for key in FILE_KEYS}, inputs=list(data.names))  # in the order of the weights
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
        model: on the session's device, in eval mode; it predicts what ``output`` takes.
        output: whose quantiles are corrected.
        budget: most bytes of scores; if all windows need more, evenly spaced windows are used.
    """

    session: Session
    data: Any
    val: Any
    model: Any
    output: Output
    budget: int = 2**28

    def collect(self, pairs: Sequence[tuple[float, float]]) -> np.ndarray:
        """All scores in ascending order. Each rank computes a share; the result is the same on every rank.

        Args:
            pairs: levels of the ends of central intervals.

        Returns:
            (pairs, N, H, C), float32; NaN, where a truth is missing, comes last. (1, N, H, C) if the quantiles are
            multiples of the spread: then |y - forecast| / spread, to which all pairs add a constant.
        """
        output, num_windows = self.output, len(self.val)
        parts = 1 if output.is_location_scale else len(pairs)
        shape = tuple(self.val[torch.zeros(1, dtype=torch.int64)]["y"].shape[1:])
        count = max(min(num_windows, self.budget // (4 * parts * int(np.prod(shape)))), 1)
        scores = torch.zeros(parts, count, *shape)
        distributed = self.session.distributed
        for indices in torch.arange(distributed.rank, count, distributed.world_size).split(self.data.eval_batch_size):
            batch = self.val[indices * num_windows // count]
            values = batch_outputs(self.session, self.model, batch).float()
            values = values if values.dim() == 4 else values.unsqueeze(-1)
            y, spread = batch["y"], output.spread(values)
            if output.is_location_scale:
                scores[0, indices] = (y - values[..., 0]).abs() / spread
                continue
            ends = output.quantiles(values, [tau for pair in pairs for tau in pair])
            for number, low in enumerate(ends):
                scores[number, indices] = torch.maximum(low - y, y - next(ends)) / spread
        return np.sort(distributed.sum(scores).numpy(), axis=1)  # exact: each element is non-zero on one rank only


def calibrate(scorer: ConformityScores, levels: Sequence[float], taus: Sequence[float]) -> tuple[torch.Tensor, int]:
    """Compute the offsets of :class:`exp.forecasting.intervals.Intervals` from the validation split.

    Args:
        scorer: the validation split.
        levels: coverages, for which there must be enough windows. The other central intervals of ``taus`` use the
            largest score if there are too few windows.
        taus: the K quantile levels, ascending.

    Returns:
        Offsets, float32 (K, H, C), and the number of windows that they were computed from.

    Raises:
        ConfigError: there are too few windows.
    """
    index_of, pairs = {tau: number for number, tau in enumerate(taus)}, central_pairs(taus)
    scores = scorer.collect(pairs)
    offsets = np.zeros((len(taus), *scores.shape[2:]), dtype=np.float32)
    check_num_scores(scores[0], max(levels), scorer.data.names, scorer.data.scored)
    is_gaussian = scorer.output.is_location_scale and not isinstance(scorer.output, Points)
    for number, (low, high) in enumerate(pairs):
        ordered = scores[0 if scorer.output.is_location_scale else number]
        constant = NormalDist().inv_cdf(high) if is_gaussian else 0.0
        offsets[index_of[high]] = conformal_bound(ordered, round(high - low, 6)) - np.float32(constant)
        offsets[index_of[low]] = -offsets[index_of[high]]
    return torch.from_numpy(offsets), scores.shape[1]


def conformal_bound(scores: np.ndarray, level: float) -> np.ndarray:
    """The bound, (H, C), that a new score does not exceed with probability ``level``.

    Args:
        scores: float32 (N, H, C), ascending, NaN last. With too few scores the bound is the largest one; with
            none but NaN it is 0.
        level: between 0 and 1.
    """
    counts = len(scores) - np.isnan(scores).sum(axis=0)
    ranks = np.clip(np.ceil(np.round((counts + 1) * level, 6)).astype(np.int64), 1, counts)
    bounds = np.take_along_axis(scores, (ranks - 1)[None], axis=0)[0]
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
