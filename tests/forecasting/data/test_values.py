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


def test_a_few_values_that_make_or_ruin_standardised_figures_are_named_and_usual_series_are_not(made):
    assert made(USUAL).notes == []
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
    assert [[word for word in each if word in note] for each, note in zip(words, notes)] == words
    assert len(notes) == len(words), notes


def test_new_rows_in_another_order_are_those_of_the_training_and_other_series_are_refused(made):
    both = {name: USUAL[name] for name in ("normal", "sun")}
    turned = {name: USUAL[name] for name in ("sun", "normal")}
    first = made(both)
    state = first.state()
    assert state["seconds"] == 3600.0
    assert state["low"] == pytest.approx([USUAL["normal"][:3500].min(), 0.0], abs=1e-9)
    new = made(turned, slice(100, 200), split="new")
    new.adopt(state)
    assert (new.names, new.notes) == (["normal", "sun"], [])
    np.testing.assert_allclose(new.test[[0]]["x"], first.train[[100]]["x"], atol=1e-4)
    own = made(turned)  # by its own standardisation, too
    own.adopt({**state, "name": "another"})
    assert own.names == first.names
    np.testing.assert_array_equal(own.test[[3]]["x"], first.test[[3]]["x"])
    with pytest.raises(DataError, match=r"s.csv"):
        made(turned, slice(100, 200), "D", split="new").adopt(state)
    with pytest.raises(DataError, match="wind"):
        made({"sun": USUAL["sun"], "wind": USUAL["walk"]}, split="new").adopt(state)


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
    with pytest.raises(DataError, match=r"s.csv"):
        data.train  # noqa: B018 - the access raises


def test_authors_weights_say_where_the_order_of_series_is_not_known(made):
    assert "OT" in made({"OT": USUAL["sun"], "b": USUAL["walk"]}).notes_on_foreign_weights()[0]
    assert made({"b": USUAL["walk"], "OT": USUAL["sun"]}).notes_on_foreign_weights() == []
