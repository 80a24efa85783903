"""Data loaders over data sets that are indexed by a whole batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable

import torch
from torch.utils.data import DataLoader, Dataset

from exp.data.sampler import EvalBatchSampler

if TYPE_CHECKING:
    from exp.data.base import Data
    from exp.launcher.rank import RankInfo

__all__ = ["eval_loader", "share_loader", "train_loader"]


def train_loader(
    dataset: Dataset[Any], sampler: Iterable[torch.Tensor], num_workers: int, seed: int
) -> DataLoader[Any]:
    """A loader of micro-batches, from the sampler's position on.

    Args:
        dataset: takes an index tensor and gives a batch.
        sampler: yields index tensors (:class:`exp.data.sampler.TrainBatchSampler`).
        num_workers: processes that cut batches ahead, one thread each; 0: none.
        seed: from which the workers' own random generators are seeded.
    """
    # A generator of its own: making an iterator draws a number, and resuming must not shift the global generator.
    generator = torch.Generator()
    generator.manual_seed(seed)
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        generator=generator,
        persistent_workers=num_workers > 0,
    )


def eval_loader(dataset: Dataset[Any], sampler: Iterable[torch.Tensor], num_workers: int) -> DataLoader[Any]:
    """As :func:`train_loader`, for data sets that draw no random numbers.

    Args:
        dataset: takes an index tensor and gives a batch.
        sampler: yields index tensors (:class:`exp.data.sampler.EvalBatchSampler`).
        num_workers: processes that cut batches ahead, one thread each; 0: none.
    """
    return train_loader(dataset, sampler, num_workers, seed=0)


def share_loader(dataset: Dataset[Any], data: Data, info: RankInfo) -> DataLoader[Any]:
    """What a rank evaluates of a split; its ``sampler`` has the numbers of the samples, batch by batch.

    Args:
        dataset: the split, or a part of it.
        data: says how large batches are, and how many processes load them.
        info: the place of the rank.
    """
    sampler = EvalBatchSampler(len(dataset), data.eval_batch_size, info.rank, info.world_size)  # type: ignore[arg-type]
    return eval_loader(dataset, sampler, data.num_workers)
