"""Forecasts of a checkpoint as CSV files in original units, and pictures of some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exp.csvfile import as_text
from exp.data.base import Prediction
from exp.engine.distributed import Distributed
from exp.engine.outputs import batch_outputs
from exp.runfolder import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from exp.session import Session

__all__ = ["predict"]

_MEASURED_ON = "plotted windows"


def predict(session: Session, data: Any, model: Any) -> Prediction:
    """Forecast windows spread over the test split, and what follows the last row of the file.

    Rank 0 does the work: it is a few windows. Writes ``forecasts/window_<n>.csv`` (date, and per channel forecast and
    truth), ``forecasts/future.csv`` (no truth yet) and ``plots/window_<n>.png``. New rows that are too few for a window
    with truth give ``future.csv`` alone.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        model: on the session's device, in eval mode.

    Returns:
        Metrics of the windows and their number, and the files below the run folder; both empty but on rank 0.
    """
    metrics, files = _forecast(session, data, model) if session.distributed.is_main else ({}, [])
    return Prediction(metrics, files, _MEASURED_ON)


def _forecast(session: Session, data: Any, model: Any) -> tuple[dict[str, float], list[str]]:
    task, folder = session.config.task, session.folder
    metrics: dict[str, float] = {}
    files: list[str] = []
    count = min(task.num_windows, len(data.test))
    if count:
        metrics, files = _windows(session, data, model, count)
    elif task.num_windows:
        session.say(
            f"{data.path} has {data.num_rows} rows, too few for a window with truth (data.lookback + data.horizon = "
            f"{data.lookback + data.horizon}): only what follows them is forecast"
        )
    future, dates = data.future_window()
    path = folder.forecasts / "future.csv"
    _write_csv(path, data.names, dates, _in_file_units(data, batch_outputs(session, model, future))[0], None)
    files.append(str(path.relative_to(folder.path)))
    return {**metrics, "windows": count}, files


def _windows(session: Session, data: Any, model: Any, count: int) -> tuple[dict[str, float], list[str]]:
    """``count`` windows of the test split, from its first to its last, evenly."""
    folder = session.folder
    indices = torch.linspace(0, len(data.test) - 1, count).round().long()
    batch = data.test[indices]
    outputs = batch_outputs(session, model, batch)
    forecast, truth, history = (_in_file_units(data, values) for values in (outputs, batch["y"], batch["x"]))
    metrics = data.metrics()
    metrics.update(outputs, batch)
    files = []
    for row, index in enumerate(indices.tolist()):
        dates = data.dates_of("test", index)
        path = folder.forecasts / f"window_{index:05d}.csv"
        _write_csv(path, data.names, dates, forecast[row], truth[row])
        picture = folder.plots / f"window_{index:05d}.png"
        _draw(picture, data, index, history[row], truth[row], forecast[row], session.config.task.max_channels)
        files += [str(path.relative_to(folder.path)), str(picture.relative_to(folder.path))]
    return metrics.compute(Distributed()), files  # of this rank alone: the others take no part


def _in_file_units(data: Any, values: torch.Tensor) -> np.ndarray:
    array: np.ndarray = data.to_original_units(values.double()).numpy()  # on the CPU, where float64 costs nothing
    return array


def _write_csv(path: Path, names: list[str], dates: Any, forecast: np.ndarray, truth: np.ndarray | None) -> None:
    import pandas as pd

    # Columns side by side, not by name: a series may be called "step", or as another one with "_truth".
    columns: list[Any] = [range(1, len(forecast) + 1) if dates is None else dates]
    titles = ["step" if dates is None else "date"]
    for channel, name in enumerate(names):
        columns.append(forecast[:, channel])
        titles.append(name)
        if truth is not None:
            columns.append(truth[:, channel])
            titles.append(f"{name}_truth")
    table = pd.concat([pd.Series(column) for column in columns], axis=1)
    titles = [str(as_text(title)) for title in titles]  # of somebody's file; the rest are dates and numbers
    write_atomically(path, table.to_csv(index=False, header=titles, float_format="%.6g").encode())


def _draw(
    path: Path,
    data: Any,
    index: int,
    history: np.ndarray,
    truth: np.ndarray,
    forecast: np.ndarray,
    max_channels: int,
) -> None:
    """History, truth and forecast of one window: one panel per channel. Shows at most three horizons of history."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    horizon, channels = forecast.shape[0], min(max_channels, forecast.shape[1])
    shown = min(len(history), 3 * horizon)
    past, ahead = list(range(-shown, 0)), list(range(horizon))
    dates = data.dates_of("test", index)
    figure = Figure(figsize=(10, 2.2 * channels + 0.8), dpi=110)
    FigureCanvasAgg(figure)
    for channel in range(channels):
        axes = figure.add_subplot(channels, 1, channel + 1)
        axes.plot(past, history[-shown:, channel], color="0.55", linewidth=1, label="history")
        axes.plot([-1, *ahead], [history[-1, channel], *truth[:, channel]], color="black", linewidth=1.2, label="truth")
        axes.plot(ahead, forecast[:, channel], color="tab:orange", linewidth=1.6, label="forecast")
        axes.axvline(-0.5, color="0.8", linewidth=0.8)
        axes.set_ylabel(data.names[channel])
        axes.margins(x=0.01)
        if channel == 0:
            begins = f", forecast from {dates[0]}" if dates is not None else ""
            axes.set_title(f"{data.name}: test window {index}{begins}", fontsize=10)
            axes.legend(loc="upper left", ncol=3, fontsize=8, frameon=False)
        if channel == channels - 1:
            axes.set_xlabel("time steps from the beginning of the forecast")
        else:
            axes.set_xticklabels([])
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())
