"""The example from its installation on: a task of one's own kind, on experiments of exp."""

from __future__ import annotations

import csv

import pytest

from tests.conftest import TINY

# tests/test_add_a_task.py sees a task on either end of the version range.
pytestmark = pytest.mark.slow

TEST = ["task=corruptions", "backend=cpu", "init_from=run"]


@pytest.fixture
def trained(run, exp):
    run(*TINY, "output_dir=run")
    return exp.result("run")["metrics"]


def test_figures_are_the_same_on_any_number_of_processes_and_batches(trained, run, exp):
    run(*TEST, "output_dir=one", "data.eval_batch_size=100")
    one = exp.result("one")["metrics"]
    assert {name: one[name] for name in trained} == pytest.approx(trained, rel=1e-6)
    assert one["mse"] < one["mse_noise_1"] < one["mse_noise_3"] < one["mse_noise_5"]
    run(*TEST, "output_dir=two", "nproc=2")
    assert exp.result("two")["metrics"] == pytest.approx(one, rel=1e-6)
    with (exp.path("two") / "corruptions.csv").open() as file:
        table = {(row["corruption"], row["severity"]): float(row["mse"]) for row in csv.DictReader(file)}
    assert len(table) == 10
    assert table["none", "0"] == pytest.approx(trained["mse"], rel=1e-6)
    assert table["blackout", "5"] == pytest.approx(one["mse_blackout_5"], rel=1e-6)


def test_of_images_and_in_a_sweep(run, exp):
    small = ["data.size=32", "data.parts={train: ['tile2/*_00[1-3].*'], val: ['tile2/*_008.*']}", "model.window=64"]
    run("experiment=dinov3_dubai", "backend=cpu", *small, "model.depth=1", "global_batch_size=2", "max_epochs=null",
        "max_steps=1", "plots=false", "output_dir=run")  # fmt: skip
    run("-m", *TEST, "task.key=image", "task.severities=[2]", "task.kinds=[missing],[blackout]", "sweep.plots=false",
        "output_dir=sweep")  # fmt: skip
    for number, kind in enumerate(("missing", "blackout")):
        assert f"mIoU_{kind}_2" in exp.result(f"sweep/{number}")["metrics"]


def test_what_cannot_be_is_refused(run, exp):
    exp.path("weights.pth").touch()
    for words, says in (
        (["task.severites=[1]"], "there is no key 'task.severites'; did you mean 'task.severities'?"),
        (["task.severities=[6]"], "task.severities=[6] must be some of 1, 2, 3, 4, 5"),
        (["task.severities=[much]"], "task.severities"),
        (["task.kinds=[fog]"], "task.kinds=['fog'] must be some of noise, missing, blackout"),
        (["resume=auto"], "resume=auto: task=corruptions saves no state to resume from"),
        (["reference=cpu"], "reference is a key of task=parity"),
    ):
        done = run("task=corruptions", "init_from=weights.pth", "backend=cpu", *words, "output_dir=new", code=2)
        assert says in done.stderr.splitlines()[0], done.stderr
    run("task=corruptions", "backend=cpu", "output_dir=new", code=2)
    assert not exp.path("new").exists()
    run(*TINY, "output_dir=run")
    assert "task.key=image is no tensor of the batch: x, marks, y" in run(*TEST, "task.key=image", code=2).stderr
