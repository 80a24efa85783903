"""Functions that tasks share: build data, model and metrics, load weights, and make the record of a run.

A task that uses a trained model as it is (eval, predict, features) needs an exact match: every tensor of the model must
be in the file, and every tensor of the file in the model. Otherwise part of the model would be random, or the model
would differ from the trained one. A training may start with a new head, for example for other classes; ``init_partial``
allows more.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import torch
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from omegaconf import OmegaConf
from torch.utils.data import Dataset

from exp import hub
from exp.config.compose import is_of_hub
from exp.config.differences import text_of
from exp.config.resolve import create
from exp.data.base import Data, Extras, split_of
from exp.data.places import shortened
from exp.engine import checkpoint
from exp.engine.wrapper import compiles_itself
from exp.errors import ConfigError, RunError
from exp.metrics import Evaluator, Metric
from exp.models.base import Model
from exp.runs.folder import blank_result, in_role
from exp.task import task_class

if TYPE_CHECKING:
    from torch import nn

    from exp.config.schema import ExpConfig
    from exp.session import Session

__all__ = [
    "Weights", "about_data", "build_data", "build_evaluator", "build_model", "fit_weights", "make_result",
    "measured_part", "rank_logger", "read_weights", "split_in_use",
]  # fmt: skip


def build_data(session: Session) -> Data:
    """Build the data set of the configuration, read the weights of ``init_from``, and print the ``notes`` of the data.

    If the task needs weights, the data take the state that belongs to them, such as mean and standard deviation of a
    series or the names of classes (:meth:`exp.data.base.Data.state_dict`).

    Raises:
        ConfigError: the class of the data cannot be used, or the weights do not exist.
        TypeError: the state of the data is not plain data.
        DataError: the data do not match the weights.
        CheckpointError: the weights cannot be read.
        UnavailableError: weights of a hub cannot be fetched, or the class cannot be imported.
    """
    data: Data = create(session.config.data, Data, "data")
    if session.config.init_from:
        session.weights = read_weights(Path(str(hub.pinned(session.config))))
        if session.weights.data is not None and task_class(session.config).needs_weights:
            data.load_state_dict(session.weights.data)
    session.extras = Extras()
    data.setup(session)
    session.data_state = data.state_dict()
    checkpoint.plain(session.data_state, key="data")  # says now what the first checkpoint would
    for note in data.notes:
        session.say(note)
    return data


def about_data(session: Session, data: Data) -> dict[str, Any]:
    """The entries about the data in ``result.json``. A collective."""
    record = session.extras.record
    if record is None:
        return {split: len(getattr(data, split)) for split in ("train", "val", "test")}
    return record(session.distributed.gather)


def build_model(session: Session, data: Data, to_place: bool = False) -> nn.Module:
    """Build the model of the configuration on the CPU, with the weights of ``init_from`` if it is set.

    With ``compile=true`` the model is marked for compilation, unless its wrapper compiles it.

    Args:
        session: the session.
        data: its ``model_arguments()`` are arguments of the model, such as the number of classes.
        to_place: whether the model is for training with :func:`exp.engine.wrapper.place_and_wrap`, where the wrapper
            may compile it.

    Raises:
        ConfigError: the class is not a model or does not take the arguments, weights are missing, or they do not match
            (:func:`fit_weights`).
    """
    model: nn.Module = create(session.config.model, (Model, BaseModel), "model", **data.model_arguments())
    if session.weights is not None:
        session.say(fit_weights(model, session.weights, session.config))
        session.weights = Weights(session.weights.path, {}, None)  # the tensors are the model's now
    elif task_class(session.config).needs_weights and model.state_dict():
        raise ConfigError(
            f"task={session.config.task.name} needs weights: the model has {len(model.state_dict())} tensors, although "
            "its typed keys have has_weights = False; set init_from, or remove has_weights"
        )
    elif any(getattr(module, "init_cfg", None) for module in model.modules()):
        rank_logger(session)  # the logger to which MMEngine reports the initialization
        model.init_weights()  # type: ignore[operator]
    if session.config.compile and not (to_place and compiles_itself(session)):
        model.compile()  # compiles at the first call; in place, so names and hooks stay, and it can still be wrapped
    session.built(model)
    return model


@dataclass(frozen=True)
class Weights:
    """The weights in a file.

    Attributes:
        path: the file.
        state: tensors by name, on the CPU.
        data: state of the data on which the weights were trained (:meth:`exp.data.base.Data.state_dict`); None: the
            file does not contain it.
    """

    path: Path
    state: Mapping[str, torch.Tensor]
    data: dict[str, Any] | None


def read_weights(path: Path) -> Weights:
    """Read the weights of exp's checkpoints, or of other projects.

    Args:
        path: a ``.pth`` or ``.safetensors`` file, the index of several ``.safetensors`` files, a run folder (its best
            checkpoint, or else the newest), a folder of weights, or a name in a hub (:mod:`exp.hub`).

    Raises:
        CheckpointError: the file cannot be read, or holds no state dict.
        ConfigError: the folder contains no weights.
        UnavailableError: the weights cannot be fetched from the hub.
    """
    if is_of_hub(str(path)):
        path = hub.local_file(str(path))
    elif path.is_dir():
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
        candidates = [folder / "best.pth", *checkpoint.list_checkpoints(folder), folder / "model.safetensors"]
        candidates.append(folder / hub.INDEX)
        found = next((each for each in candidates if each.is_file()), None)
        if found is None:
            raise ConfigError(
                f"init_from={path} holds no checkpoint; looked for best.pth, step_*.pth, model.safetensors and its "
                f"index in {folder}"
            )
        path = found
    content = checkpoint.read(path, mapped=True)
    state = checkpoint.weights_of(content, path)
    ours = isinstance(content, Mapping) and "state_dict" in content and isinstance(content.get("data"), dict)
    return Weights(path, state, content["data"] if ours else None)


def fit_weights(model: nn.Module, weights: Weights, config: ExpConfig, as_it_is: bool | None = None) -> str:
    """Load weights into a model, in place.

    Args:
        model: the model. If it has them, these methods of :class:`exp.models.base.Model` are used:
            ``adapt_state_dict(state, path)``, which renames tensors of other projects; for training
            ``fit_state_dict(state, path)``, which changes shapes; and ``may_start_anew(name)``, which tells the
            parameters that may be missing when a training starts.
        weights: of :func:`read_weights`.
        config: the frozen configuration.
        as_it_is: whether the model is used without training, which needs an exact match; None: if the task needs
            weights.

    Returns:
        A report for the user: how many tensors match, and which do not.

    Raises:
        ConfigError: the weights do not match the model, or are not finite.
    """
    path, own, task = weights.path, model.state_dict(), str(config.task.name)
    if as_it_is is None:
        as_it_is = task_class(config).needs_weights
    foreign: Any = model
    state: Any = weights.state
    if hasattr(model, "adapt_state_dict"):
        state = foreign.adapt_state_dict(state, path)
    if not as_it_is and hasattr(model, "fit_state_dict"):
        state = foreign.fit_state_dict(state, path)
    fitting = {key: value for key, value in state.items() if key in own and value.shape == own[key].shape}
    missing = [key for key in own if key not in state]
    others = [key for key in state if key in own and key not in fitting]
    unknown = [key for key in state if key not in own]
    shapes = [f"{key} {tuple(state[key].shape)} in the file, {tuple(own[key].shape)} in the model" for key in others]
    listed = {"missing in the file": missing, "other shape": shapes, "unknown to the model": unknown}
    count = f"{len(fitting)} of {len(own)} tensors"
    misfits = [f"{title}: {shortened(names)}" for title, names in listed.items() if names]
    may_be_new: Any = getattr(model, "may_start_anew", lambda _: False)
    head_alone = all(map(may_be_new, [*missing, *others]))
    reason = ""
    if as_it_is and not (head_alone and all(map(may_be_new, unknown)) if task == "features" else not misfits):
        # Features are the output of the backbone, so the head may differ.
        reason = f"task={task} needs all weights of the model, and {path} does not fit it"
        differs = ", ".join(config.record.differs)
        cure = f"not as in the run: {differs}" if differs else "use the settings with which the weights were trained"
    elif not as_it_is and not (fitting and (head_alone or config.init_partial)):
        reason = f"init_from: {path} fits the model only in part: more than a new head is missing or differs"
        cure = "init_partial=true starts the rest from random weights"
    if reason:
        raise ConfigError("; ".join([f"{reason}: {count}", cure, *misfits]))
    odd = checkpoint.not_finite(fitting, {name for name, _ in model.named_parameters()})
    if odd:
        raise ConfigError(
            f"init_from: {path} has weights that are not finite: {shortened(odd, 1)}; their training has diverged, use "
            "other weights"
        )
    model.load_state_dict(fitting, strict=False)
    report = f"init_from: {count} from {path}"
    if path.is_file() and checkpoint.digest_in(path) is None:
        report += f" ({checkpoint.NO_DIGEST})"
    trusted = [f"model.{key}={text_of(config.model.get(key))}" for key in getattr(model, "taken_on_trust", ())]
    if trusted and config.record.trained_in is None:
        report += f"\n  taken on trust, since the weights cannot confirm them: {', '.join(trusted)}"
    return report if as_it_is else "\n  ".join([report, *misfits])


def rank_logger(session: Session) -> MMLogger:
    """MMEngine's logger of this run, set up to write to the log of the rank instead of the terminal."""
    logger: MMLogger = MMLogger.get_instance(session.unique_name)
    logger.setLevel("INFO")
    logger.handlers[:] = list(logging.getLogger().handlers)
    return logger


def build_evaluator(session: Session, data: Data, detailed: bool = False) -> Evaluator:
    """Combine the metrics of the data and those of the configuration.

    Args:
        session: the session.
        data: of :func:`build_data`.
        detailed: compute tables, too, for ``task=eval``.

    Raises:
        ConfigError: an object is not a metric, two metrics have the same name, or none has the name in ``metric``.
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
        evaluator: has the name of the main metric, which is reported; None: there is none.
        selected_by: the main metric on validation data, by which sweeps and reports rank runs. None: the task has not
            measured it, so its runs are not ranked.
        **extra: further keys, such as steps and epochs.

    Raises:
        RunError: the main metric is not finite. Other metrics may be NaN, for example the precision of a class that
            does not occur; they are null in the file.
    """
    config = session.config
    part = measured_part(config)
    result = blank_result(config)
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
        greater_is_better=evaluator is not None and evaluator.greater_is_better,
        published=None if part else _published(config),
        trained_in=config.record.trained_in,
        differs=list(config.record.differs),
        device_type=session.device.type,
        devices=[{key: device.get(key) for key in ("name", "index", "host")} for device in session.devices],
        process_group=session.distributed.process_group,
        fallback=session.distributed.fallback,
        wrapper=config.wrapper.kind if session.info.world_size > 1 else "none",
        wall_s=time.time() - session.started,
        restarts=session.info.restart_count,
    )
    if session.weights is not None and task_class(config).needs_weights:
        result["checkpoint"] = str(session.weights.path)
    result.update(extra)
    if part:
        result["measured_on"] += f" ({part})"
    result["selected_by"] = in_role(result["metric_name"], "validation", selected_by)
    result["reported"] = in_role(result["metric_name"], result["measured_on"], result["metric"])
    return result


def _published(config: Any) -> dict[str, Any] | None:
    """The published metrics for these data and this horizon; None: the experiment has none."""
    horizon = config.data.get("horizon")
    if horizon not in config.published or config.published_for != config.data.get("name"):
        return None
    figures: Any = OmegaConf.to_container(config.published[horizon])
    return {**figures, "source": config.published_source, "differs": list(config.record.published_differs)}


def split_in_use(session: Session, data: Data, split: str) -> Any:
    """A split as a dataset that is indexed by a whole batch; with ``debug`` only a part of the split.

    The samples of the part are spread evenly over the split, since files are often sorted by class or time.

    Args:
        session: the session.
        data: the data set.
        split: ``train``, ``val`` or ``test``; with ``debug.overfit`` always the training split.

    Raises:
        ConfigError: the split is missing, or is not a dataset.
        DataError: the split is empty.
    """
    config, debug = session.config, session.config.debug
    overfit = debug.overfit and config.global_batch_size is not None  # other tasks than training have no batch size
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
    """The part of the split on which a run is tested; None: the whole split."""
    if config.debug.overfit and config.global_batch_size is not None:
        return "training batches"
    return None if config.debug.test_batches is None else f"{config.debug.test_batches} of its batches"


class _Part(Dataset[Any]):
    """``count`` samples of a dataset that is indexed by a whole batch, spread evenly over it.

    Args:
        dataset: the whole dataset.
        count: number of samples, at most the length of ``dataset``.
        same: return the samples of epoch 0, with the same augmentation, in every epoch and in evaluation.
    """

    takes_batches = True

    def __init__(self, dataset: Any, count: int, same: bool) -> None:
        self.dataset, self.count, self.same = dataset, count, same
        self.needs_epoch = getattr(dataset, "needs_epoch", False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, keys: torch.Tensor) -> Any:
        given = keys.reshape(len(keys), -1)  # (B, 1), or (B, 2) with the epoch
        numbers, epochs = given[:, 0] * len(self.dataset) // self.count, given[:, -1]
        if self.same:
            epochs = torch.zeros_like(epochs)
        with_epoch = keys.dim() == 2 or (self.same and self.needs_epoch)
        return self.dataset[torch.stack([numbers, epochs], dim=1) if with_epoch else numbers]
