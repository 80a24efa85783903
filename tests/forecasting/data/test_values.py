"""What is said of values: constants, fill values, outliers, and rows that are not like those of the training."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

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


@pytest.fixture
def made(tmp_path):
    def make(values, rows=slice(None), freq="h", **keys):
        table = pd.DataFrame({"date": pd.date_range("2020-01-01", periods=ROWS, freq=freq), **values}).iloc[rows]
        table.to_csv(tmp_path / "s.csv", index=False)
        return ForecastingData("s", str(tmp_path / "s.csv"), len(values), lookback=24, horizon=8, **keys)

    return make


def test_nothing_is_said_of_series_of_usual_kinds(made):
    assert made(USUAL).notes == []


def test_a_few_values_that_make_or_ruin_standardised_figures_are_named(made):
    values = {name: column.copy() for name, column in USUAL.items()}
    values["normal"][[10, 4900]] = 1e36, 1e20
    values["skewed"][20] = 600.0  # flatters all others
    values["sun"][30:60] = -9999.0
    values["walk"][4950] = 1e6  # in the test part
    values["pump"] = np.full(ROWS, 5.0)
    notes = made(values).notes
    words = [
        ["constant", "pump"],
        ["row 12, column normal", "row 4902, column normal", "fill value"],
        ["row 22, column skewed", "far from"],
        ["row 32, column sun", "and 25 more", "fill value"],
        ["row 4952, column walk", "far from"],
    ]
    assert len(notes) == len(words), notes
    for note, each in zip(notes, words):
        assert all(word in note for word in each), note


def test_new_rows_are_compared_with_the_training(made):
    state = made({name: USUAL[name] for name in ("normal", "sun")}).state()
    assert state["seconds"] == 3600.0
    assert state["low"] == pytest.approx([USUAL["normal"][:3500].min(), 0.0], abs=1e-9)
    same = {"sun": USUAL["sun"], "normal": USUAL["normal"]}  # the other way round
    new = made(same, slice(100, 200), split="new")
    new.adopt(state)
    assert (new.names, new.notes) == (["normal", "sun"], [])
    x = new.to_original_units(new.test[[0]]["x"].double())[0].numpy()
    np.testing.assert_allclose(x, np.stack([USUAL["normal"], USUAL["sun"]], axis=1)[100:124], atol=1e-4)
    for frequency in ("30min", "D"):
        with pytest.raises(DataError, match=r"s.csv"):
            made(same, slice(100, 200), frequency, split="new").adopt(state)
    with pytest.raises(DataError, match="wind"):
        made({"sun": USUAL["sun"], "wind": USUAL["walk"]}, split="new").adopt(state)


def test_a_series_keeps_its_order_by_its_own_standardisation_too(made):
    first = made({name: USUAL[name] for name in ("normal", "sun")})
    second = made({"sun": USUAL["sun"], "normal": USUAL["normal"]})
    second.adopt({**first.state(), "name": "another"})
    assert second.names == first.names
    np.testing.assert_allclose(second.mean, first.mean)
    np.testing.assert_array_equal(second.test[[3]]["x"], first.test[[3]]["x"])


def test_another_standardisation_is_exact(made):
    data = made({name: USUAL[name] for name in ("normal", "sun")})
    state, before = data.state(), data.test[[0]]["y"]
    data.adopt({**state, "mean": [0.0, 0.0], "std": [1.0, 2.0]})
    expected = (before.numpy() * np.array(state["std"]) + np.array(state["mean"])) / [1.0, 2.0]
    np.testing.assert_allclose(data.test[[0]]["y"], expected, rtol=1e-5, atol=1e-6)
    data.adopt(state)
    np.testing.assert_array_equal(data.test[[0]]["y"], before)


def test_too_few_new_rows_and_what_they_cannot_do(made):
    state = made({"sun": USUAL["sun"]}).state()
    with pytest.raises(DataError, match=r"data\.lookback=24"):
        made({"sun": USUAL["sun"]}, slice(23), split="new").adopt(state)
    data = made({"sun": USUAL["sun"]}, slice(30))  # too few for its own split
    with pytest.raises(DataError, match=r"task.input="):
        data.test  # noqa: B018 - the access raises
    data.adopt(state)
    assert len(data.test) == 0
    assert str(data.future_window()[1][0]) == "2020-01-02 06:00:00"
    for each in (data, made({"sun": USUAL["sun"]}, split="new")):
        with pytest.raises(DataError, match=r"s.csv"):
            each.train  # noqa: B018 - the access raises


def test_ambiguous_dates_of_new_rows_are_read_as_those_of_the_run(tmp_path):
    path = tmp_path / "new.csv"
    dates = pd.date_range("2020-02-01 12:00", periods=96, freq="h")
    path.write_text("date,a\n" + "".join(f"{date:%d.%m.%Y %H:%M},{n % 7}\n" for n, date in enumerate(dates)))
    data = ForecastingData("s", str(path), 1, lookback=24, horizon=8)
    with pytest.raises(DataError, match="row 2, column date"):
        data.test  # noqa: B018 - the access raises
    state = {"name": "s", "names": ["a"], "mean": [3.0], "std": [2.0]}
    with pytest.raises(DataError, match="row 2, column date"):
        data.adopt({**state, "date_format": "%Y-%m-%d"})
    data.adopt({**state, "date_format": "%d.%m.%Y %H:%M"})
    assert str(data.dates[0]) == "2020-02-01 12:00:00"
    assert str(data.future_window()[1][0]) == "2020-02-05 12:00:00"


def test_authors_weights_say_where_the_order_of_series_is_not_known(made):
    assert "OT" in made({"OT": USUAL["sun"], "b": USUAL["walk"]}).notes_on_foreign_weights()[0]
    assert made({"b": USUAL["walk"], "OT": USUAL["sun"]}).notes_on_foreign_weights() == []
