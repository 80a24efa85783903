"""Forecasts as files: numbers that read back exactly, names of columns, and pictures."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from exp.draw.figure import render_file
from exp.errors import ConfigError
from exp.forecasting.intervals import Interval
from exp.forecasting.predict import Forecast, draw_forecast, round_values, split_channels, wide_table

NAMES = ["HUFL", "$cost$ a/b", "_x", "OT", "ot", "1"]


@pytest.mark.parametrize(
    ("wanted", "most", "expected"),
    [
        (None, 2, {"HUFL_-cost-a-b": [0, 1]}),
        ("all", 4, {"HUFL_-cost-a-b__x_OT": [0, 1, 2, 3], "ot_1": [4, 5]}),
        (["OT", "HUFL", "OT"], 4, {"OT_HUFL": [3, 0]}),
        ("_x", 4, {"_x": [2]}),
        ([1, 0], 1, {"1": [5], "HUFL": [0]}),  # the series that is called 1 comes before the one at place 1
        (["OT", "ot"], 1, {"OT": [3], "channels_4": [4]}),  # also where files are the same in letters of either case
    ],
)
def test_the_channels_asked_for_and_the_names_of_their_files(wanted, most, expected):
    assert split_channels(NAMES, wanted, most) == expected
    names = [f"household_{number}" for number in range(862)]
    assert list(split_channels(names, "all", 100))[8] == "channels_800-861"
    with pytest.raises(ConfigError, match=r"task.channels.*OIL"):
        split_channels(names, ["OIL"], 4)


def test_a_picture_has_history_truth_and_forecast_at_the_dates_of_the_file():
    dates = pd.date_range("2020-02-27 05:00", periods=60, freq="h", tz="Asia/Shanghai")
    values = np.arange(120.0).reshape(60, 2)
    window = Forecast("load", values[:50], values[50:] + 1, values[50:], dates)
    figure = draw_forecast(window, ["$a$", "b"], [1])
    render_file(figure, "png")
    history, truth, forecast, _ = figure.axes[0].get_lines()
    assert history.get_ydata().tolist() == values[20:50, 1].tolist()  # three horizons
    assert truth.get_xdata()[0] == history.get_xdata()[-1]
    assert forecast.get_xdata()[-1] == dates[-1].tz_localize(None).to_pydatetime()
    future = draw_forecast(window._replace(truth=None, dates=None), ["$a$", "b"], [0, 1])
    assert [len(axes.get_lines()) for axes in future.axes] == [3, 3]
    assert future.axes[1].get_lines()[1].get_xdata()[0] == 0


def test_truth_reads_as_in_the_file_and_numbers_are_short():
    written = ["10.123", "9.87", "10.0", "34.5678", "-20.5", "nan"]
    for mean, std in ((10.04, 2.12), (10.04, 9.9)):
        told = ((np.array([[float(text)] for text in written]) - mean) / std).astype(np.float32)
        values = round_values(told.astype(np.float64) * std + mean, np.array([std]))
        assert [str(value) for value in values[:, 0].tolist()] == written
    std = np.array([2e-30, 3e-4, 1.0, 4e8, 5e30])
    values = np.random.default_rng(0).normal(size=(50, 5)) * std + 2 * std
    np.testing.assert_allclose(round_values(values, std) / std, values / std, rtol=0, atol=5.1e-6)


def test_no_two_columns_of_a_forecast_have_one_name():
    """Series may be called as what stands beside them."""
    names = ["x", "step", "x_truth", "x_lo80"]
    forecast = np.arange(8.0).reshape(2, 4)
    bands = [Interval(0.8, forecast - 1, forecast + 1)]
    table = wide_table(Forecast("", forecast, forecast, forecast + 10, None, bands), names)
    assert len(set(table.columns)) == 17 == len(table.columns)
    beside = np.stack([forecast[:, 0] + 10, forecast[:, 0] - 1], axis=1)
    np.testing.assert_array_equal(table[[*names, "x_truth_", "x_lo80_"]], np.concatenate([forecast, beside], axis=1))
    assert table["step_"].tolist() == [1, 2]
