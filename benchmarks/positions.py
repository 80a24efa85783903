"""A sampler for benchmarks of the training loop: batches in order, with the interface that the loop needs."""

from __future__ import annotations

from typing import Iterator

from torch.utils.data import Sampler

__all__ = ["Positions"]


class Positions(Sampler):  # type: ignore[type-arg]
    """Numbers of batches, one for each step.

    Args:
        steps: number of steps in the only epoch.
        batch_size: samples per step.
    """

    def __init__(self, steps: int, batch_size: int) -> None:
        self.steps_per_epoch, self.global_batch_size, self.samples = steps, batch_size, 0
        self.parts, self.weights = [batch_size], [1.0]  # of the only rank

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.steps_per_epoch))

    def set_position(self, epoch: int, samples: int) -> None:
        """Set the position in the epoch."""
        self.samples = samples

    def advance(self) -> None:
        """Advance by one step."""
        self.samples += self.global_batch_size
