"""Model and batches of a configuration, on torch's meta device: shapes without memory."""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Mapping

import torch
from mmengine.model import BaseModel
from torch import nn

from exp.config.resolve import create, resolve
from exp.contract import asked
from exp.data.base import Data, Sketch, check_data, split_of
from exp.data.transfer import tensors_of
from exp.errors import ConfigError, DataError
from exp.estimate.tracker import MemoryTracker

__all__ = ["Subject", "as_batch", "largest_sample", "optimizer_of"]

_LOOKED_AT = 8
"""Samples of a split, spread evenly over it: images may have different sizes."""


class Subject:
    """What is estimated: the model of a configuration, and what one of its batches looks like.

    Attributes:
        model: on the meta device.
        notes: what the figures do not know, a line each.
        eval_batch_size: samples per rank and batch in validation.
        held: bytes of the splits that a card keeps, and cuts its batches from.

    Args:
        config: validated; files of the data may be missing where their class has a sketch.
        on_meta: make the model on the meta device; false: on the CPU, for models whose code reads values.

    Raises:
        ConfigError: model or data cannot be made.
        DataError: the data's files are missing, and their class has no sketch.
    """

    def __init__(self, config: Any, on_meta: bool = True) -> None:
        self.notes: list[str] = []
        sketch, self.held = _sketch_of(config, self.notes)
        self.eval_batch_size = sketch.eval_batch_size
        self._train, self._val = sketch.train, sketch.val
        self._on_meta = on_meta
        with self.context():
            model: nn.Module = create(config.model, BaseModel, "model", **sketch.model_arguments)
        self.model = model.to("meta")

    def context(self) -> ContextManager[Any]:
        """In which the model runs: what it makes besides lies where its own constants are."""
        return torch.device("meta") if self._on_meta else contextlib.nullcontext()

    def train_batch(self, size: int) -> dict[str, Any]:
        """A training batch of ``size`` samples."""
        return as_batch(self._train, size)

    def val_batch(self) -> dict[str, Any]:
        """A validation batch."""
        return as_batch(self._val, self.eval_batch_size)


def _sketch_of(config: Any, notes: list[str]) -> tuple[Sketch, int]:
    """From the files where they are there, else from the configuration; and what a card keeps of the splits."""
    try:
        data: Data = create(config.data, Data, "data")
        check_data(data)
        sketch = Sketch(
            largest_sample(data, "train", config.seed),
            largest_sample(data, "val", config.seed),
            data.model_arguments(),
            data.eval_batch_size,
        )
        return sketch, _kept_on_device(data)
    except DataError as error:
        cls = resolve("data._target_", config.data["_target_"], Data)
        keys = {str(key): value for key, value in config.data.items() if key != "_target_"}
        drawn: Sketch | None = cls.sketch(**keys)
        if drawn is None:
            raise
        notes.append(f"shapes are those of the keys of data, whose files are not here: {str(error).splitlines()[0]}")
        notes.extend(drawn.notes)
        return drawn, 0


def _kept_on_device(data: Data) -> int:
    tracker = MemoryTracker()
    with tracker:
        splits = [split for split in (data.train, data.val) if hasattr(split, "on_device")]
        cuts = [split.on_device(torch.device("meta"), None) for split in splits]
        held = tracker.now["activations"]
    del cuts
    return held


def largest_sample(data: Data, split: str, seed: int) -> Mapping[str, Any]:
    """The largest of some samples of a split, as a batch of one.

    Args:
        data: the data set.
        split: its name.
        seed: of the augmentation.
    """
    dataset = split_of(data, split, seed)
    chosen = sorted({number * len(dataset) // _LOOKED_AT for number in range(_LOOKED_AT)})
    found: list[Mapping[str, Any]] = []
    for number in chosen:
        key = [number, 0] if getattr(dataset, "needs_epoch", False) else number
        with asked("data", data, f".{split}[...]"):
            found.append(dataset[torch.tensor([key], dtype=torch.int64)])
    return max(found, key=_bytes_of)


def _bytes_of(batch: Mapping[str, Any]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors_of(batch))


def as_batch(sample: Mapping[str, Any], size: int) -> dict[str, Any]:
    """A batch of ``size`` samples on the meta device.

    Args:
        sample: a batch of one; tensors (1, ...) and lists of one, also within dicts, lists and tuples.
        size: of the batch.

    Returns:
        Tensors (size, ...) of the same types, and with axes in the same order in memory.
    """
    return {key: _repeated(value, size) for key, value in sample.items()}


def _repeated(value: Any, size: int) -> Any:
    if isinstance(value, (list, tuple)) and len(value) == 1 and not isinstance(value[0], torch.Tensor):
        return value * size
    if isinstance(value, dict):
        return {key: _repeated(each, size) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_repeated(each, size) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_repeated(each, size) for each in value)
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    order = [0, *sorted(range(1, value.dim()), key=value.stride, reverse=True)]
    shape = [size, *value.shape[1:]]
    stored = torch.empty([shape[axis] for axis in order], dtype=value.dtype, device="meta")
    return stored.permute([order.index(axis) for axis in range(value.dim())])


def optimizer_of(model: nn.Module, config: Any, on_card: bool) -> torch.optim.Optimizer:
    """The optimizer of the configuration, in the form that it takes on a card.

    Args:
        model: on the meta device.
        config: :class:`exp.config.schema.OptimConfig`.
        on_card: whether the device is a card, where torch takes foreach forms of itself.

    Raises:
        ConfigError: as :func:`exp.engine.optim.build_optimizer`; or it cannot be run without values.
    """
    from exp.engine.optim import build_optimizer

    optimizer = build_optimizer(model, _without_fused(config))
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None:
            group["foreach"] = on_card
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optim.type={config.type} is no optimizer of torch's")
    return optimizer


def _without_fused(config: Any) -> Any:
    """Fused steps are for devices that are there; a step without temporary tensors comes nearest."""
    from omegaconf import OmegaConf

    if not config.options.get("fused"):
        return config
    changed: Any = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    changed.options.update(fused=False, foreach=False)
    return changed
