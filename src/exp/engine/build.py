"""Builds the data, the model and the metrics of a configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mmengine.model import BaseModel
from torch.utils.data import Dataset

from exp import hub
from exp.config.resolve import create
from exp.data.base import Data, split_of
from exp.data.extensions import DataExtensions
from exp.data.loader import EvalBatchSampler, device_loader
from exp.engine.checkpoint.writer import plain_copy
from exp.engine.mmengine import rank_logger
from exp.engine.weights import load_weights, other_classes, read_weights
from exp.errors import ConfigError
from exp.hub.files import files_of
from exp.metrics import Evaluator, Metric
from exp.models.base import Model
from exp.runs.files import file_digest

if TYPE_CHECKING:
    from torch import nn

    from exp.session import Session


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
        weights = Path(str(hub.with_commit(session.config)))
        session.weights = read_weights(weights, session.config.checkpoint.trusted)
        if session.distributed.is_main and not session.config.record.weights:  # else a hub's, which are digested
            session.weights.files.update((file.name, file_digest(file)) for file in files_of(session.weights.path))
        if session.weights.data is not None and session.task.needs_weights:
            data.load_state_dict(session.weights.data)
    session.extensions = DataExtensions()
    data.setup(session)
    session.data_state = data.state_dict()
    plain_copy(session.data_state, key="data")  # says now what the first checkpoint would
    for note in data.notes:
        session.print(note)
    return data


def fingerprint_data(session: Session) -> None:
    """Take the fingerprint of the data files, for checkpoints and ``inputs.json``, on rank 0."""
    if session.distributed.is_main and session.extensions.fingerprint is not None:
        session.data_files = session.extensions.fingerprint()


def data_record(session: Session, data: Data) -> dict[str, Any]:
    """The entries about the data in ``result.json``. A collective."""
    record = session.extensions.record
    if record is None:
        return {split: len(getattr(data, split)) for split in ("train", "val", "test")}
    return record(session.distributed.gather)


def build_model(session: Session, data: Data, for_training: bool = False) -> nn.Module:
    """Build the model of the configuration on the CPU, with the weights of ``init_from`` if it is set.

    With ``compile=true`` the model is marked for compilation, unless its wrapper compiles it.

    Args:
        session: the session.
        data: its ``model_arguments()`` are arguments of the model, such as the number of classes.
        for_training: whether the model is for training with :func:`exp.engine.wrapper.place_and_wrap`, where the
            wrapper may compile it.

    Raises:
        ConfigError: the class is not a model or does not take the arguments, weights are missing, or they do not match
            (:func:`exp.engine.weights.load_weights`).
    """
    model: nn.Module = create(session.config.model, (Model, BaseModel), "model", **data.model_arguments())
    if for_training and isinstance(model, Model):
        model.prepare_training()
    if session.weights is not None:
        classes = None if session.task.needs_weights else other_classes(session, data, model)
        session.print(load_weights(model, session.weights, session.config, session.task.needs_weights, classes))
        session.weights = replace(session.weights, state={}, data=None)  # the tensors are the model's now
    elif session.task.needs_weights and model.state_dict():
        raise ConfigError(
            f"task={session.config.task.name} needs weights: the model has {len(model.state_dict())} tensors, although "
            "its typed keys have has_weights = False; set init_from, or remove has_weights"
        )
    elif any(getattr(module, "init_cfg", None) for module in model.modules()):
        rank_logger(session.unique_name)  # the logger to which MMEngine reports the initialization
        model.init_weights()  # type: ignore[operator]
    wraps = for_training and session.info.world_size > 1
    if session.config.compile and not (wraps and "compile" in session.config.wrapper.options):  # else it compiles
        model.compile()  # compiles at the first call; in place, so names and hooks stay, and it can still be wrapped
    session.notify_model(model)
    return model


def build_evaluator(session: Session, data: Data, detailed: bool = False) -> Evaluator:
    """Combine the metrics of the data and those of the configuration.

    Args:
        session: the session.
        data: of :func:`build_data`.
        detailed: compute tables, too, for ``task=eval``.

    Raises:
        ConfigError: an object is not a metric, two metrics have the same name, or none has the name in ``metric``.
    """
    metrics = data.metrics(detailed)
    configured = [create(config, Metric, f"metrics[{number}]") for number, config in enumerate(session.config.metrics)]
    return Evaluator(
        [*(metrics if isinstance(metrics, (list, tuple)) else [metrics]), *configured], session.config.metric
    )


def dataset_for(session: Session, data: Data, split: str) -> Any:
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
        batches, size = debug.eval_batches, data.eval_batch_size * session.info.world_size
    if batches is None or (batches * size >= len(dataset) and not overfit):
        return dataset
    return _Subset(dataset, min(batches * size, len(dataset)), same=overfit)


def eval_split(session: Session, data: Data, split: str) -> Any:
    """The loader of this rank's share of a split in evaluation; its ``sampler`` yields the indices of each batch.

    Args:
        session: the session.
        data: the data set.
        split: see :func:`dataset_for`.
    """
    dataset, info = dataset_for(session, data, split), session.info
    sampler = EvalBatchSampler(len(dataset), data.eval_batch_size, info.rank, info.world_size, session.shares)
    return device_loader(dataset, sampler, data.num_workers, session)


class _Subset(Dataset[Any]):
    """``count`` samples of a dataset that is indexed by a whole batch, spread evenly over it.

    Args:
        dataset: the whole dataset.
        count: number of samples, at most the length of ``dataset``.
        same: return the samples of epoch 0, with the same augmentation, in every epoch and in evaluation.
    """

    is_batched = True

    def __init__(self, dataset: Any, count: int, same: bool) -> None:
        self.dataset, self.count, self.same = dataset, count, same
        self.needs_epoch = getattr(dataset, "needs_epoch", False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, keys: torch.Tensor) -> Any:
        indices = keys.reshape(len(keys), -1)  # (B, 1), or (B, 2) with the epoch
        numbers, epochs = indices[:, 0] * len(self.dataset) // self.count, indices[:, -1]
        if self.same:
            epochs = torch.zeros_like(epochs)
        with_epoch = keys.dim() == 2 or (self.same and self.needs_epoch)
        return self.dataset[torch.stack([numbers, epochs], dim=1) if with_epoch else numbers]
