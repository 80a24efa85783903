"""docs/guide/python.md, done to the letter, in one Python process outside the repository."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import exp
from tests.conftest import clean_environment

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "python.md"
BEFORE = """
import exp, sys
dir(exp)
assert not {"torch", "pandas", "hydra"} & set(sys.modules)
"""
AFTER = """
assert set(run.metrics.split) == {"train", "val", "test"} and run.metrics.step.max() == run.config.max_steps == 20
assert forecast.path != run.path and forecast.result["files"] and len(forecast.tables) == 5
for (name, weight), other in zip(model.state_dict().items(), forecast.model().state_dict().values()):
    assert weight.equal(other), name  # of a run with others' weights
assert list(sweep["optim.lr"]) and best.result["metric"] == min(sweep.metric)
assert list(means.n) == [1, 1] and means.metric_std.isna().all() and list(means.metric_mean) == list(sweep.metric)
assert list(exp.run(["task=report", "run=outputs/rates"]).folder) == list(sweep.folder)
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
    rows = [row.dropna().to_dict() for _, row in metrics.iterrows()]
    assert rows == [{key: value for key, value in json.loads(line).items() if value is not None} for line in lines[:2]]
    assert {str(metrics[key].dtype) for key in ("loss", "recall_at", "modified", "error", "odd")} == {"float64"}


@pytest.mark.timeout(600)
def test_the_page_runs_as_it_is_written(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 4
    (tmp_path / "page.py").write_text("\n".join([BEFORE, *blocks, AFTER]))
    printed = subprocess.check_output([sys.executable, "page.py"], cwd=tmp_path, env=clean_environment(), text=True)
    assert "timebridge" in printed  # what the runs have printed
