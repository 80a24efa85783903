"""docs/about/results.md: published figures are the configuration's, ours those of the records."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import statistics

import pytest
import yaml

from tests.conftest import TINY, run_exp
from tests.docs.reader import ROOT

FOLDERS = ("conf/experiment", "examples/forecasting/linear_forecasting/conf/experiment")
BASE = ROOT / FOLDERS[0] / "base" / "timebridge.yaml"
FORECAST = re.compile(r"^\| `(\w+)` \| (\d+) \| (\S+ / \S+|none) \| (.+) \|$", re.MULTILINE)
FIGURES = re.compile(r"(0\.\d{3})(?: ± (0\.\d{3}))? / (0\.\d{3})(?: ± (0\.\d{3}))?")
"""MSE / MAE, either of one run or as mean ± standard deviation of several."""
TUNED = re.compile(r"(0\.\d{3}) ± (0\.\d{3}) \(seeds ([^|]*)\)")


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "about" / "results.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def keep_result():
    """The functions of the script that keeps a run's record beside the page."""
    return runpy.run_path(str(ROOT / "docs" / "keep_result.py"))


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def test_published_forecasts_are_those_of_the_configuration(page):
    compared = {}
    for file in [path for folder in FOLDERS for path in (ROOT / folder).glob("*.yaml")]:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        if "base/timebridge" in config["defaults"]:
            base = yaml.safe_load(BASE.read_text(encoding="utf-8"))
            config = {**base, **config, "reference": {**base["reference"], **config.get("reference", {})}}
        for horizon, figures in config.get("reference", {}).get("metrics", {}).items():
            compared[config["name"], str(horizon)] = f"{figures['mse']:.3f} / {figures['mae']:.3f}"
            assert re.search(r"arXiv [\d.]+\d", config["reference"]["source"]).group() in page, file
    assert len(compared) >= 40
    rows = {(name, horizon): published for name, horizon, published, _ in FORECAST.findall(page)}
    assert {key: published for key, published in rows.items() if published != "none"} == compared
    assert {name for (name, _), published in rows.items() if published == "none"} == {"seasonal_naive_etth1"}


def linked_records(text):
    """The names of the records that a part of the page links to, and the records; they have no paths of a machine."""
    names = re.findall(r"\]\(\.\./results/([^)]+)\)", text)
    records = [read(ROOT / "docs" / "results" / name) for name in names]
    assert not re.search("/home|/root|/work|/tmp", json.dumps(records)), names
    return names, records


def test_records_are_those_of_their_rows(page, keep_result):
    """A figure is the mean of the records that its row links to, ± their deviation; none of them has been changed."""
    folder, linked = ROOT / "docs" / "results", set()
    for name, horizon, _, cell in FORECAST.findall(page):
        links, records = linked_records(cell)
        linked.update(links)
        assert bool(links) is (cell != "not run"), (name, horizon)
        for record in records:
            assert (record["config"]["name"], record["config"]["data"]["horizon"]) == (name, int(horizon))
            assert record["result"]["differs"] == []
        expected = []
        for metric in ("mse", "mae") if records else ():
            values = [record["result"]["metrics"][metric] for record in records]
            deviation = f"{statistics.stdev(values):.3f}" if len(values) > 1 else None
            expected += [f"{statistics.mean(values):.3f}", deviation]
        assert [figure for found in FIGURES.findall(cell) for figure in found] == [each or "" for each in expected]
    assert linked == {file.name for file in folder.glob("*.json")}
    assert keep_result["check"](folder) == []


def test_records_of_distillation_are_those_of_their_rows(page):
    section = page.partition("### Distillation")[2].partition("### All weights")[0]
    weights = {"alone": (0, 0), "logits": (1, 0), "features": (0, 0.5), "both": (1, 0.5)}
    cells = {(row, name) for row in weights for name in ("dinov3_eurosat", "dinov3_dubai_distillation")}
    for mean, deviation, links in TUNED.findall(section):
        names, records = linked_records(links)
        assert [record["config"]["seed"] for record in records] == [1, 2, 3], names
        terms = {tuple(term["weight"] for term in record["config"]["model"]["distillation"][1:]) for record in records}
        row, name = names[0].split("/")[1:]
        name = name.partition("-")[0]
        assert terms == {weights[row]}
        cells.remove((row, name))
        metric = "mIoU" if "dubai" in name else "accuracy"
        values = [record["result"]["metrics"][metric] for record in records]
        assert [mean, deviation] == [f"{statistics.mean(values):.3f}", f"{statistics.stdev(values):.3f}"]
    assert not cells
    assert sorted(linked_records(section)[0]) == records_in("distillation")


def test_records_of_tuning_are_those_of_their_rows(page):
    section = page.partition("### All weights")[2].partition("\n## ")[0]
    for mean, deviation, links in TUNED.findall(section):
        names, records = linked_records(links)
        kinds = {(name.split("/")[1], record["config"]["name"]) for name, record in zip(names, records)}
        assert [record["config"]["seed"] for record in records] == [1, 2, 3], names
        ((method, name),), metric = kinds, "mIoU" if "dubai" in names[0] else "accuracy"
        model = records[0]["config"]["model"]
        assert (model["freeze"] == "all", model["lora"]["rank"]) == (method == "frozen", 8 * (method == "lora")), name
        assert ("init_from" in records[0]["command"]) is (method != "random")
        values = [record["result"]["metrics"][metric] for record in records]
        assert [mean, deviation] == [f"{statistics.mean(values):.3f}", f"{statistics.stdev(values):.3f}"]
    assert sorted(linked_records(section)[0]) == records_in("tuning")


def records_in(folder):
    """The names of the records of a table."""
    results = ROOT / "docs" / "results"
    return sorted(str(path.relative_to(results)) for path in (results / folder).glob("*/*.json"))


def test_records_of_pretrained_weights_are_those_of_their_rows(page, keep_result):
    section = page.partition("## MobileNetV2 with")[2]
    rows = re.findall(
        r"^\| (ImageNet's|random) \| (the head alone|all weights) \| (.+) \| (.+) \|$", section, re.MULTILINE
    )
    assert len(rows) == 4
    for weights, trained, *cells in rows:
        for cell, (name, metric) in zip(cells, (("dinov3_dubai", "mIoU"), ("dinov3_eurosat", "accuracy"))):
            _, records = linked_records(cell)
            assert [(record["config"]["name"], record["config"]["seed"]) for record in records] == [
                (name, seed) for seed in (1, 2, 3)
            ]
            for record in records:
                assert ("init_from=null" in record["command"]) is (weights == "random")
                assert (record["config"]["model"]["freeze"] == "all") is (trained == "the head alone")
                assert record["result"]["steps"] == 120
            values = [record["result"]["metrics"][metric] for record in records]
            assert cell.startswith(f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f} (seeds ")
    assert sorted(linked_records(section)[0]) == records_in("mobilenet")
    assert keep_result["check"](ROOT / "docs" / "results" / "mobilenet") == []


def test_a_record_of_a_run_and_what_is_refused(tmp_path, keep_result):
    run, kept, keep = tmp_path / "run", tmp_path / "kept", keep_result["main"]
    done = run_exp(tmp_path, *TINY, "data.horizon=24", "seed=7", "output_dir=run")
    assert done.returncode == 0, done.stderr
    env = read(run / "env.json")
    for revision, code in (("0" * 40 + "-dirty", 2), ("0" * 40, 0)):
        (run / "env.json").write_text(json.dumps({**env, "git_revision": revision}))
        assert keep([str(run), "--into", str(kept)]) == code
    file = kept / "timebridge_small-24-seed7.json"
    record, result = read(file), read(run / "result.json")
    assert record["result"]["metrics"] == result["metrics"]
    assert ("data.horizon=24" in record["command"], "output_dir" in record["command"]) == (True, False)
    assert [line["split"] for line in record["log"]][-2:] == ["val", "test"]
    weights = (run / result["tested_checkpoint"]).read_bytes()
    assert record["sha256"]["weights"] == hashlib.sha256(weights).hexdigest()
    assert list(record["data"]) == ["ETTh1.csv"]
    assert str(tmp_path) not in file.read_text()
    assert keep(["--check", str(kept)]) == 0
    file.write_text(file.read_text().replace('"mse": 0.', '"mse": 0.0', 1))
    assert keep(["--check", str(kept)]) == 1
