"""Evaluation and prediction of trained runs: exact over ranks and batches, in the units of the file."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.behaviour.conftest import ROOT, result, snapshot, table

ETTH1 = ROOT / "data" / "ett" / "ETTh1.csv"
TRAIN = 12 * 30 * 24  # rows of the published split: a year of 12 months of 30 days, then 4 months twice


def test_an_evaluation_over_three_ranks_is_that_of_the_training_to_the_last_digits(trained, exp):
    run = trained("forecast")
    before = snapshot(run)
    # 2785 windows divide neither over 3 ranks nor into batches of 50.
    done = exp(
        "task=eval", f"init_from={run}", "backend=cpu", "nproc=3", "data.eval_batch_size=50", "output_dir=tested"
    )
    assert done.returncode == 0, done.stderr
    tested = exp.result("tested")
    assert tested["metrics"] == pytest.approx(result(run)["metrics"], rel=1e-6)
    assert tested["measured_on"] == "test"
    assert snapshot(run) == before

    # What standardized errors are in the file's units, from the file: pandas knows the deviations of the training rows.
    deviations = pd.read_csv(ETTH1).iloc[:TRAIN, 1:].std(ddof=0)
    rows = table(exp.path("tested") / "metrics_per_channel.csv")
    assert [row["channel"] for row in rows] == list(deviations.index)
    for row in rows:
        scale = float(row["mse_file_units"]) / float(row["mse_standardized"])
        assert scale == pytest.approx(deviations[row["channel"]] ** 2, rel=2e-5)
    mean = sum(float(row["mse_standardized"]) for row in rows) / len(rows)
    assert mean == pytest.approx(tested["metrics"]["mse"], rel=1e-4)
    assert len(table(exp.path("tested") / "metrics_per_step.csv")) == 96


def test_forecasts_are_the_model_s_in_the_units_and_at_the_dates_of_the_file(trained, exp):
    run = trained("forecast")
    done = exp(
        "task=predict", f"init_from={run}", "backend=cpu", "task.num_windows=1", "plots=false", "output_dir=said"
    )
    assert done.returncode == 0, done.stderr
    source = pd.read_csv(ETTH1)
    said = pd.read_csv(exp.path("said") / "forecasts" / "window_00000.csv")
    first = TRAIN + 4 * 30 * 24  # the first window of the test split forecasts from its first row on
    truth = source.iloc[first : first + 96]
    assert list(pd.to_datetime(said["date"])) == list(pd.to_datetime(truth["date"]))
    for channel in source.columns[1:]:
        assert said[f"{channel}_truth"].to_numpy() == pytest.approx(truth[channel].to_numpy(), rel=1e-4, abs=1e-4)
    # The last window, too, ends with the last row of the split; and after all rows of the file comes the future.
    future = pd.read_csv(exp.path("said") / "forecasts" / "future.csv")
    assert len(future) == 96
    assert pd.to_datetime(future["date"][0]) == pd.to_datetime(source["date"].iloc[-1]) + pd.Timedelta(hours=1)
    # What is forecast is of the data's size.
    columns = list(source.columns[1:])
    middle, spread = source[columns].iloc[:TRAIN].mean(), source[columns].iloc[:TRAIN].std()
    assert ((future[columns] - middle) / spread).abs().to_numpy().max() < 6


@pytest.mark.parametrize("name", ["tiles", pytest.param("scenes", marks=pytest.mark.extended)])
def test_counts_of_images_are_those_of_one_process(trained, exp, name):
    run = trained(name)
    done = exp("task=eval", f"init_from={run}", "backend=cpu", "nproc=2", "data.eval_batch_size=3", "plots=false",
               "output_dir=tested")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert exp.result("tested")["metrics"] == pytest.approx(result(run)["metrics"], rel=1e-5)
