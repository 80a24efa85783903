"""Outputs of forecasters through the command line: trained, measured, calibrated, and used without the file."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tests.behaviour.conftest import losses, ran, result, table
from tests.conftest import TINY
from tests.simulators import needs_current_card


@pytest.fixture
def counts(exp):
    """Overrides for sales of two goods, and a file with later rows."""
    rng, hours = np.random.default_rng(0), np.arange(900)
    means = np.stack([3 + 2 * np.sin(hours / 4), 20 + 10 * np.cos(hours / 12)], axis=1)
    frame = pd.DataFrame(rng.poisson(means), columns=["bread", "milk"])
    frame.insert(0, "date", pd.date_range("2020-01-01", periods=900, freq="h"))
    frame[:700].to_csv(exp.path("shop.csv"), index=False)
    frame[700:].to_csv(exp.path("later.csv"), index=False)
    return [*TINY, "data=csv", "data.name=shop", f"data.file={exp.path('shop.csv')}", "data.channels=2",
            "data.horizon=24", "data.scaling=none", "model.attention_dropout=0", "log_every=1"]  # fmt: skip


def test_an_output_on_two_processes_and_calibrated_weights_without_their_file(exp, counts):
    words = [*counts, "model/output=negative_binomial"]
    refused = ran(exp, *words, "data.scaling=null", "output_dir=no", code=2)
    assert "data.scaling=none" in refused.stderr
    ran(exp, *words, "output_dir=one")
    ran(exp, *words, "output_dir=two", "nproc=2")
    assert losses(exp.path("two")) == pytest.approx(losses(exp.path("one")), rel=1e-4)
    measured = []
    for name in ("one", "two"):
        ran(exp, "task=eval", f"init_from={name}", "task.intervals=[0.8]", "plots=false", f"output_dir=eval_{name}",
            "backend=cpu", f"nproc={1 + (name == 'two')}")  # fmt: skip
        measured.append(result(exp.path(f"eval_{name}"))["metrics"])
    assert {"crps", "wql", "sql", "msis_80", "coverage_80"} < {*measured[0]}
    assert measured[1] == pytest.approx(measured[0], rel=1e-3)

    ran(exp, "task=calibrate", "init_from=one", "task.intervals=[0.8]", "task.intervals_calibrate=true",
        "backend=cpu", "output_dir=known")  # fmt: skip
    exp.path("shop.csv").rename(exp.path("away.csv"))
    ran(exp, "task=predict", "init_from=known", "task.intervals=[0.8]", "task.intervals_calibrate=true", "backend=cpu",
        "task.input=later.csv", "data.upper=25", "plots=false", "output_dir=later")  # fmt: skip
    said = result(exp.path("later"))["data"]["intervals"]
    assert (said["stored_with_weights"], said["from"]) == (True, "NegativeBinomial")
    rows = table(exp.path("later") / "forecasts" / "future.csv")
    for name in ("bread", "milk"):
        for row in rows:
            assert 0 <= float(row[f"{name}_lo80"]) <= float(row[f"{name}_hi80"]) <= 25
    refused = ran(exp, "task=predict", "init_from=one", "task.intervals=[0.8]", "task.intervals_calibrate=true",
                  "task.input=later.csv", "output_dir=no", "backend=cpu", code=2)  # fmt: skip
    assert "shop.csv" in refused.stderr


@needs_current_card
@pytest.mark.extended
@pytest.mark.parametrize("output", ["student_t", "negative_binomial"])
def test_an_output_stays_on_the_card(exp, counts, output):
    card = {"SIM_GCU_PROFILE": "s60", "SIM_GCU_STRICT": "1"}
    words = [*counts, f"model/output={output}", "model.instance_norm=true"]
    ran(exp, *words, "output_dir=cpu")
    ran(exp, *words, "output_dir=card", "backend=gcu_simulated", **card)
    assert result(exp.path("card"))["cpu_fallbacks"]["calls_per_step"] == 0
    assert losses(exp.path("card")) == pytest.approx(losses(exp.path("cpu")), rel=1e-4)
    for name, backend in (("there", "gcu_simulated"), ("here", "cpu")):
        ran(exp, "task=eval", "init_from=cpu", "task.intervals=[0.8]", "plots=false", f"backend={backend}",
            f"output_dir={name}", **card)  # fmt: skip
    there, here = (result(exp.path(name))["metrics"] for name in ("there", "here"))
    assert there == pytest.approx(here, rel=1e-3)


def test_the_prior_takes_an_output_too(exp):
    words = [*TINY, "experiment=timebridge_prior_etth1", "model.integrated_layers=1", "model.prior_hidden=8",
             "data.horizon=24", "model/output=student_t"]  # fmt: skip
    ran(exp, *words, "max_steps=2", "output_dir=run")
    ran(exp, "task=eval", "init_from=run", "task.intervals=[0.8]", "plots=false", "backend=cpu", "output_dir=eval")
    assert result(exp.path("eval"))["data"]["intervals"] == {"from": "StudentT", "levels": [0.8]}
