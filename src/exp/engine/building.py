"""What the tasks share: building data and model, loading weights, and the record of a run."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from omegaconf import OmegaConf
from torch.utils.data import Dataset

from exp.config.resolve import create
from exp.data.base import Data, Extras, split_of
from exp.engine.checkpoint import plain
from exp.engine.fit import Weights, fit_weights, read_weights
from exp.engine.wrapper import compiles_itself
from exp.errors import EXPERIMENT_PAGE, ConfigError, RunError, shown
from exp.hub import pinned
from exp.metrics import Evaluator, Metric
from exp.models.base import Model
from exp.runs.files import write_json
from exp.runs.record import blank_result, describe_environment, in_role
from exp.task import task_class

if TYPE_CHECKING:
    from torch import nn

    from exp.session import Session

__all__ = [
    "about_data",
    "build_data",
    "build_evaluator",
    "build_model",
    "make_result",
    "measured_part",
    "rank_logger",
    "record_environment",
    "split_in_use",
]


def build_data(session: Session) -> Data:
    """The data set of the configuration; with the weights of a run, as that run had it.

    What belongs to weights, such as the standardization of a series or the names of classes, goes with them: a data set
    has ``state_dict()`` for it, which every checkpoint keeps, and ``load_state_dict(state)``. Its ``notes`` are
    reported.

    Raises:
        DataError: the data do not go with the weights.
    """
    session.wait_for("loading the data")
    data: Data = create(session.config.data, Data, "data")
    if session.config.init_from:
        session.weights = read_weights(Path(str(pinned(session.config))))
        if session.weights.data is not None and task_class(session.config).needs_weights:
            data.load_state_dict(session.weights.data)
    session.extras = Extras()
    data.setup(session)
    session.data_state = data.state_dict()
    try:
        plain(session.data_state)
    except TypeError as error:
        raise ConfigError(
            f"data: {shown(data)}.state_dict must give numbers, text, lists, dicts, tensors: {error}; "
            f"see {EXPERIMENT_PAGE}"
        ) from error
    for note in data.notes:
        session.say(note)
    return data


def about_data(session: Session, data: Data) -> dict[str, Any]:
    """What ``result.json`` has of the data; all ranks call it."""
    record = session.extras.record
    if record is None:
        return {split: len(getattr(data, split)) for split in ("train", "val", "test")}
    return record(session.distributed.gather)


def build_model(session: Session, data: Data, to_place: bool = False) -> nn.Module:
    """The model of the configuration, on the CPU, with the weights of ``init_from`` where it is set; to be compiled.

    Args:
        session: the session.
        data: what the files alone can tell, such as the number of classes, comes from its ``model_arguments()``.
        to_place: whether :func:`exp.engine.wrapper.place_and_wrap` gets it for a training.

    Raises:
        ConfigError: the weights do not fit (:func:`exp.engine.fit.fit_weights`), or it is no model.
    """
    session.wait_for("building the model")
    model: nn.Module = create(session.config.model, (Model, BaseModel), "model", **data.model_arguments())
    if session.weights is not None:
        session.say(fit_weights(model, session.weights, session.config))
        session.weights = Weights(session.weights.path, {}, None)  # the tensors are the model's now
    elif task_class(session.config).needs_weights and model.state_dict():
        raise ConfigError(
            f"task={session.config.task.name} needs weights, and the model has {len(model.state_dict())} tensors, "
            "though its keys say has_weights = False; set init_from, or leave that out"
        )
    elif any(getattr(module, "init_cfg", None) for module in model.modules()):
        rank_logger(session)  # MMEngine notes there what it does
        model.init_weights()  # type: ignore[operator]
    if session.config.compile and not (to_place and compiles_itself(session)):
        model.compile()  # when it is first called; in place: names and hooks stay, and any wrapper comes around it
    session.built(model)
    return model


def rank_logger(session: Session) -> MMLogger:
    """MMEngine's logger of this run, which writes into the log of the rank, not to the terminal."""
    logger: MMLogger = MMLogger.get_instance(session.unique_name)
    logger.setLevel("INFO")
    logger.handlers[:] = list(logging.getLogger().handlers)
    return logger


def record_environment(session: Session) -> None:
    """Rank 0 writes ``env.json``."""
    if session.distributed.is_main:
        env = session.folder.env
        path = session.folder.start / env.name if session.pending else env
        write_json(path, describe_environment(session.backend, session.devices))


def build_evaluator(session: Session, data: Data, detailed: bool = False) -> Evaluator:
    """What is measured: the metrics of the data, and those of the configuration.

    Args:
        session: the session.
        data: of :func:`build_data`.
        detailed: with tables, for ``task=eval``.

    Raises:
        ConfigError: one is no metric, two give the same name, or none gives ``metric``.
    """
    own = data.metrics(detailed)
    further = [create(config, Metric, f"metrics[{number}]") for number, config in enumerate(session.config.metrics)]
    return Evaluator([*(own if isinstance(own, (list, tuple)) else [own]), *further], session.config.metric)


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
        evaluator: knows which of them is reported; None: none.
        selected_by: that metric on validation data: what sweeps, reports and sweepers choose by. None: the task has
            measured none, and its runs are not put in an order.
        **extra: further keys, such as steps and epochs.

    Raises:
        RunError: the metric that is reported is not finite. Others may be, and are null in the file: a class
            that does not occur has no precision.
    """
    config = session.config
    part = measured_part(config)
    result = blank_result(config)
    metric_name = "" if evaluator is None else evaluator.metric_name
    _check_finite(metrics, metric_name, extra.get("measured_on", result["measured_on"]))
    result.update(
        status="completed",
        metrics=metrics,
        metric_name=metric_name,
        metric=metrics.get(metric_name),
        metric_units={} if evaluator is None else evaluator.units,
        greater_is_better=evaluator is not None and evaluator.greater_is_better,
        published=None if part else _published(config),
        trained_in=config.record.trained_in,
        differs=list(config.record.differs),
        device_type=session.device.type,
        devices=[{key: device.get(key) for key in ("name", "index", "host")} for device in session.devices],
        process_group=session.process_group,
        fallback=session.fallback,
        wrapper=config.wrapper.kind if session.info.world_size > 1 else "none",
        wall_s=time.time() - session.started,
        restarts=session.info.restart_count + session.info.requeues,
    )
    if session.weights is not None and task_class(config).needs_weights:
        result["checkpoint"] = str(session.weights.path)
    result.update(extra)
    if part:
        result["measured_on"] += f" ({part})"
    result["selected_by"] = in_role(result["metric_name"], "validation", selected_by)
    result["reported"] = in_role(result["metric_name"], result["measured_on"], result["metric"])
    return result


def _check_finite(metrics: dict[str, float], name: str, measured_on: str) -> None:
    value = metrics.get(name)
    if value is not None and not math.isfinite(value):
        raise RunError(
            f"{measured_on} {name} is {value}: the model's outputs or the data are not finite, or nothing could be "
            "scored; check the data, and the weights for a training that diverged (lower optim.lr)"
        )


def _published(config: Any) -> dict[str, Any] | None:
    """The published figures for these data and this horizon, where the experiment states them."""
    horizon = config.data.get("horizon")
    if horizon not in config.published or config.published_for != config.data.get("name"):
        return None
    figures: Any = OmegaConf.to_container(config.published[horizon])
    return {**figures, "source": config.published_source, "differs": list(config.record.published_differs)}


def split_in_use(session: Session, data: Data, split: str) -> Any:
    """A split, indexed by a whole batch, or as much of it as ``debug`` leaves.

    Samples are spread evenly over the split, since files are often sorted by class or time.

    Args:
        session: the session.
        data: the data set.
        split: ``train``, ``val`` or ``test``.

    Raises:
        ConfigError: as :func:`exp.data.base.split_of`.
    """
    config, debug = session.config, session.config.debug
    overfit = debug.overfit and config.global_batch_size is not None  # which only a training has
    dataset = split_of(data, "train" if overfit else split, config.seed)
    if overfit or split == "train":
        batches, size = debug.train_batches, config.global_batch_size or 1
    else:
        batches = debug.val_batches if split == "val" else debug.test_batches
        size = data.eval_batch_size * session.info.world_size
    if batches is None or (batches * size >= len(dataset) and not overfit):
        return dataset
    return _Part(dataset, min(batches * size, len(dataset)), same=overfit)


def measured_part(config: Any) -> str | None:
    """What the figures of a run are of, if they are of no whole split."""
    if config.debug.overfit and config.global_batch_size is not None:
        return "training batches"
    return None if config.debug.test_batches is None else f"{config.debug.test_batches} of its batches"


class _Part(Dataset[Any]):
    """``count`` samples of a dataset that is indexed by a whole batch.

    Args:
        dataset: the whole.
        count: at most its length.
        same: give the samples of epoch 0 in every epoch, as they are augmented there, also for evaluation.
    """

    takes_batches = True

    def __init__(self, dataset: Any, count: int, same: bool) -> None:
        self.dataset = dataset
        self.count = count
        self.whole_needs_epoch = getattr(dataset, "needs_epoch", False)
        self.needs_epoch = self.whole_needs_epoch and not same
        self.same = same

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, keys: torch.Tensor) -> Any:
        numbers = (keys[:, 0] if keys.dim() == 2 else keys) * len(self.dataset) // self.count
        if keys.dim() == 2:
            return self.dataset[torch.stack([numbers, keys[:, 1]], dim=1)]
        if self.same and self.whole_needs_epoch:
            return self.dataset[torch.stack([numbers, torch.zeros_like(numbers)], dim=1)]
        return self.dataset[numbers]
