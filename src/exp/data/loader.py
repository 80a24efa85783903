"""Batches: samplers assign samples to batches and ranks, loaders load them, and copy them to the device meanwhile.

Both samplers yield index tensors, one per batch, for data sets that are indexed by a whole batch. The random numbers of
a sample depend on (seed, epoch, sample) alone, not on the process or the time.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import random
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset

from exp.config.shares import split_batch
from exp.errors import ConfigError, DataError
from exp.hardware.compat import pin_memory_kwargs
from exp.runs.job import PREEMPT_SIGNAL, block_signals, ensure_socket_folder

if TYPE_CHECKING:
    from exp.session import Session

logger = logging.getLogger(__name__)


class TrainBatchSampler:
    """Shuffled micro-batches of one rank; the samples of an optimizer step do not depend on the world size.

    Every epoch has one permutation of all samples, drawn from (seed, epoch) and equal on all ranks. Each optimizer step
    takes the next :attr:`global_batch_size` samples of it. They are divided into ``accumulate`` parts, and each part
    into one micro-batch per rank. The last, incomplete global batch is dropped.

    Only :meth:`advance` and :meth:`set_position` change the position. Iterating does not, because loader processes read
    ahead.

    Args:
        num_samples: size of the data set.
        batch_size: samples per rank and micro-batch.
        rank: of this process.
        world_size: number of ranks.
        accumulate: micro-batches per optimizer step.
        seed: of the shuffling.
        with_epoch: yield sample and epoch, (batch_size, 2), for data whose augmentation differs in each epoch.
        parts: samples of each rank per micro-batch, by rank, instead of ``batch_size``.

    Attributes:
        batch_size: samples of this rank per micro-batch.
        first: position of the first of them in the micro-batch of all ranks.
        micro_batch_size: samples of all ranks per micro-batch.
        weights: samples of each rank as a multiple of their mean. The mean over ranks of values that are multiplied by
            these is the mean over samples.

    Raises:
        DataError: there are fewer samples than one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
        seed: int = 0,
        with_epoch: bool = False,
        parts: Sequence[int] = (),
    ) -> None:
        self.num_samples = num_samples
        self.parts = list(parts) or [batch_size] * world_size
        self.rank = rank
        self.batch_size = self.parts[rank]
        self.first = sum(self.parts[:rank])
        self.micro_batch_size = sum(self.parts)
        self.weights = [part * world_size / self.micro_batch_size for part in self.parts]
        self.accumulate = accumulate
        self.seed = seed
        self.with_epoch = with_epoch
        self.epoch = 0
        self.samples = 0
        """Samples consumed in this epoch, over all ranks."""
        if num_samples < self.global_batch_size:
            by_rank = f"parts {self.parts} of the" if parts else f"batch_size {batch_size} x {world_size}"
            raise DataError(
                f"the training split has {num_samples} samples, fewer than one global batch of "
                f"{self.global_batch_size} ({by_rank} ranks x accumulate {accumulate}); "
                f"set global_batch_size to at most {num_samples}"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.micro_batch_size * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return self.num_samples // self.global_batch_size

    @property
    def left_out(self) -> int:
        """Number of samples that an epoch drops; other samples in each epoch."""
        return self.num_samples - self.steps_per_epoch * self.global_batch_size

    def __len__(self) -> int:
        """Optimizer steps of a whole epoch, whatever the position; hooks compare ``batch_idx`` with it."""
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Micro-batches, int64 (batch_size,) or (batch_size, 2), from the position to the end of the epoch."""
        # Mixed by SeedSequence, so that epoch 1 of seed 0 differs from epoch 0 of seed 1.
        mixed = np.random.SeedSequence((self.seed % 2**64, self.epoch)).generate_state(1, np.uint64)[0]
        samples = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(int(mixed)))
        if self.with_epoch:
            samples = torch.stack([samples, torch.full_like(samples, self.epoch)], dim=1)
        size, end = self.batch_size, self.steps_per_epoch * self.global_batch_size
        begins = range(self.samples + self.first, end, self.micro_batch_size)
        # Not a generator itself, so that the position of this call counts, not that of the first next(). Copies, since
        # sending a view to a loader process would copy the whole permutation.
        return (samples[begin : begin + size].clone() for begin in begins)

    def advance(self) -> None:
        """Move the position by one optimizer step."""
        self.set_position(self.epoch, self.samples + self.global_batch_size)

    def set_position(self, epoch: int, samples: int) -> None:
        """Set the position; takes effect with the next ``iter()``.

        Args:
            epoch: from 0.
            samples: samples consumed in that epoch, over all ranks; a multiple of the global batch size.

        Raises:
            ConfigError: there is no such position: it was saved with another global batch size or data set.
        """
        step, rest = divmod(samples, self.global_batch_size)
        if epoch < 0 or rest != 0 or not 0 <= step <= self.steps_per_epoch:
            raise ConfigError(
                f"cannot continue at epoch {epoch} after {samples} of {self.num_samples} samples with "
                f"global_batch_size={self.global_batch_size}; resume with the data and global_batch_size of that run"
            )
        self.epoch, self.samples = epoch, samples


class EvalBatchSampler:
    """Every sample exactly once over all ranks, in order, without padding: ranks may have different numbers of batches.

    Args:
        num_samples: size of the data set.
        batch_size: samples per batch, at most.
        rank: of this process.
        world_size: number of ranks.
        weights: divide the samples in the ratio of these numbers, one per rank; empty: into equal parts.
    """

    def __init__(
        self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1, weights: Sequence[float] = ()
    ) -> None:
        self.batch_size = batch_size
        # Contiguous; distributing whole batches could leave ranks idle.
        bounds = [num_samples * rank // world_size for rank in range(world_size + 1)]
        if weights and num_samples >= world_size:
            bounds = [0, *itertools.accumulate(split_batch(num_samples, weights))]
        self.common_batches = min(end - first for first, end in zip(bounds, bounds[1:])) // batch_size
        """Number of full batches that every rank has."""
        self.first, self.end = bounds[rank], bounds[rank + 1]

    def __len__(self) -> int:
        """Number of batches of this rank."""
        return -(-(self.end - self.first) // self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield batches, int64 (B,), with B at most ``batch_size``."""
        for begin in range(self.first, self.end, self.batch_size):
            yield torch.arange(begin, min(begin + self.batch_size, self.end))


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


def make_loader(
    dataset: Dataset[Any],
    sampler: Iterable[torch.Tensor],
    num_workers: int,
    seed: int = 0,
    pinned_for: str | None = None,
) -> DataLoader[Any]:
    """A loader of the batches of a sampler.

    Args:
        dataset: takes an index tensor and returns a batch.
        sampler: yields index tensors, such as :class:`TrainBatchSampler`.
        num_workers: processes that prepare batches ahead, with one thread each; 0: this process loads them.
        seed: of the random generators of these processes.
        pinned_for: device type for which batches are put into page-locked memory; None: pageable memory.
    """
    return _Loader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        # A separate one: making an iterator draws a number, which must not shift the global generator on resume.
        generator=torch.Generator().manual_seed(seed),
        collate_fn=_identity if getattr(dataset, "yields_tensors", False) else None,
        persistent_workers=num_workers > 0,
        **({} if pinned_for is None else pin_memory_kwargs(pinned_for)),
    )


def _identity(batch: Any) -> Any:
    """Return the batch unchanged; torch's own function would search every part of it for arrays to convert."""
    return batch


def device_loader(dataset: Any, sampler: Iterable[torch.Tensor], num_workers: int, session: Session) -> Any:
    """Like :func:`make_loader`, with batches on the session's device.

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
        return make_loader(dataset, sampler, num_workers, seed)
    pinned_for = device.type if backend.capabilities.pinned_memory else None
    device_builder = (
        dataset.device_builder(device, backend.usage().get("free")) if hasattr(dataset, "device_builder") else None
    )
    loader = make_loader(dataset, sampler, num_workers, seed, pinned_for)
    return DeviceLoader(loader, device, pinned_for is not None, device_builder)


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


@contextlib.contextmanager
def preserved_generators() -> Iterator[None]:
    """Context that restores the global random generators of Python, NumPy and torch (that of the CPU)."""
    python, numpy, torchs = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)


def seed_sample(seed: int, epoch: int, number: int) -> None:
    """Seed the global random generators of Python, NumPy and torch (that of the CPU), from which transforms draw.

    Args:
        seed: of the data.
        epoch: from 0.
        number: index of the sample.
    """
    mixed = np.random.SeedSequence((seed % 2**64, epoch, number)).generate_state(3)
    random.seed(int(mixed[0]))
    np.random.seed(mixed[1])
    torch.default_generator.manual_seed(int(mixed[2]))
