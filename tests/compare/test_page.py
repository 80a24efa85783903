from __future__ import annotations

import hashlib
import html
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

import exp.compare
from exp.compare import thumbnails, write_report
from exp.compare.page import write_page
from exp.compare.runs import find_runs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIBRARY = Path(exp.compare.__file__).parent / "echarts"
VOID = {"meta", "img", "br", "input", "link", "base", "hr"}

pytestmark = pytest.mark.slow  # nothing here depends on the version of torch


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


def asks_nothing(page):
    assert page.all(
        "meta", content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    )
    library = (LIBRARY / "echarts.min.js").read_text(encoding="utf-8")
    assert library in page.source, "as it was published"
    assert not re.search("https?://|url\\(|@import", page.source.replace(library, ""))
    for element in page.elements:
        assert element["tag"] not in ("link", "base", "iframe", "object", "embed", "form")
        assert "href" not in element
        assert element.get("src", "data:").startswith("data:")
        assert not [name for name in element if name.startswith("on")]
    return True


def test_a_report_of_a_sweep(make_sweep, tmp_path):
    path = write_report(find_runs([make_sweep()]), tmp_path / "report", "Learning rates")
    assert sorted(file.name for file in path.parent.rglob("*")) == [
        "report.html", "results.md", "results.tex", "sweep.csv", "sweep.json", "sweep_seeds.csv"
    ]  # fmt: skip
    page = Page(path)
    assert asks_nothing(page)
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


@pytest.mark.parametrize(
    "name", ["<script>alert(1)", '"><img src=x onerror=alert(1)>', "</title>", "&amp;", "${title}", "\u2028"]
)
def test_names_are_harmless(make_run, tmp_path, name):
    folder = name.replace("/", "\u2215")
    for number in range(2):
        evil = {"model.<b>": f"{name}{number}", f"model.{number}": name}
        make_run(f"runs/{folder}{number}", metric=0.5, overrides=[f"model.<b>={name}"], config=evil, metric_name=name,
                 metrics={name: 0.5}, backend=name, measured_on=name, experiment=name, task=name,
                 devices=[{"name": name}], pictures=[f"plots/{folder}.png"],
                 records=[{"split": "val", "step": 1, name: 1.0}])  # fmt: skip
    (make_run("runs/failed", error=f"{name}\nx", status=name) / "env.json").write_text(json.dumps({"python": name}))
    page = written(find_runs([tmp_path / "runs"]), tmp_path, title=name)
    assert asks_nothing(page)
    assert len(page.all("script")) == 3
    assert not page.all("b", id=None) or all(
        "<" not in element["text"] or name in element["text"] for element in page.all("b")
    )
    assert page.all("h1")[0]["text"] == name
    assert page.all("title")[0]["text"] == name
    assert {run["name"] for run in page.data["runs"]} == {f"{folder}0", f"{folder}1", "failed"}
    assert f"rank 0: RunError: {name.splitlines()[0] if name.strip() else ''}" in page.text


def test_json_cannot_end_its_script(make_run, tmp_path):
    make_run("a<|/script><!--b".replace("/", "\u2215"), metric=1.0, records=[{"split": "train", "step": 1, "loss": 1}])
    page = written(find_runs([tmp_path]), tmp_path)
    raw = page.source[page.source.index('id="data"') :]
    raw = raw[raw.index(">") + 1 : raw.index("</script>")]
    assert not set("<>&") & set(raw)
    assert page.data["runs"][0]["name"].endswith("b")


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


def test_runs_that_all_failed(make_run, tmp_path):
    for number in range(3):
        make_run(str(number), error=f"cannot read file {number}", overrides=[f"seed={number}"], config={"seed": number})
    make_run("3", config={"seed": 3})
    page = written(find_runs([tmp_path]), tmp_path)
    assert "4 runs: 3 failed, 1 unfinished" in page.text
    assert all(f"cannot read file {number}" in page.text for number in range(3))
    assert page.column("status")[3] == "unfinished"


def test_a_single_run(make_sweep, tmp_path):
    page = written(find_runs([make_sweep() / "0"]), tmp_path)
    assert "1 run: 1 completed; mse 0.5100" in " ".join(page.text.split())
    assert not page.all("tr", **{"class": "best"})
    assert page.charts == ["val mse", "train loss", "train lr", "train samples_per_second"]
    assert len(page.source) < 1.3e6


def test_a_source_says_whose_it_is_where_there_are_several(make_run, tmp_path):
    for name, source in (("one", "Liu et al."), ("two", "Liu et al."), ("line", "Zeng et al.")):
        make_run(name, metric=0.4, config={"name": name}, overrides=[f"experiment={name}"], experiment=name,
                 published={"mse": 0.354, "source": source, "differs": []})  # fmt: skip
    (notes,) = (note["text"] for note in written(find_runs([tmp_path]), tmp_path).all("p", **{"class": "note"}))
    assert "; published (one, two): Liu et al.; " in notes
    assert "; published (line): Zeng et al.; " in notes


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


def test_devices_and_restarts(make_run, tmp_path):
    cards = [{"name": "Card", "index": index, "host": "here"} for index in range(8)]
    make_run("0", metric=0.4, world_size=8, devices=cards, backend="some", restarts=2)
    make_run("1", metric=0.5, world_size=2, devices="broken", backend="some", simulated=True)
    page = written(find_runs([tmp_path]), tmp_path)
    assert page.column("device") == ["8 x some (Card)", "2 x some (simulated)"]
    assert "restarts: 2" in page.column("status")[0]


class TestConfiguration:
    def rows(self, page, number):
        table = re.findall(r'<table class="keys">.*?</table>', page.source, re.DOTALL)[number]
        rows = [
            re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL) for row in re.findall("<tr>.*?</tr>", table, re.DOTALL)
        ]
        return [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in rows]

    def test_a_few_runs_are_beside_one_another(self, make_run, tmp_path):
        make_run("a", metric=2.0, overrides=["data.lookback=96"], config={"launcher.nnodes": 2})
        long = {"data.lookback": 192, "model.lookback": 192, "model.extra": ["<i>", None]}
        make_run("b", metric=1.0, overrides=["data.lookback=192"], config=long)
        page = written(find_runs([tmp_path]), tmp_path)
        assert self.rows(page, 0) == [
            ["key", "b", "a"],
            ["data.lookback", "192", "96"],
            ["model.extra", '["<i>", null]', ""],
        ]
        assert [row[0] for row in self.rows(page, 1)[1:]] == ["launcher.nnodes", "model.lookback"]
        same = dict(self.rows(page, 2))
        assert same["seed"] == "1"
        assert "data.lookback" not in same
        assert "output_dir" not in same

    def test_of_many_runs_values_are_counted(self, make_sweep, tmp_path):
        page = written(find_runs([make_sweep(rates=[1e-4, 1e-3, 1e-2], seeds=range(20))]), tmp_path)
        assert self.rows(page, 0)[1:] == [
            ["optim.lr", "0.001 × 20 0.0001 × 20 0.01 × 20"],  # noqa: RUF001
            ["seed", "20 values from 0 to 19"],
        ]

    def test_runs_that_are_alike(self, make_run, tmp_path):
        make_run("a", metric=2.0)
        make_run("b", metric=2.0, config={"launcher.nnodes": 2})
        page = written(find_runs([tmp_path]), tmp_path)
        assert "The runs differ in no key that bears on the outcome." in page.text
        assert [row[0] for row in self.rows(page, 0)[1:]] == ["launcher.nnodes"]


class TestPictures:
    def shown(self, page):
        return [image["alt"] for image in page.all("img") if ": " in image["alt"]]

    def test_the_best_runs_come_first_and_six_of_each(self, make_run, tmp_path):
        for number in range(3):
            make_run(str(number), metric=1.0 - number, pictures=[f"plots/val_{each}.png" for each in range(8)])
        page = written(find_runs([tmp_path]), tmp_path)
        assert self.shown(page) == [f"{run}: plots/val_{each}.png" for run in (2, 1, 0) for each in range(6)]
        assert "6 more are in the run folders" in page.text

    def test_200_in_total(self, make_run, tmp_path, monkeypatch):
        monkeypatch.setattr(thumbnails, "_IN_TOTAL", 7)
        for number in range(3):
            make_run(str(number), metric=number, pictures=[f"plots/val_{each}.png" for each in range(6)])
        page = written(find_runs([tmp_path]), tmp_path)
        assert len(self.shown(page)) == 7
        assert "11 more are in the run folders" in page.text

    def test_the_page_stays_small(self, make_run, tmp_path, monkeypatch):
        monkeypatch.setattr(thumbnails, "_BYTES", 400_000)
        for number in range(3):
            make_run(str(number), metric=number, pictures=["plots/noise_0.png", "plots/noise_1.png"])
        page = written(find_runs([tmp_path]), tmp_path)
        assert 0 < len(self.shown(page)) < 6
        assert len(page.source) < 1.4 * 400_000 + 1_300_000

    def test_thumbnails_are_narrow_and_of_the_smaller_format(self, make_run, tmp_path):
        folder = make_run("run", pictures=["noise.png", "flat.png"])
        noise, flat = (thumbnails.thumbnail(folder / name, name) for name in ("noise.png", "flat.png"))
        assert (noise.kind, flat.kind) == ("jpeg", "png")
        assert (noise.width, noise.height) == (640, 427)

    @pytest.mark.parametrize("mode", ["RGBA", "P", "L", "I;16", "1", "CMYK", "LA"])
    def test_pictures_of_any_mode(self, tmp_path, mode):
        path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
        Image.new("L", (1000, 10), 60).convert(mode).save(path) if mode != "I;16" else Image.new(
            mode, (1000, 10), 600
        ).save(path)
        assert thumbnails.thumbnail(path, "a").width == 640

    def test_what_is_no_picture_is_counted(self, make_run, tmp_path, monkeypatch):
        folder = make_run("run", metric=1.0, pictures=["plots/a.png", "plots/b.png"])
        (folder / "plots" / "b.png").write_bytes((folder / "plots" / "b.png").read_bytes()[:100])
        (folder / "plots" / "c.png").write_text("no picture")
        page = written(find_runs([folder]), tmp_path)
        assert self.shown(page) == ["run: plots/a.png"]
        assert "2 could not be read, or are too large" in page.text
        monkeypatch.setattr(thumbnails, "_PIXELS", 1000)
        assert "3 could not be read" in written(find_runs([folder]), tmp_path).text


def test_100_runs_fit_into_one_page(make_sweep, tmp_path):
    rates = [10 ** (-5 + number / 10) for number in range(20)]
    folder = make_sweep(rates=rates, seeds=range(5), failed=(3, 50))
    steps = range(10, 50_010, 10)
    (folder / "7" / "metrics.jsonl").write_text(
        "".join(json.dumps({"split": "train", "step": step, "loss": 1 / step}) + "\n" for step in steps)
    )
    path = write_report(find_runs([folder]), tmp_path / "out", "100")
    page = Page(path)
    assert path.stat().st_size < 3e6
    assert len(page.column("run")) == 100
    assert max(len(run["curves"]["train loss"][0]) for run in page.data["runs"]) == 400
    assert "20 values from 1e-05 to" in page.text


def test_really_run(exp, tmp_path):
    from tests.conftest import TINY

    done = exp("-m", *TINY, "seed=1,2", "output_dir=sweep")
    assert done.returncode == 0, done.stderr
    broken = exp(*TINY, "data.root=nowhere", "output_dir=sweep/2")
    assert broken.returncode != 0
    page = Page(write_report(find_runs([tmp_path / "sweep"]), tmp_path / "report", "seeds"))
    assert "2 runs: 2 completed; best is" in page.text
    scores = {name: exp.result(f"sweep/{name}")["metric"] for name in "01"}
    assert page.column("run") == sorted("01", key=scores.get)
    assert page.column("mse (standardised)") == [f"{score:.4f}" for score in sorted(scores.values())]
    assert [len(run["curves"]["train loss"][0]) for run in page.data["runs"]] == [2, 2]
    assert [len(run["curves"]["val mse"][0]) for run in page.data["runs"]] == [1, 1]
    assert [run["clocks"]["time"][0] for run in page.data["runs"]] == [[0, 2, 4]] * 2
    assert "Computed with Python 3." in page.text


def test_the_library_is_the_one_that_was_published():
    """To update it, replace the files and SHA256SUMS together, from the same release."""
    for line in (LIBRARY / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        digest, name = line.split()
        assert hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest() == digest, name
    assert {"LICENSE", "NOTICE", "echarts.min.js"} < {file.name for file in LIBRARY.iterdir()}


# What a person would do, in the page; each entry of the title is what came of it.
IN_THE_BROWSER = """
const [all, told] = [(selector, node = document) => [...node.querySelectorAll(selector)], {}];
const rows = () => all('.results tbody tr');
const plot = (index) => all('.plot')[index];
const drawing = (index) => echarts.getInstanceByDom(plot(index));
const drawn = (index) => drawing(index).getOption().series.filter((one) => /^line/.test(one.id));
const strong = (index) => drawn(index).filter((one) => one.lineStyle.opacity === 1).length;
const set = (name, value) => {
  const control = document.querySelector(`[name=${name}]`);
  control.value = value;
  control.dispatchEvent(new Event(name === 'smooth' ? 'input' : 'change'));
};
const mouse = (index, kind, x, y) => {
  const box = plot(index).getBoundingClientRect();
  const at = { clientX: box.left + x, clientY: box.top + y, bubbles: true, view: window, which: 1 };
  plot(index).querySelector('svg').parentNode.dispatchEvent(new MouseEvent(kind, at));
};
const right = () => drawing(0).convertFromPixel({ xAxisIndex: 0 }, plot(0).clientWidth - 40);
const names = () => rows().map((row) => row.querySelector('button').textContent).join(' ');
const click = (number) => all('.results th button')[number].click();

addEventListener('load', () => setTimeout(() => { // charts are drawn when they are seen
told.lines = [drawn(0).length, strong(0), drawn(0).filter((one) => one.lineStyle.type === 'dashed').length];
rows()[1].click();
rows()[5].click();
told.picked = [strong(0), all('[aria-pressed=true]').length];
document.querySelector('.clear').click();
click(5);
told.sorted = names();
click(5);
told.reversed = names();
set('group', 'seeds');
told.groups = all('.legend button').map((button) => button.textContent);
told.bands = drawing(0).getOption().series.filter((one) => one.type === 'custom').length;
told.mean = drawn(0)[0].data[0];
set('group', '');
set('x', 'time');
told.seconds = drawn(1)[0].data[19][0];
set('x', 'step');
set('smooth', 0.9);
told.smooth = drawn(1)[0].data[19][1];
set('smooth', 0);
document.querySelector('.chart input').click();
told.scale = drawing(0).getOption().yAxis[0].type;
const before = right();
for (const kind of ['mousemove', 'mousedown']) mouse(0, kind, 150, 60);
for (const kind of ['mousemove', 'mouseup']) mouse(0, kind, 250, 150);
setTimeout(() => {
  told.zoomed = right() < before;
  mouse(0, 'dblclick', 200, 100);
  mouse(1, 'mousemove', 250, 120);
  setTimeout(() => {
    told.undone = right() === before;
    told.tip = all('.tip', plot(1))[0].innerText;
    document.querySelector('.zoom').click();
    told.enlarged = document.getElementById('viewer').open;
    told.problems = problems;
    document.title = JSON.stringify(told);
  }, 400);
}, 400);
}, 500));
"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium in the PATH to run the page's script")
def test_in_a_browser(make_sweep, tmp_path):
    evil = "<img src=x>"  # which the policy would forbid to load
    folder = make_sweep(pictures=["plots/a.png"])
    config = folder / "0" / "config.yaml"
    config.write_text(config.read_text().replace("d_model: 64", f"d_model: '{evil}'"))
    source = write_report(find_runs([folder]), tmp_path / "out", "in a browser").read_text(encoding="utf-8")
    watch = "const problems = []; for (const kind of ['error', 'securitypolicyviolation'])"
    watch += " addEventListener(kind, (event) => problems.push(event.message || event.violatedDirective), true);"
    head, _, rest = source.partition("</head>")
    body, _, end = rest.rpartition("</body>")
    source = f"{head}<script>{watch}</script></head>{body}<script>{IN_THE_BROWSER}</script></body>{end}"
    (tmp_path / "page.html").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--disable-dev-shm-usage", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,900",
         "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "page.html").as_uri()],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    told = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1]))
    assert told["problems"] == []
    assert told["lines"] == [6, 6, 1], "all in colour, the failed one dashed"
    assert told["picked"] == [2, 4], "in the table and in the legend"
    assert told["sorted"] == "2 3 0 4 1 5"
    assert told["reversed"] == "1 0 4 3 2 5", "what has no metric stays last"
    assert len(told["groups"]) == 4, "three rates, one of which has two models"
    assert sum(evil in group for group in told["groups"]) == 1, "as text"
    assert told["bands"] == 2
    assert told["mean"] == pytest.approx([10, 0.1 + 0.4 + 0.015])
    assert told["seconds"] == pytest.approx(40 * 32 / 100)
    assert told["smooth"] > 1 / 40 + 0.41 + 0.01
    assert told["scale"] == "log"
    assert told["zoomed"]
    assert told["undone"]
    assert told["tip"].splitlines()[0].startswith("step ")
    assert len(told["tip"].splitlines()) == 7
    assert evil in told["tip"]
    assert told["enlarged"]
