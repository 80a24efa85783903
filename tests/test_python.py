"""docs/python.md, done to the letter, in one Python process outside the repository."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

import exp
from tests.conftest import clean_environment

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
AFTER = """
import pandas, pathlib, torch
assert dir(exp) == ["__version__", "open_run", "open_sweep", "run"]
assert run.config.backend.name == "cpu" and run.config.max_steps == 20 and isinstance(run.metrics, pandas.DataFrame)
assert set(run.metrics.split) == {"train", "val", "test"} and run.metrics.step.max() == 20
assert not model.training and next(model.parameters()).device.type == "cpu"
assert torch.equal(next(iter(model.state_dict().values())), next(iter(run.model().state_dict().values())))
assert forecast.path != run.path and all((forecast.path / file).is_file() for file in forecast.result["files"])
assert list(forecast.tables["forecasts/future.csv"])[:2] == ["date", "HUFL"] and len(forecast.tables) == 5
assert torch.equal(next(forecast.model().parameters()), next(model.parameters()))  # of a run with others' weights
assert forecast.result["files"] and list(sweep["optim.lr"]) and best.result["metric"] == min(sweep.metric)
assert list(means.n) == [1, 1] and means.metric_std.isna().all() and list(means.metric_mean) == list(sweep.metric)
report = exp.run(["task=report", "run=outputs/rates"])
assert list(report.folder) == list(sweep.folder) and pathlib.Path("outputs/rates/report.html").is_file()
assert exp.run(["--cfg", "job"]) is None
for wrong, says in (
    (lambda: exp.run("seed=1"), "exp.run(['seed=1'])"),
    (lambda: exp.open_run("outputs/rates"), "open_sweep"),
    (lambda: exp.run(["seeed=1"]), "ended with code 2: there is no key 'seeed'"),
    (lambda: run.model(device="cuda:99"), "there is no device 'cuda:99' here: "),
):
    try:
        wrong()
    except Exception as error:
        assert says in str(error), error
    else:
        raise AssertionError(says)
"""


def test_metrics_are_what_the_file_says(tmp_path):
    """Every digit; a column is no date, whatever its name; what is missing is nan; a line that is cut is none."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    lines = [
        '{"split": "train", "step": 1, "loss": 0.1234567890123456789, "recall_at": 32000000.0, "modified": 20240101}',
        '{"split": "val", "step": 1, "error": 1e-17, "timestamp_error": 5e8, "odd": null}',
        '{"split": "val", "st',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    metrics = exp.open_run(tmp_path).metrics
    for number, line in enumerate(lines[:2]):
        for key, value in json.loads(line).items():
            found = metrics[key][number]
            assert math.isnan(found) if value is None else found == value, key
    assert len(metrics) == 2
    assert metrics.modified.isna().tolist() == [False, True]
    assert {str(metrics[key].dtype) for key in ("loss", "recall_at", "modified", "error", "odd")} == {"float64"}


@pytest.mark.timeout(600)
def test_the_page_runs_as_it_is_written(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    (tmp_path / "page.py").write_text("\n".join([*blocks, AFTER]))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=clean_environment(), capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "timebridge" in done.stdout  # what the runs have printed
    quick = "import sys, exp; dir(exp); assert not {'torch', 'pandas', 'hydra'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", quick], check=False).returncode == 0
