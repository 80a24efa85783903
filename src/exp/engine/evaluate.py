"""The tasks eval and predict, and evaluation for the user's own tasks."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np
import torch
from mmengine.structures import BaseDataElement

from exp.data.base import Prediction
from exp.data.extensions import RankedSample
from exp.data.loader import to_device
from exp.engine.build import (
    build_data,
    build_evaluator,
    build_model,
    data_record,
    dataset_for,
    eval_split,
    fingerprint_data,
)
from exp.engine.loops import EvalLoop
from exp.engine.result import draw_pictures, make_result, write_samples
from exp.engine.wrapper import place_and_wrap, unwrapped
from exp.errors import EXPERIMENT_PAGE, ConfigError, qualified_name
from exp.runs.files import csv_content, write_atomically
from exp.runs.heartbeat import Stage, report_stage
from exp.runs.record import empty_result

if TYPE_CHECKING:
    from pathlib import Path

    from exp.data.base import Data
    from exp.metrics import Evaluator, SampleMetric, Table
    from exp.session import Session

_OTHER_KEYS = ("data", "digests", "run_id", "checkpoint", "checkpoint_digest", "checkpoint_run")
"""Keys of ``result.json`` besides those of :func:`exp.runs.record.empty_result`."""


def evaluate(session: Session) -> dict[str, Any]:
    """Do ``task=eval``: measure the test split, and write ``metrics_<name>.csv`` for each table of the metrics.

    Also draws the worst and the best samples, if the data can.

    Args:
        session: the session; called on every rank.

    Returns:
        The content of ``result.json``.

    Raises:
        RunError: predictions are NaN, or the main metric is not finite.
        ExpError: the data, the model or the metrics cannot be built, or raise.
    """
    data = build_data(session)
    model = build_model(session, data)
    fingerprint_data(session)
    test = dataset_for(session, data, "test")
    evaluator = build_evaluator(session, data, detailed=True)
    task, extensions = session.config.task, session.extensions
    draws = session.config.plots and task.worst + task.best
    ranking = Ranking(extensions.ranking) if draws and extensions.ranking is not None else None
    model = place_and_wrap(model, session, trains=False).eval()
    session.start_run()  # a collective, so before the first batch: ranks may have different numbers of batches
    values = measure(session, data, model, evaluator, on_batch=None if ranking is None else ranking.add)
    write_samples(session, evaluator, eval_split(session, data, "test").sampler)
    draw = extensions.draw_samples
    if ranking is not None and draw is not None:
        worst, best = ranking.worst_and_best(session.distributed, task.worst, task.best)

        def predicted(pairs: list[Any]) -> list[RankedSample]:
            outputs = [batch_outputs(session, model, test[torch.tensor([number])])[0] for number, _ in pairs]
            return [RankedSample(number, value, output) for (number, value), output in zip(pairs, outputs)]

        draw_pictures(session, lambda: draw(predicted(worst), predicted(best)))
    tables, notes = evaluator.tables({*empty_result(session.config), *_OTHER_KEYS})
    for note in notes:
        session.print(note)
    if session.distributed.is_main:
        for table in tables:
            _write_table(session.folder.path / f"metrics_{table.name}.csv", table)
    details = {table.name: {name: dict(zip(table.rows, values)) for name, values in table.columns.items()}
               for table in tables}  # fmt: skip
    return make_result(
        session,
        values,
        evaluator,
        values[evaluator.metric_name] if data.test_split_name.startswith("val") else None,
        measured_on=data.test_split_name,
        data=data_record(session, data),
        **details,
    )


def _write_table(path: Path, table: Table) -> None:
    titles = [f"{name}_{table.units[name]}" if name in table.units else name for name in table.columns]
    rows = [[row, *(_cell(values[index]) for values in table.columns.values())] for index, row in enumerate(table.rows)]
    write_atomically(path, csv_content([[table.key, *titles], *rows]))


def _cell(value: Any) -> Any:
    """A whole number with all digits, any other with six, and text as it is."""
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.6g}"
    return value


def predict(session: Session) -> dict[str, Any]:
    """Do ``task=predict``, by :meth:`exp.data.base.Data.predict` or :func:`predict_split`.

    Args:
        session: the session; called on every rank.

    Returns:
        The content of ``result.json``.

    Raises:
        ExpError: the data or the model cannot be built, or the data raise.
    """
    data = build_data(session)
    model = place_and_wrap(build_model(session, data), session, trains=False).eval()
    session.start_run()
    prediction = data.predict(session, model) or predict_split(session, data, model)
    session.distributed.barrier()
    return make_result(
        session,
        prediction.metrics,
        build_evaluator(session, data),
        files=prediction.files,
        measured_on=prediction.measured_on,
        data=data_record(session, data),
        warnings=session.warnings,
        reference=None,  # reference metrics are for the whole test split, and this may be a few samples
    )


def batch_outputs(session: Session, model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Predict one batch.

    Args:
        session: the session.
        model: on the session's device, wrapped or not; is left in eval mode.
        batch: a batch of the data, on any device.

    Returns:
        The predictions that the metrics take, a tensor on the CPU; of MMEngine's data elements the first member whose
        name begins with ``pred``.

    Raises:
        ConfigError: the model does not return one tensor.
    """
    model = unwrapped(model).eval()
    with torch.no_grad(), session.backend.autocast(session.config.precision):
        outputs = model.test_step(to_device(batch, session.device))
    if isinstance(outputs, (list, tuple)) and outputs and all(isinstance(each, BaseDataElement) for each in outputs):
        outputs = _of_data_elements(outputs)
    if not isinstance(outputs, torch.Tensor):
        raise ConfigError(
            f"model: {qualified_name(model)} predicts a {type(outputs).__name__}, not a tensor with a row for each "
            f"sample; override predict in the class of the data, see {EXPERIMENT_PAGE}"
        )
    return outputs.detach().cpu()


def _of_data_elements(outputs: Sequence[BaseDataElement]) -> torch.Tensor | None:
    """The predictions in MMEngine's data elements, one row for each; None: they have none, or of other shapes."""
    name = next((key for key in outputs[0].keys() if key.startswith("pred")), None)  # noqa: SIM118 - no dict
    values = [] if name is None else [getattr(each, name, None) for each in outputs]
    data = [value if isinstance(value, torch.Tensor) else getattr(value, "data", None) for value in values]
    rows = [row for row in data if isinstance(row, torch.Tensor)]
    return torch.stack(rows) if len(rows) == len(outputs) and len({row.shape for row in rows}) == 1 else None


def predict_split(session: Session, data: Data, model: Any) -> Prediction:
    """Predict every sample of the test split; each rank writes its share. A collective.

    ``predictions/rank<n>.npz`` has ``outputs`` (N, ...), and ``index``, int64 (N,), the indices of the samples in the
    split.

    Args:
        session: the session.
        data: the data set.
        model: on the session's device, in eval mode.

    Raises:
        ConfigError: the model does not return a tensor with one row per sample of a batch.
    """
    loader = eval_split(session, data, "test")
    numbers, outputs = [], []
    for indices, batch in zip(loader.sampler, loader):
        predicted = batch_outputs(session, model, batch)
        if not predicted.dim() or len(predicted) != len(indices):
            raise ConfigError(
                f"model: {qualified_name(model)} predicts a tensor of shape {tuple(predicted.shape)} for "
                f"{len(indices)} samples, not a row for each; see {EXPERIMENT_PAGE}"
            )
        numbers.append(indices)
        outputs.append(predicted)
    files = []
    if outputs:
        content = io.BytesIO()
        np.savez_compressed(content, outputs=torch.cat(outputs).numpy(), index=torch.cat(numbers).numpy())
        path = session.folder.path / "predictions" / f"rank{session.info.rank}.npz"
        write_atomically(path, content.getvalue())
        files.append(path.relative_to(session.folder.path).as_posix())
    every_file = [file for part in session.distributed.gather(files) for file in part]
    return Prediction({"samples": len(loader.dataset)}, every_file, data.test_split_name)


def measure(
    session: Session,
    data: Data,
    model: Any,
    evaluator: Evaluator,
    transform: Callable[[dict[str, Any], torch.Tensor], dict[str, Any]] | None = None,
    on_batch: Callable[[Any, dict[str, Any]], object] | None = None,
) -> dict[str, float]:
    """Compute the metrics of the test split, also for the user's own tasks; each rank takes its share. A collective.

    Args:
        session: the session.
        data: the data set.
        model: on the session's device.
        evaluator: of :func:`exp.engine.build.build_evaluator`.
        transform: returns a changed batch for the model and the metrics. Arguments: the batch, on the device, and the
            indices of its samples in the split, int64 (B,) on the CPU. Its random numbers should depend on these
            indices alone, because the number of ranks changes which samples are in a batch.
        on_batch: called with the predictions for each batch, and the batch.

    Returns:
        The metrics over all ranks, by name.

    Raises:
        RunError: predictions are NaN.
    """
    loader = eval_split(session, data, "test")
    metrics = EvalLoop(session, model, loader, evaluator, "test", transform, on_batch).measure()
    report_stage(Stage.FREE)  # no time limit for what follows, such as pictures
    return metrics


class Ranking:
    """Keeps the metric of each tested sample, on the device.

    Args:
        metric: ``ranking`` of :class:`exp.data.extensions.DataExtensions`; batches must have ``index``.
    """

    def __init__(self, metric: SampleMetric) -> None:
        self.metric = metric
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, outputs: Any, batch: dict[str, Any]) -> None:
        """Compute the metric for the samples of a batch."""
        self._values.append((batch["index"], self.metric.per_sample(outputs, batch).detach().float()))

    def worst_and_best(self, distributed: Any, worst: int, best: int) -> tuple[list[Any], list[Any]]:
        """The worst and the best samples over all ranks. A collective.

        Of equal samples, those with a smaller index are taken. Samples with NaN are left out.

        Args:
            distributed: gathers the values of the ranks.
            worst: number of worst samples.
            best: number of best samples.

        Returns:
            Pairs (index, value) of the worst samples, worst first, and of the best ones, best first. No sample is in
            both.
        """
        pairs = [pair for index, values in self._values for pair in zip(index.tolist(), values.tolist())]
        ranked = [pair for part in distributed.gather(pairs) for pair in part if pair[1] == pair[1]]
        sign = 1.0 if self.metric.greater_is_better else -1.0
        first = sorted(ranked, key=lambda pair: (sign * pair[1], pair[0]))[:worst]
        others = sorted(set(ranked) - set(first), key=lambda pair: (-sign * pair[1], pair[0]))
        return first, others[:best]
