"""docs/python.md, done to the letter, in one Python process outside the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
for wrong, says in (
    (lambda: exp.run("seed=1"), "exp.run(['seed=1'])"),
    (lambda: exp.open_run("outputs/rates"), "open_sweep"),
    (lambda: exp.run(["seeed=1"]), "ended with code 2: there is no key 'seeed'"),
    (lambda: run.predict(["seeed=1"]), "ended with code 2: there is no key 'seeed'"),
    (lambda: run.model(device="cuda:99"), "there is no device 'cuda:99' here: "),
):
    try:
        wrong()
    except Exception as error:
        assert says in str(error), error
    else:
        raise AssertionError(says)
"""


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
