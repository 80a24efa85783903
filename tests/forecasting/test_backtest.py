"""task=backtest: which windows, what models see of the rows, the errors of all of them, and the comparisons."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from exp.forecasting.backtest import backtest_table
from exp.forecasting.comparison import Windows, compare, student_p

ETT = Path(__file__).parents[2] / "data" / "ett" / "ETTh1.csv"
TINY = ["model.d_model=16", "model.d_ff=16", "model.num_heads=2", "model.num_patches_out=null", "model.period=4",
        "max_steps=3", "backend=cpu", "plots=false"]  # fmt: skip
PEER = """
import numpy as np
from exp.forecasting.peers import Peer

class Last(Peer):
    def fit(self, history, horizon, season):
        self.horizon = horizon
        print("fit", season, history["ds"].max(), len(history), flush=True)

    def predict(self, history):
        print("predict", history["ds"].max(), len(history), history["unique_id"].nunique(), flush=True)
        last = history.groupby("unique_id", sort=False)["y"].last().to_numpy()
        return np.repeat(last[:, None], self.horizon, axis=1)
"""


def write_shops(path, planted=None):
    """Series that end at different dates; ``planted`` replaces the values from this date on."""
    draws, parts = np.random.default_rng(0), []
    for begin, (name, count) in enumerate({"a": 120, "b": 100, "c": 80, "short": 20}.items()):
        dates = pd.date_range("2024-01-01", periods=200)[begin * 10 : begin * 10 + count]
        values = 10.0 * (begin + 1) + np.sin(np.arange(count)) + draws.normal(size=count)
        parts.append(pd.DataFrame({"unique_id": name, "ds": dates, "y": values}))
    table = pd.concat(parts).sample(frac=1.0, random_state=0)
    if planted is not None:
        table.loc[table["ds"] >= planted, "y"] = 1e3
    table.to_csv(path, index=False)


def read(folder):
    """The long table; Parquet or CSV."""
    path = next((folder / "forecasts").iterdir())
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    return pd.read_csv(path, parse_dates=["origin", "date"])


def test_models_see_only_rows_before_the_origin_also_when_trained_again(exp):
    """A planted future changes no forecast before it, of any model; metrics are those of the table."""
    panel = ["data=panel", "data.file=shops.csv", "data.targets=[y]", "data.lookback=8", "data.horizon=4",
             "data.val_start=2024-03-20", "data.test_start=2024-04-01"]  # fmt: skip
    (exp.path("shops.csv").parent / "last.py").write_text(PEER)
    write_shops(exp.path("shops.csv"))
    for name, seed in (("one", 1), ("two", 2)):
        done = exp(*panel, *TINY, f"seed={seed}", f"output_dir={name}")
        assert done.returncode == 0, done.stderr
    words = ["task=backtest", "init_from=one", "task.runs={two: two}", "task.peers={last: {_target_: last.Last}}",
             "task.step=2", "task.refit=8", "backend=cpu", "nproc=2"]  # fmt: skip
    done = exp(*words, "output_dir=before")
    assert done.returncode == 0, done.stderr
    table, planted = read(exp.path("before")), pd.Timestamp("2024-04-13")
    write_shops(exp.path("shops.csv"), planted)
    again = exp(*words, "output_dir=after")
    assert again.returncode == 0, again.stderr
    later = read(exp.path("after"))
    known = table["origin"] < planted
    columns = ["model", "unique_id", "origin", "date", "forecast"]
    assert 0 < known.sum() < len(table)
    pd.testing.assert_frame_equal(table.loc[known, columns], later.loc[later["origin"] < planted, columns], rtol=1e-5)
    assert not np.allclose(table["forecast"][~known], later["forecast"][later["origin"] >= planted])

    origins = table.groupby("unique_id")["origin"].unique()
    assert {name: len(dates) for name, dates in origins.items()} == {"a": 13, "b": 8, "c": 3}
    assert all((np.diff(np.sort(dates)) == np.timedelta64(2, "D")).all() for dates in origins)
    assert origins["a"].max() == pd.Timestamp("2024-04-29") - pd.Timedelta(days=4)
    assert (table["date"] > table["origin"]).all()
    seen = [line.split() for line in done.stdout.splitlines() if line.startswith(("fit", "predict"))]
    assert sum(line[0] == "fit" for line in seen) == -(-table["origin"].nunique() // 8)
    assert [line[1] for line in seen if line[0] == "predict"] == sorted({str(day.date()) for day in table["origin"]})
    models = {row["model"]: row for row in exp.result("before")["models"]}
    assert list(models) == sorted(models, key=lambda name: models[name]["mse"])
    assert {*models} == {"timebridge_small", "two", "last value", "mean of the lookback", "drift", "seasonal naive",
                         "last"}  # fmt: skip
    for name, part in table.groupby("model"):
        assert models[name]["mae_file_units"] == pytest.approx(
            (part["forecast"] - part["truth"]).abs().mean(), rel=1e-4
        )
    assert models["last"]["mse"] == pytest.approx(models["last value"]["mse"], rel=1e-5)
    assert (exp.path("before") / "refits" / "two" / "checkpoints").is_dir()

    for wrong, words_of_error in (
        ("data.test_start=2024-03-01", "data.test_start"),
        ("task.runs={other: nowhere}", "task.runs.other"),
        ("task.step=0", "task.step"),
        ("task.peers={ets: {_target_: exp.forecasting.peers.StatsForecast, model: AutoETS}}", "statsforecast"),
    ):
        refused = exp(*words, wrong, "nproc=1", "output_dir=refused")
        assert refused.returncode in (2, 3), refused.stdout + refused.stderr
        assert words_of_error in refused.stderr + refused.stdout


def test_a_wide_table_without_a_run_has_baselines_with_intervals(exp):
    done = exp("task=backtest", "model=naive", "model.kind=drift", "data.lookback=48", "data.horizon=24",
               "task.windows=9", "task.intervals=[0.8]", "backend=cpu", "output_dir=out")  # fmt: skip
    assert done.returncode == 0, done.stderr
    table, result = read(exp.path("out")), exp.result("out")
    assert list(table.columns) == ["model", "series", "origin", "date", "forecast", "lo80", "hi80", "truth"]
    assert len(table) == 4 * 9 * 24 * 7
    season = table[(table["model"] == "seasonal naive") & (table["series"] == "OT")]
    windows = season["forecast"].to_numpy().reshape(9, 24)
    truth = season["truth"].to_numpy().reshape(9, 24)
    np.testing.assert_allclose(windows[1:], truth[:-1], atol=1e-4)  # windows are a day apart
    row = next(each for each in result["models"] if each["model"] == "seasonal naive")
    part = table[table["model"] == "seasonal naive"]
    inside = (part["lo80"] <= part["truth"]) & (part["truth"] <= part["hi80"])
    assert row["coverage_80"] == pytest.approx(inside.mean(), abs=0.01)  # ends that equal a truth are rounded
    assert result["metrics"]["mse"] == next(each["mse"] for each in result["models"] if each["model"] == "drift")
    assert result["comparisons"][0]["text"] in done.stdout
    drift = table[table["model"] == "drift"]
    errors = drift["forecast"] - drift["truth"]
    assert (errors**2).mean() == pytest.approx(result["metrics"]["mse_file_units"], rel=1e-4)
    rows, last = pd.read_csv(ETT, parse_dates=["date"]), drift.iloc[-1]
    assert (last["series"], last["date"]) == ("OT", rows["date"][14399])  # where the published split ends
    assert last["truth"] == pytest.approx(rows["OT"][14399], abs=1e-5)
    assert "and repeating the last 24 rows" in result["data"]["warnings"][0]
    assert result["data"]["warnings"][0] in done.stdout


def test_a_backtest_has_a_row_for_each_window_series_and_step():
    forecast = np.arange(12.0).reshape(2, 3, 2)
    dates = pd.date_range("2020-01-01", periods=20, freq="h")
    for rows in (dates, pd.RangeIndex(20)):
        table = backtest_table({"forecast": forecast, "truth": forecast + 0.5}, ["a", "=b"], rows, np.array([4, 9]))
        assert list(table.columns) == ["series", "origin", "date", "forecast", "truth"]
        cell = table[(table["origin"] == rows[9]) & (table["date"] == rows[11])]
        assert cell["forecast"].tolist() == forecast[1, 1].tolist()
        assert (len(table), table["series"].nunique(), table["series"][0]) == (12, 2, "a")
        assert (table["truth"] == table["forecast"] + 0.5).all()


def test_the_comparison_holds_its_level_where_windows_overlap_and_finds_a_difference():
    draws, rejected, found = np.random.default_rng(0), 0, 0
    origins, horizon, trials = 240, 12, 300
    windows = Windows(np.repeat([0, 1, 2], origins), np.tile(np.arange(origins), 3), horizon)
    for _ in range(trials):
        noise = draws.normal(size=origins + horizon) + 0.3 * draws.normal(size=(3, origins + horizon))
        sums = np.concatenate([np.zeros((3, 1)), noise.cumsum(axis=1)], axis=1)
        error = ((sums[:, horizon:] - sums[:, :-horizon]) / horizon)[:, :origins].ravel()
        rejected += compare("mse", {"a": error + 5, "b": np.full(len(error), 5.0)}, windows)[0].p < 0.05
        found += compare("mse", {"a": error + 4, "b": np.full(len(error), 5.0)}, windows)[0].p < 0.05
    assert 0.02 < rejected / trials < 0.09  # 5 % is right; errors as if independent would give 60 %
    assert found > 0.99 * trials
    assert student_p(2.776, 4) == pytest.approx(0.05, abs=1e-4)
    assert student_p(2.571, 5) == pytest.approx(0.05, abs=1e-4)


def test_comparisons_in_words():
    series, times = np.repeat(np.arange(10), 2), np.tile([0, 6], 10)
    low = np.linspace(1.0, 2.0, 20)
    (line,) = compare("mae", {"b": low + 1.0 + 0.1 * low, "a": low}, Windows(series, times, 6))
    assert (line.better, line.worse, line.wins, line.windows) == ("a", "b", 20, 20)
    assert line.text.startswith(
        "a is better than b in 20 of 20 windows (mae 1.5 against 2.65); p < .001 if the 10 series"
    )
    assert (
        "too few windows" in compare("mae", {"a": low[:4], "b": low[:4] + 1}, Windows(series[:4], times[:4], 6))[0].text
    )
    assert "no difference" in compare("mae", {"a": low, "b": low}, Windows(series, times, 6))[0].text
    holes = np.where(np.arange(20) < 2, np.nan, low)
    assert compare("mae", {"a": holes, "b": low}, Windows(series, times, 6))[0].windows == 18
