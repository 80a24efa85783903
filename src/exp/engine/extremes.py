"""The worst and the best samples of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import torch
from mmengine.hooks import Hook

from exp.engine.outputs import batch_outputs

if TYPE_CHECKING:
    from exp.metrics import SampleMetric
    from exp.session import Session

__all__ = ["RankedSample", "RankingHook", "predicted"]


class RankedSample(NamedTuple):
    """A sample of the tested split.

    Attributes:
        number: of the sample in the split.
        value: the figure by which it was ranked.
        outputs: what the model predicts for it, without the axis of the batch, on the CPU.
    """

    number: int
    value: float
    outputs: torch.Tensor


class RankingHook(Hook):
    """Keeps the figure of each tested sample, on the device.

    Args:
        metric: of :meth:`exp.data.base.Data.ranking`; batches have ``index``.
    """

    def __init__(self, metric: SampleMetric) -> None:
        self.metric = metric
        self._found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def after_test_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Rank the samples of a batch."""
        self._found.append((data_batch["index"], self.metric.per_sample(outputs, data_batch).detach().float()))

    def extremes(self, distributed: Any, worst: int, best: int) -> tuple[list[Any], list[Any]]:
        """Number and value of the worst and of the best samples over all ranks, the most extreme first. A collective.

        Of equal samples those that come first in the split are taken. None is in both lists; NaN does not count.
        """
        own = [pair for index, values in self._found for pair in zip(index.tolist(), values.tolist())]
        known = [pair for part in distributed.gather(own) for pair in part if pair[1] == pair[1]]
        sign = 1.0 if self.metric.greater_is_better else -1.0
        first = sorted(known, key=lambda pair: (sign * pair[1], pair[0]))[:worst]
        others = sorted(set(known) - set(first), key=lambda pair: (-sign * pair[1], pair[0]))
        return first, others[:best]


def predicted(session: Session, model: Any, dataset: Any, pairs: Sequence[tuple[int, float]]) -> list[RankedSample]:
    """Samples with what the model predicts for them; by one rank alone.

    Args:
        session: the session.
        model: on the session's device.
        dataset: the tested split, indexed by a whole batch.
        pairs: number and value of each.
    """
    outputs = [batch_outputs(session, model, dataset[torch.tensor([number])])[0] for number, _ in pairs]
    return [RankedSample(number, value, output) for (number, value), output in zip(pairs, outputs)]
