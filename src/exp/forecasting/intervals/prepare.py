"""Intervals for the weights of a run: from its folder, or calibrated now."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Sequence

import torch

from exp.contract import shown
from exp.engine.debug import split_in_use
from exp.engine.wrapper import unwrapped
from exp.errors import ConfigError
from exp.forecasting.intervals import store
from exp.forecasting.intervals.calibrate import Calibration, Scores, calibrated_quantiles, calibrated_residuals
from exp.forecasting.intervals.conformal import GRID, quantile_levels, rank_of
from exp.forecasting.intervals.intervals import Intervals, Spread
from exp.forecasting.intervals.keys import MODEL, RESIDUALS, check_keys

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["prepare"]

_KINDS = ("std", "quantiles")


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
    """That of the run's folder where it holds, else a new one; and what it is of.

    New rows take what the run keeps: so only what is made of the run's own data, with the model as it was trained, is
    kept there, and taken from there.
    """
    task = session.config.task
    budget = int(task.intervals_memory_mb) * 2**20
    val = split_in_use(session, data, "val") if "val" in data.rows and len(data.val) > 0 else None
    files = store.trained_on(session)
    unlike = store.not_as_trained(session, data, val, files)
    about = {
        "weights": store.digest_of(model),
        "model": store.settings_of(session.config),
        "data": data.name,
        "files": list((files or {}).values()),
        "names": list(data.names),
        "targets": list(data.target_names),
        "precision": session.config.precision,
        "horizon": data.horizon,
        "memory_mb": int(task.intervals_memory_mb),
    }
    name = store.file_name(about, f"{kind}_signed" if task.intervals_signed else kind)
    kept = place = None
    for folder in store.folders(session) if unlike is None else ():
        read = store.read(folder / name)
        if read is not None and all(read[0].get(key) == value for key, value in about.items()):
            kept, place = read[1], folder / name
            break
    # All ranks or none: files need not be the same everywhere.
    known = session.distributed.gather(kept if kept is None else _kept_levels(kept))
    if all(session.distributed.gather(kept is not None and _has(kept, levels, task.intervals_signed))):
        assert kept is not None
        session.say(f"intervals: those of {kept.windows} validation windows of {', '.join(files or ())}, from {place}")
        return kept, f"val of {', '.join(files or ())}"
    if val is None:
        problem = f"task.intervals: {data.path} has no validation part to calibrate {levels} with"
        if unlike is not None:
            raise ConfigError(f"{problem}, and what the run keeps is of the model as it was trained: {unlike}")
        there = "" if kept is None else f" (kept are those for {_kept_levels(kept)})"
        raise ConfigError(
            f"{problem}{there}; run task=eval with the same task.intervals on the run's own data first: its folder "
            "then keeps them"
        )
    session.wait_for("calibrating the intervals")
    scores = Scores(session, data, val, model, budget, spread)
    if kind == "quantiles":
        found = calibrated_quantiles(scores, levels)
    else:  # what could be asked for before can be still
        also = {level for each in known if each for level in each}
        found = calibrated_residuals(scores, levels, sorted(also), bool(task.intervals_signed))
    on = f"val of {data.path.name}"
    if len(val) < len(data.val):
        on += f" ({len(val)} of {len(data.val)} windows)"
    said = f"intervals: calibrated on {found.windows} validation windows"
    if found.windows < found.of:
        said += f", spread evenly over {found.of} (task.intervals_memory_mb={task.intervals_memory_mb})"
    if session.distributed.is_main:
        path = None if unlike else store.write(session, name, about, found)
        session.say(f"{said}; kept in {path}" if path else f"{said}; not kept for new rows: {unlike or 'no folder'}")
    return found, on


def _has(kept: Calibration, levels: Sequence[float], signed: bool) -> bool:
    """Whether it tells these levels, of windows enough at every step of every series."""
    if set(quantile_levels(levels)) - {round(tau, 6) for tau in kept.taus}:
        return False
    highest = max((1.0 + level) / 2.0 if signed else level for level in levels)
    return rank_of(kept.fewest, highest) <= kept.fewest


def _kept_levels(kept: Calibration) -> list[float]:
    return [round(2.0 * tau - 1.0, 6) for tau in kept.taus if tau > 0.5]
