"""What is said of values: constants, fill values, outliers, and rows that are not like those of the training."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from exp.distributed import Distributed
from exp.errors import DataError
from exp.forecasting.data.dataset import ForecastingData

ROWS = 5000
RNG = np.random.default_rng(0)
USUAL = {
    "normal": RNG.normal(size=ROWS),
    "skewed": np.exp(RNG.normal(size=ROWS)),
    "rain": np.where(RNG.random(ROWS) < 0.1, RNG.gamma(0.7, 3, ROWS), 0.0),
    "flag": (RNG.random(ROWS) < 0.005) * 1.0,
    "count": RNG.poisson(0.02, ROWS) * 1.0,
    "sun": np.maximum(np.sin(np.arange(ROWS) / 4), 0) * RNG.random(ROWS) * 100,
    "walk": np.cumsum(RNG.normal(size=ROWS)),
    "to999": RNG.integers(0, 1000, ROWS) * 1.0,
}
SUN = {"sun": USUAL["sun"]}


def test_a_few_values_that_make_or_ruin_standardized_figures_are_named_and_usual_series_are_not(made):
    usual = made(USUAL)
    assert (len(usual.rows), usual.notes) == (3, [])
    values = {name: column.copy() for name, column in USUAL.items()}
    values["skewed"][20] = 600.0  # flatters all others
    values["sun"][30:60] = -9999.0
    values["walk"][4950] = 1e6  # in the test part
    values["pump"] = np.full(ROWS, 0.1)  # whose deviation rounding makes
    data = made(values)
    assert (data.std[-1], bool((data.train[[0]]["x"][0, :, -1].abs() < 1e-6).all())) == (1.0, True)
    words = [
        ["constant", "pump"],
        ["row 22, column skewed", "far from"],
        ["row 32, column sun", "and 25 more", "fill value"],
        ["row 4952, column walk", "far from"],
    ]
    assert [[word for word in each if word in note] for each, note in zip(words, data.notes)] == words
    assert len(data.notes) == len(words), data.notes


def test_other_scalings_are_of_the_training_rows(made):
    train = np.sort(USUAL["skewed"][:3500])
    low, median, high = np.quantile(train, [0.25, 0.5, 0.75])
    for scaling, center, scale in (("robust", median, (high - low) / 1.3489795), ("none", 0.0, 1.0)):
        data = made({"skewed": USUAL["skewed"], "flag": USUAL["flag"]}, scaling=scaling)
        np.testing.assert_allclose([data.mean[0], data.std[0]], [center, scale])
        assert scaling == "none" or data.std[1] == USUAL["flag"][:3500].std()  # no range
        np.testing.assert_allclose(
            data.to_original_units(data.train[[7]]["y"].double())[0, :, 0], USUAL["skewed"][31:39], rtol=1e-5
        )


def test_rows_with_a_standardisation_of_their_own_take_that_of_the_training(made):
    first = made({"normal": USUAL["normal"], **SUN})
    own = made({**SUN, "normal": USUAL["normal"]})  # in another order
    own.load_state_dict({**first.state_dict(), "name": "another"})
    np.testing.assert_array_equal(own.test[[3]]["x"], first.test[[3]]["x"])
    with pytest.raises(DataError, match="wind"):
        made({**SUN, "wind": USUAL["walk"]}, split="test_only").load_state_dict(first.state_dict())


def test_rows_unlike_those_of_the_training_are_named(made):
    state = made(SUN).state_dict()
    gaps, later = SUN["sun"].copy(), SUN["sun"].copy()
    gaps[::3], later[4500:] = np.nan, 5000.0  # in the test part alone
    for sun, keys, named in (
        (SUN["sun"] * 100, {"split": "test_only"}, "far outside"),
        (gaps, {"split": "test_only", "missing": "mask"}, "more empty cells"),
        (later, {}, "far outside"),
        (SUN["sun"], {}, None),
    ):
        data = made({"sun": sun}, **keys)
        data.load_state_dict(state)
        found = [note for note in data.notes if named is not None and named in note]
        assert len(found) == (named is not None)
        assert all("sun (" in note for note in found)
    with pytest.raises(DataError, match=r"s\.csv: its rows are 2:00:00 apart"):
        made(SUN, freq="2h", split="test_only").load_state_dict(state)


def test_too_few_new_rows_and_what_they_cannot_do(made):
    state = made(SUN).state_dict()
    with pytest.raises(DataError, match=r"data\.lookback=24"):
        made(SUN, slice(23), split="test_only").load_state_dict(state)
    data = made(SUN, slice(30))  # too few for its own split
    with pytest.raises(DataError, match=r"task.input="):
        data.test  # noqa: B018 - the access raises
    data.load_state_dict(state)
    assert len(data.test) == 0
    with pytest.raises(DataError, match=r"s.csv"):
        data.train  # noqa: B018 - the access raises


def test_ambiguous_dates_of_new_rows_are_read_as_those_of_the_run(tmp_path):
    path, dates = tmp_path / "new.csv", pd.date_range("2020-02-01 12:00", periods=96, freq="h")
    pd.DataFrame({"date": dates.strftime("%d.%m.%Y %H:%M"), "a": np.arange(96) % 7}).to_csv(path, index=False)
    data = ForecastingData(name="s", file=str(path), channels=1, lookback=24, horizon=8)
    state = {"name": "s", "names": ["a"], "mean": [3.0], "std": [2.0]}
    with pytest.raises(DataError, match="row 2, column date"):
        data.load_state_dict({**state, "date_format": "%Y-%m-%d"})
    data.load_state_dict({**state, "date_format": "%d.%m.%Y %H:%M"})
    assert data.dates.tolist() == dates.tolist()


def test_the_scale_of_mase_is_that_of_rows_a_season_apart(made):
    """Rows 0, 10, 1, 11, 2, 12, ... two a day: a season apart they differ by 1, and neighbors by 10 or 9."""
    rows = np.arange(400)
    data = made({"till": rows // 2 + 10.0 * (rows % 2)}, freq="12h")
    state = data.state_dict()
    assert (state["season"], data.record(list)["season"]) == (2, 2)
    assert state["scale"][0] * state["std"][0] == pytest.approx(1.0)
    metrics, batch = data.metrics(), data.test[[0, 5]]
    metrics.update(batch["y"] + 3.0 / state["std"][0], batch)  # 3 too many, in the units of the file
    found = metrics.compute(Distributed())
    assert (found["mase"], found["mae_file_units"]) == pytest.approx((3.0, 3.0), rel=1e-5)
    # Over 8 steps the last season is 1, 1, 2, 2, 3, 3, 4, 4 behind.
    assert found["mae_seasonal_naive"] * state["std"][0] == pytest.approx(2.5)
    assert made({"till": rows // 2 + 10.0 * (rows % 2)}, freq="12h", season=4).state_dict()["scale"][
        0
    ] == pytest.approx(2.0 / state["std"][0])
    with pytest.raises(DataError, match=r"data\.season=280 must be less than the 280 training rows"):
        made({"till": rows}, freq="12h", season=280).state_dict()


def test_what_is_saved_of_a_series_is_that_of_its_training_rows(made):
    """Of 0, 1, ... 499 the first 350: by hand mean 174.5, variance (350 ** 2 - 1) / 12, 1 % and 99 % quantiles."""
    data = made({"ramp": np.arange(500.0)})
    state = data.state_dict()
    expected = {"mean": 174.5, "std": ((350**2 - 1) / 12) ** 0.5, "low": 3.49, "high": 345.51, "missing": 0.0}
    assert {name: state[name][0] for name in expected} == pytest.approx(expected)
    window, (dates,) = data.future_windows()  # after the last row, 499, of 2020-01-21 19:00
    seen = data.to_original_units(window["x"].double())[0, :, 0]
    np.testing.assert_allclose(seen, np.arange(476, 500), atol=1e-4)
    assert [str(dates[0]), len(dates)] == ["2020-01-21 20:00:00", 8]
    np.testing.assert_allclose(data.lookback_rows(476)[:, 0], window["x"][0, :, 0])


def test_an_outlier_is_twenty_scaled_median_deviations_away(made):
    """Of 0, 1, -1, 2, -2 again and again the usual distance from the median is 1.5, so 20 * 1.4826 * 1.5 = 44.5."""
    for value, named in ((44.0, False), (45.0, True)):
        column = np.tile([0.0, 1.0, -1.0, 2.0, -2.0], 20)
        column[3] = value
        data = made({"gauge": column})
        assert data.num_rows == 100
        assert ["column gauge" in note for note in data.notes] == [True] * named
