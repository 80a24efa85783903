"""Forecasts of a checkpoint as CSV files in the units of the file, and pictures of some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

import numpy as np
import torch

from exp.data.base import Prediction
from exp.engine.distributed import Distributed
from exp.engine.outputs import batch_outputs
from exp.engine.plots import PictureWriter
from exp.forecasting.intervals.intervals import Band, percent
from exp.forecasting.pictures import Forecast, draw_forecast, pages
from exp.metrics import Evaluator
from exp.runs.files import as_text, write_atomically

if TYPE_CHECKING:
    from exp.session import Session

__all__ = ["predict", "shortest_texts"]

_MEASURED_ON = "plotted windows"
_FEWEST, _MOST = 6, 17  # significant digits; 17 tell every float64 from the others


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
    task = session.config.task
    drawn = pages(data.target_names, task.channels, task.max_channels)
    if not session.distributed.is_main:
        return Prediction({}, [], _MEASURED_ON)
    count = min(task.num_windows, len(data.test))
    if task.num_windows and not count:
        session.say(
            f"{data.path} has {data.num_rows} rows, too few for a window with truth (data.lookback + data.horizon = "
            f"{data.lookback + data.horizon}): only what follows them is forecast"
        )
    windows, metrics = _windows(session, data, model, count) if count else ({}, {})
    windows["future"] = _future(session, data, model)
    mean, std = data.mean.numpy()[data.scored], data.std.numpy()[data.scored]
    writer, files = PictureWriter(session), []
    for name, window in windows.items():
        path = session.folder.forecasts / f"{name}.csv"
        write_atomically(path, csv_table(window, data.target_names, mean, std))
        files.append(str(path.relative_to(session.folder.path)))
        if session.config.plots:  # drawing takes longer than writing
            for page, channels in drawn.items():
                files += writer.write(f"plots/{name}_{page}.png", draw_forecast(window, data.target_names, channels))
    return Prediction({**metrics, "windows": count}, files, _MEASURED_ON)


def _windows(session: Session, data: Any, model: Any, count: int) -> tuple[dict[str, Forecast], dict[str, float]]:
    """``count`` windows of the test split, from its first to its last, evenly; and their metrics."""
    indices = torch.linspace(0, len(data.test) - 1, count).round().long()
    batch = data.test[indices]
    outputs = batch_outputs(session, model, batch)
    forecasts, truths = _in_file_units(data, outputs), _in_file_units(data, batch["y"])
    own = data.metrics()
    metrics = Evaluator(own if isinstance(own, list) else [own])
    metrics.update(outputs, batch)
    bands = _bands(data, outputs, batch)
    windows = {}
    for row, index in enumerate(indices.tolist()):
        first = data.rows["test"].start + index
        dates = None if data.dates is None else data.dates[first : first + data.lookback + data.horizon]
        begins = "" if dates is None else f", forecast from {dates[data.lookback]}"
        windows[f"window_{index:05d}"] = Forecast(
            f"{data.name}: test window {index}{begins}",
            _in_file_units(data, data.past(first)),
            forecasts[row],
            truths[row],
            dates,
            _of_row(bands, row),
        )
    return windows, metrics.compute(Distributed())  # of this rank alone: the others take no part


def _future(session: Session, data: Any, model: Any) -> Forecast:
    """What follows the last row."""
    batch, dates = data.future_window()
    outputs = batch_outputs(session, model, batch)
    first = data.num_past - data.lookback
    known = None if dates is None else data.dates[first : data.num_past].append(dates)
    begins = "" if dates is None else f", from {dates[0]}"
    past, forecast = _in_file_units(data, data.past(first)), _in_file_units(data, outputs)[0]
    bands = _of_row(_bands(data, outputs, batch), 0)
    return Forecast(f"{data.name}: what follows the last row{begins}", past, forecast, None, known, bands)


def _bands(data: Any, outputs: torch.Tensor, batch: dict[str, Any]) -> list[Band]:
    """The intervals of forecasts, (B, H, targets) in the units of the file; none where none are asked for."""
    intervals = data.intervals
    if intervals is None:
        return []
    spread = intervals.spread(batch)
    found = intervals.bands(dict(intervals.quantiles(outputs.float(), None if spread is None else spread.cpu())))
    return [Band(level, _in_file_units(data, lower), _in_file_units(data, upper)) for level, lower, upper in found]


def _of_row(bands: Sequence[Band], row: int) -> list[Band]:
    return [Band(band.level, band.lower[row], band.upper[row]) for band in bands]


def _in_file_units(data: Any, values: torch.Tensor) -> np.ndarray:
    """The targets (..., targets) of standardized values (..., C), float64, in the units of the file."""
    array: np.ndarray = data.to_original_units(values.double()).numpy()  # on the CPU, where float64 costs nothing
    return array[..., data.scored]


def csv_table(window: Forecast, names: Sequence[str], mean: np.ndarray, std: np.ndarray) -> bytes:
    """A window as a CSV file: date or step; and of each series forecast, ends of intervals and truth.

    Args:
        window: the window.
        names: of the C series.
        mean: of their training rows, (C,).
        std: likewise.
    """
    import pandas as pd

    def free(title: str) -> str:
        """A title that no series has: the series keep their names."""
        while title in names:
            title += "_"
        return title

    values = {"": window.forecast}
    for level, lower, upper in window.bands:
        values.update({f"_lo{percent(level)}": lower, f"_hi{percent(level)}": upper})
    if window.truth is not None:
        values["_truth"] = window.truth
    texts = {ending: shortest_texts(each, mean, std) for ending, each in values.items()}
    horizon = len(window.forecast)
    # Columns side by side, not by name: a series may be called "step", or as another one with "_truth".
    columns: list[Any] = [range(1, horizon + 1) if window.dates is None else window.dates[-horizon:]]
    titles = [free("step" if window.dates is None else "date")]
    for channel, name in enumerate(names):
        columns += [text[:, channel] for text in texts.values()]
        titles += [free(f"{name}{ending}") if ending else name for ending in texts]
    table = pd.concat([pd.Series(column) for column in columns], axis=1)
    titles = [str(as_text(title)) for title in titles]  # of somebody's file; the rest are dates and numbers
    return table.to_csv(index=False, header=titles).encode()


def shortest_texts(values: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """The shortest decimal text that is standardized to the same float32 number, from six digits on.

    A model computes with standardized float32, so this is all that there is to know of a forecast, also of a series
    whose mean is far larger than its standard deviation; and a truth reads as it stands in the file.

    Args:
        values: in the units of the file, float64 (..., C).
        mean: of the training rows, float64 (C,).
        std: likewise.

    Returns:
        Text of the same shape, an object array; empty where a value is nan.
    """
    flat = values.reshape(-1, values.shape[-1])
    texts = np.full(flat.shape, "", dtype=object)
    rows, channels = np.nonzero(~np.isnan(flat))
    wanted = ((flat - mean) / std).astype(np.float32)
    for digits in range(_FEWEST, _MOST + 1):
        left = [f"{value:.{digits}g}" for value in flat[rows, channels].tolist()]
        texts[rows, channels] = left
        read = (np.array(left, dtype=np.float64) - mean[channels]) / std[channels]
        unlike = read.astype(np.float32) != wanted[rows, channels]
        rows, channels = rows[unlike], channels[unlike]
        if not len(rows):
            break
    return texts.reshape(values.shape)
