"""A user's own series from training to the forecast of new rows: units, gaps, standardisation are those of the run."""

from __future__ import annotations

import csv
import json
import re
from datetime import datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.errors import DataError
from exp.forecasting.data.dataset import ForecastingData
from exp.forecasting.data.splits import borders
from tests.conftest import TINY, run_exp

SIZES = ["data.lookback=96", "data.horizon=24", "data.channels=2"]


def write_series(path, count, first=0, skip=()):
    """Day-first dates from 1 December 2019 on, below a name of their own; a load in thousands, and a temperature."""
    rows = ["Zeit, load,temp"]
    for hour in range(first, first + count):
        date = datetime(2019, 12, 1) + timedelta(hours=hour)
        if hour not in skip:
            rows.append(f"{date:%d.%m.%Y %H:%M},{5000 + 300 * np.sin(hour / 4):.2f},{10 + np.cos(hour / 12):.3f}")
    path.write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_series(folder / "plant.csv", 1500, skip=(700,))
    write_series(folder / "new.csv", 100, first=1500)
    own = ["data=csv", "data.name=plant", f"data.root={folder}", "data.file=plant.csv", "data.date_column=zeit"]
    done = run_exp(folder, *TINY, *own, *SIZES, "output_dir=run")
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(
        folder=folder, done=done, own=own, result=json.loads((folder / "run/result.json").read_text())
    )


@pytest.mark.slow
def test_gaps_are_said_once_and_recorded(trained):
    assert trained.done.stdout.count("most rows are 1:00:00 apart (1 of 1498 steps depart from that)") == 1
    assert "plant.csv row 702, column Zeit: '30.12.2019 05:00'" in trained.done.stdout
    assert trained.result["data"]["irregular_steps"] == 1
    assert trained.result["data"]["time_step"] == "1:00:00"
    refused = run_exp(trained.folder, *TINY, *trained.own, *SIZES, "data.allow_gaps=false", "output_dir=refused")
    assert refused.returncode == 2
    assert "plant.csv row 702, column Zeit" in refused.stderr


def test_metrics_say_their_units_wherever_they_are_written(trained):
    metrics = trained.result["metrics"]
    assert list(metrics) == ["mse", "mae", "mse_file_units", "mae_file_units"]
    assert metrics["mae_file_units"] > 10 * metrics["mae"]
    assert trained.result["metric"] == metrics["mse"]
    assert trained.result["metric_units"] == {"mse": "standardised", "mae": "standardised"}
    for line in ("MSE (standardised)", "MAE (standardised)", "MSE file units", "MAE file units"):
        assert line in trained.done.stdout
    assert "(standardised)  val_mae" in trained.done.stdout
    records = [json.loads(line) for line in (trained.folder / "run/metrics.jsonl").read_text().splitlines()]
    judged = [record for record in records if record["split"] in ("val", "test")]
    assert len(judged) == 2
    for record in judged:
        assert record["units"] == {"mse": "standardised", "mae": "standardised"}
        assert record["mse_file_units"] > record["mse"]


@pytest.mark.slow
def test_evaluation_has_both_for_each_channel(trained):
    done = run_exp(trained.folder, *TINY, *trained.own, *SIZES, "task=eval", "init_from=run", "output_dir=eval")
    assert done.returncode == 0, done.stderr
    with (trained.folder / "eval/metrics_per_channel.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["channel", "mse_standardised", "mae_standardised", "mse_file_units", "mae_file_units"]
    data = ForecastingData("plant", str(trained.folder / "plant.csv"), 2, lookback=96, horizon=24, date_column="zeit")
    for row, std in zip(rows, data.std.tolist()):
        assert float(row["mae_file_units"]) == pytest.approx(std * float(row["mae_standardised"]), rel=1e-4)
    result = json.loads((trained.folder / "eval/result.json").read_text())
    both = [result["per_channel"]["mse_file_units"][name] for name in ("load", "temp")]
    assert np.mean(both) == pytest.approx(result["metrics"]["mse_file_units"], rel=1e-5)


@pytest.mark.slow
def test_too_few_rows_name_the_file_and_how_many_would_do(trained):
    own = [*trained.own, "data.file=new.csv", "data.date_format=%d.%m.%Y %H:%M", *SIZES]
    done = run_exp(trained.folder, *TINY, *own, "output_dir=few")
    assert done.returncode == 2
    line = done.stderr.splitlines()[0]
    assert f"{trained.folder / 'new.csv'}: too few rows" in line
    enough = int(re.search(r"(\d+) rows would do", line).group(1))
    assert borders("ratio", enough, 96, 24)
    with pytest.raises(DataError):
        borders("ratio", enough - 1, 96, 24)
    assert "task.input=" in line


def new_rows(trained, tmp_path, count, split="ratio", like=None, **options):
    write_series(tmp_path / "new.csv", count, first=1500)
    data = ForecastingData(
        "plant", str(tmp_path / "new.csv"), 2, split=split, lookback=96, horizon=24, date_column="zeit", **options
    )
    if like is not None:
        data.adopt(like.state())
    return data


@pytest.fixture
def like(trained):
    return ForecastingData("plant", str(trained.folder / "plant.csv"), 2, lookback=96, horizon=24, date_column="zeit")


def predicted(trained, folder, *arguments):
    """The result of ``task=predict`` with nothing of the run repeated, and its future."""
    done = run_exp(folder, "task=predict", f"init_from={trained.folder / 'run'}", "output_dir=out", *arguments)
    assert done.returncode == 0, done.stderr
    with (folder / "out/forecasts/future.csv").open() as file:
        future = list(csv.DictReader(file))
    return json.loads((folder / "out/result.json").read_text()), future, done.stdout


def test_lookback_rows_are_enough_for_the_future(trained, tmp_path):
    """Without the file that the run was trained on, and with dates that only the run's own tell to be day-first."""
    write_series(tmp_path / "new.csv", 96, first=1500)
    (trained.folder / "plant.csv").rename(trained.folder / "away.csv")
    try:
        result, future, said = predicted(trained, tmp_path, "task.input=new.csv")
    finally:
        (trained.folder / "away.csv").rename(trained.folder / "plant.csv")
    assert result["files"] == ["forecasts/future.csv", "plots/future_load_temp.png"]
    assert result["metrics"] == {"windows": 0}
    assert f"{tmp_path / 'new.csv'} has 96 rows, too few for a window with truth" in said
    dates = [str(datetime(2019, 12, 1) + timedelta(hours=1500 + 96 + ahead)) for ahead in (0, 23)]
    assert [future[0]["date"], future[23]["date"]] == dates
    # In the units of the file, by the run's standardisation: 96 rows of its own would give another one.
    assert 4000 < float(future[0]["load"]) < 6000
    assert 5 < float(future[0]["temp"]) < 15


def test_too_few_new_rows_to_be_scored_are_counted(trained):
    done = run_exp(trained.folder, "task=eval", "init_from=run", "data.split=new", "data.file=new.csv", "output_dir=no")
    assert done.returncode == 2
    assert "new.csv has 100 rows, and task=eval needs 120" in done.stderr.splitlines()[0]


@pytest.mark.slow
def test_more_rows_give_windows_with_truth_and_the_same_future(trained, tmp_path):
    write_series(tmp_path / "new.csv", 130, first=1500)
    result, future, _ = predicted(trained, tmp_path, f"data.file={tmp_path / 'new.csv'}", "task.num_windows=3")
    assert [name for name in result["files"] if name.endswith(".csv")] == [
        *(f"forecasts/window_{index:05d}.csv" for index in (0, 5, 10)),
        "forecasts/future.csv",
    ]
    assert result["metrics"]["windows"] == 3
    assert result["metrics"]["mae_file_units"] > result["metrics"]["mae"]
    (tmp_path / "later").mkdir()
    write_series(tmp_path / "later/new.csv", 96, first=1500 + 34)
    _, shorter, _ = predicted(trained, tmp_path / "later", "task.input=new.csv")
    assert shorter == future  # the same last rows


def test_what_new_rows_cannot_do_is_said(trained, tmp_path, like):
    with pytest.raises(DataError, match=r"new.csv: 95 rows are too few: a forecast sees data.lookback=96"):
        new_rows(trained, tmp_path, 95, like=like)
    data = new_rows(trained, tmp_path, 100, like=like)
    with pytest.raises(DataError, match="all its rows are new; it has no part for train"):
        data.train  # noqa: B018 - the access raises
    for split, words in (("ratio", "too few rows"), ("new", "no rows for training")):
        with pytest.raises(DataError, match=words):
            new_rows(trained, tmp_path, 100, split, date_format="%d.%m.%Y %H:%M").test  # noqa: B018


def test_ambiguous_dates_of_new_rows_are_read_as_those_of_the_run(trained, tmp_path, like):
    with pytest.raises(DataError, match=r"new.csv row 2, column Zeit: '01.02.2020 12:00' can be read as %d.%m"):
        new_rows(trained, tmp_path, 96).test  # noqa: B018 - the access raises
    data = new_rows(trained, tmp_path, 96, like=like)
    assert str(data.dates[0]) == "2020-02-01 12:00:00"
    assert str(data.future_window()[1][0]) == "2020-02-05 12:00:00"
    with pytest.raises(DataError, match="can be read as"):
        new_rows(trained, tmp_path, 96, like=SimpleNamespace(state=lambda: {**like.state(), "date_format": "%Y-%m-%d"}))


def test_other_series_than_those_of_the_run_are_refused(like):
    state = like.state()
    with pytest.raises(DataError, match="not those that the weights were trained on;") as error:
        like.adopt({**state, "names": ["load", "wind"]})
    assert "here:  load, temp\n  there: load, wind" in str(error.value)


def test_another_standardisation_is_exact(like):
    state = like.state()
    before = like.test[[0]]["y"]
    like.adopt({**state, "mean": [0.0, 0.0], "std": [1.0, 2.0]})
    after = like.test[[0]]["y"]
    mean, std = (torch.tensor(state[key], dtype=torch.float64) for key in ("mean", "std"))
    np.testing.assert_allclose(after * torch.tensor([1.0, 2.0]), before.double() * std + mean, rtol=1e-6)
    like.adopt(state)
    assert torch.equal(like.test[[0]]["y"], before)


def test_authors_weights_say_where_the_order_of_series_is_not_known(tmp_path):
    (tmp_path / "s.csv").write_text("date,OT,b\n" + "".join(f"2020-01-{n:02d},{n},{n * n % 7}\n" for n in range(1, 32)))
    data = ForecastingData("s", str(tmp_path / "s.csv"), 2, lookback=4, horizon=2)
    assert "the column OT is not the last one" in data.notes_on_foreign_weights()[0]
    assert ForecastingData("ETTh1", "ETTh1.csv", 7).notes_on_foreign_weights() == []


@pytest.mark.slow
def test_another_data_set_keeps_its_own_standardisation_and_says_so(trained):
    write_series(trained.folder / "sister.csv", 1500, first=7)
    for name, said in (("plant", 0), ("sister", 1)):
        data = [f"data.name={name}", "data.file=sister.csv"]
        done = run_exp(trained.folder, "task=eval", "init_from=run", *data, f"output_dir=transfer-{name}")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("standardised by its own training rows, not by those of plant") == said
