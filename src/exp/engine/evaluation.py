"""task=eval: test the weights of a checkpoint, also in detail: per series and horizon step, or per class."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

import torch
from mmengine.hooks import Hook

from exp.data.loader import share_loader
from exp.engine.building import (
    about_data,
    build_data,
    build_evaluator,
    build_model,
    make_result,
    record_environment,
    split_in_use,
)
from exp.engine.outputs import batch_outputs, draw_extras
from exp.engine.trainer import EvalLoop, Trainer
from exp.engine.wrapper import place_and_wrap
from exp.runs.files import csv_content, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from exp.metrics import SampleMetric, Table
    from exp.session import Session

__all__ = ["RankedSample", "RankingHook", "evaluate"]


def evaluate(session: Session) -> dict[str, Any]:
    """Evaluate on the test split; writes a ``metrics_<name>.csv`` for each table of the metrics, and pictures of the
    worst and the best samples, if the data can draw them.
    """
    record_environment(session)
    data = build_data(session)
    model = build_model(session, data)
    test = split_in_use(session, data, "test")
    evaluator = build_evaluator(session, data, detailed=True)
    task = session.config.task
    extras = session.extras
    draws = session.config.plots and task.worst + task.best
    hooks = [RankingHook(extras.ranking)] if draws and extras.ranking is not None else []
    model = place_and_wrap(model, session, trains=False)
    loop = EvalLoop(share_loader(test, data, session), evaluator, "test")
    trainer = Trainer(session, model, test_loop=loop, hooks=hooks)
    values = trainer.test()
    trainer.close()
    draw = extras.draw_samples
    if hooks and draw is not None:
        worst, best = hooks[0].extremes(session.distributed, task.worst, task.best)
        shown = functools.partial(predicted, session, model, test)
        draw_extras(session, lambda: draw(shown(worst), shown(best)))
    tables = evaluator.tables()
    if session.distributed.is_main:
        for table in tables:
            _write_table(session.folder.path / f"metrics_{table.name}.csv", table)
    details = {table.name: {name: dict(zip(table.rows, values)) for name, values in table.columns.items()}
               for table in tables}  # fmt: skip
    return make_result(
        session,
        values,
        evaluator,
        values[evaluator.metric_name] if data.tested_on.startswith("val") else None,
        measured_on=data.tested_on,
        data=about_data(session, data),
        **details,
    )


def _write_table(path: Path, table: Table) -> None:
    titles = [f"{name}_{table.units[name]}" if name in table.units else name for name in table.columns]
    rows = [[row, *(_cell(values[index]) for values in table.columns.values())] for index, row in enumerate(table.rows)]
    write_atomically(path, csv_content([[table.key, *titles], *rows]))


def _cell(value: float) -> str:
    """Counts whole, whatever their size; six digits of anything else."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


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
        metric: of :class:`exp.data.base.Extras`; batches have ``index``.
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
