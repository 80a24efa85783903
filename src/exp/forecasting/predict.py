"""Forecasts of a checkpoint as tables in the units of the file, and plots of some of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, BinaryIO, Iterator, NamedTuple, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

from exp.data.base import Prediction
from exp.data.places import shortened
from exp.distributed import Distributed
from exp.draw.figure import as_it_is, label, new_figure, title_and_legend
from exp.engine.evaluate import batch_outputs
from exp.engine.pictures import write_picture
from exp.errors import ConfigError
from exp.forecasting.intervals import Band, percent
from exp.metrics import Evaluator
from exp.runs.files import as_text, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from exp.session import Session

__all__ = ["Forecast", "backtest_table", "draw_forecast", "pages", "predict", "rounded", "wide_table"]

# Digits after the first digit of the standard deviation: within float32's precision, and a truth reads as in the file.
_DIGITS = 5


def predict(session: Session, data: Any, model: Any) -> Prediction:
    """Forecast windows of the test split, and the horizon after the last row of the file.

    Rank 0 alone computes and writes ``forecasts/future.csv`` (without truth) and, for ``task.num_windows`` windows,
    ``forecasts/window_<n>.csv`` (date; for each target the forecast, ends of intervals and truth), each with plots of
    the chosen channels in ``plots/``. If ``task.backtest_file`` names a file, it has all windows as one table
    (:func:`backtest_table`). If new rows are too few for a window with truth, only ``future`` is written.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        model: on the session's device, in eval mode.

    Returns:
        Metrics of the windows (of the backtest if there is one) with their number, and the files, relative to the run
        folder; both empty on other ranks than 0.

    Raises:
        ConfigError: ``task.channels`` names a series that does not exist.
    """
    task = session.config.task
    drawn = pages(data.target_names, task.channels, task.max_channels)
    if not session.distributed.is_main:
        return Prediction({}, [], "")
    count = min(task.num_windows, len(data.test))
    if (task.num_windows or task.backtest_file) and not len(data.test):
        session.say(
            f"{data.path} has {data.num_rows} rows, too few for a window with truth (data.lookback + data.horizon = "
            f"{data.lookback + data.horizon}): only the rows after them are forecast"
        )
    own = data.metrics()
    evaluator = Evaluator(own if isinstance(own, list) else [own])
    windows = {}
    for index in _spread(len(data.test), count).split(data.eval_batch_size) if count else ():
        values = _values(session, data, model, data.test[index], evaluator)
        for row, number in enumerate(index.tolist()):
            first = data.rows["test"].start + number
            dates = None if data.dates is None else data.dates[first : first + data.lookback + data.horizon]
            windows[f"window_{number:05d}"] = _forecast(data, f"test window {number}", first, dates, values, row)
    batch, ahead = data.future_window()
    first = data.num_past - data.lookback
    dates = None if ahead is None else data.dates[first : data.num_past].append(ahead)
    values = _values(session, data, model, batch)
    windows["future"] = _forecast(data, "what follows the last row", first, dates, values)
    files = []
    for name, window in windows.items():
        path = session.folder.forecasts / f"{name}.csv"
        write_atomically(path, wide_table(window, data.target_names).to_csv(index=False).encode())
        files.append(str(path.relative_to(session.folder.path)))
        if session.config.plots:  # drawing takes longer than writing
            for page, channels in drawn.items():
                picture = draw_forecast(window, data.target_names, channels)
                files += write_picture(session, f"plots/{name}_{page}.png", picture)
    if task.backtest_file and len(data.test):
        count = min(task.backtest_windows or len(data.test), len(data.test))
        evaluator.reset()
        path = session.folder.forecasts / task.backtest_file
        tables = _backtest(session, data, model, _spread(len(data.test), count), evaluator)
        write = _write_parquet if path.suffix == ".parquet" else _write_csv
        write_atomically(path, lambda file: write(file, tables))
        files.append(str(path.relative_to(session.folder.path)))
    metrics = evaluator.compute(Distributed()) if count else {}  # of this rank alone: no other rank calls it
    return Prediction({**metrics, "windows": count}, files, "backtest" if task.backtest_file else "plotted windows")


def _spread(windows: int, count: int) -> torch.Tensor:
    """The numbers of ``count`` windows, evenly spaced from the first to the last, int64 (count,)."""
    return torch.linspace(0, windows - 1, count, dtype=torch.float64).round().long()


def _values(
    session: Session, data: Any, model: Any, batch: dict[str, Any], evaluator: Evaluator | None = None
) -> dict[str, np.ndarray]:
    """Forecast, ends of intervals and, if the batch has it, truth, (B, H, targets) each, in the units of the file."""
    outputs = batch_outputs(session, model, batch)
    if evaluator is not None:
        evaluator.update(outputs, batch)
    found = {"forecast": outputs}
    if data.intervals is not None:
        quantiles = dict(data.intervals.quantiles(outputs.float(), data.intervals.spread(batch)))
        for level, lower, upper in data.intervals.bands(quantiles):
            found.update({f"lo{percent(level)}": lower, f"hi{percent(level)}": upper})
    if "y" in batch:
        found["truth"] = batch["y"]
    return {name: _in_file_units(data, values) for name, values in found.items()}


def _in_file_units(data: Any, values: torch.Tensor) -> np.ndarray:
    """The targets, float64 (..., targets) in the units of the file, of standardized values (..., C)."""
    array: np.ndarray = data.to_original_units(values.double()).numpy()  # on the CPU, where float64 costs nothing
    return rounded(array, data.std.numpy())[..., data.scored]


def rounded(values: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Values rounded to five digits after the first digit of the standard deviation, so that their text is short.

    Args:
        values: float64 (..., C).
        std: of each series, (C,).

    Returns:
        float64 (..., C).
    """
    digits = _DIGITS - np.floor(np.log10(std))
    # Powers of ten with a positive exponent are exact, so that a quotient of integers is the float nearest to the text.
    up, down = 10.0 ** np.maximum(digits, 0), 10.0 ** np.maximum(-digits, 0)
    result: np.ndarray = np.rint(values * up / down) * down / up + 0.0  # no -0
    return result


def _forecast(data: Any, what: str, first: int, dates: Any, values: dict[str, np.ndarray], row: int = 0) -> Forecast:
    """One window of a batch; its lookback begins at row ``first`` of the file."""
    of_row = {name: each[row] for name, each in values.items()}
    levels = data.intervals.levels if data.intervals is not None else []
    bands = [Band(level, of_row[f"lo{percent(level)}"], of_row[f"hi{percent(level)}"]) for level in levels]
    past = _in_file_units(data, data.past(first))
    title = f"{data.name}: {what}" + ("" if dates is None else f", forecast from {dates[data.lookback]}")
    return Forecast(title, past, of_row["forecast"], of_row.get("truth"), dates, bands)


def wide_table(window: Forecast, names: Sequence[str]) -> pd.DataFrame:
    """A table with a row per step: its date or number, then forecast, ends of intervals and truth of each series.

    The forecast's column has the name of its series. Another column whose name is also a series' gets ``_`` appended.

    Args:
        window: the window.
        names: names of the C series.
    """

    def free(title: str) -> str:
        while title in names:
            title += "_"
        return title

    values = {"": window.forecast}
    for level, lower, upper in window.bands:
        values.update({f"_lo{percent(level)}": lower, f"_hi{percent(level)}": upper})
    if window.truth is not None:
        values["_truth"] = window.truth
    horizon = len(window.forecast)
    columns: dict[str, Any] = {free("step"): range(1, horizon + 1)}
    if window.dates is not None:
        columns = {free("date"): window.dates[-horizon:]}
    for channel, name in enumerate(names):
        columns.update({free(name + ending) if ending else name: each[:, channel] for ending, each in values.items()})
    return pd.DataFrame(columns).rename(columns=as_text)  # a name must not be a formula in a spreadsheet


def _backtest(
    session: Session, data: Any, model: Any, windows: torch.Tensor, evaluator: Evaluator
) -> Iterator[pd.DataFrame]:
    """Forecast windows batch by batch: update the evaluator, and yield the table of each batch."""
    rows = pd.RangeIndex(data.num_rows) if data.dates is None else data.dates
    for index in windows.split(data.eval_batch_size):
        values = _values(session, data, model, data.test[index], evaluator)
        origins = data.rows["test"].start + data.lookback - 1 + index.numpy()
        yield backtest_table(values, data.target_names, rows, origins)


def backtest_table(values: dict[str, np.ndarray], names: Sequence[str], rows: Any, origins: np.ndarray) -> pd.DataFrame:
    """A long table: series, origin (the last row of the lookback), date, and a column for each of the values.

    Args:
        values: (B, H, C) each, in the units of the file.
        names: names of the C series.
        rows: dates or numbers of the file's rows, a pandas index.
        origins: position in ``rows`` of the last row of each window's lookback, (B,).
    """
    count, horizon, channels = values["forecast"].shape
    steps = origins[:, None, None] + np.arange(1, horizon + 1)
    columns = {
        "series": np.tile(np.repeat(np.array([str(as_text(name)) for name in names], dtype=object), horizon), count),
        "origin": rows[np.repeat(origins, channels * horizon)],
        "date": rows[np.broadcast_to(steps, (count, channels, horizon)).ravel()],
    }
    return pd.DataFrame({**columns, **{name: each.transpose(0, 2, 1).ravel() for name, each in values.items()}})


def _write_csv(file: BinaryIO, tables: Iterator[pd.DataFrame]) -> None:
    for number, table in enumerate(tables):
        file.write(table.to_csv(index=False, header=number == 0).encode())


def _write_parquet(file: BinaryIO, tables: Iterator[pd.DataFrame]) -> None:
    import pyarrow
    from pyarrow import parquet

    writer = None
    for table in tables:
        content = pyarrow.Table.from_pandas(table, preserve_index=False)
        writer = writer or parquet.ParquetWriter(file, content.schema)
        writer.write_table(content)
    if writer is not None:
        writer.close()


_HORIZONS = 3  # most history that is drawn, in horizons
_BANDS = ("#ffc48a", "#ffe3c7", "#fff3e6")  # from the narrowest interval on; opaque, so that each keeps its own color
_LONGEST_NAME = 80  # bytes of a file name
_UNSAFE = re.compile(r"[^\w.+-]+")


class Forecast(NamedTuple):
    """One window, in the units of the file.

    Attributes:
        title: title of its plots.
        history: (L, C).
        forecast: (H, C).
        truth: (H, C); None: not known yet.
        dates: of the L + H rows; None: the file has no dates.
        bands: intervals around the forecast, (H, C) each, ascending.
    """

    title: str
    history: np.ndarray
    forecast: np.ndarray
    truth: np.ndarray | None
    dates: pd.DatetimeIndex | None
    bands: Sequence[Band] = ()


def pages(names: Sequence[str], wanted: Any, most: int) -> dict[str, list[int]]:
    """Distribute the channels of a window over pictures.

    Args:
        names: names of the C series.
        wanted: ``task.channels``: ``all``, names or numbers (from 0) of series; None: the first ``most``.
        most: ``task.max_channels``, the channels of a picture.

    Returns:
        The positions of each picture's channels, by a name for its file.

    Raises:
        ConfigError: a channel does not exist.
    """
    chosen = list(range(len(names)))[: most if wanted is None else None]
    if wanted not in (None, "all"):
        numbers = {str(number): number for number in range(len(names))}
        numbers.update((name, number) for number, name in reversed(list(enumerate(names))))
        several = [str(each) for each in ([wanted] if isinstance(wanted, (str, int)) else wanted)]
        lacking = [each for each in several if each not in numbers]
        if lacking:
            raise ConfigError(f"task.channels: no series {lacking[0]} in {shortened(names, 20)}; use these, or all")
        chosen = list(dict.fromkeys(numbers[each] for each in several))
    found: dict[str, list[int]] = {}
    for first in range(0, len(chosen), most):
        channels = chosen[first : first + most]
        name = "_".join(_UNSAFE.sub("-", names[channel]) for channel in channels)
        if len(name.encode()) > _LONGEST_NAME or name.lower() in map(str.lower, found):
            name = f"channels_{'-'.join(map(str, dict.fromkeys((channels[0], channels[-1]))))}"
        found[name] = channels
    return found


def draw_forecast(forecast: Forecast, names: Sequence[str], channels: Sequence[int]) -> Figure:
    """Plot history (three horizons at most), truth and forecast, with a panel for each channel.

    Args:
        forecast: all channels of a window.
        names: names of all series.
        channels: positions of the series to draw.
    """
    horizon = len(forecast.forecast)
    shown = min(len(forecast.history), _HORIZONS * horizon)
    dates = forecast.dates
    if dates is None:
        times: Any = list(range(-shown, horizon))
    else:  # the local times of the file: matplotlib would convert them to UTC
        times = list(dates[-shown - horizon :].tz_localize(None).to_pydatetime())
    figure = new_figure(8, 1.5 * len(channels) + 0.9)
    panels = figure.subplots(len(channels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, channel in zip(panels, channels):
        past = forecast.history[-shown:, channel]
        axes.plot(times[:shown], past, color="0.55", linewidth=1, label="history")
        if forecast.truth is not None:
            known = [past[-1], *forecast.truth[:, channel]]
            axes.plot(times[shown - 1 :], known, color="black", linewidth=1.2, label="truth")
        for number, band in enumerate(reversed(forecast.bands)):  # the widest first, so that narrower ones lie on top
            axes.fill_between(
                times[shown:],
                band.lower[:, channel],
                band.upper[:, channel],
                facecolor=_BANDS[min(len(forecast.bands) - 1 - number, len(_BANDS) - 1)],
                edgecolor="none",
                label=f"{percent(band.level)} %",
                zorder=1,
            )
        axes.plot(times[shown:], forecast.forecast[:, channel], color="tab:orange", linewidth=1.6, label="forecast")
        axes.axvline(times[shown], color="0.8", linewidth=0.8)
        as_it_is(axes.set_ylabel(label(names[channel])))
        axes.margins(x=0.01)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    title_and_legend(panels[0], forecast.title, columns=4 + len(forecast.bands))
    if dates is None:
        panels[-1].set_xlabel("time steps from the beginning of the forecast")
    else:
        locator = AutoDateLocator(minticks=3, maxticks=8)
        panels[-1].xaxis.set_major_locator(locator)
        panels[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))
    figure.align_ylabels()
    return figure
