"""docs/results.md: published figures are those that the configuration compares with, and ours those told elsewhere."""

from __future__ import annotations

import re

import pytest
import yaml

from exp.vision.dinov3.sizes import SIZES
from tests.docs.reader import ROOT
from tests.vision.dinov3.test_backbone import PUBLISHED, num_parameters

FOLDERS = ("conf/experiment", "examples/forecasting/linear_forecasting/conf/experiment")
FORECAST = re.compile(r"^\| `(\w+)` \| (\d+) \| (\S+ / \S+) \| (.+) \|$", re.MULTILINE)
BACKBONE = re.compile(r"^\| `(\w+)` \| (\d[\d.]*) \| (\d[\d.]*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


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
    assert {(name, int(horizon)): published for name, horizon, published, _ in FORECAST.findall(page)} == compared


def test_ours_are_runs_that_are_told_of(page):
    ours = {(name, int(horizon)): figures for name, horizon, _, figures in FORECAST.findall(page)}
    measured = {key: figures for key, figures in ours.items() if figures != "not run"}
    prior = (ROOT / "docs" / "prior.md").read_text(encoding="utf-8")
    linear = (ROOT / "examples" / "forecasting" / "README.md").read_text(encoding="utf-8")
    assert f"| TimeBridge | {measured['timebridge_etth1', 96].replace(' / ', ' | ')} |" in prior
    assert f"here {measured['dlinear_etth1', 96]}" in linear
    told = page.split("### How ours were measured")[1].split("\n## ")[0]
    assert {name for name, _ in measured} == set(re.findall(r"^\| `(\w+)` \|", told, re.MULTILINE))
    for figures in measured.values():
        assert re.fullmatch(r"0\.\d{3} / 0\.\d{3}", figures), figures


def test_sizes_of_backbones(page):
    rows = BACKBONE.findall(page)
    assert {name: float(published) for name, published, _ in rows} == PUBLISHED
    for name, _, ours in rows:
        assert float(ours) == round(num_parameters(SIZES[name]) / 1e6, 1), name
