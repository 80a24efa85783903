"""task=eval: test the weights of a checkpoint, also per channel and per horizon step."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from exp.data.loader import eval_loader
from exp.data.sampler import EvalBatchSampler
from exp.engine.loops import EvalLoop
from exp.engine.runner import Runner
from exp.runfolder import write_atomically
from exp.tasks.common import build_data, build_model, make_result, record_environment

if TYPE_CHECKING:
    from pathlib import Path

    from exp.session import Session

__all__ = ["run"]


def run(session: Session) -> dict[str, Any]:
    """Evaluate on the test part; writes ``metrics_per_channel.csv`` and ``metrics_per_step.csv``."""
    record_environment(session)
    data = build_data(session)
    model = build_model(session)
    config, info = session.config, session.info
    sampler = EvalBatchSampler(len(data.test), config.data.eval_batch_size, info.rank, info.world_size)
    loader = eval_loader(data.test, sampler, config.data.num_workers)
    metrics = data.metrics(per_position=True)
    runner = Runner(session, model, test_dataloader=loader, test_cfg={}, test_evaluator=metrics,
                    visualizer={"type": "Visualizer", "name": session.unique_name, "vis_backends": None})  # fmt: skip
    runner._test_loop = EvalLoop(runner, loader, metrics, "test")
    values = runner.test()
    runner.close()
    if session.distributed.is_main:
        folder = session.folder.path
        _write_table(folder / "metrics_per_channel.csv", "channel", data.names, metrics.channel)
        steps = [str(step + 1) for step in range(len(metrics.step["mse"]))]
        _write_table(folder / "metrics_per_step.csv", "step", steps, metrics.step)
    return make_result(
        session,
        values,
        data.metric_name,
        checkpoint=config.init_from,
        per_channel={name: dict(zip(data.names, values)) for name, values in metrics.channel.items()},
        per_step=metrics.step,
    )


def _write_table(path: Path, key: str, rows: list[str], columns: dict[str, list[float]]) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow([key, *columns])
    for index, row in enumerate(rows):
        writer.writerow([row, *(f"{values[index]:.6g}" for values in columns.values())])
    write_atomically(path, buffer.getvalue().encode())
