"""The example from its installation on: models for the data and the metrics of exp."""

from __future__ import annotations

import csv

import pytest

TINY = ["experiment=dlinear_etth1", "backend=cpu", "data.lookback=96", "max_steps=4", "val_every=2", "log_every=1",
        "plots=false"]  # fmt: skip
NAIVE = ["experiment=seasonal_naive_etth1", "backend=cpu", "data.lookback=48", "data.horizon=48"]


@pytest.mark.slow
def test_trained_evaluated_and_used_on_any_number_of_processes(run, exp):
    run(*TINY, "nproc=2", "output_dir=two")
    trained = exp.result("two")
    assert trained["published"]["mse"] == 0.375
    run("task=eval", "init_from=two", "backend=cpu", "output_dir=tested")
    assert exp.result("tested")["metrics"] == pytest.approx(trained["metrics"], rel=1e-6)
    run("task=predict", "init_from=two", "backend=cpu", "task.num_windows=1", "output_dir=said")
    assert len((exp.path("said") / "forecasts" / "future.csv").read_text().splitlines()) == 97


@pytest.mark.slow
def test_resumed_swept_and_compared_with_a_reference(run, exp):
    run("-m", *TINY, "sweep.plots=false", "model.kernel=5,25", "output_dir=sweep")
    assert exp.result("sweep/0")["metrics"] != exp.result("sweep/1")["metrics"]
    run(*TINY, "output_dir=half", "max_steps=2")
    run(*TINY, "output_dir=half", "resume=auto")
    assert exp.result("half")["metrics"] == exp.result("sweep/1")["metrics"]
    assert exp.losses("half") == exp.losses("sweep/1")
    run(*TINY, "task=parity", "reference=cpu", "steps=2", "output_dir=parity")


def test_what_has_no_weights_is_measured_and_used_without_a_training(run, exp):
    run(*NAIVE, "output_dir=one")
    result = exp.result("one")
    assert "checkpoint" not in result
    # The same figure, from the file: each hour of two days is forecast to be as the day before was.
    with (exp.path("one") / "metrics_per_step.csv").open() as file:
        errors = [float(row["mse_standardised"]) for row in csv.DictReader(file)]
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


@pytest.mark.slow
def test_a_training_of_nothing_and_weights_from_nowhere_are_refused(run, exp):
    done = run(*NAIVE, "task=train", "global_batch_size=32", "output_dir=run", code=2)
    assert "SeasonalNaive has nothing to train; task=eval measures it as it is" in done.stderr.splitlines()[0]
    assert "task=eval needs weights" in run(*TINY, "task=eval", "output_dir=run", code=2).stderr.splitlines()[0]
    (exp.folder / "scaled.py").write_text(
        "import torch\nfrom linear_forecasting.models import SeasonalNaive\n\n\n"
        "class Scaled(SeasonalNaive):\n    def __init__(self, **keys):\n        super().__init__(**keys)\n"
        "        self.scale = torch.nn.Parameter(torch.ones(1))\n"
    )
    done = run(*NAIVE, "model._target_=scaled.Scaled", "output_dir=run", code=2)
    assert "the model has 1 tensors, though its keys say has_weights = False" in done.stderr
    assert not exp.path("run").exists()


@pytest.mark.slow
def test_keys_and_data_that_do_not_go_with_it_are_refused(run, exp):
    for words, says in (
        ([*TINY, "model.kernl=5"], "there is no key 'model.kernl'; did you mean 'model.kernel'?"),
        ([*TINY, "model.kernel=4"], "model.kernel=4 must be odd"),
        (["experiment=dlinear_etth1", "data=dubai"], "experiment=dlinear_etth1 sets data.lookback, which the data"),
    ):
        assert says in run(*words, "output_dir=run", code=2).stderr.splitlines()[0]
    assert not exp.path("run").exists()
