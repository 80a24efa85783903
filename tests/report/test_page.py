from __future__ import annotations

import hashlib
import html
import json
import re
from pathlib import Path

import pytest

import exp.report
from exp.report.page import downsample, write_report
from exp.report.runs import find_runs

LIBRARY = Path(exp.report.__file__).parent / "echarts"


class Page:
    """What a page shows: its text, the texts of its elements and tables, and the options of its charts by title."""

    def __init__(self, path):
        self.source = path.read_text(encoding="utf-8")
        self.text = " ".join(self.texts("body"))
        charts = re.findall(
            r'<figure class="chart[^>]*><figcaption>(.*?)</figcaption><div class="plot" data-chart="(.*?)">',
            self.source,
        )
        self.charts = {html.unescape(title): json.loads(html.unescape(option)) for title, option in charts}
        assert len(self.charts) == self.source.count("data-chart=")
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
    return Page(write_report(runs, path / "report", "A sweep"))


def test_a_report_of_a_sweep(make_sweep, tmp_path):
    path = write_report(find_runs([make_sweep()]), tmp_path / "report", "Learning rates")
    assert sorted(file.name for file in path.parent.rglob("*")) == [
        "report.html", "results.md", "results.tex", "sweep.csv", "sweep.json", "sweep_seeds.csv"
    ]  # fmt: skip
    page = Page(path)
    assert page.texts("h1") == ["Learning rates"]
    assert "6 runs: 5 completed, 1 failed; best on validation is lr=0.001 with mse 0.4150 ± 0.0071" in page.text
    end = ["40", "12.3456", "1234.57"]
    first, *_, failed = page.table(1)[1:]
    assert first == ["1", "2", "0.001", "1", "completed", "0.41", "0.41", "0.205", *end, ""]
    assert failed == ["", "5", "0.01", "2", "failed", "", "", "", *end, "rank 0: RunError: loss is nan"]


def test_the_charts_of_a_sweep(make_sweep, tmp_path):
    charts = written(find_runs([make_sweep()]), tmp_path).charts
    bars, *titles = charts
    assert bars == "mse on validation, mean ± standard deviation over seeds"
    assert titles == ["validation mse", "training loss", "training lr", "training samples_per_second"]
    whiskers, points = charts[bars]["series"]
    assert charts[bars]["yAxis"]["data"] == ["lr=0.001", "lr=0.01", "lr=0.0001"], "the best mean first"
    assert whiskers["data"][0]["value"] == [0.40793, 0.415, 0.415, 0.415, 0.42207]
    assert [point["value"] for point in points["data"]] == [[0.41, 0], [0.42, 0], [0.51, 1], [0.51, 2], [0.52, 2]]
    lines = charts["training loss"]["series"]
    assert [line["name"] for line in lines] == ["lr=0.001"] * 2 + ["lr=0.01"] * 2 + ["lr=0.0001"] * 2
    assert [line["color_index"] for line in lines] == [0, 0, 1, 1, 2, 2], "seeds of one configuration share a color"
    assert [len(line["data"]) for line in lines] == [20] * 6


@pytest.mark.parametrize("count", [1, 400, 401, 12345])
def test_thinning_keeps_the_ends_and_every_spike(count):
    points = [(step, 9.0 if step == count // 3 else 0.0) for step in range(count)]
    thin = downsample(points, 400)
    assert len(thin) <= 400
    assert thin == sorted(set(thin))
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert points[count // 3] in thin


def test_pictures_of_the_best_run_come_first_two_of_each_and_curves_and_what_is_none_are_left_out(make_run, tmp_path):
    for number in range(3):
        make_run(str(number), metric=1.0 - number, pictures=["plots/curves.png", "plots/val_0.png", "plots/val_1.png"])
    (tmp_path / "0" / "plots" / "val_0.png").write_text("no picture")
    page = written(find_runs([tmp_path]), tmp_path)
    shown = [name for name in re.findall('<img[^>]* alt="(.*?)"', page.source) if ": " in name]
    numbers = {2: range(2), 1: range(2), 0: range(1, 2)}
    assert shown == [f"{run}: plots/val_{each}.png" for run, found in numbers.items() for each in found]


def test_the_library_is_the_one_that_was_published():
    """To update it, replace the files and SHA256SUMS together, from the same release."""
    for line in (LIBRARY / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, name = line.split()
        assert hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest() == digest, name
    assert {"LICENSE", "NOTICE", "echarts.min.js"} < {file.name for file in LIBRARY.iterdir()}
