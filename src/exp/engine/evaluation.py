"""task=eval: test the weights of a checkpoint, also in detail: per series and horizon step, or per class."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from exp.data.loader import share_loader
from exp.engine.building import build_data, build_evaluator, build_model, make_result, record_environment
from exp.engine.debug import split_in_use
from exp.engine.extremes import RankingHook, predicted
from exp.engine.loops import EvalLoop
from exp.engine.plots import draw_extras
from exp.engine.trainer import Trainer
from exp.engine.wrapper import place_and_wrap
from exp.runs.files import csv_content, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from exp.metrics import Table
    from exp.session import Session

__all__ = ["evaluate"]


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
    ranking = data.ranking() if session.config.plots and task.worst + task.best else None
    hooks = [] if ranking is None else [RankingHook(ranking)]
    model = place_and_wrap(model, session, trains=False)
    loop = EvalLoop(share_loader(test, data, session), evaluator, "test")
    trainer = Trainer(session, model, test_loop=loop, hooks=hooks)
    values = trainer.test()
    trainer.close()
    if hooks:
        worst, best = hooks[0].extremes(session.distributed, task.worst, task.best)
        shown = functools.partial(predicted, session, model, test)
        draw_extras(session, lambda: data.draw_samples(shown(worst), shown(best)))
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
        data=data.record(session.distributed.gather),
        **details,
    )


def _write_table(path: Path, table: Table) -> None:
    titles = [f"{name}_{table.units[name]}" if name in table.units else name for name in table.columns]
    rows = [[row, *(_cell(values[index]) for values in table.columns.values())] for index, row in enumerate(table.rows)]
    write_atomically(path, csv_content([[table.key, *titles], *rows]))


def _cell(value: float) -> str:
    """Counts whole, whatever their size; six digits of anything else."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"
