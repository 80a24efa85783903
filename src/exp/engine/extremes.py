"""The worst and the best samples of an evaluation, found while it runs: no more than these few are kept or gathered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from exp.engine.distributed import Distributed
    from exp.metrics import Evaluator, SampleMetric

__all__ = ["Extremes", "RankedSample"]


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


class Extremes:
    """An evaluator for the evaluation loop, which also remembers extreme samples.

    Args:
        evaluator: measures.
        ranking: of :meth:`exp.data.base.Data.ranking`: a figure for each sample; batches have ``index``.
        worst: how many of the worst are kept.
        best: how many of the best.
    """

    def __init__(self, evaluator: Evaluator, ranking: SampleMetric, worst: int, best: int) -> None:
        self.evaluator = evaluator
        self.ranking = ranking
        self.worst = worst
        self.best = best
        self._worst: list[RankedSample] = []
        self._best: list[RankedSample] = []

    @property
    def units(self) -> dict[str, str]:
        """What values the evaluator's figures are of, by name."""
        return self.evaluator.units

    def reset(self) -> None:
        """Forget everything."""
        self.evaluator.reset()
        self._worst, self._best = [], []

    def update(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Take in one batch; of its outputs, only those of new extreme samples are copied."""
        self.evaluator.update(outputs, batch)
        values = self.ranking.per_sample(outputs, batch).detach().float().cpu().tolist()
        found = [
            RankedSample(index, value, outputs[row])
            for row, (index, value) in enumerate(zip(batch["index"].tolist(), values))
            if value == value  # nan: it does not count
        ]
        new = {sample.number for sample in found}
        self._worst = [_kept(each, new) for each in self._first([*self._worst, *found], self.worst, True)]
        self._best = [_kept(each, new) for each in self._first([*self._best, *found], self.best, False)]

    def compute(self, distributed: Distributed) -> dict[str, float]:
        """The figures of the evaluator."""
        return self.evaluator.compute(distributed)

    def collect(self, distributed: Distributed) -> tuple[list[RankedSample], list[RankedSample]]:
        """The worst and the best samples over all ranks, the most extreme first; called by every rank.

        Where there are few samples, those among the worst are not among the best, too.
        """
        mine = {sample.number: sample for sample in (*self._worst, *self._best)}
        places = [(sample.number, sample.value) for sample in mine.values()]
        known = [pair for part in distributed.gather(places) for pair in part]
        nothing = torch.empty(0)
        ranked = [RankedSample(index, value, nothing) for index, value in known]
        worst = self._first(ranked, self.worst, True)
        taken = {sample.number for sample in worst}
        best = self._first([sample for sample in ranked if sample.number not in taken], self.best, False)
        wanted = taken | {sample.number for sample in best}
        parts = distributed.gather({index: sample for index, sample in mine.items() if index in wanted})
        samples = {index: sample for part in parts for index, sample in part.items()}
        return [samples[each.number] for each in worst], [samples[each.number] for each in best]

    def _first(self, samples: list[RankedSample], count: int, worst: bool) -> list[RankedSample]:
        """Of equal samples those that come first in the split, for any number of ranks."""
        sign = 1.0 if self.ranking.greater_is_better == worst else -1.0
        return sorted(samples, key=lambda sample: (sign * sample.value, sample.number))[:count]


def _kept(sample: RankedSample, new: set[int]) -> RankedSample:
    """With outputs of its own: a row of a batch would hold the whole batch."""
    return sample._replace(outputs=sample.outputs.detach().clone().cpu()) if sample.number in new else sample
