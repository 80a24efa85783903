"""Forecasts, and how sure they are, through the command line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from tests.behaviour.conftest import ran, result, table
from tests.conftest import TINY

ETT = Path(__file__).parents[2] / "data" / "ett" / "ETTh1.csv"


def content(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def etth1(begin, end):
    return pd.read_csv(ETT, dtype=str).iloc[begin:end]


def test_scores_of_intervals_hang_on_the_command_alone_and_nothing_is_written_into_the_run(trained, exp):
    run = trained("forecast")
    before = content(run)
    found = []
    for number, levels in enumerate(("[0.8]", "[0.55,0.8,0.9,0.975]")):
        ran(exp, "task=eval", f"init_from={run}", f"task.intervals={levels}", "plots=false", f"output_dir=e{number}")
        found.append(result(exp.path(f"e{number}"))["metrics"])
    for name in ("crps", "wql", "width_80"):
        assert found[0][name] == found[1][name]
    etth1(9000, 9100).to_csv(exp.path("new.csv"), index=False)
    words = [f"init_from={run}", "task.intervals=[0.8,0.975]", f"task.input={exp.path('new.csv')}"]
    ran(exp, "task=predict", *words, "plots=false", "output_dir=new")
    assert result(exp.path("new"))["data"]["intervals"]["calibrated_on"] == "val of ETTh1.csv"
    rows = table(exp.path("new") / "forecasts" / "future.csv")
    for row in rows:
        ends = [float(row[f"OT{end}"]) for end in ("_lo97.5", "_lo80", "", "_hi80", "_hi97.5")]
        assert ends == sorted(ends)
    by_channel = {row["channel"]: row for row in table(exp.path("e1") / "metrics_intervals_per_channel.csv")}
    deviation = pd.read_csv(ETT)["OT"][:8640].std(ddof=0)
    width = np.mean([float(row["OT_hi80"]) - float(row["OT_lo80"]) for row in rows]) / deviation
    assert abs(width - float(by_channel["OT"]["width_80_standardized"])) < 1e-4
    assert content(run) == before


def test_new_rows_are_those_of_the_same_series(trained, exp):
    """Names in another order are matched, another unit is named, another frequency refused; no picture is drawn."""
    run = trained("forecast")
    rows = etth1(9000, 9100)
    rows["OT"] = (100 * rows["OT"].astype(float)).map("{:.3f}".format)
    rows.to_csv(exp.path("new.csv"), index=False)
    rows[[*reversed(rows.columns)]].to_csv(exp.path("turned.csv"), index=False)
    futures = []
    for name in ("new", "turned"):
        ran(exp, "task=predict", f"init_from={run}", f"task.input={name}.csv", "plots=false", f"output_dir={name}")
        (note,) = result(exp.path(name))["data"]["notes"]
        assert "OT (" in note
        assert "HUFL (" not in note
        futures.append(table(exp.path(name) / "forecasts" / "future.csv"))
        assert not (exp.path(name) / "plots").exists()
    assert futures[0] == futures[1]
    etth1(9000, 9400)[::2].to_csv(exp.path("slow.csv"), index=False)
    refused = ran(exp, "task=predict", f"init_from={run}", "task.input=slow.csv", "output_dir=no", code=2)
    assert "slow.csv" in refused.stderr.splitlines()[0]
    assert "2:00:00" in refused.stderr.splitlines()[0]


def test_fill_values_are_named_and_files_that_are_cut_or_long_are_refused(exp):
    rows = etth1(0, 1000)
    own = ["data=csv", "data.name=own", f"data.root={exp.folder}", "data.file=own.csv", *TINY, "max_steps=1"]
    rows.iloc[100, 1], rows.iloc[300, 1], rows.iloc[200, 7] = "1e36", "1e20", "-9999"
    rows.to_csv(exp.path("own.csv"), index=False)
    ran(exp, *own, "data.channels=7", "data.horizon=24", "output_dir=filled")
    notes = result(exp.path("filled"))["data"]["notes"]
    assert [word in notes[0] for word in ("row 102", "row 302", "HUFL", "1e36", "1e20", "fill value")] == [True] * 6
    assert [word in notes[1] for word in ("row 202", "OT", "-9999", "fill value")] == [True] * 4
    with exp.path("own.csv").open("a") as file:
        file.write("2016-08-11 16:00:00,1.5,2.5\n")
    refused = ran(exp, *own, "data.channels=7", "data.horizon=24", "data.missing=mask", "output_dir=no", code=2)
    assert "own.csv row 1002" in refused.stderr.splitlines()[0]
    long = rows.melt("date", ["LUFL", "OT"], "plant", "y")
    long.to_csv(exp.path("own.csv"), index=False)
    refused = ran(exp, *own, "data.channels=2", "data.horizon=24", "output_dir=no", code=2)
    assert "data.id_column=plant" in refused.stderr.splitlines()[0]
    assert "keep one per date" not in refused.stderr


def test_a_period_as_in_the_authors_code_and_what_weights_do_not_tell(exp):
    sizes = [*TINY, "data.lookback=104", "model.period=24", "data.horizon=24"]  # as the users' illness.sh
    done = ran(exp, *sizes, "max_steps=1", "output_dir=run")
    assert "26 time steps" in done.stdout
    weights = torch.load(exp.path("run") / "checkpoints" / "best.pth")["state_dict"]
    assert weights["embedding.proj.0.weight"].shape == (16, 26)
    torch.save({f"module.{name}": value for name, value in weights.items()}, exp.path("checkpoint.pth"))
    done = ran(exp, *sizes, "task=eval", "init_from=checkpoint.pth", "output_dir=said")
    assert "model.num_heads=2, model.stable_len=6" in done.stdout
    assert result(exp.path("said"))["metrics"] == result(exp.path("run"))["metrics"]


def test_splits_by_size_and_date_and_a_refit_on_all_rows(exp):
    etth1(0, 600).to_csv(exp.path("own.csv"), index=False)
    own = ["data=csv", "data.name=own", f"data.root={exp.folder}", "data.file=own.csv", "data.channels=7", *TINY]
    ran(exp, *own, "data.horizon=24", "data.val_size=0.2", "data.test_start=2016-07-21 00:00:00", "output_dir=run")
    windows = result(exp.path("run"))["data"]
    assert [windows[split] for split in ("train", "val", "test")] == [360 - 120 + 1, 120 - 24 + 1, 120 - 24 + 1]
    ran(exp, *own, "data.val_size=24", "output_dir=no", code=2)
    futures = []
    for name, refit in (("once", "false"), ("twice", "true")):
        words = ["task=predict", "init_from=run", f"task.refit={refit}", "task.num_windows=1", "plots=false", "nproc=2"]
        ran(exp, *words, "backend=cpu", f"output_dir={name}")
        futures.append(table(exp.path(name) / "forecasts" / "future.csv"))
    assert result(exp.path("once"))["metrics"] == result(exp.path("twice"))["metrics"]
    assert futures[0] != futures[1]
    (note,) = result(exp.path("twice"))["data"]["notes"]
    assert "all 600 rows (481 windows) for 4 steps" in note
    weights = [torch.load(path)["meta"] for path in sorted(exp.path("twice").glob("checkpoints/*.pth"))]
    assert [(meta["step"], meta["samples"]) for meta in weights] == [(4, 128)]


def test_a_table_of_many_series_on_one_and_two_ranks_and_new_series_without_training(exp):
    draws, tables = np.random.default_rng(0), []
    for number, (name, length) in enumerate({"NA": 90, "7": 70, "shop, north": 50, "new": 40}.items()):
        days = pd.date_range("2024-01-01", periods=length + number)[number:]
        tables.append(pd.DataFrame({"unique_id": name, "ds": days, "y": 10.0**number + draws.normal(size=length)}))
    pd.concat(tables[:3]).sample(frac=1, random_state=0).to_csv(exp.path("shops.csv"), index=False)
    own = ["data=panel", "data.file=shops.csv", "data.id_column=unique_id", "data.date_column=ds", "data.targets=[y]"]
    sizes = [*TINY, "data.lookback=24", "data.horizon=6", "data.val_size=0.2", "data.test_size=10"]
    sizes += ["data.sampling=series", "model.attention_dropout=0"]
    found = []
    for ranks in (1, 2):
        ran(exp, *own, *sizes, f"nproc={ranks}", f"output_dir=run{ranks}")
        found.append(result(exp.path(f"run{ranks}")))
    assert found[0]["metrics"].keys() == found[1]["metrics"].keys() >= {"mse", "mase", "mae_file_units", "mse_naive"}
    for name, value in found[0]["metrics"].items():
        np.testing.assert_allclose(found[1]["metrics"][name], value, rtol=1e-4)
    assert [found[0]["data"][key] for key in ("series", "season", "test")] == [3, 7, 15]
    ran(exp, "task=eval", "init_from=run1", "backend=cpu", "plots=false", "nproc=2", "output_dir=eval")
    rows = table(exp.path("eval") / "metrics_per_series.csv")
    assert sorted(row["series"] for row in rows) == ["7", "NA", "shop, north"]
    mase = np.mean([float(row["mase"]) for row in rows])
    np.testing.assert_allclose(mase, found[0]["metrics"]["mase"], rtol=1e-4)
    pd.concat(tables[2:]).to_csv(exp.path("later.csv"), index=False)
    words = ["task=predict", "init_from=run1", "backend=cpu", "plots=false", "task.input=later.csv"]
    ran(exp, *words, "task.intervals=[0.5]", "output_dir=later")
    assert any("1 of 2 series are new" in note for note in result(exp.path("later"))["data"]["notes"])
    future = pd.read_csv(exp.path("later") / "forecasts" / "future.csv", index_col="unique_id")
    assert future.loc["new", "date"].tolist() == pd.date_range("2024-02-13", periods=6).strftime("%Y-%m-%d").tolist()
    assert (
        future.loc["new", "y"].between(990, 1010) & future.loc["shop, north", "y"].between(90, 110).to_numpy()
    ).all()
    assert (future["y_lo50"] <= future["y_hi50"]).all()
