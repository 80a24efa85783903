from __future__ import annotations

import subprocess
import sys

import pytest

from exp.compare.keys import column, short_names
from exp.compare.runs import by_metric, differing, find_runs, ranked
from exp.errors import ConfigError


def names(runs):
    return [run.name for run in runs]


def test_a_sweep_is_found_in_natural_order(make_run, tmp_path):
    for number in range(12):
        make_run(f"sweep/{number}", metric=1.0)
    assert names(find_runs([tmp_path / "sweep"])) == [str(number) for number in range(12)]
    assert names(find_runs([tmp_path])) == [str(number) for number in range(12)]
    assert names(find_runs([tmp_path / "sweep" / "*"])) == [str(number) for number in range(12)]
    assert names(find_runs([tmp_path / "sweep" / "1[01]"])) == ["10", "11"]
    assert names(find_runs([tmp_path / "sweep" / "7"])) == ["7"]


def test_parts_of_a_run_are_no_runs(make_run, tmp_path):
    make_run("check", metric=0.0)
    make_run("check/tested")
    make_run("check/checkpoints/0")
    make_run("check/0", metric=1.0)  # a sweep into the folder of an earlier run
    assert names(find_runs([tmp_path])) == ["check", "check/0"]
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults: []\n")
    assert len(find_runs([tmp_path])) == 2


@pytest.mark.parametrize(
    ("path", "said"),
    [("nowhere", "does not exist"), ("none*", "matches nothing"), (".", "no run found"), ("file", "is a file")],
)
def test_what_is_not_there_is_said_in_one_line(tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=said) as error:
        find_runs([path])
    assert "\n" not in str(error.value)


def test_broken_files_are_told_and_stop_nothing(make_run, tmp_path):
    for name in ("config.yaml", "overrides.yaml", "result.json", "metrics.jsonl"):
        make_run(f"{name} broken", metric=1.0)
        (tmp_path / f"{name} broken" / name).write_bytes(b'{"\xff')
    (make_run("a list", metric=1.0) / "result.json").write_text("[1]")
    runs = {run.name: run for run in find_runs([tmp_path])}
    assert runs["result.json broken"].status == "unfinished"
    assert "result.json" in runs["result.json broken"].error
    assert runs["config.yaml broken"].metric == 1.0
    assert "config.yaml" in runs["config.yaml broken"].error
    assert runs["a list"].metric is None
    assert list(runs["metrics.jsonl broken"].records()) == []
    assert all("\n" not in (run.error or "") for run in runs.values())
    assert names(ranked(list(runs.values())))[-1] in ("a list", "result.json broken")


def test_status_of_runs_without_a_result(make_run, tmp_path):
    folder = make_run("begun")
    (make_run("waiting") / "logs" / "rank0.log").unlink()
    assert {run.name: run.status for run in find_runs([tmp_path])} == {"begun": "unfinished", "waiting": "pending"}
    (folder / "result.json").write_text('{"status": "preempted", "metric": null}')
    assert find_runs([folder])[0].status == "preempted"


def test_the_best_come_first_and_those_without_a_metric_last(make_run, tmp_path):
    for number, metric in enumerate([0.3, None, 0.1, float("nan"), 0.1, float("inf"), 0.2]):
        make_run(str(number), metric=metric, **({"error": "x"} if metric is None else {}))
    assert names(ranked(find_runs([tmp_path]))) == ["2", "4", "6", "0", "1", "3", "5"]
    greater = tmp_path / "greater"
    for number, metric in enumerate([0.3, 0.7, None, 0.5]):
        make_run(
            f"greater/{number}", metric=metric, **({"error": "x"} if metric is None else {}), greater_is_better=True
        )
    assert names(ranked(find_runs([greater]))) == ["1", "3", "0", "2"]


def test_metrics_of_different_names_are_not_mixed(make_run, tmp_path):
    make_run("0", metric=0.5)
    make_run("1", metric=0.7, metric_name="mIoU", greater_is_better=True, config={"name": "dinov3_dubai"})
    make_run("2", metric=0.4)
    make_run("3", metric=0.8, metric_name="mIoU", greater_is_better=True, config={"name": "dinov3_dubai"})
    make_run("4", error="out of memory", config={"name": "dinov3_dubai"})
    make_run("5", error="no weights", config={"name": "dinov3_dubai", "task.name": "predict"})
    runs = find_runs([tmp_path])
    groups = {metric: names(group) for metric, group in by_metric(runs).items()}
    assert groups == {"mse": ["2", "0"], "mIoU": ["3", "1", "4"], None: ["5"]}
    assert names(ranked(runs)) == ["2", "0", "3", "1", "4", "5"]


def test_pictures_of_training_and_of_prediction(make_run):
    pictures = ["plots/curves.png", "plots/val_10.png", "plots/val_9.png", "plots/features/a.png", "overlays/a.jpg"]
    folder = make_run("run", metric=1.0, pictures=[*pictures, "classes/a.png", "checkpoints/x.png", "tested/x.png"])
    (folder / "tested" / "config.yaml").write_text("{}")
    (folder / "tested" / "logs").mkdir()
    found = [path.relative_to(folder).as_posix() for path in find_runs([folder])[0].pictures()]
    assert found == [
        "plots/val_9.png", "plots/val_10.png", "plots/curves.png", "plots/features/a.png", "overlays/a.jpg",
        "classes/a.png",
    ]  # fmt: skip


class TestDiffering:
    @pytest.fixture
    def keys(self, make_run, tmp_path):
        def keys(*runs):
            place = f"sweep{len(list(tmp_path.iterdir()))}"
            for number, (overrides, config) in enumerate(runs):
                make_run(f"{place}/{number}", metric=1.0, overrides=overrides.split(), config=config)
            keys.runs = find_runs([tmp_path / place])
            return differing(keys.runs)

        return keys

    def test_swept_keys_in_the_order_of_the_command_line(self, keys):
        runs = [(f"seed={seed} optim.lr={rate} max_epochs=4", {"seed": seed, "optim.lr": rate, "data.seed": seed,
                 "schedule.param_scheduler": [{"type": "OneCycleLR", "eta_max": rate, "total_steps": 4}]})
                for seed in (1, 2) for rate in (1e-4, 1e-3)]  # fmt: skip
        assert keys(*runs) == ["seed", "optim.lr"]

    def test_what_refers_to_a_swept_key_is_a_consequence(self, keys):
        assert keys(*[(f"data.lookback={length}", {"data.lookback": length, "model.lookback": length})
                      for length in (96, 192)]) == ["data.lookback"]  # fmt: skip

    def test_a_change_that_no_override_names_is_shown(self, keys):
        runs = [("seed=1", {}), ("seed=2", {"seed": 2}), ("seed=2", {"seed": 2, "max_epochs": 8})]
        assert keys(*runs) == ["seed", "max_epochs"]

    @pytest.mark.parametrize("key", ["output_dir", "launcher.nnodes", "resume", "published.96.mse"])
    def test_what_says_nothing_about_the_computation_is_left_out(self, keys, key):
        assert keys((f"{key}=1", {key: 1}), (f"{key}=2", {key: 2})) == []

    def test_a_backend_is_its_name(self, keys):
        other = {"backend.name": "card", "backend._target_": "x.Card", "backend.options.fast": True}
        assert keys(("backend=cpu", {}), ("backend=card", other)) == ["backend"]
        assert column(keys.runs, "backend") == ["cpu", "card"]

    def test_an_experiment_is_its_name_and_all_that_it_brings(self, keys):
        other = {"name": "dinov3_dubai", "data.name": "dubai", "data.size": 128, "model.size": "tiny", "batch_size": 8,
                 "global_batch_size": 8, "max_epochs": 99, "optim.type": "AdamW"}  # fmt: skip
        runs = [("experiment=a seed=1", {"seed": 1}), ("experiment=b seed=1", other)]
        assert keys(*runs) == ["experiment"]
        assert keys(*runs, ("experiment=b seed=2", {**other, "seed": 2})) == ["experiment", "seed"]
        mixed = [*runs, ("experiment=b seed=2", {**other, "seed": 2}), ("", {**other, "optim.lr": 1.0})]
        assert keys(*mixed) == ["experiment", "seed", "optim.lr"]
        assert column(keys.runs, "experiment") == ["timebridge_small", *["dinov3_dubai"] * 3]

    def test_choices_of_a_group(self, keys):
        runs = [("model=big", {"model.d_model": 512, "model.d_ff": 512}), ("model=small", {})]
        assert keys(*runs) == ["model"]
        assert column(keys.runs, "model") == ["big", "small"]
        assert keys(*runs, ("optim=sgd", {"optim.type": "SGD", "optim.lr": 0.01})) == ["model", "optim"]
        assert column(keys.runs, "model") == ["big", "small", "(default)"]

    @pytest.mark.parametrize("key", ["batch_size", "global_batch_size"])
    def test_of_the_batch_sizes_the_one_that_was_chosen(self, keys, key):
        runs = [(f"{key}={size}", {"batch_size": size, "global_batch_size": size}) for size in (16, 32)]
        assert keys(*runs) == [key]


def test_short_names_stay_unambiguous():
    assert short_names(["model.d_model", "data.lookback", "model.lookback", "lookback", "seed"]) == {
        "model.d_model": "d_model",
        "data.lookback": "data.lookback",
        "model.lookback": "model.lookback",
        "lookback": "lookback",
        "seed": "seed",
    }


def test_nothing_here_imports_torch(make_sweep, tmp_path):
    program = (
        "import sys, pathlib, exp.compare; assert 'matplotlib' not in sys.modules and 'yaml' not in sys.modules\n"
        "from exp.compare.runs import find_runs; from exp.compare.table import write_table\n"
        f"write_table(find_runs([{str(make_sweep())!r}]), pathlib.Path({str(tmp_path / 'out')!r}))\n"
        "assert not {'torch', 'mmengine', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
