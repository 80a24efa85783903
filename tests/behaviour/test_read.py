"""Runs as they are read: from Python, on a page, and whole files for other programs."""

from __future__ import annotations

import re

import pytest

import exp as package
from tests.behaviour.conftest import losses, result, snapshot, table


@pytest.mark.legacy
def test_a_run_is_opened_from_python_with_its_model_and_figures(trained):
    folder = trained("forecast")
    before = snapshot(folder)
    assert dir(package) == ["__version__", "open_run", "open_sweep", "run"]
    run = package.open_run(folder)
    assert run.result == result(folder)
    assert run.config.max_steps == 4
    training = run.metrics.query("split == 'train'")
    assert dict(zip(training.step, training.loss)) == losses(folder)
    model = run.model(device="cpu")
    assert not model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == result(folder)["parameters"]
    assert snapshot(folder) == before
    with pytest.raises(Exception, match="nowhere"):
        package.open_run(folder / "nowhere")


@pytest.mark.extended
def test_what_python_starts_is_what_the_command_line_starts(exp, trained):
    run = package.run(
        ["task=predict", f"init_from={trained('forecast')}", "backend=cpu", f"output_dir={exp.path('said')}"]
    )
    assert list(run.tables["forecasts/future.csv"])[:2] == ["date", "HUFL"]
    with pytest.raises(Exception, match="seeed"):
        package.run(["seeed=1"])
    with pytest.raises(Exception, match="list"):
        package.run("seed=1")
    assert package.run(["--cfg", "job"]) is None


def test_runs_are_compared_on_one_page_and_in_tables(exp, copy_of):
    values = {}
    for name in ("forecast", "steady"):
        values[name] = result(copy_of(name, f"runs/{name}"))["selected_by"]["value"]
    copy_of("forecast", "runs/killed").joinpath("result.json").unlink()
    before = snapshot(exp.path("runs/forecast"))
    done = exp("task=report", "run=runs")
    assert done.returncode == 0, done.stderr
    rows = table(exp.path("runs/sweep.csv"))
    best = sorted(values, key=values.__getitem__)  # on validation
    assert [row["run"].rpartition("/")[2] for row in rows] == [*best, "killed"]
    page = exp.path("runs/report.html").read_text()
    assert not re.search(r"""(?:src|href)=["']?https?:""", page)  # one file that asks nothing of any network
    assert "steady" in page
    for name in ("sweep.json", "results.tex", "results.md"):
        assert exp.path(f"runs/{name}").is_file()
    assert snapshot(exp.path("runs/forecast")) == before
    assert exp("task=report", "run=nowhere").returncode == 2
