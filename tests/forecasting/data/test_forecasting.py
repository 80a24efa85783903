"""The bundled series against a reading of its file by other means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from exp.errors import DataError
from exp.forecasting.data.dataset import ForecastingData
from exp.forecasting.data.preflight import locate


def test_windows_are_standardised_with_the_training_rows():
    data = ForecastingData("ETTh1", "ETTh1.csv", 7, split="ett_hour", allow_gaps=False)
    table = pd.read_csv(locate(None, "ETTh1.csv", "ETTh1"))
    values = table.iloc[:, 1:].to_numpy()
    assert [len(part) for part in (data.train, data.val, data.test)] == [7825, 2785, 2785]  # as in the authors' logs
    assert (data.notes, data.names) == ([], [*table.columns[1:]])
    mean, std = values[:8640].mean(axis=0), values[:8640].std(axis=0)
    np.testing.assert_allclose(data.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(data.std, std, rtol=1e-12)
    index = [0, 1234, 2784]
    batch = data.test[index]
    for number, window in enumerate(index):
        begin = 11520 - 720 + window
        expected = (values[begin : begin + 816] - mean) / std
        np.testing.assert_allclose(batch["x"][number], expected[:720], atol=1e-6)
        np.testing.assert_allclose(batch["y"][number], expected[720:], atol=1e-6)
        assert [str(date) for date in data.dates_of("test", window)] == [*table["date"][begin + 720 : begin + 816]]
    assert batch["marks"].shape == (3, 720, data.num_marks)
    with pytest.raises(IndexError):
        data.dates_of("test", 2785)
    seen = data.future_window()[0]["x"]
    np.testing.assert_allclose(data.to_original_units(seen)[0], values[-720:], atol=1e-5)


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
        assert (ahead, data.dates_of("train", 0)) == (None, None)
        assert not data.train[[0]]["marks"].any()


def test_a_window_that_does_not_fit_is_refused():
    data = ForecastingData("ETTh1", "ETTh1.csv", 7, split="ett_hour", lookback=8600)
    with pytest.raises(DataError, match=r"data\.lookback=8600"):
        data.train  # noqa: B018 - the access raises
