"""The installed example: models for the data and the metrics of exp."""

from __future__ import annotations

import csv

import pytest

TINY = ["experiment=dlinear_etth1", "backend=cpu", "data.lookback=96", "max_steps=4", "val_every=2", "log_every=1",
        "plots=false"]  # fmt: skip
NAIVE = ["experiment=seasonal_naive_etth1", "backend=cpu", "data.lookback=48", "data.horizon=48"]


def test_trained_resumed_evaluated_and_used_on_any_number_of_processes(run, exp):
    run(*TINY, "output_dir=one", "checkpoint.every_steps=2")
    assert exp.result("one")["reference"]["mse"] == 0.375
    run(*TINY, "output_dir=half", "resume=one/checkpoints/step_00000002.pth")
    assert exp.result("half")["metrics"] == exp.result("one")["metrics"]
    run("task=eval", "init_from=one", "backend=cpu", "nproc=2", "output_dir=tested")
    assert exp.result("tested")["metrics"] == pytest.approx(exp.result("one")["metrics"], rel=1e-6)
    run("task=predict", "init_from=one", "backend=cpu", "task.num_windows=1", "output_dir=said")
    assert len((exp.path("said") / "forecasts" / "future.csv").read_text().splitlines()) == 97
    for words, named in ((["model.kernl=5"], "model.kernel"), (["model.kernel=4"], "model.kernel")):
        assert named in run(*TINY, *words, "output_dir=new", code=2).stderr.splitlines()[0]
    assert not exp.path("new").exists()


def test_what_has_no_weights_is_measured_and_used_without_a_training(run, exp):
    run(*NAIVE, "output_dir=one")
    result = exp.result("one")
    assert "checkpoint" not in result
    # The same figure, from the file: each hour of two days is forecast to be as the day before was.
    with (exp.path("one") / "metrics_per_step.csv").open() as file:
        errors = [float(row["mse_standardized"]) for row in csv.DictReader(file)]
    assert sum(errors) / 48 == pytest.approx(result["metrics"]["mse"], rel=1e-4)
    assert errors[0] < errors[24]  # the second day is a day farther away
    run(*NAIVE, "nproc=2", "task.intervals=[0.8]", "output_dir=two")
    two = exp.result("two")["metrics"]
    assert {name: two[name] for name in result["metrics"]} == pytest.approx(result["metrics"], rel=1e-6)
    assert 0.7 < two["coverage_80"] < 0.95  # how sure it is comes from its residuals
    run(*NAIVE, "task=predict", "task.num_windows=0", "output_dir=said")
    with (exp.path("said") / "forecasts" / "future.csv").open() as file:
        first, *rows = list(csv.reader(file))[1:]
    assert first[1:] == rows[23][1:]  # the season again
    done = run(*NAIVE, "task=train", "global_batch_size=32", "output_dir=run", code=2)
    assert "SeasonalNaive" in done.stderr.splitlines()[0]
