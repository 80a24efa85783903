"""The installed example: a custom task, on experiments of exp."""

from __future__ import annotations

import csv

import pytest

from tests.conftest import TINY

TEST = ["task=corruptions", "backend=cpu", "init_from=run"]


def test_figures_are_the_same_on_any_number_of_processes_and_batches(run, exp):
    run(*TINY, "output_dir=run")
    trained = exp.result("run")["metrics"]
    run(*TEST, "output_dir=one", "data.eval_batch_size=100")
    one = exp.result("one")["metrics"]
    assert {name: one[name] for name in trained} == pytest.approx(trained, rel=1e-6)
    assert one["mse"] < one["mse_noise_1"] < one["mse_noise_3"] < one["mse_noise_5"]
    run(*TEST, "output_dir=two", "nproc=2")
    assert exp.result("two")["metrics"] == pytest.approx(one, rel=1e-6)
    with (exp.path("two") / "corruptions.csv").open() as file:
        table = {(row["corruption"], row["severity"]): float(row["mse"]) for row in csv.DictReader(file)}
    assert len(table) == 10
    assert table["blackout", "5"] == pytest.approx(one["mse_blackout_5"], rel=1e-6)
    for words, named in (
        (["task.severites=[1]"], "task.severities"),
        (["task.severities=[6]"], "task.severities"),
        (["task.kinds=[fog]"], "task.kinds"),
        (["task.key=image"], "task.key"),
    ):
        assert named in run(*TEST, *words, "output_dir=new", code=2).stderr.splitlines()[0]
    assert not exp.path("new").exists()


def test_of_images_and_in_a_sweep(run, exp):
    small = ["data.size=32", "data.splits={train: ['tile2/*_00[1-3].*'], val: ['tile2/*_008.*']}", "model.window=64"]
    run("experiment=dinov3_dubai", "backend=cpu", *small, "model.backbone.depth=1", "global_batch_size=2",
        "max_epochs=null", "max_steps=1", "plots=false", "output_dir=run")  # fmt: skip
    run("-m", *TEST, "task.key=image", "task.severities=[2]", "task.kinds=[missing],[blackout]", "sweep.plots=false",
        "output_dir=sweep")  # fmt: skip
    for number, kind in enumerate(("missing", "blackout")):
        assert f"mIoU_{kind}_2" in exp.result(f"sweep/{number}")["metrics"]
