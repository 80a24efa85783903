"""What a sweep makes of what a sweeper, or a command line, asks for."""

from __future__ import annotations

import csv
import json
import math

import pytest

from exp.sweep.sweeper import NoMetric
from tests.behaviour.test_refusals import ONE_BY_ONE
from tests.conftest import TINY, Forked

SWEEP = ["-m", *TINY, "max_steps=2", "output_dir=sweep", "sweep.plots=false", "sweep.parallel_jobs=1"]


def test_a_job_without_a_metric_is_nan_in_sums_and_no_number_alone():
    assert isinstance(NoMetric(), float)
    assert math.isnan(NoMetric())
    assert math.isnan(-1 * NoMetric())
    with pytest.raises(ValueError, match="no metric"):
        float(NoMetric())


REFUSED = [
    (["-m", "output_dir=a,b"], "output_dir"),
    (["-m", "output_dir=x${seed}", "seed=1,2"], "output_dir"),
    (["-m", "output_dir=", "seed=1,2"], "output_dir"),
    (["-m", "hydra.sweep.subdir=a_${seed}", "seed=1,2"], "hydra.sweep.subdir"),
    (["-m", "seed=range(5,5)"], "seed=range(5,5)"),
    (["-m", "seed=range(5,5)", "hydra.sweeper.max_batch_size=2"], "seed=range(5,5)"),
    (["-m", "task=eval", "init_from=glob(*)"], "glob()"),
    (["-m", "task=report", "run=a,b"], "task=report"),
    (["task=report", "run="], "run is empty"),
    (["task=report", "run=[a,'']"], "run is empty"),
    (["task=track", "run="], "run is empty"),
    (["output_dir="], "output_dir"),
    (["init_from="], "init_from"),
    (["task=eval", "init_from="], "init_from"),
    (["resume="], "resume"),
]


def test_what_can_only_be_a_mistake_is_refused_and_leaves_nothing(exp):
    process = Forked(exp.folder, json.dumps([["backend=cpu", *line] for line, _ in REFUSED]), script=ONE_BY_ONE)
    output, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    for (line, key), (code, said) in zip(REFUSED, json.loads(output.splitlines()[-1])):
        assert (code, len(said.splitlines()), said[:7], key in said) == (2, 1, "error: ", True), (line, said)
    assert list(exp.folder.iterdir()) == []


def statuses(exp) -> list[str]:
    with exp.path("sweep/sweep.csv").open(newline="") as file:
        return [row["status"] for row in csv.DictReader(file)]


def test_optuna_goes_on_where_trials_fail(exp):
    pytest.importorskip("optuna", reason="the extra 'optuna' is not installed")
    optuna = [*SWEEP, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=2"]
    done = exp(*optuna, "hydra.sweeper.sampler.seed=1", "optim.lr=interval(-1e-3,1e-3)")  # one below 0
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert statuses(exp) == ["completed", "failed"]
    assert "lr: 0.00044" in exp.path("sweep/optimization_results.yaml").read_text()


def test_a_sweeper_that_raises_is_one_line(exp):
    """As Optuna's does where no trial has a value."""
    pytest.importorskip("optuna", reason="the extra 'optuna' is not installed")
    done = exp(*SWEEP, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "optim.lr=choice(1e30)", "log_every=1")
    assert done.returncode == 1, done.stdout
    assert "error: OptunaSweeper has ended the sweep: ValueError: No trials are completed yet" in done.stderr
    assert "Traceback" not in done.stderr
    assert statuses(exp) == ["failed"]
    assert "1 failed" in done.stdout


def test_a_search_for_the_worst_ends_with_its_first_batch(exp):
    pytest.importorskip("optuna", reason="the extra 'optuna' is not installed")
    optuna = [*SWEEP, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
    done = exp(*optuna, "optim.lr=interval(1e-4,1e-3)", "hydra.sweeper.direction=maximize")
    assert done.returncode == 2, done.stderr
    assert "looks for the worst mse, of which smaller is better; set hydra.sweeper.direction=minimize" in done.stderr
    assert statuses(exp) == ["completed"]
    refused = exp(*optuna, "optim.lr=interval(1e-4,1e-3)", "hydra.sweeper.direction=[minimize,maximize]")
    assert refused.returncode == 2
    assert "names 2 directions" in refused.stderr


def test_jobs_that_are_the_same_are_gone_on_with_one_by_one(exp):
    assert exp(*SWEEP, "seed=1,1").returncode == 0
    exp.path("sweep/0/result.json").unlink()
    done = exp(*SWEEP, "seed=1,1,1", "sweep.resume=true")
    assert done.returncode == 0, done.stderr
    assert "1 of 3 jobs are done already" in done.stdout
    assert statuses(exp) == ["completed"] * 3
    assert sorted(path.parent.name for path in exp.path("sweep").glob("*/result.json")) == ["0", "1", "2"]
