"""task=backtest: runs, baselines and models of other libraries forecast the same windows of the test split.

A window's origin is the last row that a forecast may see. Windows are taken in the order of time, so that a model that
is trained again has seen no later row of any series.
"""

from __future__ import annotations

import collections
import copy
import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Sequence

import numpy as np
import pandas as pd
import torch
from omegaconf import OmegaConf

from exp.config.compose import load, run_folder_of
from exp.config.resolve import create, mark_untrusted
from exp.distributed import Distributed
from exp.engine.build import build_data, build_evaluator, build_model, data_record
from exp.engine.result import make_result
from exp.engine.wrapper import place_and_wrap, unwrapped
from exp.errors import ConfigError, RunError
from exp.forecasting.baselines import KINDS, Naive
from exp.forecasting.comparison import Windows, compare
from exp.forecasting.data.series import TrainingStatistics, read_series
from exp.forecasting.data.splits import num_windows
from exp.forecasting.intervals import percent
from exp.forecasting.keys import FILE_KEYS, interval_levels
from exp.forecasting.model import Forecaster
from exp.forecasting.peers import Peer
from exp.forecasting.predict import forecast_arrays, write_tables
from exp.forecasting.refit import train_again, training_config
from exp.metrics import Evaluator
from exp.runs.files import csv_content, escape_formula, write_atomically

if TYPE_CHECKING:
    from exp.session import Session

_SPLIT_KEYS = ("split", "val_size", "test_size", "val_start", "test_start")
_RANKED = ("mse", "mae", "mase", "crps", "wql", "sql")
_ALONE = {f"{error}_{naive}" for error in ("mse", "mae") for naive in ("naive", "seasonal_naive")}  # rows of their own


class Origins(NamedTuple):
    """The windows of a backtest, in the order of time.

    Attributes:
        series: number of each window's series, int64 (N,).
        back: rows from its origin to that of the last window of its series, int64 (N,).
        rows: its origin, a row of the table, int64 (N,).
        times: position of its origin in time, int64 (N,): among the distinct dates of the table, or, without dates,
            within its series.
    """

    series: np.ndarray
    back: np.ndarray
    rows: np.ndarray
    times: np.ndarray

    @classmethod
    def of(cls, data: Sequence[Any], times: np.ndarray, count: int | None, step: int) -> Origins:
        """The windows of the test split that all data have: ``count`` of each series, ``step`` rows apart.

        Args:
            data: the :class:`exp.forecasting.data.dataset.ForecastingData` of each run, of the same rows.
            times: of the rows of the table, int64 (T,).
            count: most windows of a series, from the last one backwards; None: all.
            step: rows between two origins.
        """
        available = np.min([_num_windows(part) for part in data], axis=0)
        counts = -(-available // step) if count is None else np.minimum(-(-available // step), count)
        series = np.repeat(np.arange(len(counts)), counts)
        back = (np.arange(len(series)) - np.repeat(counts.cumsum() - counts, counts)) * step
        rows = data[0].rows["test"][series, 1] - data[0].horizon - 1 - back
        order = np.lexsort((series, times[rows]))
        return cls(series[order], back[order], rows[order], times[rows][order])

    def numbers(self, data: Any) -> torch.Tensor:
        """The numbers of the windows in the test split of some data, int64 (N,)."""
        available = _num_windows(data)
        return torch.from_numpy(available.cumsum()[self.series] - 1 - self.back)

    def blocks(self, size: int | None) -> list[np.ndarray]:
        """The positions of the windows of each ``size`` origins in time; None: of all."""
        distinct, numbers = np.unique(self.times, return_inverse=True)
        return [np.flatnonzero(numbers // (size or len(distinct)) == block)
                for block in range(-(-len(distinct) // (size or len(distinct))))]  # fmt: skip


@dataclass
class _Entry:
    """A model of the backtest.

    Attributes:
        name: in tables.
        kind: ``run``, ``baseline`` or ``peer``.
        data: an :class:`exp.forecasting.data.dataset.ForecastingData` with its windows.
        model: on the session's device.
        intervals: around its forecasts; None: there are none.
        training: the configuration by which it trains again; None: it does not.
    """

    name: str
    kind: str
    data: Any
    model: Any
    intervals: Any = None
    training: Any = None


def backtest(session: Session) -> dict[str, Any]:
    """Do ``task=backtest``: write ``forecasts/backtest`` and ``metrics_models.csv``, and compare the models.

    Rank 0 alone forecasts; all ranks train again.

    Args:
        session: the session; called on every rank.

    Returns:
        The content of ``result.json``; its metrics are those of the first model.

    Raises:
        ConfigError: runs do not fit each other, or a run was trained with another split of the file.
        RunError: a model of another library gives no finite numbers.
    """
    task, is_main = session.config.task, session.distributed.is_main
    entries = _entries(session)
    data = entries[0].data
    times = _times(data)
    origins = Origins.of([entry.data for entry in entries], times, task.windows, task.step or data.horizon)
    session.start_run()
    path = session.folder.path / "forecasts" / f"backtest.{'parquet' if find_spec('pyarrow') else 'csv'}"
    rows: list[dict[str, Any]] = []
    errors: dict[str, dict[str, np.ndarray]] = {}
    tables = (table for entry in entries for table in _forecast(session, entry, origins, times, rows, errors))
    if is_main:
        ends = [f"{end}{percent(level)}" for level in interval_levels(task) for end in ("lo", "hi")]
        ids = [] if data.ids is None else [data.config.id_column]
        columns = ["model", *ids, "series", "origin", "date", "forecast", *ends, "truth"]
        write_tables(path, (table.reindex(columns=columns) for table in tables))
    else:
        collections.deque(tables, maxlen=0)  # trains again with the others
    session.distributed.barrier()
    evaluator = build_evaluator(session, data)
    metrics, results = (rows[0] if rows else {}), []
    if is_main:
        main = evaluator.metric_name if evaluator.metric_name in errors[entries[0].name] else "mse"
        windows = Windows(origins.series, origins.times, data.horizon)
        results = compare(main, {name: values[main] for name, values in errors.items()}, windows)
        rows = _ranked(rows, main)
        size = f"{len(origins.rows)} windows of {len(np.unique(origins.times))} origins"
        _report(session, rows, [size, *(each.text for each in results)])
    return make_result(
        session,
        {name: value for name, value in metrics.items() if name in evaluator.names},
        evaluator,
        files=[str(path.relative_to(session.folder.path)), "metrics_models.csv"],
        measured_on="backtest",
        data=data_record(session, data),
        models=rows,
        comparisons=[comparison._asdict() for comparison in results],
        reference=None,  # reference metrics are for all windows of the test split
    )


def _ranked(rows: list[dict[str, Any]], main: str) -> list[dict[str, Any]]:
    """Rows of models, the best first, with a rank by each metric that all of them have."""
    ranks = {name: sorted(row.get(name, math.nan) for row in rows) for name in _RANKED}
    complete = {name: values for name, values in ranks.items() if not any(map(math.isnan, values))}
    ranked = [{**row, **{f"rank_{name}": complete[name].index(row[name]) + 1 for name in complete}} for row in rows]
    return sorted(ranked, key=lambda row: row[main])


def _report(session: Session, rows: list[dict[str, Any]], lines: list[str]) -> None:
    """Write the table of metrics; print it, and the comparisons in words."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[f"{row[n]:.6g}" if isinstance(row.get(n), float) else row.get(n, "") for n in names] for row in rows]
    write_atomically(session.folder.path / "metrics_models.csv", csv_content([names, *cells]))
    table = pd.DataFrame(rows).reindex(columns=["model", *(name for name in _RANKED if name in names)])
    session.print(f"{lines[0]}:\n{table.to_string(index=False, float_format='{:.4g}'.format)}")
    for line in lines[1:]:
        session.print(line)


# -- the models -------------------------------------------------------------------------------------------------------


def _entries(session: Session) -> list[_Entry]:
    """The model of this session first, then further runs, baselines, and models of other libraries."""
    task = session.config.task
    first = _entry(session, session, session.config.name)
    runs = [_entry_of_run(session, name, path, first.data) for name, path in task.runs.items()]
    data, model, baselines = first.data, first.model, first.data.baselines
    naive: dict[str, Any] = {
        text: Naive(data.lookback, data.horizon, len(data.names), kind, baselines.season)
        for kind, text in KINDS.items()
        if kind != "seasonal" or baselines.seasonal
    }
    if isinstance(model, Naive):  # it is one of them
        first.name, first.kind = KINDS[model.kind], "baseline"
        naive.pop(first.name, None)
    if baselines.zero is not None:
        naive["zero"] = _Zero(data, baselines.zero)
    entries = [first, *runs]
    for name, baseline in naive.items():
        entry = _Entry(name, "baseline", data, baseline.to(session.device).eval())
        if task.intervals and task.intervals_method != "model" and data.calibration is None:  # else that of the run
            data.calibrate(session, baseline)
            entry.intervals = data.intervals
        entries.append(entry)
    for name, keys in task.peers.items():
        peer = create(keys, Peer, f"task.peers.{name}")
        entries.append(_Entry(name, "peer", data, _PeerModel(name, peer, data).eval()))
    twice = [name for name, count in collections.Counter(entry.name for entry in entries).items() if count > 1]
    if twice:
        raise ConfigError(f"two models are called {twice[0]!r}; give one another name in task.runs or task.peers")
    return entries


def _entry(session: Session, opened: Session, name: str) -> _Entry:
    """The model that a session's configuration opens, with its data; ``session`` trains it again."""
    config = opened.config
    data: Any = build_data(opened)
    weights, folder = opened.weights, config.record.trained_in
    run = None if weights is None or folder is None else load(Path(folder) / "config.yaml")
    files = ((weights and weights.data) or {}).get("files") or {}
    if run is not None and list(data.fingerprint().values()) == list(files.values()):
        changed = [key for key in _SPLIT_KEYS if run.data[key] != config.data[key]]
        if changed:
            raise ConfigError(
                f"data.{changed[0]}={config.data[changed[0]]}: {name} was trained with {run.data[changed[0]]} on the "
                f"same rows of {data.path}, so that windows might be among those; choose by task.windows",
                key=f"data.{changed[0]}",
            )
    model = place_and_wrap(build_model(opened, data), session, trains=False).eval()
    entry = _Entry(name, "run", data, model, data.intervals)
    if weights is not None and session.config.task.refit:
        entry.training = training_config(session, run, weights.path, str(config.init_from))
    return entry


def _entry_of_run(session: Session, name: str, path: str, data: Any) -> _Entry:
    """The model of a further run, with data of its own: the same rows, but its own columns and lookback."""
    key, folder, opened = f"task.runs.{name}", run_folder_of(path), copy.copy(session)
    if folder is None:
        raise ConfigError(f"{key}={path} is not the folder of a run", key=key)
    run, opened.config = load(folder / "config.yaml"), copy.deepcopy(session.config)
    mark_untrusted(run)
    OmegaConf.set_readonly(opened.config, False)  # type: ignore[arg-type]
    opened.config.update(model=run.model, data=run.data, init_from=path)  # type: ignore[attr-defined]
    opened.config.data.update({key: session.config.data[key] for key in FILE_KEYS})
    opened.config.record.trained_in = str(folder)
    entry = _entry(session, opened, name)
    for what, here, value in zip(_COMPARED, _compared(data), _compared(entry.data)):
        if here != value:
            raise ConfigError(f"{key}={path} has other {what} than the first model; they cannot be compared", key=key)
    return entry


_COMPARED = ("data.horizon", "data.targets", "series", "rows", "standardization (data.scaling, training rows)")


def _compared(data: Any) -> tuple[Any, ...]:
    moments = [moment[..., data.scored].tolist() for moment in (data.mean, data.std)]
    return data.horizon, data.target_names, data.ids, data.num_rows, moments


class _Zero(Forecaster):
    """Forecasts 0, in the units of the file; ``zero`` is its standardized value (:class:`Baselines`)."""

    def __init__(self, data: Any, zero: torch.Tensor) -> None:
        super().__init__()
        self.data, self.zero = data, zero

    def forward(self, x: torch.Tensor, *_: Any, index: torch.Tensor, **__: Any) -> torch.Tensor:  # type: ignore[override]
        """(B, H, C)."""
        series = self.data.series_of(index.cpu())
        level = self.zero if series is None else self.zero[series].unsqueeze(1)
        return level.to(x).expand(len(x), self.data.horizon, x.shape[2])


class _PeerModel(Forecaster):
    """A model of another library; it forecasts the windows of a block, which are then looked up by their first rows."""

    def __init__(self, name: str, peer: Peer, data: Any) -> None:
        super().__init__()
        self.name, self.peer, self.data = name, peer, data
        values = read_series(data.path, data.config, TrainingStatistics(**data.state_dict())).values
        self.values = values[:, data.scored]
        self.found: dict[int, torch.Tensor] = {}

    def predict_block(self, origins: Origins, block: np.ndarray, times: np.ndarray) -> None:
        """Fit at the first origin of the block, and forecast its windows.

        Raises:
            RunError: the forecasts have another shape, or are not finite.
        """
        data = self.data
        stops = _stops(data, times, origins.times[block[0]])
        started = np.flatnonzero(stops > data.starts[:-1])
        self.peer.fit(self._history(started, stops[started]), data.horizon, data.baselines.season)
        for time in np.unique(origins.times[block]):
            chosen = block[origins.times[block] == time]
            series, rows = origins.series[chosen], origins.rows[chosen]
            forecast = np.asarray(self.peer.predict(self._history(series, rows + 1)), dtype=np.float64)
            shape = (len(data.scored) * len(series), data.horizon)
            if forecast.shape != shape or not np.isfinite(forecast).all():
                finding = f"shape {forecast.shape}" if forecast.shape != shape else "values that are not finite"
                raise RunError(
                    f"task.peers.{self.name}: {type(self.peer).__name__}.predict gives {finding}, not {shape} numbers, "
                    f"at row {rows[0] + 1} of {data.path}"
                )
            values = torch.from_numpy(forecast).view(len(data.scored), len(series), -1).permute(1, 2, 0)
            numbers = data.series_of(torch.from_numpy(rows))
            moments = (data.mean, data.std) if numbers is None else (data.mean[numbers, None], data.std[numbers, None])
            mean, std = (moment[..., data.scored] for moment in moments)
            self.found.update(zip((rows + 1 - data.lookback).tolist(), ((values - mean) / std).float()))

    def _history(self, series: np.ndarray, stops: np.ndarray) -> pd.DataFrame:
        """The rows of some series before ``stops``, as :class:`exp.forecasting.peers.Peer` describes them."""
        data, lengths = self.data, stops - self.data.starts[series]
        rows = np.arange(lengths.sum()) + np.repeat(stops - lengths.cumsum(), lengths)
        parts = []
        for number, target in enumerate(data.target_names):
            ending = f"/{target}" if len(data.target_names) > 1 else ""
            ids = [target] if data.ids is None else [f"{data.ids[index]}{ending}" for index in series]
            column = {"unique_id": np.repeat(np.array(ids, dtype=object), lengths)}
            column["ds"] = rows if data.dates is None else data.dates[rows]
            parts.append(pd.DataFrame({**column, "y": self.values[rows, number]}))
        return pd.concat(parts, ignore_index=True)

    def forward(self, x: torch.Tensor, *_: Any, index: torch.Tensor, **__: Any) -> torch.Tensor:  # type: ignore[override]
        """(B, H, C)."""
        firsts = index.cpu() + self.data.test.first_row
        forecast = torch.zeros(len(x), self.data.horizon, x.shape[2])
        forecast[..., self.data.scored] = torch.stack([self.found[first] for first in firsts.tolist()])
        return forecast.to(x)


# -- no model sees a later row ----------------------------------------------------------------------------------------


def _num_windows(data: Any) -> np.ndarray:
    return num_windows(data.rows["test"], data.lookback + data.horizon)


def _times(data: Any) -> np.ndarray:
    """The position of each row in time, int64 (T,) (:class:`Origins`)."""
    if data.dates is None:
        return np.arange(data.num_rows) - np.repeat(data.starts[:-1], np.diff(data.starts))
    return pd.factorize(data.dates, sort=True)[0].astype(np.int64)


def _stops(data: Any, times: np.ndarray, time: int) -> np.ndarray:
    """The row after the last one of each series that is not later than ``time``, int64 (S,)."""
    return data.starts[:-1] + np.add.reduceat((times <= time).astype(np.int64), data.starts[:-1])


# -- forecasts --------------------------------------------------------------------------------------------------------


def _forecast(
    session: Session,
    entry: _Entry,
    origins: Origins,
    times: np.ndarray,
    rows: list[dict[str, Any]],
    errors: dict[str, dict[str, np.ndarray]],
) -> Iterator[pd.DataFrame]:
    """Forecast all windows with one model; yield a table of each batch, and add its metrics and errors at the end."""
    data, model, task, is_main = entry.data, entry.model, session.config.task, session.distributed.is_main
    data.intervals = entry.intervals
    measured = data.metrics()
    metrics = list(measured) if isinstance(measured, (list, tuple)) else [measured]
    if rows:  # the verdict that the run reports is that of the first model
        metrics[0].baselines = replace(metrics[0].baselines)
    evaluator, numbers = Evaluator(metrics), origins.numbers(data)
    index = pd.RangeIndex(data.num_rows) if data.dates is None else data.dates
    for block in origins.blocks(task.refit if entry.kind != "baseline" else None):
        if entry.training is not None:
            stops = _stops(data, times, origins.times[block[0]])
            model = _trained_before(session, entry, np.minimum(stops, data.observed_stops))
            model.gives_values = getattr(unwrapped(entry.model), "gives_values", False)
        if not is_main:
            continue
        if isinstance(model, _PeerModel):
            model.predict_block(origins, block, times)
        for part in torch.from_numpy(block).split(data.eval_batch_size):
            chosen = origins.rows[part.numpy()]
            firsts = torch.from_numpy(chosen + 1 - data.lookback)
            values = forecast_arrays(session, data, model, data.test[numbers[part]], firsts, evaluator)
            table = backtest_table(values, data.target_names, index, chosen)
            if data.ids is not None:
                ids = [str(escape_formula(data.ids[number])) for number in origins.series[part.numpy()]]
                table.insert(0, data.config.id_column, np.repeat(ids, len(table) // len(ids)))
            table.insert(0, "model", entry.name)
            yield table
    if is_main:
        figures = {name: value for name, value in evaluator.compute(Distributed()).items() if name not in _ALONE}
        rows.append({"model": entry.name, "kind": entry.kind, **figures})
        errors[entry.name] = metrics[0].window_errors()


def _trained_before(session: Session, entry: _Entry, stops: np.ndarray) -> Any:
    """The model of a run, trained again on the rows before ``stops`` of each series, in a folder of its own."""
    folder = session.folder
    session.folder = type(folder)(folder.path / "refits" / entry.name)
    try:
        session.folder.create()
        return train_again(session, entry.data, entry.training, entry.data.all_windows(stops))
    finally:
        session.folder = folder


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
    titles = np.array([str(escape_formula(name)) for name in names], dtype=object)
    columns = {
        "series": np.tile(np.repeat(titles, horizon), count),
        "origin": rows[np.repeat(origins, channels * horizon)],
        "date": rows[np.broadcast_to(steps, (count, channels, horizon)).ravel()],
    }
    return pd.DataFrame({**columns, **{name: array.transpose(0, 2, 1).ravel() for name, array in values.items()}})
