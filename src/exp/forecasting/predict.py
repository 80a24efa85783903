"""Forecasts of a checkpoint as tables in the units of the file, and plots of some of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, BinaryIO, Iterator, NamedTuple, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

from exp.data.base import Prediction
from exp.data.fingerprint import shortened
from exp.distributed import Distributed
from exp.draw.figure import label, literal_text, new_figure, title_and_legend
from exp.engine.evaluate import batch_outputs
from exp.engine.result import write_picture
from exp.engine.wrapper import unwrapped
from exp.errors import ConfigError
from exp.forecasting.intervals import Interval, percent
from exp.forecasting.refit import refit
from exp.metrics import Evaluator
from exp.runs.files import escape_formula, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

    from exp.session import Session

# Digits after the first digit of the standard deviation: within float32's precision, and a truth reads as in the file.
_DIGITS = 5

_MAX_HISTORY_HORIZONS = 3  # most history that is drawn, in horizons
_INTERVAL_COLORS = ("#ffc48a", "#ffe3c7", "#fff3e6")  # from the narrowest on; opaque, so that each keeps its color
_COMPARED_WINDOWS, _CHANNELS = 15, 2  # for the picture at the end of a training
_MAX_NAME_BYTES = 80  # bytes of a file name
_UNSAFE_CHARS = re.compile(r"[^\w.+-]+")


class Forecast(NamedTuple):
    """One window, in the units of the file.

    Attributes:
        title: title of its plots.
        history: (L, C).
        forecast: (H, C).
        truth: (H, C); None: not known yet.
        dates: of the L + H rows; None: the file has no dates.
        intervals: around the forecast, (H, C) each, ascending.
        series: its id in a table of many series; None: there is one.
    """

    title: str
    history: np.ndarray
    forecast: np.ndarray
    truth: np.ndarray | None
    dates: pd.DatetimeIndex | None
    intervals: Sequence[Interval] = ()
    series: str | None = None


def predict(session: Session, data: Any, model: Any) -> Prediction:
    """Forecast windows of the test split, and the horizon after the last row of the file (of each series).

    Rank 0 alone computes and writes ``forecasts/future.csv`` (without truth) and, for ``task.num_windows`` windows,
    ``forecasts/window_<n>.csv`` (date; for each target the forecast, ends of intervals and truth), each with plots of
    the chosen channels in ``plots/``. If new rows are too few for a window with truth, only ``future`` is written. With
    ``task.refit`` it is of a model that was trained on all rows (:func:`exp.forecasting.refit.refit`).

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        model: on the session's device, in eval mode.

    Returns:
        Metrics of the windows with their number, and the files, relative to the run
        folder; both empty on other ranks than 0.

    Raises:
        ConfigError: ``task.channels`` names a series that does not exist.
    """
    task = session.config.task
    channel_pages = split_channels(data.target_names, task.channels, task.max_channels)
    refitted = refit(session, data) if task.refit else model
    if not session.distributed.is_main:
        return Prediction({}, [], "")
    count = min(task.num_windows, len(data.test))
    if task.num_windows and not len(data.test):
        session.print(
            f"{data.path} has {data.num_rows} rows, too few for a window with truth (data.lookback + data.horizon = "
            f"{data.lookback + data.horizon}): only the rows after them are forecast"
        )
    data_metrics = data.metrics()
    evaluator = Evaluator(data_metrics if isinstance(data_metrics, list) else [data_metrics])
    windows = {}
    for index in _evenly_spaced(len(data.test), count).split(data.eval_batch_size) if count else ():
        firsts = _first_rows(data, index)
        values = forecast_arrays(session, data, model, data.test[index], firsts, evaluator)
        for row, (number, first) in enumerate(zip(index.tolist(), firsts.tolist())):
            dates = None if data.dates is None else data.dates[first : first + data.lookback + data.horizon]
            windows[f"window_{number:05d}"] = _window_forecast(data, f"test window {number}", first, dates, values, row)
    if data.intervals is not None:
        refitted.gives_values = unwrapped(model).gives_values
    files = []
    if data.ids is None:
        (first,), (dates,), values = _future_arrays(session, data, refitted, [0])
        dates = None if dates is None else data.dates[int(first) : int(first) + data.lookback].append(dates)
        windows["future"] = _window_forecast(data, "what follows the last row", int(first), dates, values)
    else:
        path = session.folder.path / "forecasts" / "future.csv"
        write_tables(path, _future_tables(session, data, refitted))
        files.append(str(path.relative_to(session.folder.path)))
    for name, window in windows.items():
        path = session.folder.path / "forecasts" / f"{name}.csv"
        table = wide_table(window, data.target_names)
        if window.series is not None:
            table.insert(0, data.config.id_column, escape_formula(window.series))
        write_atomically(path, table.to_csv(index=False).encode())
        files.append(str(path.relative_to(session.folder.path)))
        if session.config.plots:  # drawing takes longer than writing
            for page, channels in channel_pages.items():
                picture = draw_forecast(window, data.target_names, channels)
                files += write_picture(session, f"plots/{name}_{page}.png", picture)
    metrics = evaluator.compute(Distributed()) if count else {}  # of this rank alone: no other rank calls it
    return Prediction({**metrics, "windows": count}, files, "plotted windows")


def draw_representative(session: Session, data: Any, model: Any) -> dict[str, Figure]:
    """``forecast.png`` for the end of a training: a window of the test split, the same for all models.

    Of some windows it is the one where repeating the last value has the median error: neither an easy nor a hard one.

    Args:
        session: the session.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData`.
        model: on the session's device.
    """
    numbers = _evenly_spaced(len(data.test), min(_COMPARED_WINDOWS, len(data.test)))
    batch = data.test[numbers]
    errors = torch.nan_to_num(batch["y"] - batch["x"][:, -1:]).square().mean(dim=(1, 2))
    chosen = numbers[errors.argsort()[len(numbers) // 2]].reshape(1)
    (first,) = firsts = _first_rows(data, chosen)
    dates = None if data.dates is None else data.dates[int(first) : int(first) + data.lookback + data.horizon]
    values = forecast_arrays(session, data, model, data.test[chosen], firsts)
    window = _window_forecast(data, f"test window {int(chosen)}", int(first), dates, values)
    channels = next(iter(split_channels(data.target_names, None, _CHANNELS).values()))
    return {"forecast.png": draw_forecast(window, data.target_names, channels)}


def _evenly_spaced(windows: int, count: int) -> torch.Tensor:
    """The numbers of ``count`` windows, evenly spaced from the first to the last, int64 (count,)."""
    return torch.linspace(0, windows - 1, count, dtype=torch.float64).round().long()


def _first_rows(data: Any, windows: torch.Tensor) -> torch.Tensor:
    """The first rows of windows of the test split, int64 (B,)."""
    rows: torch.Tensor = data.test.first_row + data.test.sample_ids(windows)
    return rows


def _future_tables(session: Session, data: Any, model: Any) -> Iterator[pd.DataFrame]:
    """What follows the last observed row of each series that is long enough for a forecast, batch by batch."""
    numbers = np.flatnonzero(data.observed_stops - data.starts[:-1] >= data.lookback)
    for begin in range(0, len(numbers), data.eval_batch_size):
        chosen = numbers[begin : begin + data.eval_batch_size].tolist()
        firsts, dates, values = _future_arrays(session, data, model, chosen)
        arrays = {name: array.reshape(-1, array.shape[-1]) for name, array in values.items()}
        joined = None if dates[0] is None else dates[0].append(dates[1:])
        window = Forecast("", arrays["forecast"][:0], arrays["forecast"], None, joined, _intervals(data, arrays))
        table = wide_table(window, data.target_names)
        if joined is None:
            table.iloc[:, 0] = np.tile(np.arange(1, data.horizon + 1), len(firsts))
        ids = [str(escape_formula(data.ids[number])) for number in chosen]
        table.insert(0, data.config.id_column, np.repeat(ids, data.horizon))
        yield table


def _future_arrays(
    session: Session, data: Any, model: Any, series: list[int]
) -> tuple[torch.Tensor, list[Any], dict[str, np.ndarray]]:
    """For the forecasts after the last observed rows: first rows of the lookbacks, dates, and the values."""
    batch, dates = data.future_windows(series)
    firsts = torch.from_numpy(data.observed_stops[series] - data.lookback)
    return firsts, dates, forecast_arrays(session, data, model, batch, firsts)


def forecast_arrays(
    session: Session,
    data: Any,
    model: Any,
    batch: dict[str, Any],
    rows: torch.Tensor,
    evaluator: Evaluator | None = None,
) -> dict[str, np.ndarray]:
    """Forecast, ends of intervals and, if the batch has it, truth, (B, H, targets) each, in the units of the file.

    ``rows`` are the first rows of the windows, int64 (B,).
    """
    outputs = batch_outputs(session, model, batch)
    if evaluator is not None:
        evaluator.update(outputs, batch)
    tensors = {"forecast": outputs if outputs.dim() == 3 else outputs[..., 0]}
    if data.intervals is not None:
        quantiles = dict(data.intervals.quantiles(outputs.float()))
        for level, lower, upper in data.intervals.central(quantiles):
            tensors.update({f"lo{percent(level)}": lower, f"hi{percent(level)}": upper})
    if "y" in batch:
        tensors["truth"] = batch["y"]
    arrays = {name: _to_file_units(data, values, rows) for name, values in tensors.items()}
    for name, array in arrays.items():
        if name != "truth" and (data.lower is not None or data.upper is not None):
            arrays[name] = array.clip(data.lower, data.upper)
    return arrays


def _to_file_units(data: Any, values: torch.Tensor, rows: torch.Tensor) -> np.ndarray:
    """The targets, float64 (B, ..., targets) in the units of the file, of standardized values (B, ..., C)."""
    series = data.series_of(rows)
    array: np.ndarray = data.to_original_units(values.double(), series).numpy()  # on the CPU: float64 costs nothing
    std = data.std if series is None else data.std[series].unsqueeze(1)
    return round_values(array, std.numpy())[..., data.scored]


def round_values(values: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Round values to five digits after the first digit of the standard deviation, so that their text is short.

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


def _intervals(data: Any, arrays: dict[str, np.ndarray]) -> list[Interval]:
    levels = data.intervals.levels if data.intervals is not None else []
    return [Interval(level, arrays[f"lo{percent(level)}"], arrays[f"hi{percent(level)}"]) for level in levels]


def _window_forecast(
    data: Any, description: str, first_row: int, dates: Any, values: dict[str, np.ndarray], row: int = 0
) -> Forecast:
    """One window of a batch; its lookback begins at row ``first_row`` of the file."""
    arrays = {name: batch[row] for name, batch in values.items()}
    intervals = _intervals(data, arrays)
    past = _to_file_units(data, data.lookback_rows(first_row)[None], torch.tensor([first_row]))[0]
    series = None if data.ids is None else data.ids[int(data.series_of(torch.tensor([first_row])))]
    title = f"{data.name}{'' if series is None else f', {series}'}: {description}"
    title += "" if dates is None else f", forecast from {dates[data.lookback]}"
    return Forecast(title, past, arrays["forecast"], arrays.get("truth"), dates, intervals, series)


def wide_table(window: Forecast, names: Sequence[str]) -> pd.DataFrame:
    """A table with a row per step: its date or number, then forecast, ends of intervals and truth of each series.

    The forecast's column has the name of its series. Another column whose name is also a series' gets ``_`` appended.

    Args:
        window: the window.
        names: names of the C series.
    """

    def unique_title(title: str) -> str:
        while title in names:
            title += "_"
        return title

    values = {"": window.forecast}
    for level, lower, upper in window.intervals:
        values.update({f"_lo{percent(level)}": lower, f"_hi{percent(level)}": upper})
    if window.truth is not None:
        values["_truth"] = window.truth
    horizon = len(window.forecast)
    columns: dict[str, Any] = {unique_title("step"): range(1, horizon + 1)}
    if window.dates is not None:
        columns = {unique_title("date"): window.dates[-horizon:]}
    for channel, name in enumerate(names):
        for ending, array in values.items():
            columns[unique_title(name + ending) if ending else name] = array[:, channel]
    return pd.DataFrame(columns).rename(columns=escape_formula)  # a name must not be a formula in a spreadsheet


def write_tables(path: Path, tables: Iterator[pd.DataFrame]) -> None:
    """Write tables of the same columns below each other, as they come, to a file that appears once it is complete.

    Args:
        path: a name in ``.parquet`` is written by pyarrow, any other as CSV.
        tables: one after the other.
    """
    write = _write_parquet if path.suffix == ".parquet" else _write_csv
    write_atomically(path, lambda file: write(file, tables))


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


def split_channels(names: Sequence[str], channels_key: Any, per_page: int) -> dict[str, list[int]]:
    """Distribute the channels of a window over pictures.

    Args:
        names: names of the C series.
        channels_key: ``task.channels``: ``all``, names or numbers (from 0) of series; None: the first ``per_page``.
        per_page: ``task.max_channels``, the channels of a picture.

    Returns:
        The positions of each picture's channels, by a name for its file.

    Raises:
        ConfigError: a channel does not exist.
    """
    chosen = list(range(len(names)))[: per_page if channels_key is None else None]
    if channels_key not in (None, "all"):
        positions = {str(number): number for number in range(len(names))}
        positions.update((name, number) for number, name in reversed(list(enumerate(names))))
        requested = [str(name) for name in ([channels_key] if isinstance(channels_key, (str, int)) else channels_key)]
        unknown = [name for name in requested if name not in positions]
        if unknown:
            raise ConfigError(f"task.channels: no series {unknown[0]} in {shortened(names, 20)}; use these, or all")
        chosen = list(dict.fromkeys(positions[name] for name in requested))
    pages_by_name: dict[str, list[int]] = {}
    for first in range(0, len(chosen), per_page):
        channels = chosen[first : first + per_page]
        name = "_".join(_UNSAFE_CHARS.sub("-", names[channel]) for channel in channels)
        if len(name.encode()) > _MAX_NAME_BYTES or name.lower() in map(str.lower, pages_by_name):
            name = f"channels_{'-'.join(map(str, dict.fromkeys((channels[0], channels[-1]))))}"
        pages_by_name[name] = channels
    return pages_by_name


def draw_forecast(forecast: Forecast, names: Sequence[str], channels: Sequence[int]) -> Figure:
    """Plot history (three horizons at most), truth and forecast, with a panel for each channel.

    Args:
        forecast: all channels of a window.
        names: names of all series.
        channels: positions of the series to draw.
    """
    horizon = len(forecast.forecast)
    num_shown = min(len(forecast.history), _MAX_HISTORY_HORIZONS * horizon)
    dates = forecast.dates
    if dates is None:
        times: Any = list(range(-num_shown, horizon))
    else:  # the local times of the file: matplotlib would convert them to UTC
        times = list(dates[-num_shown - horizon :].tz_localize(None).to_pydatetime())
    figure = new_figure(8, 1.5 * len(channels) + 0.9)
    panels = figure.subplots(len(channels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, channel in zip(panels, channels):
        past = forecast.history[-num_shown:, channel]
        axes.plot(times[:num_shown], past, color="0.55", linewidth=1, label="history")
        if forecast.truth is not None:
            truth = [past[-1], *forecast.truth[:, channel]]
            axes.plot(times[num_shown - 1 :], truth, color="black", linewidth=1.2, label="truth")
        for number, interval in enumerate(reversed(forecast.intervals)):  # the widest first: narrower ones lie on top
            color = _INTERVAL_COLORS[min(len(forecast.intervals) - 1 - number, len(_INTERVAL_COLORS) - 1)]
            style = {"facecolor": color, "edgecolor": "none", "label": f"{percent(interval.level)} %", "zorder": 1}
            axes.fill_between(times[num_shown:], interval.lower[:, channel], interval.upper[:, channel], **style)
        axes.plot(times[num_shown:], forecast.forecast[:, channel], color="tab:orange", linewidth=1.6, label="forecast")
        axes.axvline(times[num_shown], color="0.8", linewidth=0.8)
        literal_text(axes.set_ylabel(label(names[channel])))
        axes.margins(x=0.01)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    title_and_legend(panels[0], forecast.title, columns=4 + len(forecast.intervals))
    if dates is None:
        panels[-1].set_xlabel("time steps from the beginning of the forecast")
    else:
        locator = AutoDateLocator(minticks=3, maxticks=8)
        panels[-1].xaxis.set_major_locator(locator)
        panels[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))
    figure.align_ylabels()
    return figure
