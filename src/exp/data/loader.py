"""Data loaders over data sets that are indexed by a whole batch, and asynchronous copies of batches to the device."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from exp.data.sampler import EvalBatchSampler
from exp.hardware.compat import pin_memory_kwargs
from exp.runs.scratch import ensure_socket_folder
from exp.runs.signals import PREEMPT_SIGNAL, block_signals

if TYPE_CHECKING:
    from exp.data.base import Data
    from exp.session import Session

__all__ = [
    "DeviceLoader", "device_loader", "eval_loader", "eval_loader_for_rank", "map_tensors", "tensors_of", "to_device",
    "train_loader",
]  # fmt: skip

logger = logging.getLogger(__name__)


class _Loader(DataLoader[Any]):
    """Starts its worker processes with the preemption signal blocked.

    Slurm sends the signal to every process of a job step, and its default action is to kill. Forked processes would
    inherit a handler, but those of a fork server (the default of Python 3.14) would not.
    """

    def __iter__(self) -> Any:
        if self.num_workers > 0:
            ensure_socket_folder()
        with block_signals((PREEMPT_SIGNAL,)):
            return super().__iter__()


def train_loader(
    dataset: Dataset[Any],
    sampler: Iterable[torch.Tensor],
    num_workers: int,
    seed: int,
    pinned_for: str | None = None,
) -> DataLoader[Any]:
    """A loader of micro-batches, from the sampler's position on.

    Args:
        dataset: takes an index tensor and returns a batch.
        sampler: yields index tensors (:class:`exp.data.sampler.TrainBatchSampler`).
        num_workers: processes that prepare batches ahead, with one thread each; 0: this process loads them.
        seed: of the random generators of these processes.
        pinned_for: device type for which batches are put into page-locked memory; None: pageable memory.
    """
    # A separate generator: making an iterator draws a number, which must not shift the global generator on resume.
    generator = torch.Generator()
    generator.manual_seed(seed)
    return _Loader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        generator=generator,
        collate_fn=_identity if getattr(dataset, "yields_tensors", False) else None,
        persistent_workers=num_workers > 0,
        **({} if pinned_for is None else pin_memory_kwargs(pinned_for)),
    )


def eval_loader(dataset: Dataset[Any], sampler: Iterable[torch.Tensor], num_workers: int) -> DataLoader[Any]:
    """Like :func:`train_loader`, for data sets that draw no random numbers.

    Args:
        dataset: takes an index tensor and returns a batch.
        sampler: yields index tensors (:class:`exp.data.sampler.EvalBatchSampler`).
        num_workers: processes that prepare batches ahead, with one thread each; 0: this process loads them.
    """
    return train_loader(dataset, sampler, num_workers, seed=0)


def _identity(batch: Any) -> Any:
    """Return the batch unchanged; torch's own function would search every part of it for arrays to convert."""
    return batch


def device_loader(dataset: Any, sampler: Iterable[torch.Tensor], num_workers: int, session: Session) -> Any:
    """Like :func:`train_loader`, with batches on the session's device.

    Args:
        dataset: takes an index tensor and returns a batch. If it has ``sample_ids(keys)`` and
            ``device_builder(device, free)`` (:class:`exp.data.base.Data`), batches may be built on the device.
        sampler: yields index tensors.
        num_workers: processes that prepare batches ahead; at most this rank's share of the cores is used.
        session: has device, backend, and rank.
    """
    seed, device, backend = session.config.seed, session.device, session.backend
    most = session.info.cores
    if num_workers > most:
        logger.info("data.num_workers=%d is reduced to %d, this rank's share of the cores", num_workers, most)
    num_workers = min(num_workers, most)
    if device.type == "cpu":
        return train_loader(dataset, sampler, num_workers, seed)
    pinned_for = device.type if backend.capabilities.pinned_memory else None
    device_builder = (
        dataset.device_builder(device, backend.usage().get("free")) if hasattr(dataset, "device_builder") else None
    )
    loader = train_loader(dataset, sampler, num_workers, seed, pinned_for)
    return DeviceLoader(loader, device, pinned_for is not None, device_builder)


def eval_loader_for_rank(dataset: Dataset[Any], data: Data, session: Session) -> Any:
    """The loader of this rank's share of a split in evaluation; its ``sampler`` yields the indices of each batch.

    Args:
        dataset: the split, or a subset of it.
        data: has ``eval_batch_size`` and ``num_workers``.
        session: has device, rank and world size.
    """
    info = session.info
    sampler = EvalBatchSampler(len(dataset), data.eval_batch_size, info.rank, info.world_size)  # type: ignore[arg-type]
    return device_loader(dataset, sampler, data.num_workers, session)


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on ``device``, without waiting for the copy.

    Moves tensors and packed sequences, also in nested dicts, lists, tuples and named tuples, as collate functions make
    them. Everything else (image sizes, names, objects of other classes) stays unchanged.
    """
    if device.type == "cpu":
        return batch
    return {key: map_tensors(lambda each: each.to(device, non_blocking=True), value) for key, value in batch.items()}


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of each tensor in its place: of itself, or of those in dicts, lists and tuples."""
    if isinstance(value, (torch.Tensor, PackedSequence)):  # a PackedSequence is a named tuple; its lengths stay
        return function(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # keeps the class, whatever its constructor takes
        mapped.update((key, map_tensors(function, item)) for key, item in value.items())
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a batch or in a model's output: a tensor, or nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(item)


class DeviceLoader:
    """The batches of a loader, on a device.

    Copies from page-locked memory use a stream of their own, so that a batch is copied while the step before it
    computes. If batches are built on the device, only the sample numbers are copied.

    Args:
        loader: yields batches on the CPU. Other attributes of this object are those of ``loader``.
        device: a card.
        pinned: whether ``loader`` yields page-locked tensors.
        device_builder: builds a batch on the device from sample numbers there, int64 (B,); then only the sampler of
            ``loader`` is used.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device,
        pinned: bool,
        device_builder: Callable[[torch.Tensor], dict[str, Any]] | None = None,
    ) -> None:
        self.loader, self.device, self.pinned, self.device_builder = loader, device, pinned, device_builder
        streams = getattr(torch, device.type, None)
        self._streams = streams if pinned and device_builder is None and hasattr(streams, "Stream") else None
        self._copy_stream = None if self._streams is None else self._streams.Stream(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches on the device; their copies may still be in progress."""
        if self.device_builder is not None:
            dataset: Any = self.loader.dataset
            for keys in self.loader.sampler:
                sample_ids = dataset.sample_ids(keys)
                sample_ids = sample_ids.pin_memory() if self.pinned else sample_ids
                yield self.device_builder(sample_ids.to(self.device, non_blocking=True))
        else:
            for batch in self.loader:
                yield to_device(batch, self.device) if self._streams is None else self._copy_on_side_stream(batch)

    def _copy_on_side_stream(self, batch: dict[str, Any]) -> dict[str, Any]:
        assert self._streams is not None
        computing = self._streams.current_stream(self.device)
        with self._streams.stream(self._copy_stream):
            moved = to_device(batch, self.device)
        computing.wait_stream(self._copy_stream)
        for value in tensors_of(moved):
            if value.device.type == self.device.type:  # the lengths of a packed sequence stay on the CPU
                value.record_stream(computing)  # its memory must not be reused before the computation has finished
        return moved
