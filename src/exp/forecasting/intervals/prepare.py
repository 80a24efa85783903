"""Intervals for the weights of a run, calibrated on its own data where new rows cannot."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Sequence

import torch
from omegaconf import OmegaConf

from exp.config.resolve import create
from exp.contract import shown
from exp.data.base import Data
from exp.engine import checkpoint
from exp.engine.debug import split_in_use
from exp.engine.wrapper import unwrapped
from exp.errors import ConfigError, DataError
from exp.forecasting.intervals.calibrate import Calibration, Scores, calibrated_quantiles, calibrated_residuals
from exp.forecasting.intervals.conformal import GRID, quantile_levels
from exp.forecasting.intervals.intervals import Intervals, Spread
from exp.forecasting.intervals.keys import MODEL, RESIDUALS, check_keys
from exp.runfolder import RunFolder

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["prepare"]

_KINDS = ("std", "quantiles")
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
    kind = _kind(task, model)
    rate = _rate(task, kind)
    if task.intervals_signed and kind == "quantiles":
        raise ConfigError("task.intervals_signed=true is for residuals; a model's own quantiles differ by side anyway")
    spread = None if kind == RESIDUALS else Spread(session, model)
    if kind == "quantiles":
        _check_quantiles(levels, model.quantiles)
    rescaled = kind == "std" if task.intervals_rescaled is None else task.intervals_rescaled
    if spread is not None and not rescaled:
        if task.intervals_signed:
            raise ConfigError(
                "task.intervals_signed=true is for residuals of the validation part: set task.intervals_rescaled=true"
            )
        record: dict[str, Any] = {"from": kind, "levels": levels}
        return Intervals(kind, levels, *_uncalibrated(kind, levels, model), spread, calibrated=False, record=record)
    found, on = _calibration(session, data, model, kind, levels, spread)
    record = {"from": kind, "levels": levels, "signed": bool(task.intervals_signed), "calibrated_on": on}
    record.update(windows=found.windows, of=found.of)
    if rate:
        record["adapts"] = rate
    budget = int(task.intervals_memory_mb) * 2**20
    return Intervals(
        kind, levels, found.taus, torch.from_numpy(found.offsets), spread, record=record, adapts=rate, budget=budget
    )


def _rate(task: Any, kind: str) -> float:
    """``task.intervals_adapt``, which only an evaluation has."""
    rate = float(task.get("intervals_adapt") or 0.0)
    if rate and (kind != RESIDUALS or task.intervals_signed):
        raise ConfigError(
            f"task.intervals_adapt={rate:g} is for intervals from absolute residuals: set "
            f"task.intervals_from={RESIDUALS} and task.intervals_signed=false"
        )
    return rate


def _kind(task: Any, model: Any) -> str:
    """What the intervals are made of."""
    offered = getattr(model, "spread", None)
    wanted = task.intervals_from
    if wanted == MODEL and offered not in _KINDS:
        raise ConfigError(
            f"task.intervals_from=model: {shown(model)} says nothing of how sure it is; set model.quantiles for the "
            f"training, or task.intervals_from={RESIDUALS}"
        )
    if wanted is None:
        kind = "quantiles" if offered == "quantiles" else RESIDUALS
    else:
        kind = RESIDUALS if wanted == RESIDUALS else str(offered)
    if kind == RESIDUALS and task.intervals_rescaled:
        raise ConfigError(
            "task.intervals_rescaled=true corrects what a model says of how sure it is: set task.intervals_from=model; "
            "intervals from residuals need no correction"
        )
    return kind


def _check_quantiles(levels: Sequence[float], quantiles: Sequence[float]) -> None:
    taus = {round(float(tau), 6) for tau in quantiles}
    there = sorted(round(2.0 * tau - 1.0, 6) for tau in taus if tau > 0.5 and round(1.0 - tau, 6) in taus)
    missing = [level for level in levels if level not in there]
    if missing:
        offered = ", ".join(f"{level:g}" for level in there) or "none"
        raise ConfigError(
            f"task.intervals: {missing[0]:g} is between no two of model.quantiles={[float(tau) for tau in quantiles]}; "
            f"these give {offered}; or set task.intervals_from={RESIDUALS}"
        )


def _uncalibrated(kind: str, levels: Sequence[float], model: Any) -> tuple[list[float], torch.Tensor]:
    taus = [float(tau) for tau in model.quantiles] if kind == "quantiles" else quantile_levels([*levels, *GRID])
    normal = NormalDist()
    offsets = [0.0 if kind == "quantiles" else normal.inv_cdf(tau) for tau in taus]
    return taus, torch.tensor(offsets).view(-1, 1, 1)


def _calibration(
    session: Session, data: Any, model: Any, kind: str, levels: list[float], spread: Spread | None
) -> tuple[Calibration, str]:
    """From the validation part of the data, or of those that the weights were trained on; and what it is of."""
    task = session.config.task
    own = data if "val" in data.rows and len(data.val) > 0 else _trained_on(session, data)
    session.wait_for("calibrating the intervals")
    val = split_in_use(session, own, "val")
    scores = Scores(session, own, val, model, int(task.intervals_memory_mb) * 2**20, spread)
    if kind == "quantiles":
        found = calibrated_quantiles(scores, levels)
    else:
        found = calibrated_residuals(scores, levels, bool(task.intervals_signed))
    on = f"val of {own.path.name}"
    if len(val) < len(own.val):
        on += f" ({len(val)} of {len(own.val)} windows)"
    said = f"intervals: calibrated on {found.windows} validation windows of {own.path.name}"
    if found.windows < found.of:
        said += f", spread evenly over {found.of} (task.intervals_memory_mb={task.intervals_memory_mb})"
    if session.distributed.is_main:
        session.say(said)
    return found, on


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
    for key in _OF_FILE:
        keys[key] = theirs[key]
    keys.inputs = list(data.names)  # in the order of the weights
    try:
        own = create(keys, Data, "data")
    except DataError as error:
        raise ConfigError(f"{problem}, nor can those of {run} be read: {error}") from error
    if list(own.fingerprint().values()) != list(files.values()):
        raise ConfigError(f"{problem}, and {own.path} is not what the weights were trained on any more")
    return own
