from __future__ import annotations

import hashlib
import html
import json
import re
from pathlib import Path

from PIL import Image

import exp.report
from exp.report import thumbnails, write_report
from exp.report.page import write_page
from exp.report.runs import find_runs

LIBRARY = Path(exp.report.__file__).parent / "echarts"


class Page:
    """What a page shows: its text, the texts of its elements and tables, and the data of its charts."""

    def __init__(self, path):
        self.source = path.read_text(encoding="utf-8")
        self.data = json.loads(re.findall(r'id="data">(.*?)</script>', self.source, re.DOTALL)[0])
        self.text = " ".join(self.texts("body"))
        for tag in ("section", "table", "tr", "td", "th", "details", "figure", "button"):
            assert len(re.findall(rf"<{tag}[ >]", self.source)) == self.source.count(f"</{tag}>"), tag

    @staticmethod
    def _inside(tag, text):
        return re.findall(rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>", text, re.DOTALL)

    def texts(self, tag, within=None):
        found = self._inside(tag, self.source if within is None else within)
        return [html.unescape(re.sub("<[^>]*>", "", text)).strip() for text in found]

    def table(self, number):
        return [self.texts("t[hd]", row) for row in self._inside("tr", self._inside("table", self.source)[number])]


def written(runs, path):
    write_page(runs, path / "page.html", "A sweep")
    return Page(path / "page.html")


def test_a_report_of_a_sweep(make_sweep, tmp_path):
    path = write_report(find_runs([make_sweep()]), tmp_path / "report", "Learning rates")
    assert sorted(file.name for file in path.parent.rglob("*")) == [
        "report.html", "results.md", "results.tex", "sweep.csv", "sweep.json", "sweep_seeds.csv"
    ]  # fmt: skip
    page = Page(path)
    assert page.texts("h1") == ["Learning rates"]
    assert "6 runs: 5 completed, 1 failed; best on validation is 2 with mse 0.4100 (lr=0.001 seed=1)" in page.text
    end = ["12", "1,235", "cpu (Some Processor)"]
    assert page.table(1) == [
        ["#", "run", "lr", "seed", "validation", "mse", "mae", "status", "seconds", "samples/s", "device"],
        ["1", "2", "0.001", "1", "0.4100", "0.4100", "0.2050", "completed", *end],
        ["2", "3", "0.001", "2", "0.4200", "0.4200", "0.2100", "completed", *end],
        ["3", "0", "0.0001", "1", "0.5100", "0.5100", "0.2550", "completed", *end],
        ["4", "4", "0.01", "1", "0.5100", "0.5100", "0.2550", "completed", *end],
        ["5", "1", "0.0001", "2", "0.5200", "0.5200", "0.2600", "completed", *end],
        ["", "5", "0.01", "2", "", "", "", "failedrank 0: RunError: loss is nan", *end],
    ]
    assert "python -m exp optim.lr=0.001 seed=1" in page.text
    assert "model.d_model" in page.texts("details")[2], "the same in all runs"
    assert re.findall('data-chart="(.*?)"', page.source) == [
        "val mse", "train loss", "train lr", "train samples_per_second", "parallel", "over 0", "over 1",
    ]  # fmt: skip
    runs = page.data["runs"]
    assert [run["at"] for run in runs] == [[1e-3, 0], [1e-3, 1], [1e-4, 0], [1e-2, 0], [1e-4, 1], [1e-2, 1]]
    assert [(len(run["curves"]["train loss"][0]), run["settings"]) for run in runs[:2]] == [
        (20, "lr=0.001 seed=1"), (20, "lr=0.001 seed=2"),
    ]  # fmt: skip
    assert page.data["sections"][0]["keys"] == [
        {"name": "lr", "seed": False, "kind": "log", "categories": []},
        {"name": "seed", "seed": True, "kind": "category", "categories": ["1", "2"]},
    ]


def test_metrics_of_different_names_are_not_mixed(make_run, tmp_path):
    """A run that failed goes with those of its experiment and task."""
    for place, metric in (("a", 0.5), ("b", 0.4)):
        make_run(place, metric=metric, greater_is_better=False)
    for place, metric in (("c", 0.7), ("d", 0.8)):
        make_run(place, metric=metric, metric_name="mIoU", greater_is_better=True, config={"name": "dinov3"})
    make_run("e", error="out of memory", config={"name": "dinov3"})
    make_run("f", error="no weights", config={"name": "dinov3", "task.name": "predict"})
    page = written(find_runs([tmp_path]), tmp_path)
    assert page.texts("h2") == [
        "mse on test timebridge_small; smaller is better", "mIoU on test dinov3; larger is better",
        "Runs without a metric", "Configuration",
    ]  # fmt: skip
    assert [run["name"] for run in page.data["runs"]] == ["b", "a", "d", "c", "e", "f"]
    assert [(each["runs"], each["greater"]) for each in page.data["sections"]] == [
        ([0, 1], False), ([2, 3, 4], True), ([5], False),
    ]  # fmt: skip


def test_published_figures_are_beside_those_of_the_runs(make_run, tmp_path):
    published = {"mse": 0.354, "mae": 0.39, "source": "Liu et al., <2024>"}
    for number, unlike in enumerate([[], ["data.lookback=96 (there: 720)"]]):
        make_run(str(number), metric=0.4, config={"data.lookback": number}, overrides=[f"data.lookback={number}"],
                 published={**published, "differs": unlike}, metric_units={"mse": "raw"})  # fmt: skip
    page = written(find_runs([tmp_path]), tmp_path)
    assert page.table(0)[-2:] == [
        ["ETTh1", "0", "0.4000", "0.354", "+0.0460", "0.2000", "0.39", "-0.1900"],
        ["ETTh1", "1", "0.4000", "", "", "0.2000", "", ""],
    ]
    for words in (
        "; published: Liu et al., <2024>; ", "mse: of raw values; ", "mse (raw)",
        "are of another experiment, and not shown, where data.lookback=96 (there: 720).",
    ):  # fmt: skip
        assert words in page.text


def test_pictures_of_any_mode(tmp_path):
    for mode, name in (("RGBA", "a.png"), ("P", "b.png"), ("I;16", "c.png"), ("CMYK", "d.jpg")):
        image = Image.new(mode, (1000, 10), 600) if mode == "I;16" else Image.new("L", (1000, 10), 60).convert(mode)
        image.save(tmp_path / name)
        assert thumbnails.thumbnail(tmp_path / name, "a").width == 640


def test_pictures_of_the_best_run_come_first_six_of_each_and_what_is_none_is_counted(make_run, tmp_path):
    for number in range(3):
        make_run(str(number), metric=1.0 - number, pictures=[f"plots/val_{each}.png" for each in range(8)])
    (tmp_path / "0" / "plots" / "val_0.png").write_text("no picture")
    page = written(find_runs([tmp_path]), tmp_path)
    shown = [name for name in re.findall('<img[^>]* alt="(.*?)"', page.source) if ": " in name]
    numbers = {2: range(6), 1: range(6), 0: range(1, 7)}
    assert shown == [f"{run}: plots/val_{each}.png" for run, found in numbers.items() for each in found]
    assert "1 could not be read" in page.text


def test_the_library_is_the_one_that_was_published():
    """To update it, replace the files and SHA256SUMS together, from the same release."""
    for line in (LIBRARY / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, name = line.split()
        assert hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest() == digest, name
    assert {"LICENSE", "NOTICE", "echarts.min.js"} < {file.name for file in LIBRARY.iterdir()}
