"""What is written as JSON can be read by any program: it has no infinity and no nan."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from exp.runfolder import RunFolder, last_known, to_json, write_json
from tests.conftest import TINY, read_strictly, run_exp

INF, NAN = math.inf, math.nan


def test_numbers_that_are_not_finite_are_null_and_told(tmp_path):
    value = {"a": 1.0, "metrics": {"mse": NAN, "mae": 2.0}, "rows": [1.0, -INF, {"x": np.float64(INF)}]}
    write_json(tmp_path / "file.json", value)
    assert read_strictly((tmp_path / "file.json").read_text()) == {
        "a": 1.0,
        "metrics": {"mse": None, "mae": 2.0},
        "rows": [1.0, None, {"x": None}],
        "not_finite": {"metrics.mse": "nan", "rows.1": "-inf", "rows.2.x": "inf"},
    }
    assert math.isnan(value["metrics"]["mse"])  # the caller's own is as it was


def test_each_record_of_a_list_tells_its_own():
    assert read_strictly(to_json([{"x": 1.0}, {"x": NAN}])) == [{"x": 1.0}, {"x": None, "not_finite": {"x": "nan"}}]
    assert read_strictly(to_json((NAN, 1))) == [None, 1]


def test_finite_values_are_written_as_json_writes_them():
    value = {"b": [1, 2.5, None, True, "x"], "a": {"c": ()}, 3: np.float64(0.1)}
    for options in ({}, {"indent": 2}, {"sort_keys": True}):
        one = {str(key): item for key, item in value.items()}
        assert to_json(one, **options) == json.dumps(one, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a trained run."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_exp(folder, *TINY, "output_dir=run")
    assert done.returncode == 0, done.stderr
    return folder


POISON = """
from mmengine.hooks import Hook

class Poison(Hook):
    '''Spoils the weights after the last validation: the square of what they predict is no float32.'''

    def before_test(self, runner):
        dict(runner.model.named_parameters())["decoder.1.weight"].data.fill_(1e30)
"""


@pytest.mark.parametrize("task", ["train", "predict"])
def test_a_run_whose_test_metric_is_not_finite_has_failed(trained, task):
    arguments = [*TINY, f"output_dir={task}"]
    if task == "train":
        (trained / "poison.py").write_text(POISON)
        arguments += ["plugins=[poison]", "hooks=[{type: poison.Poison}]"]
    else:
        content = torch.load(str(trained / "run" / "checkpoints" / "best.pth"))
        content["state_dict"]["decoder.1.weight"].fill_(1e30)
        torch.save(content, str(trained / "spoilt.pth"))
        arguments += [f"task={task}", "init_from=spoilt.pth"]
    done = run_exp(trained, *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    measured_on = "plotted windows" if task == "predict" else "test"
    assert f"{measured_on} mse is inf" in done.stderr.splitlines()[0]
    folder = RunFolder(trained / task)
    result = read_strictly(folder.result.read_text())
    assert result["status"] == "failed"
    assert "mse is inf" in result["error"]["message"]
    if task != "predict":
        lines = folder.metrics.read_text().splitlines() if folder.metrics.exists() else []
        for record in map(read_strictly, lines):
            if record["split"] == "test":
                assert record["mse"] is None
                assert record["not_finite"]["mse"] == "inf"
        assert lines


def test_a_sweep_gets_nan_and_writes_null(trained):
    (trained / "poison.py").write_text(POISON)
    done = run_exp(
        trained, "-m", *TINY, "seed=1", "output_dir=sweep", "plugins=[poison]", "hooks=[],[{type: poison.Poison}]"
    )
    assert done.returncode == 1, done.stdout
    rows = read_strictly((trained / "sweep" / "sweep.json").read_text())
    assert sorted(row["status"] for row in rows) == ["completed", "failed"]
    assert [row["mse"] is None for row in rows] == [row["status"] == "failed" for row in rows]


def test_how_far_a_training_came_that_was_killed(tmp_path):
    folder = RunFolder(tmp_path)
    assert last_known(folder) == {"steps": 0, "epochs": 0}
    lines = [
        {"split": "train", "step": 20, "epoch": 0, "loss": 1.0},
        {"split": "val", "step": 30, "epoch": 1, "mse": 1.0},
        {"split": "test", "step": 10, "epoch": 0, "mse": 1.0},
    ]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "train", "st')
    assert last_known(folder) == {"steps": 30, "epochs": 1}
    folder.checkpoints.mkdir()
    for name in ("step_00000040.pth", "step_00000050.pth.tmp", "best.pth", "step_x.pth"):
        (folder.checkpoints / name).touch()
    assert last_known(folder) == {"steps": 40, "epochs": 1}
