"""What is written as JSON can be read by any program: it has no infinity and no nan."""

from __future__ import annotations

import csv
import io
import json
import math

import numpy as np
import pytest
import torch

from exp.launcher.outcome import progress_of
from exp.runs.files import csv_content, to_json, write_json
from exp.runs.folder import FolderSnapshot, RunFolder, last_progress
from exp.vision.plots import ScenePrediction
from exp.vision.predict import predictions_csv
from tests.conftest import TINY, read_strictly

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
    # Each record of a list tells its own.
    assert read_strictly(to_json([{"x": 1.0}, {"x": NAN}])) == [{"x": 1.0}, {"x": None, "not_finite": {"x": "nan"}}]
    assert read_strictly(to_json((NAN, 1))) == [None, 1]


# Spoils the weights after the last validation: the square of what they predict is no float32.
POISON = """
from mmengine.hooks import Hook
class Poison(Hook):
    def before_test(self, runner):
        dict(runner.model.named_parameters())["decoder.1.weight"].data.fill_(1e30)
"""


def test_a_run_whose_test_metric_is_not_finite_has_failed(exp):
    """In a sweep, whose table has null for it; and a prediction."""
    (exp.folder / "poison.py").write_text(POISON)
    hooks = ["plugins=[poison]", "hooks=[],[{type: poison.Poison}]"]
    done = exp("-m", *TINY, *hooks, "output_dir=sweep", "sweep.plots=false")
    assert done.returncode == 1, done.stdout
    rows = read_strictly((exp.path("sweep") / "sweep.json").read_text())
    assert [(row["status"], row["mse"] is None) for row in rows] == [("completed", False), ("failed", True)]
    lines = (exp.path("sweep") / "1" / "metrics.jsonl").read_text().splitlines()
    (tested,) = [record for record in map(read_strictly, lines) if record["split"] == "test"]
    assert (tested["mse"], tested["not_finite"]["mse"]) == (None, "inf")

    content = torch.load(str(exp.path("sweep/0/checkpoints/best.pth")))
    content["state_dict"]["decoder.1.weight"].fill_(1e30)
    torch.save(content, str(exp.path("spoilt.pth")))
    done = exp(*TINY, "task=predict", "init_from=spoilt.pth", "checkpoint.trusted=true", "output_dir=predict")
    assert done.returncode == 1, done.stdout
    assert "plotted windows mse is inf" in done.stderr.splitlines()[0]
    for name, measured_on in (("sweep/1", "test"), ("predict", "plotted windows")):
        assert exp.result(name)["status"] == "failed"
        assert f"{measured_on} mse is inf" in exp.result(name)["error"]["message"]


def contents(folder) -> dict:
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def earlier_run(path) -> RunFolder:
    folder = RunFolder(path)
    folder.create()
    folder.write_pending({"config.yaml": b"seed: 0", "overrides.yaml": b"[]"})
    folder.checkpoints.mkdir()
    (folder.checkpoints / "step_00000002.pth").write_bytes(b"two")
    folder.metrics.write_text('{"split": "train", "step": 2}\n{"split": "train", "step": 3}\n')
    folder.log_file(0).write_text("of the earlier run\n")
    folder.write_result({"status": "completed"})
    return folder


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_start_that_is_refused_before_it_begins_leaves_the_folder_as_it_was(tmp_path, overwrite, begun):
    folder = earlier_run(tmp_path)
    before, snapshot = contents(tmp_path), FolderSnapshot(folder)
    folder.write_pending({"config.yaml": b"seed: 1", "overrides.yaml": b"[seed=1]"})
    folder.log_file(0).open("a").write("of the later one\n")
    if begun:
        folder.commit_pending(overwrite)
        assert folder.has_checkpoint() is not overwrite
        assert (folder.metrics.is_file(), folder.result.is_file()) == (not overwrite, False)
    else:
        folder.discard_pending()
    assert snapshot.rollback() is not begun
    if begun:
        assert folder.config.read_bytes() == b"seed: 1"
    else:
        assert contents(tmp_path) == before


def test_a_first_run_that_is_refused_leaves_nothing_unless_it_has_results(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    snapshot = FolderSnapshot(folder)
    folder.write_pending({"config.yaml": b"seed: 1"})
    folder.metrics.write_text("{}\n")
    assert not snapshot.rollback()
    folder.metrics.write_text("")
    assert snapshot.rollback()
    assert [path.name for path in folder.path.iterdir()] == ["logs"]


def test_how_far_a_training_is_or_came_that_was_killed(tmp_path):
    folder = RunFolder(tmp_path)
    assert (last_progress(folder), progress_of(folder)) == ({"steps": 0, "epochs": 0}, "")
    lines = [
        {"split": "train", "step": 20, "epoch": 0, "loss": 1.0},
        {"split": "val", "step": 30, "epoch": 1, "mse": 1.0},
        {"split": "test", "step": 10, "epoch": 0, "mse": 1.0},
    ]
    folder.metrics.write_text(json.dumps(lines[0]) + '\n{"split": "tr')
    assert progress_of(folder) == "step 20  loss 1.0000"
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "train", "st')
    assert last_progress(folder) == {"steps": 30, "epochs": 1}
    folder.checkpoints.mkdir()
    for name in ("step_00000040.pth", "step_00000050.pth.tmp", "best.pth", "step_x.pth"):
        (folder.checkpoints / name).touch()
    assert last_progress(folder) == {"steps": 40, "epochs": 1}


def test_cells_that_a_spreadsheet_would_compute_are_text():
    computed = ['=HYPERLINK("http://a.b")', "+1+2", "-cmd", "@SUM(A1)", "\t=1"]
    others = ["-1.5e-3", "+7", "-inf", "Forest", -3, "a=b"]
    (row,) = csv.reader(io.StringIO(csv_content([[*computed, *others]]).decode(), newline=""))
    assert row == [*(f"'{cell}" for cell in computed), *map(str, others)]
    scenes = [ScenePrediction("=1+1.png", [("@class", 0.5)], "-x")]
    assert predictions_csv(scenes).splitlines()[1] == b"'=1+1.png,'@class,0.5000,'-x"
