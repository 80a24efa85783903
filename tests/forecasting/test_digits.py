from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from exp.forecasting.digits import shortest_texts
from exp.forecasting.intervals.intervals import Band
from exp.forecasting.predict import _write_csv


@pytest.mark.parametrize(("mean", "std"), [(1e9 + 20, 2.0), (10.0, 3.0), (2e-31, 1e-30), (0.0, 1.0), (-5e30, 1e30)])
def test_text_gives_the_standardised_number_back(mean, std):
    told = np.random.default_rng(0).normal(size=(200, 1)).astype(np.float32)
    values = told.astype(np.float64) * std + mean
    texts = shortest_texts(values, np.array([mean]), np.array([std]))
    again, expected = (((each - mean) / std).astype(np.float32) for each in (texts.astype(np.float64), values))
    assert np.array_equal(again, expected)


def test_truth_reads_as_in_the_file():
    written = ["10.123", "9.87", "10", "34.5678", "nan"]
    mean, std = np.array([10.04]), np.array([2.12])
    standardised = ((np.array([[float(text)] for text in written]) - mean) / std).astype(np.float32)
    texts = shortest_texts(standardised.astype(np.float64) * std + mean, mean, std)[:, 0].tolist()
    assert texts == [*written[:-1], ""]


def test_no_two_columns_of_a_forecast_have_one_name(tmp_path):
    """Series may be called as what stands beside them."""
    names = ["x", "step", "x_truth", "x_lo80"]
    data = SimpleNamespace(target_names=names, scored=[0, 1, 2, 3], mean=torch.zeros(4), std=torch.ones(4))
    forecast = np.arange(8.0).reshape(2, 4)
    _write_csv(tmp_path / "f.csv", data, None, forecast, forecast + 10, [Band(0.8, forecast - 1, forecast + 1)])
    table = pd.read_csv(tmp_path / "f.csv")
    assert len(set(table.columns)) == 17 == len(table.columns)
    assert not any(".1" in name for name in table.columns)  # pandas' way to part them
    np.testing.assert_array_equal(table[names], forecast)
    np.testing.assert_array_equal(table["x_truth_"], forecast[:, 0] + 10)
    np.testing.assert_array_equal(table["x_lo80_"], forecast[:, 0] - 1)
    assert table["step_"].tolist() == [1, 2]
