"""Series of one's own: units, gaps, columns, empty cells, intervals and priors, from training to forecast."""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import pandas as pd
import pytest

from tests.behaviour.conftest import losses, ran, result, table
from tests.conftest import TINY
from tests.simulators import needs_current_card

ASKED = "task.intervals=[0.8,0.95]"
HEADS = ["model/output=quantiles", "model.output.levels=[0.025,0.1,0.5,0.9,0.975]"]


def write_plant(path, count, first=0, skip=()):
    """Day-first dates below a name of their own; a load in thousands, and a temperature."""
    rows = ["Zeit, load,temp"]
    for hour in range(first, first + count):
        date = datetime(2019, 12, 1) + timedelta(hours=hour)
        if hour not in skip:
            rows.append(f"{date:%d.%m.%Y %H:%M},{5000 + 300 * np.sin(hour / 4):.2f},{10 + np.cos(hour / 12):.3f}")
    path.write_text("\n".join(rows) + "\n")


def test_units_gaps_and_dates_are_those_of_the_file(exp):
    write_plant(exp.path("plant.csv"), 1500, skip=(700,))
    own = ["data=csv", "data.name=plant", f"data.root={exp.folder}", "data.file=plant.csv", "data.date_column=zeit"]
    sizes = ["data.horizon=24", "data.channels=2"]
    refused = ran(exp, *TINY, *own, *sizes, "data.allow_gaps=false", "output_dir=no", code=2)
    assert "plant.csv row 702, column Zeit" in refused.stderr.splitlines()[0]
    ran(exp, *TINY, *own, *sizes, "output_dir=run")
    trained = result(exp.path("run"))
    assert (trained["data"]["irregular_steps"], trained["data"]["time_step"]) == (1, "1:00:00")
    assert trained["metric_units"] == {"mse": "standardized", "mae": "standardized"}
    assert trained["metric"] == trained["metrics"]["mse"]
    assert trained["metrics"]["mae_file_units"] > 10 * trained["metrics"]["mae"]

    ran(exp, "backend=cpu", "task=eval", "init_from=run", "plots=false", "output_dir=eval")
    assert result(exp.path("eval"))["metrics"] == pytest.approx(trained["metrics"], rel=1e-6)
    rows = table(exp.path("eval") / "metrics_per_channel.csv")
    assert list(rows[0]) == ["channel", "mse_standardized", "mae_standardized", "mse_file_units", "mae_file_units"]
    load = pd.read_csv(exp.path("plant.csv"), skipinitialspace=True)["load"][: int(1499 * 0.7)]
    assert float(rows[0]["mae_file_units"]) == pytest.approx(
        load.std(ddof=0) * float(rows[0]["mae_standardized"]), rel=1e-4
    )

    # 96 rows, read as the run read its own (1.2.2020 is in February), suffice without the file of the training.
    write_plant(exp.path("new.csv"), 96, first=1500)
    exp.path("plant.csv").rename(exp.path("away.csv"))
    ran(exp, "backend=cpu", "task=predict", "init_from=run", "task.input=new.csv", "output_dir=new")
    predicted = result(exp.path("new"))
    assert predicted["files"] == ["forecasts/future.csv", "plots/future_load_temp.png"]
    assert predicted["metrics"] == {"windows": 0}
    assert (exp.path("new") / "plots" / "future_load_temp.png").stat().st_size > 5000
    future = table(exp.path("new") / "forecasts" / "future.csv")
    begins = datetime(2019, 12, 1) + timedelta(hours=1596)
    assert [future[0]["date"], future[23]["date"]] == [str(begins), str(begins + timedelta(hours=23))]
    assert 4000 < float(future[0]["load"]) < 6000  # by the run's standardisation
    refused = ran(exp, "task=predict", "init_from=run", "task.input=new.csv", ASKED, "output_dir=no", code=2)
    assert "plant.csv" in refused.stderr  # nothing to calibrate with
    refused = ran(
        exp, "task=eval", "init_from=run", "data.split=test_only", "data.file=new.csv", "output_dir=no", code=2
    )
    assert "new.csv" in refused.stderr.splitlines()[0]


ROWS = 700


@pytest.fixture
def holes(exp):
    """Overrides for four series of which a tenth of the cells is empty; and which."""
    rng = np.random.default_rng(0)
    values = np.sin(np.arange(ROWS) / 4)[:, None] + rng.normal(size=(ROWS, 4)) / 4
    empty = rng.random((ROWS, 4)) < 0.1
    frame = pd.DataFrame(np.where(empty, np.nan, values.round(4)), columns=["price", "a", "b b", "OT"])
    frame.insert(0, "date", pd.date_range("2020-01-01", periods=ROWS, freq="h"))
    frame.to_csv(exp.path("plant.csv"), index=False)
    words = ["data=csv", "data.name=plant", f"data.file={exp.path('plant.csv')}", "data.channels=4", "data.horizon=24",
             "data.targets=[OT,b b]", "data.future_covariates=[price]", "data.missing=mask",
             "model.attention_dropout=0", "model.cointegrated_layers=1", *HEADS, "log_every=1",
             "val_every=2"]  # fmt: skip
    return [*TINY, *words], empty


MEAN = """
import torch
from exp.models.base import Model

class Mean(Model):
    def __init__(self, channels, lookback, horizon, **_):
        super().__init__()
        self.head = torch.nn.Linear(lookback, horizon)

    def forward(self, x, y=None, mode="tensor", **_):
        forecast = self.head(x.transpose(1, 2)).transpose(1, 2)
        return forecast if mode != "loss" else {"loss": (forecast - y).abs().mean()}
"""


def test_what_is_not_forecast_or_empty_does_not_count(exp, holes):
    words, empty = holes
    ran(exp, *words, "output_dir=run")
    trained = result(exp.path("run"))
    assert trained["data"]["targets"] == ["b b", "OT"]
    assert trained["data"]["cells_without_truth"] == empty[:, 2:].sum()
    exp.path("mine.py").write_text(MEAN)
    refused = ran(exp, *words, "model._target_=mine.Mean", "output_dir=no", code=1)
    assert "'y'" in refused.stderr.splitlines()[0]  # is NaN where there is no truth
    common = ["backend=cpu", "init_from=run", "plots=false", "task.intervals=[0.8]"]
    ran(exp, "task=eval", *common, "output_dir=eval")
    tested = result(exp.path("eval"))
    assert tested["data"]["intervals"] == {"from": "Quantiles", "levels": [0.8]}
    assert {name: tested["metrics"][name] for name in trained["metrics"]} == trained["metrics"]
    for name in ("metrics_per_channel.csv", "metrics_intervals_per_channel.csv"):
        assert [row["channel"] for row in table(exp.path("eval") / name)] == ["b b", "OT"]
    ran(exp, "task=predict", *common, "task.intervals_method=conformal", "task.num_windows=1", "output_dir=said")
    rows = table(exp.path("said") / "forecasts" / "window_00000.csv")
    ends = [f"{name}{end}" for name in ("b b", "OT") for end in ("", "_lo80", "_hi80", "_truth")]
    assert list(rows[0]) == ["date", *ends]
    begin = ROWS - 140  # of the test part
    assert [row["OT_truth"] == "" for row in rows] == empty[begin : begin + 24, 3].tolist()
    assert all(float(row["OT_lo80"]) < float(row["OT"]) < float(row["OT_hi80"]) for row in rows)


@pytest.mark.extended
def test_columns_and_heads_on_several_processes_and_resumed(exp, holes):
    words, _ = holes
    ran(exp, *words, "output_dir=one")
    ran(exp, *words, "output_dir=two", "nproc=2")
    one, two = (result(exp.path(name))["metrics"] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-5)
    assert losses(exp.path("two")) == pytest.approx(losses(exp.path("one")), rel=1e-5)
    ran(exp, *words, "output_dir=half", "max_steps=2")
    ran(exp, *words, "output_dir=half", "resume=auto")
    assert result(exp.path("half"))["metrics"] == one
    assert losses(exp.path("half")) == losses(exp.path("one"))
    for kind in ("model", "model task.intervals_calibrate=true", "conformal"):
        ask = [
            "task=eval",
            "init_from=one",
            "backend=cpu",
            ASKED,
            *f"task.intervals_method={kind}".split(),
            "plots=false",
        ]
        ran(exp, *ask, "output_dir=alone", "overwrite=true")
        ran(exp, *ask, "output_dir=both", "nproc=2", "overwrite=true")
        alone, both = (result(exp.path(name))["metrics"] for name in ("alone", "both"))
        assert both == pytest.approx(alone, rel=1e-5)
        assert 0 < alone["coverage_80"] <= alone["coverage_95"] <= 1


@needs_current_card
@pytest.mark.extended
def test_columns_heads_and_intervals_stay_on_the_card(exp, holes):
    words, _ = holes
    card = {"SIM_GCU_PROFILE": "s60", "SIM_GCU_STRICT": "1"}
    ran(exp, *words, "output_dir=cpu")
    ran(exp, *words, "output_dir=cards", "backend=gcu_simulated", "nproc=2", **card)
    assert result(exp.path("cards"))["cpu_fallbacks"]["calls_per_step"] == 0
    assert result(exp.path("cards"))["metrics"] == pytest.approx(result(exp.path("cpu"))["metrics"], rel=1e-5)
    assert losses(exp.path("cards")) == pytest.approx(losses(exp.path("cpu")), rel=1e-4)
    for kind in (
        "eval task.intervals_calibrate=true",
        "eval task.intervals_method=conformal",
        "predict task.num_windows=2",
    ):
        ask = [*f"task={kind}".split(), "init_from=cpu", ASKED, "plots=false", "overwrite=true"]
        ran(exp, *ask, "output_dir=there", "backend=gcu_simulated", **card)
        ran(exp, *ask, "output_dir=here", "backend=cpu")
        there, here = (result(exp.path(name)) for name in ("there", "here"))
        assert there["cpu_fallbacks"] in (None, {}, [], 0), there["cpu_fallbacks"]
        assert there["metrics"] == pytest.approx(here["metrics"], rel=1e-3)


PRIOR = [*TINY, "experiment=timebridge_prior_etth1", "model.integrated_layers=1", "model.prior_hidden=8", "log_every=1",
         "data.horizon=24"]  # fmt: skip
TERMS = ["loss_forecast", "loss_reconstruction", "loss_stationary_kl", "loss_nonstationary_kl", "loss_hmm"]


def terms(run):
    return pd.read_json(run / "metrics.jsonl", lines=True).query("split == 'train'")[[*TERMS, "loss"]]


def test_the_prior_trains_in_two_phases_and_its_deviations_are_corrected(exp):
    ran(exp, *PRIOR, "max_epochs=2", "global_batch_size=1956", "max_steps=5", "output_dir=run")
    found = terms(exp.path("run"))
    assert np.isfinite(found.to_numpy()).all()
    assert (found["loss_hmm"] == 0).tolist() == [False] * 4 + [True]  # frozen after the first epoch
    off = []
    for name, words in (("plain", ["task.intervals_calibrate=false"]), ("mended", [])):  # the correction is the default
        ran(exp, "backend=cpu", "task=eval", "init_from=run", ASKED, "task.intervals_method=model", *words,
            "plots=false", f"output_dir={name}")  # fmt: skip
        assert result(exp.path(name))["data"]["intervals"]["from"] == "PosteriorDeviations"
        off.append(abs(result(exp.path(name))["metrics"]["coverage_80"] - 0.8))
    assert off[1] < off[0]


@pytest.mark.extended
def test_the_prior_on_two_processes_and_resumed_in_either_phase(exp):
    same = ["model.sampling=false", "model.attention_dropout=0", "max_steps=6"]  # what each device draws for itself
    for phase in (0, 1):
        words = [*PRIOR, *same, f"model.regime_epochs={phase}", "model.prior_hidden=384"]
        ran(exp, *words, f"output_dir=one{phase}")
        ran(exp, *words, f"output_dir=two{phase}", "nproc=2")
        one, two = (terms(exp.path(f"{name}{phase}")) for name in ("one", "two"))
        assert (one["loss_hmm"] == 0).all() == (phase == 0)
        # Of a divergence, a difference of large numbers, it is the part of the whole loss that counts.
        assert ((one - two).abs() <= 1e-5 * (one.abs() + two[["loss"]].to_numpy())).to_numpy().all()
    words = [*PRIOR, "global_batch_size=1956", "max_epochs=2", "max_steps=8", "checkpoint.every_steps=1"]
    ran(exp, *words, "checkpoint.keep_last=9", "output_dir=whole")
    for step in (3, 6):
        ran(exp, *words, f"resume=whole/checkpoints/step_{step:08d}.pth", f"output_dir=cut{step}")
        assert result(exp.path(f"cut{step}"))["metrics"] == result(exp.path("whole"))["metrics"]
        assert terms(exp.path(f"cut{step}")).iloc[-1].tolist() == terms(exp.path("whole")).iloc[-1].tolist()
