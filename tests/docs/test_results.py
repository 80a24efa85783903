"""docs/results.md: published figures are those that the configuration compares with, and ours those told elsewhere."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import statistics

import pytest
import yaml

from exp.vision.dinov3.sizes import SIZES
from tests.conftest import TINY, run_exp
from tests.docs.reader import ROOT
from tests.vision.dinov3.test_backbone import PUBLISHED, num_parameters

FOLDERS = ("conf/experiment", "examples/forecasting/linear_forecasting/conf/experiment")
FORECAST = re.compile(r"^\| `(\w+)` \| (\d+) \| (\S+ / \S+|none) \| (.+) \|$", re.MULTILINE)
FIGURES = re.compile(r"(0\.\d{3})(?: ± (0\.\d{3}))? / (0\.\d{3})(?: ± (0\.\d{3}))?")
"""MSE / MAE, either of one run or as mean ± standard deviation of several."""
BACKBONE = re.compile(r"^\| `(\w+)` \| (\d[\d.]*) \| (\d[\d.]*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def keep_result():
    path = ROOT / "docs" / "keep_result.py"
    spec = importlib.util.spec_from_file_location("keep_result", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def shown(figures):
    return f"{figures['mse']:.3f} / {figures['mae']:.3f}"


def test_published_forecasts_are_those_of_the_configuration(page):
    compared = {}
    for folder in FOLDERS:
        for file in (ROOT / folder).glob("*.yaml"):
            config = yaml.safe_load(file.read_text(encoding="utf-8"))
            for horizon, figures in config.get("published", {}).items():
                compared[config["name"], horizon] = shown(figures)
                (source,) = re.findall(r"arXiv [\d.]+\d", config["published_source"])
                assert source in page, file
    assert len(compared) >= 40
    rows = {(name, int(horizon)): published for name, horizon, published, _ in FORECAST.findall(page)}
    assert {key: published for key, published in rows.items() if published != "none"} == compared
    without = {name for (name, _), published in rows.items() if published == "none"}
    assert without == {"seasonal_naive_etth1"}


def test_records_are_those_of_their_rows(page):
    """A figure is the mean of the records that its row links to, ± their deviation; none of them has been changed."""
    linked = set()
    for name, horizon, _, cell in FORECAST.findall(page):
        records = [read(ROOT / "docs" / file) for file in re.findall(r"\]\((results/[^)]+)\)", cell)]
        linked.update(re.findall(r"\]\(results/([^)]+)\)", cell))
        assert records or cell == "not run", (name, horizon)
        if not records:
            continue
        for record in records:
            assert (record["config"]["name"], record["config"]["data"]["horizon"]) == (name, int(horizon))
            assert record["result"]["differs"] == []
            assert not any(part in json.dumps(record) for part in ("/home", "/root", "/work", "/tmp")), name
        expected = []
        for metric in ("mse", "mae"):
            values = [record["result"]["metrics"][metric] for record in records]
            expected.append(f"{statistics.mean(values):.3f}")
            expected.append(f"{statistics.stdev(values):.3f}" if len(values) > 1 else None)
        assert list(FIGURES.search(cell).groups()) == expected, (name, horizon)
    folder = ROOT / "docs" / "results"
    assert linked == {file.name for file in folder.iterdir()}
    assert keep_result().check(folder) == []


def test_a_record_of_a_run_and_what_is_refused(tmp_path, capsys):
    done = run_exp(tmp_path, *TINY, "data.horizon=24", "seed=7", "output_dir=run")
    assert done.returncode == 0, done.stderr
    script = keep_result()
    env = read(tmp_path / "run" / "env.json")
    env["git_revision"] = "0" * 40
    (tmp_path / "run" / "env.json").write_text(json.dumps(env))
    assert script.main([str(tmp_path / "run"), "--into", str(tmp_path / "kept")]) == 0
    (file,) = (tmp_path / "kept").iterdir()
    assert capsys.readouterr().out == f"{file}\n"
    assert file.name == "timebridge_small-24-seed7.json"
    record, result = read(file), read(tmp_path / "run" / "result.json")
    assert record["result"]["metrics"] == result["metrics"]
    assert "data.horizon=24" in record["command"]
    assert "output_dir" not in record["command"]
    assert [line["split"] for line in record["log"]][-2:] == ["val", "test"]
    weights = (tmp_path / "run" / result["tested_checkpoint"]).read_bytes()
    assert record["sha256"]["weights"] == hashlib.sha256(weights).hexdigest()
    assert list(record["data"]) == ["ETTh1.csv"]
    assert str(tmp_path) not in file.read_text()
    assert script.main(["--check", str(file.parent)]) == 0
    file.write_text(file.read_text().replace('"mse": 0.', '"mse": 0.0', 1))
    assert script.main(["--check", str(file.parent)]) == 1
    env["git_revision"] += "-dirty"
    (tmp_path / "run" / "env.json").write_text(json.dumps(env))
    assert script.main([str(tmp_path / "run")]) == 2


def test_sizes_of_backbones(page):
    rows = BACKBONE.findall(page)
    assert {name: float(published) for name, published, _ in rows} == PUBLISHED
    for name, _, ours in rows:
        assert float(ours) == round(num_parameters(SIZES[name]) / 1e6, 1), name
