"""Short ways to see whether an experiment works (``conf/debug``): parts of splits, starting anew, overfitting."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from mmengine.hooks import Hook
from torch.utils.data import Dataset

from exp.data.base import split_of

if TYPE_CHECKING:
    from exp.data.base import Data
    from exp.session import Session

__all__ = ["OverfitHook", "measured_part", "split_in_use"]

_NEAR_ZERO = 0.01  # of the first loss


def split_in_use(session: Session, data: Data, split: str) -> Any:
    """A split, indexed by a whole batch, or as much of it as ``debug`` leaves.

    Samples are spread evenly over the split, since files are often sorted by class or time.

    Args:
        session: the session.
        data: the data set.
        split: ``train``, ``val`` or ``test``.

    Raises:
        ConfigError: as :func:`exp.data.base.split_of`.
    """
    config, debug = session.config, session.config.debug
    overfit = debug.overfit and config.global_batch_size is not None  # which only a training has
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
    """What the figures of a run are of, if they are of no whole split."""
    if config.debug.overfit and config.global_batch_size is not None:
        return "training batches"
    return None if config.debug.test_batches is None else f"{config.debug.test_batches} of its batches"


class _Part(Dataset[Any]):
    """``count`` samples of a dataset that is indexed by a whole batch.

    Args:
        dataset: the whole.
        count: at most its length.
        same: give the samples of epoch 0 in every epoch, as they are augmented there, also for evaluation.
    """

    takes_batches = True

    def __init__(self, dataset: Any, count: int, same: bool) -> None:
        self.dataset = dataset
        self.count = count
        self.whole_needs_epoch = getattr(dataset, "needs_epoch", False)
        self.needs_epoch = self.whole_needs_epoch and not same
        self.same = same

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, keys: torch.Tensor) -> Any:
        numbers = (keys[:, 0] if keys.dim() == 2 else keys) * len(self.dataset) // self.count
        if keys.dim() == 2:
            return self.dataset[torch.stack([numbers, keys[:, 1]], dim=1)]
        if self.same and self.whole_needs_epoch:
            return self.dataset[torch.stack([numbers, torch.zeros_like(numbers)], dim=1)]
        return self.dataset[numbers]


class OverfitHook(Hook):
    """Stops when the loss of the last round over the batches is near zero, and reports the verdict.

    Reads the loss at every step, which costs time that a few batches have.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.first: float | None = None
        self.last: deque[float] = deque(maxlen=session.config.debug.train_batches)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Take in the loss, as the mean over ranks."""
        loss = outputs["loss"].detach().cpu().double().reshape(1)
        self.last.append(float(self.session.distributed.sum(loss)) / self.session.distributed.world_size)
        if len(self.last) == self.last.maxlen:
            self.first = self._mean() if self.first is None else self.first
            runner.train_loop.stop_training |= self._learned()

    def after_train(self, runner: Any) -> None:
        """The verdict."""
        if self.first is not None:
            verdict = (
                "the model can learn"
                if self._learned()
                else "that is not near zero: give it more steps (max_steps) or another optim.lr, take out dropout, or "
                "look at the loss, the targets and which parameters are trained"
            )
            self.session.say(
                f"overfit: the loss on {self.last.maxlen} batches went from {self.first:.4g} to {self._mean():.4g} in "
                f"{runner.iter} steps; {verdict}"
            )

    def _mean(self) -> float:
        return sum(self.last) / len(self.last)

    def _learned(self) -> bool:
        return self.first is not None and self.first > 0 and self._mean() < _NEAR_ZERO * self.first
