from __future__ import annotations

import pandas as pd
import pytest

from exp.forecasting.data.dataset import ForecastingData


@pytest.fixture
def made(tmp_path):
    """The data of columns by name, or of some of their rows, from a file with a date in each row."""

    def make(series, rows=slice(None), freq="h", **keys):
        table = pd.DataFrame(series)
        table.insert(0, "date", pd.date_range("2020-01-01", periods=len(table), freq=freq))
        table.iloc[rows].to_csv(tmp_path / "s.csv", index=False)
        keys = {"channels": len(table.columns) - 1, "lookback": 24, "horizon": 8, **keys}
        return ForecastingData(name="s", file=str(tmp_path / "s.csv"), **keys)

    return make
