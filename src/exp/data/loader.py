"""Data loaders over data sets that are indexed by a whole batch, and how a batch comes to the device: from page-locked
memory, beside the computation, without waiting.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from exp.data.sampler import EvalBatchSampler
from exp.hardware.compat import pinned_by
from exp.runs.status import PREEMPT_SIGNAL, held_back
from exp.sockets import make_sockets_possible

if TYPE_CHECKING:
    from exp.data.base import Data
    from exp.session import Session

__all__ = [
    "DeviceLoader",
    "device_loader",
    "eval_loader",
    "map_tensors",
    "move",
    "share_loader",
    "tensors_of",
    "train_loader",
]

logger = logging.getLogger(__name__)


class _Loader(DataLoader[Any]):
    """Starts its processes with the signal of preemption blocked.

    Slurm sends it to every process of a job step, and its default is to kill. Forked processes would inherit a handler,
    those of a fork server, which Python 3.14 has by default, would not.
    """

    def __iter__(self) -> Any:
        if self.num_workers > 0:
            make_sockets_possible()
        with held_back((PREEMPT_SIGNAL,)):
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
        dataset: takes an index tensor and gives a batch.
        sampler: yields index tensors (:class:`exp.data.sampler.TrainBatchSampler`).
        num_workers: processes that cut batches ahead, one thread each; 0: none.
        seed: from which the workers' own random generators are seeded.
        pinned_for: torch's type of the device that batches are put into page-locked memory for; None: they are not.
    """
    # A generator of its own: making an iterator draws a number, and resuming must not shift the global generator.
    generator = torch.Generator()
    generator.manual_seed(seed)
    return _Loader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        generator=generator,
        collate_fn=_as_it_is if getattr(dataset, "gives_tensors", False) else None,
        persistent_workers=num_workers > 0,
        **({} if pinned_for is None else pinned_by(pinned_for)),
    )


def eval_loader(dataset: Dataset[Any], sampler: Iterable[torch.Tensor], num_workers: int) -> DataLoader[Any]:
    """As :func:`train_loader`, for data sets that draw no random numbers.

    Args:
        dataset: takes an index tensor and gives a batch.
        sampler: yields index tensors (:class:`exp.data.sampler.EvalBatchSampler`).
        num_workers: processes that cut batches ahead, one thread each; 0: none.
    """
    return train_loader(dataset, sampler, num_workers, seed=0)


def _as_it_is(batch: Any) -> Any:
    """The batch; torch's own way looks at every part of it for arrays to convert."""
    return batch


class _Numbers(Dataset[Any]):
    """Numbers of samples only: the device cuts the batches."""

    gives_tensors = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keys: torch.Tensor) -> torch.Tensor:
        numbers: torch.Tensor = self.dataset.numbers(keys)
        return numbers


def device_loader(dataset: Any, sampler: Iterable[torch.Tensor], num_workers: int, session: Session) -> Any:
    """As :func:`train_loader`, with batches on the session's device.

    Args:
        dataset: takes an index tensor and gives a batch. One that has ``numbers(keys)`` and ``on_device(device, free)``
            (:class:`exp.data.base.Data`) may have the device cut them.
        sampler: yields index tensors.
        num_workers: processes that cut batches ahead; more than this rank's share of the cores would only wait for
            each other.
        session: gives device, backend, and the place of the rank.
    """
    seed, device, backend = session.config.seed, session.device, session.backend
    most = session.info.cores
    if num_workers > most:
        logger.info("data.num_workers=%d: %d, this rank's share of the cores", num_workers, most)
    num_workers = min(num_workers, most)
    if device.type == "cpu":
        return train_loader(dataset, sampler, num_workers, seed)
    pinned_for = device.type if backend.capabilities.pinned_memory else None
    if hasattr(dataset, "on_device"):
        cut = dataset.on_device(device, backend.usage().get("free"))
        if cut is not None:
            numbers = train_loader(_Numbers(dataset), sampler, 0, seed, pinned_for)
            return DeviceLoader(numbers, dataset, device, pinned_for is not None, cut)
    loader = train_loader(dataset, sampler, num_workers, seed, pinned_for)
    return DeviceLoader(loader, dataset, device, pinned_for is not None)


def share_loader(dataset: Dataset[Any], data: Data, session: Session) -> Any:
    """What a rank evaluates of a split; its ``sampler`` has the numbers of the samples, batch by batch.

    Args:
        dataset: the split, or a part of it.
        data: says how large batches are, and how many processes load them.
        session: gives the device that batches come to, and the place of the rank.
    """
    info = session.info
    sampler = EvalBatchSampler(len(dataset), data.eval_batch_size, info.rank, info.world_size)  # type: ignore[arg-type]
    return device_loader(dataset, sampler, data.num_workers, session)


def move(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch on ``device``, without waiting for the copy.

    Tensors are moved wherever they stand: in dicts, lists, tuples and named tuples, however deep, as collate functions
    make such, and in torch's packed sequences. Anything else (sizes of images, names, objects of other classes, which a
    model's ``data_preprocessor`` may know) stays as it is.
    """
    if device.type == "cpu":
        return batch
    return {key: map_tensors(lambda each: each.to(device, non_blocking=True), value) for key, value in batch.items()}


def map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with what ``function`` gives for each tensor in it: itself, or in dicts, lists and tuples."""
    if isinstance(value, (torch.Tensor, PackedSequence)):  # the latter is a named tuple, too, a part of which stays
        return function(value)
    if isinstance(value, dict):
        mapped = copy.copy(value)  # of its own class, whatever the constructor of that takes
        mapped.update((key, map_tensors(function, each)) for key, each in value.items())
        return mapped
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, each) for each in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(function, each) for each in value)
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, or of what a model gives for it: itself, or wherever mappings, lists and tuples lead."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_of(each)


class DeviceLoader:
    """The batches of a loader, on a device.

    Copies from page-locked memory go over a stream of their own, so that a batch crosses while the step before it
    computes. Where the device cuts batches itself, the numbers of the samples are all that crosses.

    Args:
        loader: gives batches on the CPU; or numbers of samples, int64 (B,), where there is ``cut``. What is asked of
            this one is asked of it.
        dataset: that they are batches of.
        device: a card.
        pinned: whether what ``loader`` gives is page-locked.
        cut: makes a batch of numbers that lie on the device.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        dataset: Any,
        device: torch.device,
        pinned: bool,
        cut: Callable[[torch.Tensor], dict[str, Any]] | None = None,
    ) -> None:
        self.loader, self.dataset, self.device, self.cut = loader, dataset, device, cut
        streams = getattr(torch, device.type, None)
        self._streams = streams if pinned and cut is None and _has_streams(streams, device) else None
        self._side = None if self._streams is None else self._streams.Stream(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Batches, queued for the device when they are given."""
        for batch in self.loader:
            if self.cut is not None:
                yield self.cut(batch.to(self.device, non_blocking=True))
            elif self._streams is None:
                yield move(batch, self.device)
            else:
                yield self._aside(batch)

    def _aside(self, batch: dict[str, Any]) -> dict[str, Any]:
        assert self._streams is not None
        computing = self._streams.current_stream(self.device)
        with self._streams.stream(self._side):
            moved = move(batch, self.device)
        computing.wait_stream(self._side)
        for value in tensors_of(moved):
            if value.device.type == self.device.type:  # a packed sequence keeps its lengths on the CPU
                value.record_stream(computing)  # its memory is not to be had again before the computation is through
        return moved


def _has_streams(module: Any, device: torch.device) -> bool:
    """Whether a device's module has all that is needed; plug-ins have more or less of it."""
    if not all(hasattr(module, name) for name in ("current_stream", "stream", "Stream")):
        return False
    try:
        torch.empty(1, device=device).record_stream(module.current_stream(device))
    except (RuntimeError, NotImplementedError):
        return False
    return True
