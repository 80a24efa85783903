"""Forecasts of a checkpoint as CSV files in original units, and pictures of some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import torch

from exp.csvfile import as_text
from exp.data.base import Prediction
from exp.engine.distributed import Distributed
from exp.engine.outputs import batch_outputs
from exp.engine.plots import PictureWriter
from exp.forecasting.digits import shortest_texts
from exp.forecasting.intervals.conformal import percent
from exp.forecasting.intervals.intervals import Band
from exp.forecasting.pictures import Forecast, draw_forecast, pages
from exp.metrics import Evaluator
from exp.runfolder import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from exp.forecasting.pictures import Page
    from exp.session import Session

__all__ = ["predict"]

_MEASURED_ON = "plotted windows"


def predict(session: Session, data: Any, model: Any) -> Prediction:
    """Forecast windows spread over the test split, and what follows the last row of the file.

    Rank 0 does the work: it is a few windows. Writes ``forecasts/window_<n>.csv`` (date, and per target forecast,
    ends of intervals and truth), ``forecasts/future.csv`` (no truth yet), and, of the channels asked for,
    ``plots/window_<n>_<channels>.png`` and ``plots/future_<channels>.png``. New rows that are too few for a window with
    truth give the future alone.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        model: on the session's device, in eval mode.

    Returns:
        Metrics of the windows and their number, and the files below the run folder; both empty but on rank 0.

    Raises:
        ConfigError: ``task.channels`` names a series that is not there.
    """
    drawn = pages(data.target_names, session.config.task.channels, session.config.task.max_channels)
    metrics, files = _forecast(session, data, model, drawn) if session.distributed.is_main else ({}, [])
    return Prediction(metrics, files, _MEASURED_ON)


def _forecast(session: Session, data: Any, model: Any, drawn: Sequence[Page]) -> tuple[dict[str, float], list[str]]:
    task, folder = session.config.task, session.folder
    writer = PictureWriter(session)
    metrics: dict[str, float] = {}
    files: list[str] = []
    count = min(task.num_windows, len(data.test))
    if count:
        metrics, files = _windows(session, data, model, count, drawn, writer)
    elif task.num_windows:
        session.say(
            f"{data.path} has {data.num_rows} rows, too few for a window with truth (data.lookback + data.horizon = "
            f"{data.lookback + data.horizon}): only what follows them is forecast"
        )
    window, dates = data.future_window()
    outputs = batch_outputs(session, model, window)
    forecast = _in_file_units(data, outputs)[0]
    bands = _of_row(_bands(data, outputs, window), 0)
    path = folder.forecasts / "future.csv"
    _write_csv(path, data, dates, forecast, None, bands)
    files.append(str(path.relative_to(folder.path)))
    known = None if dates is None else data.dates[data.num_past - data.lookback : data.num_past].append(dates)
    begins = "" if dates is None else f", from {dates[0]}"
    title = f"{data.name}: what follows the last row{begins}"
    past = _in_file_units(data, data.past(data.num_past - data.lookback))
    future = Forecast(title, past, forecast, None, known, bands)
    return {**metrics, "windows": count}, files + _draw(writer, "future", future, data.target_names, drawn)


def _windows(
    session: Session, data: Any, model: Any, count: int, drawn: Sequence[Page], writer: PictureWriter
) -> tuple[dict[str, float], list[str]]:
    """``count`` windows of the test split, from its first to its last, evenly."""
    folder = session.folder
    indices = torch.linspace(0, len(data.test) - 1, count).round().long()
    batch = data.test[indices]
    outputs = batch_outputs(session, model, batch)
    forecasts, truths = (_in_file_units(data, values) for values in (outputs, batch["y"]))
    own = data.metrics()
    metrics = Evaluator(own if isinstance(own, list) else [own])
    metrics.update(outputs, batch)
    bands = _bands(data, outputs, batch)
    files = []
    for row, index in enumerate(indices.tolist()):
        dates = data.dates_of("test", index)
        path = folder.forecasts / f"window_{index:05d}.csv"
        _write_csv(path, data, dates, forecasts[row], truths[row], _of_row(bands, row))
        files.append(str(path.relative_to(folder.path)))
        first = data.rows["test"].start + index
        all_dates = None if dates is None else data.dates[first : first + data.lookback + data.horizon]
        begins = "" if dates is None else f", forecast from {dates[0]}"
        title = f"{data.name}: test window {index}{begins}"
        past = _in_file_units(data, data.past(first))
        window = Forecast(title, past, forecasts[row], truths[row], all_dates, _of_row(bands, row))
        files += _draw(writer, f"window_{index:05d}", window, data.target_names, drawn)
    return metrics.compute(Distributed()), files  # of this rank alone: the others take no part


def _draw(writer: PictureWriter, name: str, window: Forecast, names: list[str], drawn: Sequence[Page]) -> list[str]:
    if not writer.session.config.plots:  # drawing takes longer than writing
        return []
    return writer.write_all({f"{name}_{page.name}.png": draw_forecast(window, names, page.channels) for page in drawn})


def _bands(data: Any, outputs: torch.Tensor, batch: dict[str, Any]) -> list[Band]:
    """The intervals of forecasts, (B, H, C) in the units of the file; none where none are asked for."""
    intervals = data.intervals
    if intervals is None:
        return []
    spread = intervals.spread(batch)
    found = intervals.bands(dict(intervals.quantiles(outputs.float(), None if spread is None else spread.cpu())))
    return [Band(level, *(_in_file_units(data, end) for end in (lower, upper))) for level, lower, upper in found]


def _of_row(bands: Sequence[Band], row: int) -> list[Band]:
    return [Band(band.level, band.lower[row], band.upper[row]) for band in bands]


def _in_file_units(data: Any, values: torch.Tensor) -> np.ndarray:
    array: np.ndarray = data.to_original_units(values.double()).numpy()  # on the CPU, where float64 costs nothing
    return array[..., data.scored]


def _write_csv(
    path: Path, data: Any, dates: Any, forecast: np.ndarray, truth: np.ndarray | None, bands: Sequence[Band]
) -> None:
    import pandas as pd

    names = data.target_names
    mean, std = data.mean.numpy()[data.scored], data.std.numpy()[data.scored]
    written = shortest_texts(forecast, mean, std)
    ends = [
        (percent(band.level), shortest_texts(band.lower, mean, std), shortest_texts(band.upper, mean, std))
        for band in bands
    ]
    known = None if truth is None else shortest_texts(truth, mean, std)
    # Columns side by side, not by name: a series may be called "step", or as another one with "_truth".
    columns: list[Any] = [range(1, len(forecast) + 1) if dates is None else dates]
    titles = [_free("step" if dates is None else "date", names)]
    for channel, name in enumerate(names):
        columns.append(written[:, channel])
        titles.append(name)
        for level, lower, upper in ends:
            columns += [lower[:, channel], upper[:, channel]]
            titles += [_free(f"{name}_{end}{level}", names) for end in ("lo", "hi")]
        if known is not None:
            columns.append(known[:, channel])
            titles.append(_free(f"{name}_truth", names))
    table = pd.concat([pd.Series(column) for column in columns], axis=1)
    titles = [str(as_text(title)) for title in titles]  # of somebody's file; the rest are dates and numbers
    write_atomically(path, table.to_csv(index=False, header=titles).encode())


def _free(title: str, names: Sequence[str]) -> str:
    """A title of a column that no series has: the series keep their names."""
    while title in names:
        title += "_"
    return title
