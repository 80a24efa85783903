"""Models of other libraries in a backtest: an interface of two methods, and that of statsforecast."""

from __future__ import annotations

import abc
import importlib
import inspect
from typing import Any

import numpy as np
import pandas as pd

from exp.errors import ConfigError, DataError, UnavailableError, nearest


class Peer(abc.ABC):
    """A forecaster from outside exp: one of another library, or one that was trained elsewhere.

    ``task.peers={<name>: {_target_: <path of a subclass>, <arguments of its constructor>}}`` adds it to a backtest.
    Both methods get a table with a row for each series and row of the file up to an origin, that row included:
    ``unique_id`` (str; with several targets ``<id>/<column>``), ``ds`` (dates, or int64 numbers of rows) and ``y``
    (float64 in the units of the file, NaN where it is empty); the rows of a series follow each other, oldest first.
    """

    @abc.abstractmethod
    def fit(self, history: pd.DataFrame, horizon: int, season: int) -> None:
        """Learn from all series; called at the first origin, and with ``task.refit`` again.

        Args:
            history: all rows before the rows to forecast.
            horizon: rows of a forecast (H).
            season: rows of a season; 1: not known.
        """

    @abc.abstractmethod
    def predict(self, history: pd.DataFrame) -> Any:
        """Forecast the H rows after the last of each series.

        Args:
            history: of S series, up to the same origin.

        Returns:
            Numbers (S, H), in the units of the file and in the order of the series in ``history``.
        """


class StatsForecast(Peer):
    """A model of statsforecast, which is fitted to each series at each origin (``pip install statsforecast``).

    Args:
        model: name of a class in ``statsforecast.models``, such as ``AutoETS``, ``AutoTheta``, ``CrostonOptimized``.
        **options: arguments of its constructor; ``season_length`` is that of the data unless it is given.

    Raises:
        UnavailableError: statsforecast is not installed.
        ConfigError: it has no such model.
    """

    def __init__(self, model: str, **options: Any) -> None:
        try:
            self._library = importlib.import_module("statsforecast")
            models = importlib.import_module("statsforecast.models")
        except ImportError as error:
            raise UnavailableError(
                f"task.peers: {model} needs statsforecast ({error}): pip install 'exp-accelerators[statsforecast]'"
            ) from error
        if model not in models.__all__:
            raise ConfigError(f"task.peers: statsforecast has no model {model}{nearest(model, models.__all__)}")
        self._class, self._options = getattr(models, model), options

    def fit(self, history: pd.DataFrame, horizon: int, season: int) -> None:
        """Keep the lengths: :meth:`predict` fits."""
        self._horizon = horizon
        if "season_length" in inspect.signature(self._class).parameters:
            self._options.setdefault("season_length", season)

    def predict(self, history: pd.DataFrame) -> np.ndarray:
        """See :meth:`Peer.predict`.

        Raises:
            DataError: a value is missing.
        """
        empty = history["y"].isna()
        if empty.any():
            raise DataError(
                f"{self._class.__name__} needs all values, and series {history['unique_id'][empty].iloc[0]!r} lacks "
                f"{int(empty.sum())}; fill them, or leave the model out"
            )
        ids = pd.unique(history["unique_id"])
        numbered = history.assign(ds=history.groupby("unique_id", sort=False).cumcount())
        library = self._library.StatsForecast(models=[self._class(**self._options, alias="forecast")], freq=1)
        forecasts = library.forecast(df=numbered, h=self._horizon)
        values: np.ndarray = forecasts["forecast"].to_numpy(dtype=np.float64).reshape(-1, self._horizon)
        order = {name: number for number, name in enumerate(pd.unique(forecasts["unique_id"]))}
        return values[[order[name] for name in ids]]
