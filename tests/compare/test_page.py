from __future__ import annotations

import hashlib
import html
import html.parser
import json
import re
from pathlib import Path

import pytest
from PIL import Image

import exp.compare
from exp.compare import thumbnails, write_report
from exp.compare.page import write_page
from exp.compare.runs import find_runs

LIBRARY = Path(exp.compare.__file__).parent / "echarts"
VOID = {"meta", "img", "br", "input", "link", "base", "hr"}


class Page(html.parser.HTMLParser):
    """What a page consists of: its elements with their attributes and texts; raises where they are not balanced."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements, self.open = [], []
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "text": "", **dict(attributes)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag, **attributes):
        return [element for element in self.elements if element["tag"] == tag
                and all(element.get(key) == value for key, value in attributes.items())]  # fmt: skip

    @property
    def text(self):
        return self.all("body")[0]["text"]

    @property
    def data(self):
        return json.loads(self.all("script", id="data")[0]["text"])

    @property
    def charts(self):
        return [figure["data-chart"] for figure in self.all("figure") if "data-chart" in figure]

    def column(self, title):
        """The cells of one column of the first table of runs."""
        table = re.search(r'<table class="results".*?</table>', self.source, re.DOTALL)[0]
        titles = [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<th .*?</th>", table)]
        rows = re.findall(r"<tr[^>]* data-run.*?</tr>", table, re.DOTALL)
        cells = [re.findall(r"<td.*?</td>", row, re.DOTALL) for row in rows]
        return [re.sub("<[^>]*>", " ", row[titles.index(title)]).strip() for row in cells]


def written(runs, path, title="A sweep"):
    write_page(runs, path / "page.html", title)
    return Page(path / "page.html")


def test_a_report_of_a_sweep(make_sweep, tmp_path):
    path = write_report(find_runs([make_sweep()]), tmp_path / "report", "Learning rates")
    assert sorted(file.name for file in path.parent.rglob("*")) == [
        "report.html", "results.md", "results.tex", "sweep.csv", "sweep.json", "sweep_seeds.csv"
    ]  # fmt: skip
    page = Page(path)
    assert page.all("h1")[0]["text"] == "Learning rates"
    assert "6 runs: 5 completed, 1 failed; best on validation is 2 with mse 0.4100 (lr=0.001 seed=1)" in page.text
    assert page.column("run") == ["2", "3", "0", "4", "1", "5"]
    assert page.column("lr") == ["0.001", "0.001", "0.0001", "0.01", "0.0001", "0.01"]
    assert page.column("mse") == ["0.4100", "0.4200", "0.5100", "0.5100", "0.5200", ""]
    assert page.column("status")[-1].split() == ["failed", "rank", "0:", "RunError:", "loss", "is", "nan"]
    assert page.column("device")[0] == "cpu (Some Processor)"
    assert "python -m exp optim.lr=0.001 seed=1" in page.text
    assert "model.d_model" in page.all("details")[2]["text"], "the same in all runs"
    assert page.charts == [
        "val mse", "train loss", "train lr", "train samples_per_second", "parallel", "over 0", "over 1",
    ]  # fmt: skip
    assert [len(run["curves"]["train loss"][0]) for run in page.data["runs"]] == [20] * 6
    assert [run["metric"] is None for run in page.data["runs"]] == [False] * 5 + [True]
    assert [run["settings"] for run in page.data["runs"][:2]] == ["lr=0.001 seed=1", "lr=0.001 seed=2"]
    (section,) = page.data["sections"]
    assert section["keys"] == [
        {"name": "lr", "seed": False, "kind": "log", "categories": []},
        {"name": "seed", "seed": True, "kind": "category", "categories": ["1", "2"]},
    ]
    assert [run["at"] for run in page.data["runs"]] == [
        [1e-3, 0], [1e-3, 1], [1e-4, 0], [1e-2, 0], [1e-4, 1], [1e-2, 1],
    ]  # fmt: skip


def test_runs_of_different_metrics_have_a_table_each(make_run, tmp_path):
    make_run("a", metric=0.5)
    make_run(
        "b", metric=0.7, metric_name="mIoU", greater_is_better=True, config={"name": "dinov3"}, experiment="dinov3"
    )
    make_run(
        "c", metric=0.8, metric_name="mIoU", greater_is_better=True, config={"name": "dinov3"}, experiment="dinov3"
    )
    make_run("d", status="completed", config={"name": "dinov3", "task.name": "predict"})
    page = written(find_runs([tmp_path]), tmp_path)
    assert [head["text"] for head in page.all("h2")] == [
        "mse on test timebridge_small",
        "mIoU on test dinov3; larger is better",
        "Runs without a metric",
        "Configuration",
    ]
    assert len(page.all("table", **{"class": "results"})) == 3
    assert [section["runs"] for section in page.data["sections"]] == [[0], [1, 2], [3]]
    assert [section["greater"] for section in page.data["sections"]] == [False, True, False]
    assert [run["name"] for run in page.data["runs"]] == ["a", "c", "b", "d"]


def test_published_figures_are_beside_those_of_the_runs(make_run, tmp_path):
    published = {"mse": 0.354, "mae": 0.39, "source": "Liu et al., <2024>"}
    for number, unlike in enumerate([[], ["data.lookback=96 (there: 720)"]]):
        make_run(str(number), metric=0.4, config={"data.lookback": number}, overrides=[f"data.lookback={number}"],
                 published={**published, "differs": unlike})  # fmt: skip
    page = written(find_runs([tmp_path]), tmp_path)
    table = re.search(r'<table class="paper">.*?</table>', page.source, re.DOTALL)[0]
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", table)][1:]
    assert rows == [
        ["ETTh1", "0", "0.4000", "0.354", "+0.0460", "0.2000", "0.39", "-0.1900"],
        ["ETTh1", "1", "0.4000", "", "", "0.2000", "", ""],
    ]
    (notes,) = (note["text"] for note in page.all("p", **{"class": "note"}))
    assert "; published: Liu et al., <2024>; " in notes
    assert "published figures are of another experiment, and not shown, where data.lookback=96 (there: 720)." in notes


@pytest.mark.parametrize("mode", ["RGBA", "P", "I;16", "CMYK"])
def test_pictures_of_any_mode(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    image = Image.new(mode, (1000, 10), 600) if mode == "I;16" else Image.new("L", (1000, 10), 60).convert(mode)
    image.save(path)
    assert thumbnails.thumbnail(path, "a").width == 640


def test_pictures_of_the_best_run_come_first_six_of_each_and_what_is_none_is_counted(make_run, tmp_path):
    for number in range(3):
        make_run(str(number), metric=1.0 - number, pictures=[f"plots/val_{each}.png" for each in range(8)])
    (tmp_path / "0" / "plots" / "val_0.png").write_text("no picture")
    page = written(find_runs([tmp_path]), tmp_path)
    shown = [image["alt"] for image in page.all("img") if ": " in image["alt"]]
    numbers = {2: range(6), 1: range(6), 0: range(1, 7)}
    assert shown == [f"{run}: plots/val_{each}.png" for run, found in numbers.items() for each in found]
    assert "1 could not be read" in page.text


def test_the_library_is_the_one_that_was_published():
    """To update it, replace the files and SHA256SUMS together, from the same release."""
    for line in (LIBRARY / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, name = line.split()
        assert hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest() == digest, name
    assert {"LICENSE", "NOTICE", "echarts.min.js"} < {file.name for file in LIBRARY.iterdir()}
