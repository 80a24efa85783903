"""What is chosen is chosen on validation; what is reported is measured on test."""

from __future__ import annotations

import csv

import pytest
import yaml

from tests.behaviour.conftest import FORECAST, result

# Its forecast is its level, which no step changes. The series of the validation part lie lower than those of the test.
MINE = """
import torch
from exp.models.base import Model

class Level(Model):
    def __init__(self, horizon, channels, level, **_):
        super().__init__()
        self.level = torch.nn.Parameter(torch.full((horizon, channels), float(level)))

    def forward(self, x, y=None, mode="tensor", **_):
        return {"loss": self.level.mean() * 0} if mode == "loss" else self.level.expand(x.shape[0], -1, -1)
"""


@pytest.mark.extended
def test_sweeps_sweepers_and_reports_choose_by_validation(exp):
    (exp.folder / "mine.py").write_text(MINE)
    rows = [f"2020-01-{day:02d} {hour:02d}:00:00,{value}" for day in range(1, 31) for hour in range(24)
            for value in [hour % 2 + (1 if day > 24 else 0)]]  # fmt: skip
    (exp.folder / "levels.csv").write_text("\n".join(["date,a", *rows]) + "\n")
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra 'optuna' is not installed")
    data = [
        "data=csv",
        "data.name=levels",
        "data.file=levels.csv",
        "data.root=.",
        "data.channels=1",
        "data.lookback=24",
    ]
    optuna = [
        "hydra/sweeper=optuna",
        "hydra/sweeper/sampler=grid",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=2",
    ]
    done = exp("-m", *FORECAST, *data, *optuna, "data.horizon=2", "model._target_=mine.Level", "max_steps=1",
               "+model.level=choice(0,2)", "sweep.plots=false", "output_dir=sweep")  # fmt: skip
    assert done.returncode == 0, done.stderr
    jobs = {result(folder)["reported"]["value"]: folder for folder in map(exp.path, ("sweep/0", "sweep/1"))}
    assert sorted(jobs) == pytest.approx([1, 5], rel=0.1)
    best = result(jobs[max(jobs)])  # on validation; on test it is the worst
    assert best["selected_by"] == {"metric": "mse", "measured_on": "validation", "value": pytest.approx(1, rel=0.1)}
    assert best["reported"] == {"metric": "mse", "measured_on": "test", "value": best["metric"]}
    for row in csv.DictReader((exp.path("sweep") / "sweep.csv").open()):
        is_best = row["run"] == jobs[max(jobs)].name
        assert row["rank"] == ("1" if is_best else "2")
        assert (float(row["selected_by"]) < 2) == is_best
    (starred,) = [line for line in done.stdout.splitlines() if line.strip().startswith("* ")]
    assert starred.split()[1] == jobs[max(jobs)].name
    found = yaml.safe_load((exp.path("sweep") / "optimization_results.yaml").read_text())
    assert found["best_value"] == pytest.approx(1, rel=0.1)
    assert found["best_params"]["+model.level"] == 0
    # An evaluation measures on test alone: nothing to choose by, so no run of several is the best one.
    for number in (0, 1):
        words = [f"init_from=sweep/{number}", "plugins=[mine]", f"output_dir=tested/{number}"]
        done = exp("task=eval", "backend=cpu", *words)
        assert done.returncode == 0, done.stderr
    assert result(exp.path("tested/0"))["selected_by"] is None
    done = exp("task=report", "run=tested")
    assert not [line for line in done.stdout.splitlines() if line.strip().startswith("* ")]
    assert {row["rank"] for row in csv.DictReader((exp.path("tested") / "sweep.csv").open())} == {""}
