"""What a task leaves: the content of ``result.json``, and pictures."""

from __future__ import annotations

import io
import logging
import math
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Callable, Mapping

import numpy as np
import torch
from omegaconf import OmegaConf

from exp.engine.wrapper import is_sharded, unwrapped
from exp.errors import RunError
from exp.runs.files import read_seal, write_atomically
from exp.runs.record import empty_result

if TYPE_CHECKING:
    from exp.draw.figure import Picture
    from exp.metrics import Evaluator
    from exp.session import Session

logger = logging.getLogger(__name__)

_OF_DEVICE = ("name", "index", "host", "backend", "share")
"""What ``result.json`` says of each rank's device; ``env.json`` has all."""


def make_result(
    session: Session,
    metrics: dict[str, float],
    evaluator: Evaluator | None,
    selected_by: float | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """The content of ``result.json`` for a completed task.

    Args:
        session: the session.
        metrics: all metrics by name.
        evaluator: has the name of the main metric, which is reported; None: there is none.
        selected_by: the main metric on validation data, by which sweeps and reports rank runs. None: the task has not
            measured it, so its runs are not ranked.
        **extra: further keys, such as steps and epochs.

    Raises:
        RunError: the main metric is not finite. Other metrics may be NaN, for example the precision of a class that
            does not occur; they are null in the file.
    """
    config = session.config
    part = _measured_part(config)
    result = empty_result(config)
    metric_name = "" if evaluator is None else evaluator.metric_name
    value = metrics.get(metric_name)
    if value is not None and not math.isfinite(value):
        measured_on = extra.get("measured_on", result["measured_on"])
        raise RunError(
            f"{measured_on} {metric_name} is {value}: the model's outputs or the data are not finite, or no sample "
            "could be measured; check the data, and whether the training has diverged (lower optim.lr)"
        )
    result.update(
        status="completed",
        metrics=metrics,
        metric_name=metric_name,
        metric=value,
        metric_units={} if evaluator is None else evaluator.units,
        baselines={} if evaluator is None else evaluator.baselines,
        metrics_alike=[] if evaluator is None else evaluator.alike,
        greater_is_better=evaluator is not None and evaluator.greater_is_better,
        reference=None if part or not config.record.reference else OmegaConf.to_container(config.record.reference),
        trained_in=config.record.trained_in,
        differs=list(config.record.differs),
        device_type=session.device.type,
        world_size=session.info.world_size,
        devices=[
            {key: value for key, value in {"index": None, **device}.items() if key in _OF_DEVICE}
            for device in session.devices
        ],
        process_group=session.distributed.process_group,
        fallback=session.distributed.fallback,
        wrapper=config.wrapper.kind if session.info.world_size > 1 else "none",
        wall_s=time.time() - session.started,
        restarts=session.info.restart_count,
    )
    if config.launcher.mixed:
        result["backend"] = "+".join(dict.fromkeys(device["backend"] for device in session.devices))
        result["simulated"] = any(device["simulated"] for device in session.devices)
    if session.weights is not None and session.weights.files:
        result["weights"] = {"source": config.init_from, "files": session.weights.files}
    if session.weights is not None and session.task.needs_weights:
        result["checkpoint"] = str(session.weights.path)
        seal = read_seal(session.weights.path)
        result["checkpoint_digest"], result["checkpoint_run"] = (None, None) if seal is None else seal
    result.update(extra)
    if part:
        result["measured_on"] += f" ({part})"
    measurements = {"selected_by": ("validation", selected_by), "reported": (result["measured_on"], result["metric"])}
    for role, (split, number) in measurements.items():
        report = {"metric": result["metric_name"], "measured_on": split, "value": number}
        result[role] = None if number is None else report
    return result


def write_samples(session: Session, evaluator: Evaluator, sampler: Any) -> None:
    """Write ``test_samples.npz``: what each sample of the test split adds to the metrics. A collective.

    By name of a metric, float32 (N,) in the order of the split, scaled so that their mean is the metric. Nothing is
    written if no metric is a mean over samples (:meth:`exp.metrics.Metric.sample_sums`).

    Args:
        session: the session.
        evaluator: after ``compute``.
        sampler: yields the indices of each batch of this rank.
    """
    sums = [metric.sample_sums() for metric in evaluator.metrics]
    order = torch.cat([torch.empty(0, dtype=torch.long), *sampler])
    by_rank = session.distributed.gather_to_main((order, sums))
    if not session.distributed.is_main:
        return
    places = torch.argsort(torch.cat([order for order, _ in by_rank]))
    arrays: dict[str, Any] = {}
    for parts in zip(*(sums for _, sums in by_rank)):
        if any(part is None or len(part[1]) != len(order) for part, (order, _) in zip(parts, by_rank)):
            continue  # it does not have a value for each sample
        weights = torch.cat([weights for _, weights in parts]).double().mean()
        for name in parts[0][0]:
            values = torch.cat([values[name] for values, _ in parts])[places]
            arrays[name] = (values.double() / weights).float().numpy()
    if arrays:
        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_atomically(session.folder.test_samples, content.getvalue())


def _measured_part(config: Any) -> str | None:
    """The part of the split on which a run is tested; None: the whole split."""
    if config.debug.overfit and config.global_batch_size is not None:
        return "training batches"
    return None if config.debug.eval_batches is None else f"{config.debug.eval_batches} of its batches"


def write_picture(session: Session, name: str, picture: Picture) -> list[str]:
    """Write a picture into the run folder.

    Args:
        session: the session.
        name: path of the PNG file, relative to the run folder; other formats get their own suffix.
        picture: a picture (:class:`exp.data.extensions.DataExtensions`).

    Returns:
        Paths of the files, relative to the run folder; empty with ``plots=false``.
    """
    # Imported here, because it imports matplotlib.
    from exp.draw.figure import encode_picture

    files: list[str] = []
    if not session.config.plots:
        return files
    for form, content in encode_picture(picture, session.config.figures).items():
        files.append(str(PurePosixPath(name).with_suffix(f".{form}")))
        write_atomically(session.folder.path / files[-1], content)
    return files


def draw_pictures(session: Session, make: Callable[[], Mapping[str, Picture]]) -> None:
    """Draw and write pictures on rank 0; an error is reported, but does not end the run."""
    if session.config.plots and session.distributed.is_main:
        try:
            for name, picture in make().items():
                write_picture(session, f"plots/{name}", picture)
        except Exception as error:
            logger.exception("plots")
            session.print(f"plots: not drawn: {type(error).__name__}: {error}; the log of rank 0 has the traceback")


def training_pictures(session: Session, model: Any, evaluator: Evaluator) -> dict[str, Picture]:
    """Draw ``curves.png`` and the pictures of the data.

    Args:
        session: the session.
        model: wrapped or not, on the session's device, with the tested weights; is left in eval mode.
        evaluator: that of the test.

    Returns:
        Pictures by name.
    """
    from exp.draw.figure import training_curves

    pictures: dict[str, Picture] = {}
    if session.folder.metrics.is_file():
        metric, greater = evaluator.metric_name, evaluator.greater_is_better
        pictures["curves.png"] = training_curves(session.folder.records(), metric, greater, session.config.name)
    draw = session.extensions.pictures
    if draw is not None and is_sharded(unwrapped(model)):  # a forward pass is a collective, and this is rank 0 alone
        session.print("plots: no pictures of predictions with wrapper=fsdp; task=predict draws them")
    elif draw is not None:
        pictures.update(draw(model, evaluator))
    return pictures
