"""From a series to windows: parts, time features, and batches against a loop."""

from __future__ import annotations

import pickle

import numpy as np
import pandas as pd
import pytest
import torch

from exp.errors import DataError
from exp.forecasting.data.calendar import time_features
from exp.forecasting.data.dataset import WindowDataset
from exp.forecasting.data.splits import split_rows
from exp.forecasting.keys import ForecastingDataConfig

LOOKBACK, HORIZON = 7, 3


@pytest.fixture
def data():
    return torch.randn(5, 50).t(), torch.randn(4, 50).t()


def test_equals_a_loop_over_windows(data):
    values, marks = data
    dataset = WindowDataset({"x": values, "marks": marks}, range(11, 45), LOOKBACK, HORIZON, True)
    assert len(dataset) == 34 - 10 + 1
    index = torch.tensor([24, 0, 3, 3])
    begins = [11 + number for number in index.tolist()]
    expected = {
        "x": torch.stack([values[begin : begin + LOOKBACK] for begin in begins]),
        "marks": torch.stack([marks[begin : begin + LOOKBACK] for begin in begins]),
        "y": torch.stack([values[begin + LOOKBACK : begin + LOOKBACK + HORIZON] for begin in begins]),
        "index": index,
    }
    on_device = dataset.device_builder(torch.device("cpu"), None)(dataset.sample_ids(index))
    torch.testing.assert_close(on_device, dataset[index], rtol=0, atol=0, check_stride=True)
    for found in (dataset[index], dataset[index.tolist()], pickle.loads(pickle.dumps(dataset))[index]):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert all(found[key].transpose(1, 2).is_contiguous() for key in ("x", "marks", "y"))
    assert dataset[[]]["x"].shape == (0, LOOKBACK, 5)
    for outside in (-1, 25):
        with pytest.raises(IndexError):
            dataset[[outside]]


def split_ranges(split, num_rows, lookback, horizon, **keys):
    config = ForecastingDataConfig(split=split, lookback=lookback, horizon=horizon, **keys)
    rows = split_rows(config, np.array([num_rows]), lambda start: np.array([int(start)]))
    return {name: range(*part[0]) for name, part in rows.items()}


@pytest.mark.parametrize(("split", "num_rows", "train", "val", "test"), [
    ("ett_hour", 17420, 8640, 11520, 14400),
    ("ett_minute", 69680, 34560, 46080, 57600),
    ("ratio", 52696, 36887, 42157, 52696),  # weather
    ("ratio", 10, 7, 8, 10),  # 0.7 * 10 is just below 7 in no arithmetic that Python has
])  # fmt: skip
def test_ends_of_splits(split, num_rows, train, val, test):
    expected = {"train": range(train), "val": range(train - 2, val), "test": range(val - 2, test)}
    assert split_ranges(split, num_rows, 2, 1) == expected


def test_just_enough_rows_and_too_few():
    parts = split_ranges("ratio", 100, 60, 10)  # 70 rows for training, 10 for validation
    assert [len(rows) - 70 + 1 for rows in parts.values()] == [1, 1, 11]
    for split, num_rows, lookback, horizon, named in (
        ("ratio", 100, 61, 10, "data.lookback=61"),
        ("ratio", 100, 50, 11, "data.horizon=11"),
        ("ett_hour", 14399, 96, 1, "data.split=ratio"),
        ("pems", 100, 10, 11, "20 for testing"),
    ):
        with pytest.raises(DataError, match=named):
            split_ranges(split, num_rows, lookback, horizon)


@pytest.mark.parametrize("keys", [
    {"val_size": 20, "test_size": 30}, {"val_size": 0.2, "test_size": 0.3}, {"val_start": "50", "test_start": "70"},
    {"val_size": 20, "test_start": "70"},
])  # fmt: skip
def test_splits_by_size_share_and_date(keys):
    expected = {"train": range(50), "val": range(46, 70), "test": range(66, 100)}
    assert split_ranges("ratio", 100, 4, 2, **keys) == expected
    with pytest.raises(DataError, match=r"data\.val_s.*20 for validation and 30"):
        split_ranges("ratio", 100, 4, 21, **keys)


def test_scaled_calendar():
    # A Friday at 12, the last second of a leap year (a Saturday), and the first of a year (a Monday).
    dates = pd.DatetimeIndex(["2016-07-01 12:45:00", "2016-12-31 23:59:59", "2018-01-01 00:00:00"])
    expected = [[12 / 23 - 0.5, 4 / 6 - 0.5, -0.5, 182 / 365 - 0.5], [0.5, 5 / 6 - 0.5, 0.5, 0.5], [-0.5] * 4]
    for features, values in ((time_features(dates, 3), expected), (time_features(None, 3), np.zeros((3, 4)))):
        assert features.dtype == np.float32
        np.testing.assert_allclose(features, values, atol=1e-7)
