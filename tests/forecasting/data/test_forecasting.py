"""The bundled series against a reading of its file by other means."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from exp.errors import DataError
from exp.forecasting.data.dataset import ForecastingData
from exp.forecasting.data.preflight import locate


@pytest.fixture(scope="module")
def etth1():
    return ForecastingData("ETTh1", "ETTh1.csv", 7, split="ett_hour", allow_gaps=False)


@pytest.fixture(scope="module")
def raw():
    with locate(None, "ETTh1.csv", "ETTh1").open() as file:
        header, *rows = csv.reader(file)
    return header, [row[0] for row in rows], np.array([[float(cell) for cell in row[1:]] for row in rows])


def test_windows_are_standardised_with_the_training_rows(etth1, raw):
    header, _, values = raw
    assert [len(part) for part in (etth1.train, etth1.val, etth1.test)] == [7825, 2785, 2785]  # as in the authors' logs
    assert etth1.notes == []
    mean, std = values[:8640].mean(axis=0), values[:8640].std(axis=0)
    assert etth1.names == header[1:]
    np.testing.assert_allclose(etth1.mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(etth1.std.numpy(), std, rtol=1e-12)
    index = [0, 1234, 2784]
    batch = etth1.test[index]
    for number, window in enumerate(index):
        begin = 11520 - 720 + window
        expected = (values[begin : begin + 816] - mean) / std
        np.testing.assert_allclose(batch["x"][number], expected[:720], atol=1e-6)
        np.testing.assert_allclose(batch["y"][number], expected[720:], atol=1e-6)
    assert batch["x"].dtype == torch.float32
    assert batch["marks"].shape == (3, 720, etth1.num_marks)
    y = etth1.to_original_units(etth1.test[[7]]["y"])
    np.testing.assert_allclose(y[0], values[11527 : 11527 + 96], atol=1e-5)


def test_dates_and_what_follows_the_last_row(etth1, raw):
    _, dates, values = raw
    assert [str(date) for date in etth1.dates_of("test", 7)] == dates[11527 : 11527 + 96]
    assert str(etth1.dates_of("test", 2784)[-1]) == dates[14399]
    with pytest.raises(IndexError):
        etth1.dates_of("test", 2785)
    batch, ahead = etth1.future_window()
    np.testing.assert_allclose(etth1.to_original_units(batch["x"])[0], values[-720:], atol=1e-5)
    assert batch["marks"].shape == (1, 720, 4)
    assert [str(ahead[0]), str(ahead[-1]), len(ahead)] == ["2018-06-26 20:00:00", "2018-06-30 19:00:00", 96]


@pytest.mark.parametrize("dates", [True, False])
def test_a_constant_series_of_months(tmp_path, dates):
    rows = [f"0.1,{n * n}" for n in range(60)]
    if dates:
        rows = ["date,flat,square", *(f"{2000 + n // 12}-{n % 12 + 1:02d}-01,{row}" for n, row in enumerate(rows))]
    Path(tmp_path / "m.csv").write_text("\n".join(rows))
    data = ForecastingData("m", "m.csv", 2, str(tmp_path), "ratio", lookback=6, horizon=3, header=dates)
    assert float(data.std[0]) == 1.0
    assert float(data.train[[0]]["x"][0, :, 0].abs().max()) < 1e-6
    ahead = data.future_window()[1]
    if dates:
        assert [str(date)[:10] for date in ahead] == ["2005-01-01", "2005-02-01", "2005-03-01"]
    else:
        assert ahead is None
        assert data.dates_of("train", 0) is None
        assert not data.train[[0]]["marks"].any()


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match=r"ETTh1.csv row 1.*data.channels=8"):
        ForecastingData("ETTh1", "ETTh1.csv", 8)
    data = ForecastingData("ETTh1", "ETTh1.csv", 7, split="ett_hour", lookback=8600)
    with pytest.raises(DataError, match=r"data\.lookback=8600"):
        data.train  # noqa: B018 - the access raises
