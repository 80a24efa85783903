"""Columns that are not forecast and cells that are empty, from training to forecast, on any number of processes."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import TINY, run_exp

ROWS = 700


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns")
    rng = np.random.default_rng(0)
    values = np.sin(np.arange(ROWS) / 4)[:, None] + rng.normal(size=(ROWS, 4)) / 4
    empty = rng.random((ROWS, 4)) < 0.1
    cells = [["" if gap else f"{value:.4f}" for value, gap in zip(*row)] for row in zip(values, empty)]
    dates = [f"2020-01-{1 + row // 24:02d} {row % 24:02d}:00:00" for row in range(ROWS)]
    rows = [",".join([date, *row]) for date, row in zip(dates, cells)]
    (folder / "plant.csv").write_text("\n".join(["date,price,a,b b,OT", *rows]))
    words = [*TINY, "data=csv", "data.name=plant", f"data.file={folder / 'plant.csv'}", "data.channels=4",
             "data.horizon=24", "data.targets=[OT,b b]", "data.covariates=[price]", "data.missing=mask",
             "model.attention_dropout=0", "model.cointegrated_layers=1", "log_every=1", "val_every=2"]  # fmt: skip

    def run(name, *arguments, own=True, **environment):
        done = run_exp(folder, *(words if own else []), *arguments, f"output_dir={name}", **environment)
        assert done.returncode == 0, done.stderr
        return json.loads((folder / name / "result.json").read_text())

    def losses(name):
        lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}

    return SimpleNamespace(folder=folder, run=run, losses=losses, one=run("one"), empty=empty)


def test_any_number_of_processes(trained):
    assert trained.one["data"]["targets"] == ["b b", "OT"]
    assert trained.one["data"]["cells_without_truth"] == trained.empty[:, 2:].sum()
    two = trained.run("two", "nproc=2")
    assert two["metrics"] == pytest.approx(trained.one["metrics"], rel=1e-5)
    assert trained.losses("two") == pytest.approx(trained.losses("one"), rel=1e-5)


@pytest.mark.slow
def test_resumed_exactly(trained):
    trained.run("half", "max_steps=2")
    assert trained.run("half", "resume=auto")["metrics"] == trained.one["metrics"]
    assert trained.losses("half") == trained.losses("one")


@pytest.mark.slow
def test_on_simulated_cards_nothing_leaves_the_card(trained):
    cards = trained.run("cards", "backend=gcu_simulated", "nproc=2", SIM_GCU_PROFILE="s60", SIM_GCU_STRICT="1")
    assert cards["left_device"]["calls_per_step"] == 0
    assert cards["metrics"] == pytest.approx(trained.one["metrics"], rel=1e-5)
    assert trained.losses("cards") == pytest.approx(trained.losses("one"), rel=1e-4)


def test_evaluated_and_used_as_it_was_trained(trained):
    where = ["init_from=one", "backend=cpu", "plots=false"]
    assert trained.run("tested", "task=eval", *where, own=False)["metrics"] == trained.one["metrics"]
    with (trained.folder / "tested/metrics_per_channel.csv").open() as file:
        assert [row[0] for row in csv.reader(file)] == ["channel", "b b", "OT"]
    trained.run("used", "task=predict", "task.num_windows=2", *where, own=False)
    with (trained.folder / "used/forecasts/future.csv").open() as file:
        assert next(csv.reader(file)) == ["date", "b b", "OT"]
    with (trained.folder / "used/forecasts/window_00000.csv").open() as file:
        rows = list(csv.DictReader(file))
    begin = ROWS - 140  # of the test part
    assert [row["OT_truth"] == "" for row in rows] == trained.empty[begin : begin + 24, 3].tolist()
    assert all(row["OT"] for row in rows)


@pytest.mark.slow
def test_a_loss_that_does_not_know_of_it_is_refused(trained):
    (trained.folder / "mine.py").write_text(
        "import torch\nfrom exp.models.base import Model\n\n\nclass Mean(Model):\n"
        "    def __init__(self, channels, lookback, horizon, **_):\n        super().__init__()\n"
        "        self.head = torch.nn.Linear(lookback, horizon)\n\n"
        "    def forward(self, x, y=None, mode='tensor', **_):\n"
        "        forecast = self.head(x.transpose(1, 2)).transpose(1, 2)\n"
        "        return forecast if mode != 'loss' else {'loss': (forecast - y).abs().mean()}\n"
    )
    with pytest.raises(
        AssertionError, match=r"loss is nan .* the latest batch has nan in 'y': leave those values out of the loss"
    ):
        trained.run("mine", "model._target_=mine.Mean")


def test_a_part_without_truth_is_refused_before_the_training(trained):
    lines = (trained.folder / "plant.csv").read_text().splitlines()
    lines[490:561] = [",".join([*line.split(",")[:3], "", ""]) for line in lines[490:561]]
    file = trained.folder / "unknown.csv"
    file.write_text("\n".join(lines))
    done = run_exp(trained.folder, *TINY, "data=csv", "data.name=plant", f"data.file={file}", "data.channels=4",
                   "data.horizon=24", "data.targets=[OT,b b]", "data.missing=mask", "output_dir=unknown")  # fmt: skip
    assert done.returncode == 2
    said = done.stderr.splitlines()[0]
    assert f"{file}: b b, OT has no value where the val part is forecast (rows 490 to 560 of 700" in said
    assert not (trained.folder / "unknown" / "metrics.jsonl").exists()
