"""Samplers, which assign samples to batches and ranks, and the seeds of augmentation.

Both samplers yield index tensors, one per batch, for ``DataLoader(dataset, sampler=..., batch_size=None)``. The random
numbers of a sample depend on (seed, epoch, sample) alone, not on the process or the time.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import Iterator

import numpy as np
import torch

from exp.errors import ConfigError, DataError

__all__ = ["EvalBatchSampler", "TrainBatchSampler", "preserved_generators", "seed_sample"]


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
    ) -> None:
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.accumulate = accumulate
        self.seed = seed
        self.with_epoch = with_epoch
        self.epoch = 0
        self.samples = 0
        """Samples consumed in this epoch, over all ranks."""
        if num_samples < self.global_batch_size:
            raise DataError(
                f"the training split has {num_samples} samples, fewer than one global batch of "
                f"{self.global_batch_size} (batch_size {batch_size} x {world_size} ranks x accumulate {accumulate}); "
                f"set global_batch_size to at most {num_samples}"
            )

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.batch_size * self.world_size * self.accumulate

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
        # Not a generator itself, so that the position of this call counts, not that of the first next().
        samples = self._permutation()
        if self.with_epoch:
            samples = torch.stack([samples, torch.full_like(samples, self.epoch)], dim=1)
        remaining = (self.steps_per_epoch - self.samples // self.global_batch_size) * self.accumulate
        return self._micro_batches(samples, self.samples, remaining)

    def _permutation(self) -> torch.Tensor:
        # Mixed by SeedSequence, so that epoch 1 of seed 0 differs from epoch 0 of seed 1.
        mixed = np.random.SeedSequence((self.seed % 2**64, self.epoch)).generate_state(1, np.uint64)[0]
        generator = torch.Generator()
        generator.manual_seed(int(mixed))
        return torch.randperm(self.num_samples, generator=generator)

    def _micro_batches(self, permutation: torch.Tensor, first: int, count: int) -> Iterator[torch.Tensor]:
        size = self.batch_size
        for begin in range(first + self.rank * size, first + count * self.world_size * size, self.world_size * size):
            # A copy: sending a view to a loader process would copy the whole permutation.
            yield permutation[begin : begin + size].clone()

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
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1) -> None:
        self.batch_size = batch_size
        self.common_batches = num_samples // world_size // batch_size
        """Number of full batches that every rank has."""
        # Contiguous shares whose sizes differ by at most one sample; distributing whole batches could leave ranks idle.
        self.first, self.end = num_samples * rank // world_size, num_samples * (rank + 1) // world_size

    def __len__(self) -> int:
        """Number of batches of this rank."""
        return -(-(self.end - self.first) // self.batch_size)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield batches, int64 (B,), with B at most ``batch_size``."""
        for begin in range(self.first, self.end, self.batch_size):
            yield torch.arange(begin, min(begin + self.batch_size, self.end))


@contextmanager
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
