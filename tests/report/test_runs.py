from __future__ import annotations

import pytest

from exp.report.groups import column, differing
from exp.report.runs import find_runs


def names(runs):
    return [run.name for run in runs]


def test_a_sweep_is_found_in_natural_order(make_run, tmp_path):
    for number in range(12):
        make_run(f"sweep/{number}", metric=1.0)
    for place in ("sweep", "", "sweep/*"):
        assert names(find_runs([tmp_path / place])) == [str(number) for number in range(12)]
    assert names(find_runs([tmp_path / "sweep" / "1[01]"])) == ["10", "11"]
    assert names(find_runs([tmp_path / "sweep" / "7"])) == ["7"]


def test_parts_of_a_run_are_no_runs(make_run, tmp_path):
    for place in ("check", "check/tested", "check/checkpoints/0", "check/0"):
        make_run(place, metric=0.0)  # the last a sweep into the folder of an earlier run
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: []\n")
    assert names(find_runs([tmp_path])) == ["check", "check/0"]


def test_broken_files_are_told_and_stop_nothing(make_run, tmp_path):
    for name in ("config.yaml", "overrides.yaml", "result.json", "metrics.jsonl"):
        (make_run(f"{name} broken", metric=1.0) / name).write_bytes(b'{"\xff')
    (make_run("a list", metric=1.0) / "result.json").write_text("[1]")
    runs = {run.name: run for run in find_runs([tmp_path])}
    assert runs["result.json broken"].status == "unfinished"
    for name in ("result.json", "config.yaml"):
        assert name in runs[f"{name} broken"].error
    assert [runs[name].metric for name in ("config.yaml broken", "a list")] == [1.0, None]
    assert runs["metrics.jsonl broken"].records() == []
    assert all("\n" not in (run.error or "") for run in runs.values())


def test_status_of_runs_without_a_result(make_run, tmp_path):
    folder = make_run("begun")
    (make_run("waiting") / "logs" / "rank0.log").unlink()
    assert {run.name: run.status for run in find_runs([tmp_path])} == {"begun": "unfinished", "waiting": "pending"}
    (folder / "result.json").write_text('{"status": "preempted", "metric": null}')
    assert find_runs([folder])[0].status == "preempted"


EXPERIMENT = {
    "name": "dinov3_dubai",
    "data.name": "dubai",
    "model.backbone.size": "tiny",
    "batch_size": 8,
    "max_epochs": 99,
}
EXPERIMENTS = [
    ("experiment=timebridge_small seed=1", {"seed": 1}), ("experiment=dinov3_dubai seed=1", EXPERIMENT),
    ("experiment=dinov3_dubai seed=2", {**EXPERIMENT, "seed": 2}), ("", {**EXPERIMENT, "seed": 2, "optim.lr": 1.0}),
]  # fmt: skip
GROUPS = [("model=big", {"model.d_model": 512, "model.d_ff": 512}), ("model=small", {}),
          ("optim=sgd", {"optim.type": "SGD", "optim.lr": 0.01})]  # fmt: skip
CARD = {"backend.name": "card", "backend._target_": "x.Card", "backend.options.fast": True}


@pytest.mark.parametrize(
    ("runs", "keys", "values"),
    [
        # swept keys, in the order of the command line, without what follows them
        ([(f"seed={seed} optim.lr={rate} max_epochs=4",
           {"seed": seed, "optim.lr": rate, "data.seed": seed, "schedule.param_scheduler": [{"eta_max": rate}]})
          for seed in (1, 2) for rate in (1e-4, 1e-3)], ["seed", "optim.lr"], {}),
        # what says nothing about the computation
        ([(f"{key}=1", {key: 1}) for key in ("output_dir", "launcher.nnodes", "resume", "reference.source")], [], {}),
        # a choice of a group is its name
        ([("backend=cpu", {}), ("backend=card", CARD)], ["backend"], {"backend": ["cpu", "card"]}),
        (GROUPS[:2], ["model"], {"model": ["big", "small"]}),
        (GROUPS, ["model", "optim"], {"model": ["big", "small", "timebridge_small"], "optim": ["adam", "adam", "sgd"]}),
        # an experiment is its name and all that it brings
        (EXPERIMENTS[:2], ["experiment"], {}),
        (EXPERIMENTS, ["experiment", "seed", "optim.lr"],
         {"experiment": ["timebridge_small", *["dinov3_dubai"] * 3]}),
        # of the batch sizes the one that was chosen
        *([[(f"{key}={size}", {"batch_size": size, "global_batch_size": size}) for size in (16, 32)], [key], {}]
          for key in ("batch_size", "global_batch_size")),
    ],
)  # fmt: skip
def test_keys_that_tell_runs_apart(make_run, tmp_path, runs, keys, values):
    for number, (overrides, config) in enumerate(runs):
        make_run(str(number), metric=1.0, overrides=overrides.split(), config=config)
    found = find_runs([tmp_path])
    assert differing(found) == keys
    assert {key: column(found, key) for key in values} == values


def test_an_evaluation_has_no_keys_of_training(make_run, tmp_path):
    """Its own are defaults, beside those that the weights were trained with."""
    make_run("a", 0.5, ["model=dlinear"], {"optim.lr": 0.01, "max_epochs": 2})
    make_run("b", 0.6, config={"task.name": "eval", "max_epochs": 10, "record": {"trained_in": str(tmp_path / "a")}})
    runs = find_runs([tmp_path])
    assert {key: column(runs, key) for key in ("max_epochs", "optim.lr", "seed")} == {
        "max_epochs": [2, None], "optim.lr": [0.01, None], "seed": [1, 1],
    }  # fmt: skip
