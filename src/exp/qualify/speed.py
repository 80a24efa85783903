"""task=speed: how long a training step takes, and what it holds of the card's memory."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from mmengine.hooks import Hook
from torch.utils.data import Dataset

from exp.data.base import split_of
from exp.engine.building import build_data, build_model, make_result, record_environment
from exp.engine.training import Training

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["Repeated", "StepTimer", "measure_speed"]


class Repeated(Dataset[Any]):
    """A training split over and over, so that it lasts for all steps: of any batch, in one epoch.

    Args:
        dataset: indexed by a whole batch.
        count: how many samples there shall be.
    """

    takes_batches = True

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self.count = count
        self.needs_epoch = getattr(dataset, "needs_epoch", False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, keys: torch.Tensor) -> Any:
        numbers = (keys[:, 0] if keys.dim() == 2 else keys) % len(self.dataset)
        return self.dataset[torch.stack([numbers, keys[:, 1]], dim=1) if keys.dim() == 2 else numbers]


class _LongData:
    """A data set with another training split.

    Args:
        data: of :func:`exp.engine.building.build_data`.
        train: takes the place of its own.
    """

    def __init__(self, data: Any, train: Any) -> None:
        self._data = data
        self.train = train

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


class StepTimer(Hook):
    """Times every step by itself, from the end of the one before, the device's work included; no validation.

    Args:
        warm_up: steps at the beginning that do not count: kernels are compiled, caches filled.
    """

    priority = "VERY_LOW"

    def __init__(self, warm_up: int) -> None:
        self._left = warm_up
        self._mark = 0.0
        self.seconds: list[float] = []

    def before_train_epoch(self, runner: Any) -> None:
        """What came before is no part of a step."""
        runner.backend.synchronize()
        self._mark = time.perf_counter()

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        """Nor is a validation in mid-epoch."""
        self.before_train_epoch(runner)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Wait for the device, and read the clock."""
        runner.backend.synchronize()
        now = time.perf_counter()
        if self._left > 0:
            self._left -= 1
        else:
            self.seconds.append(now - self._mark)
        self._mark = now


def measure_speed(session: Session) -> dict[str, Any]:
    """Train ``max_steps`` steps; the result has their times and each rank's largest memory."""
    record_environment(session)
    config, backend = session.config, session.backend
    data = build_data(session)
    train = split_of(data, "train", config.seed)
    wanted = (config.max_steps or 1) * (config.global_batch_size or 1)
    lasting = data if len(train) >= wanted else _LongData(data, Repeated(train, wanted))
    training = Training(session, lasting, build_model(session, data, to_place=True))
    runner = training.runner
    runner.hooks.remove(training.checkpoint_hook)
    timer = StepTimer(config.task.warm_up)
    runner.register_hook(timer)
    runner.train()
    steps, left = runner.iter, training.metrics_hook.left_device
    runner.close()
    own = {"memory": backend.memory().get("max_allocated"), "seconds": timer.seconds}
    told = session.distributed.gather(own)
    slowest = [max(each) for each in zip(*(rank["seconds"] for rank in told))]
    step_s = statistics.median(slowest) if slowest else None
    return make_result(
        session,
        {},
        None,
        steps=steps,
        step_seconds=step_s,
        samples_per_second=config.global_batch_size / step_s if step_s else None,
        slowest_step_seconds=max(slowest, default=None),
        memory_by_rank=[rank["memory"] for rank in told],
        left_device=None if left is None else left.summary(session.distributed),
        train_samples=len(train),
    )
