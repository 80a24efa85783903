"""Data loaders over data sets that are indexed by a whole batch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Iterable

import torch
from torch.utils.data import DataLoader, Dataset

from exp.data.sampler import EvalBatchSampler
from exp.data.transfer import DeviceLoader
from exp.hardware.compat import pinned_by
from exp.runs.status import PREEMPT_SIGNAL, held_back
from exp.sockets import make_sockets_possible

if TYPE_CHECKING:
    from exp.data.base import Data
    from exp.session import Session

__all__ = ["device_loader", "eval_loader", "share_loader", "train_loader"]

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
