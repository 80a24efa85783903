"""Intervals as users have them: a run of one's own, measured, used for new rows, on one process and on several."""

from __future__ import annotations

import csv

import numpy as np
import pandas as pd
import pytest

from tests.conftest import TINY
from tests.simulators import needs_current_card

SIZES = ["data.lookback=48", "data.horizon=12", "data.channels=2", "model.period=24", "backend=cpu"]
ASKED = "task.intervals=[0.8,0.95]"
QUANTILES = "model.quantiles=[0.025,0.1,0.5,0.9,0.975]"


def write_series(path, count, first=0):
    noise = np.random.default_rng(first).normal(size=(count, 2))
    dates = pd.date_range("2024-01-01", periods=first + count, freq="h")[first:]
    hours = np.arange(first, first + count)
    values = np.stack([5000 + 300 * np.sin(hours / 4), 10 + np.cos(hours / 12)], axis=1) + noise * [100, 0.3]
    pd.DataFrame({"date": dates, "load": values[:, 0], "air temp": values[:, 1]}).to_csv(path, index=False)


@pytest.fixture
def own(exp):
    """Overrides for a series of one's own."""
    write_series(exp.folder / "plant.csv", 900)
    write_series(exp.folder / "new.csv", 70, first=900)
    return [*SIZES, "data=csv", "data.name=plant", f"data.root={exp.folder}", "data.file=plant.csv"]


def ran(exp, *words, code=0, **environment):
    done = exp(*words, **environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_residuals_cover_on_one_process_and_on_two(exp, own):
    ran(exp, *TINY, *own, "output_dir=run")
    done = ran(exp, "task=eval", "init_from=run", ASKED, "nproc=2", "plots=false", "output_dir=two")
    assert "calibrated on 79 validation windows" in done.stdout
    two = exp.result("two")
    ran(exp, "task=eval", "init_from=run", ASKED, "plots=false", "output_dir=one")
    one = exp.result("one")
    assert one["metrics"] == pytest.approx(two["metrics"], rel=1e-5)
    assert one["data"]["intervals"]["windows"] == one["data"]["intervals"]["of"] == one["data"]["val"]
    assert 0.6 < one["metrics"]["coverage_80"] < one["metrics"]["coverage_95"] < 1
    assert one["metric_name"] == "mse"
    table = read(exp.path("one") / "metrics_intervals_per_channel.csv")
    assert [row["channel"] for row in table] == ["load", "air temp"]
    mean = np.mean([float(row["coverage_80"]) for row in table])
    assert mean == pytest.approx(one["metrics"]["coverage_80"], rel=1e-4)


@pytest.mark.slow
def test_keys_that_do_not_go_together_are_refused_in_one_line(exp, own):
    ran(exp, *TINY, *own, "output_dir=run", QUANTILES)
    for words, says in (
        (["task.intervals=[80]"], "80 is no share between 0 and 1"),
        (["task.intervals=[0.9]"], "0.9 is between no two of model.quantiles=[0.025, 0.1, 0.5, 0.9, 0.975]"),
        ([ASKED, "task.intervals_from=magic"], "task.intervals_from=magic must be residuals or model"),
        ([ASKED, "task.intervals_signed=true"], "is for residuals"),
        ([ASKED, "task.intervals_from=residuals", "task.intervals_rescaled=true"], "set task.intervals_from=model"),
        (["task.intervals=[0.999]", "task.intervals_from=residuals"], "999 are needed"),
        ([ASKED, "task.interval=3"], "did you mean"),
    ):
        done = ran(exp, "task=eval", "init_from=run", *words, "output_dir=no", "plots=false", code=2)
        assert says in done.stderr.splitlines()[0]
    for wrong, says in (("[0.1,0.9]", "must have 0.5"), ("[0.5,0.1]", "must ascend"), ("[0.5,1.5]", "between 0 and 1")):
        done = ran(exp, *TINY, *own, f"model.quantiles={wrong}", "output_dir=no", code=2)
        assert says in done.stderr


def test_quantile_heads_are_trained_resumed_measured_and_used(exp, own):
    common = [*TINY, *own, QUANTILES, "model.attention_dropout=0", "log_every=1"]
    ran(exp, *common, "output_dir=one")
    ran(exp, *common, "output_dir=two", "nproc=2")
    assert exp.losses("two") == pytest.approx(exp.losses("one"), rel=1e-4)
    ran(exp, *common, "output_dir=half", "max_steps=2")
    ran(exp, *common, "output_dir=half", "resume=auto")
    assert exp.result("half")["metrics"] == exp.result("one")["metrics"]
    ran(exp, "task=eval", "init_from=one", ASKED, "plots=false", "output_dir=said")
    said = exp.result("said")
    assert said["data"]["intervals"] == {"from": "quantiles", "levels": [0.8, 0.95]}
    assert said["metrics"]["mse"] == pytest.approx(exp.result("one")["metrics"]["mse"], rel=1e-6)
    ran(exp, "task=eval", "init_from=one", ASKED, "task.intervals_rescaled=true", "plots=false", "output_dir=mended")
    assert abs(exp.result("mended")["metrics"]["coverage_80"] - 0.8) < abs(said["metrics"]["coverage_80"] - 0.8)
    ran(exp, "task=predict", "init_from=one", ASKED, "task.num_windows=1", "task.channels=load", "output_dir=drawn")
    for row in read(exp.path("drawn") / "forecasts" / "future.csv"):
        ends = [float(row[f"load{end}"]) for end in ("_lo95", "_lo80", "", "_hi80", "_hi95")]
        assert ends == sorted(ends)
    assert (exp.path("drawn") / "plots" / "future_load.png").stat().st_size > 5000


@needs_current_card
@pytest.mark.slow
def test_no_operator_of_heads_and_intervals_leaves_the_card(exp, own):
    card = {"SIM_GCU_PROFILE": "s60", "SIM_GCU_STRICT": "1"}
    common = [*TINY, *own, QUANTILES, "model.attention_dropout=0", "backend=gcu_simulated"]
    ran(exp, *common, "output_dir=run", **card)
    for words in ([], ["task.intervals_rescaled=true"], ["task.intervals_from=residuals"]):
        ran(exp, "task=eval", "init_from=run", ASKED, *words, "backend=gcu_simulated", "plots=false",
            "overwrite=true", "output_dir=card", **card)  # fmt: skip
        ran(exp, "task=eval", "init_from=run", ASKED, *words, "backend=cpu", "plots=false", "overwrite=true",
            "output_dir=cpu")  # fmt: skip
        assert exp.result("card")["left_device"] in (None, {}, [], 0), exp.result("card")["left_device"]
        assert exp.result("card")["metrics"] == pytest.approx(exp.result("cpu")["metrics"], rel=1e-3)


@pytest.mark.slow
def test_the_deviations_of_the_prior_variant(exp, own):
    prior = ["experiment=timebridge_prior_etth1", "model.integrated_layers=1", "model.prior_hidden=8",
             "model.num_heads=2"]  # fmt: skip
    ran(exp, *TINY, *prior, *own, "output_dir=run")
    found = {}
    for name, words in (("plain", ["task.intervals_rescaled=false"]), ("mended", [])):  # which nobody has to ask for
        ran(exp, "task=eval", "init_from=run", ASKED, "task.intervals_from=model", *words, "plots=false",
            f"output_dir={name}")  # fmt: skip
        assert exp.result(name)["data"]["intervals"]["from"] == "std"
        found[name] = abs(exp.result(name)["metrics"]["coverage_80"] - 0.8)
    assert found["mended"] < found["plain"]
    refused = ran(exp, *TINY, *prior, *own, QUANTILES, "output_dir=no", code=2)
    assert "the variant with a prior says by its variance" in refused.stderr
