"""Training through the command line: the same numbers however it is interrupted, spread or split."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from exp.engine import checkpoint
from tests.conftest import TINY, clean_environment

NO_DROPOUT = ["model.attention_dropout=0", "log_every=1"]


def final_state(folder: Path, step: int) -> dict:
    return checkpoint.read(folder / "checkpoints" / f"step_{step:08d}.pth")


def assert_same(left, right, where="checkpoint"):
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, (a, b) in enumerate(zip(left, right)):
            assert_same(a, b, f"{where}[{index}]")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where


def test_a_resumed_run_ends_in_the_same_state_bit_for_bit(exp):
    settings = ["data.num_workers=1", "schedule=onecycle", "max_epochs=3", "max_steps=7", "checkpoint.every_steps=4"]
    straight = exp.train("straight", *settings)
    resumed = exp.train("resumed", *settings, "resume=straight/checkpoints/step_00000004.pth")
    assert resumed["resumed_from"].endswith("step_00000004.pth")
    assert resumed["steps"] == 7
    assert_same(final_state(exp.path("straight"), 7), final_state(exp.path("resumed"), 7))
    assert resumed["metrics"] == straight["metrics"]


@pytest.mark.slow
def test_a_run_resumed_in_a_later_epoch_knows_its_best_epoch(exp):
    # 8 windows: an epoch is two steps of 4
    settings = ["global_batch_size=2048", "schedule=halving", "model.d_model=8", "model.d_ff=8", "data.lookback=24"]
    exp.train("straight", *settings, "max_steps=null", "max_epochs=3")
    exp.train("halves", *settings, "max_steps=6", "max_epochs=3")
    exp.train("halves", *settings, "max_steps=null", "max_epochs=3", "resume=auto")
    straight, halves = (exp.path(name) / "checkpoints" for name in ("straight", "halves"))
    assert_same(
        checkpoint.read(checkpoint.list_checkpoints(straight)[0]),
        checkpoint.read(checkpoint.list_checkpoints(halves)[0]),
    )
    assert exp.result("straight")["epochs"] == exp.result("halves")["epochs"] == 3


@pytest.mark.slow
def test_resume_skips_a_damaged_checkpoint_and_says_so(exp):
    exp.train("run", "checkpoint.every_steps=1", "max_steps=3")
    newest = exp.path("run") / "checkpoints" / "step_00000003.pth"
    newest.write_bytes(newest.read_bytes()[:1000])
    done = exp(*TINY, "output_dir=run", "resume=auto", "max_steps=4")
    assert done.returncode == 0, done.stderr
    assert "skipped" in done.stdout
    assert "step_00000003.pth" in done.stdout
    assert exp.result("run")["resumed_from"].endswith("step_00000002.pth")
    steps = sorted(exp.losses("run"))
    assert steps == sorted(set(steps))


@pytest.mark.slow
def test_resume_from_another_folder_continues_in_a_new_one(exp):
    exp.train("first", "max_steps=3")
    exp.train("straight", "max_steps=5")
    for source in ("first", "first/checkpoints/step_00000003.pth"):
        name = f"from-{len(source)}"
        result = exp.train(name, "max_steps=5", f"resume={source}")
        assert result["resumed_from"].endswith("step_00000003.pth")
        assert_same(final_state(exp.path("straight"), 5), final_state(exp.path(name), 5))


@pytest.mark.slow
def test_resume_with_another_global_batch_is_refused(exp):
    exp.train("run")
    done = exp(*TINY, "output_dir=run", "resume=auto", "global_batch_size=64", "max_steps=8")
    assert done.returncode == 2
    assert "global_batch_size=32" in done.stderr.splitlines()[0]


@pytest.mark.parametrize("wrapper", ["mmddp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_two_processes_compute_what_one_does(exp, wrapper):
    one = exp.train("one", *NO_DROPOUT)
    two = exp.train("two", *NO_DROPOUT, "nproc=2", f"wrapper={wrapper}")
    assert two["world_size"] == 2
    assert two["wrapper"] == wrapper
    assert two["batch_size"] == 16
    assert len(two["devices"]) == 2
    left, right = exp.losses("one"), exp.losses("two")
    assert left.keys() == right.keys()
    assert all(math.isclose(left[step], right[step], abs_tol=1e-5) for step in left), (left, right)
    assert math.isclose(one["metric"], two["metric"], abs_tol=1e-5)
    logs = exp.path("two") / "logs"
    assert "rank 1/2  local_rank 1" in (logs / "rank1.log").read_text()


@pytest.mark.slow
def test_accumulation_computes_what_one_batch_does(exp):
    one = exp.train("one", *NO_DROPOUT)
    accumulated = exp.train("accumulated", *NO_DROPOUT, "accumulate=4")
    assert accumulated["batch_size"] == 8
    assert accumulated["steps"] == one["steps"]
    assert math.isclose(one["metric"], accumulated["metric"], abs_tol=1e-5)


@pytest.mark.slow
def test_clipping_and_bf16_train(exp):
    result = exp.train("run", "precision=bf16", "optim.clip_grad_norm=1.0")
    assert result["precision"] == "bf16"
    assert "grad_norm" in (exp.path("run") / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_evaluation_does_not_depend_on_processes_or_batches(exp):
    exp.train("run")
    metrics = []  # the 2785 test windows divide by neither 3 nor 7
    for name, extra in (("a", ["nproc=1"]), ("b", ["nproc=3"]), ("c", ["nproc=1", "data.eval_batch_size=7"])):
        done = exp(*TINY, "task=eval", "init_from=run", f"output_dir={name}", *extra)
        assert done.returncode == 0, done.stderr
        metrics.append(exp.result(name)["metrics"])
    trained = exp.result("run")["metrics"]
    for other in metrics:
        assert all(math.isclose(trained[key], other[key], rel_tol=1e-6) for key in trained), metrics
    channels = (exp.path("b") / "metrics_per_channel.csv").read_text().splitlines()
    assert channels[0] == "channel,mse_standardised,mae_standardised,mse_file_units,mae_file_units"
    assert len(channels) == 8
    mean = sum(float(line.split(",")[1]) for line in channels[1:]) / 7
    assert math.isclose(mean, trained["mse"], rel_tol=1e-4)
    assert len((exp.path("b") / "metrics_per_step.csv").read_text().splitlines()) == 97


@pytest.mark.slow
def test_prediction_writes_forecasts_in_original_units_and_pictures(exp):
    exp.train("run")
    done = exp(*TINY, "task=predict", "init_from=run", "output_dir=predicted", "task.num_windows=2",
               "task.channels=[OT,HULL]", "figures.format=svg")  # fmt: skip
    assert done.returncode == 0, done.stderr
    folder = exp.path("predicted")
    table = (folder / "forecasts" / "window_00000.csv").read_text().splitlines()
    assert table[0].split(",")[:3] == ["date", "HUFL", "HUFL_truth"]
    assert len(table) == 97
    # The first row of the test split of ETTh1: 16 months of 30 days after 2016-07-01, in the units of the file.
    source = (Path(__file__).parents[2] / "data" / "ett" / "ETTh1.csv").read_text().splitlines()[1 + 16 * 30 * 24]
    assert table[1].split(",")[0][:13] == source.split(",")[0][:13]
    assert math.isclose(float(table[1].split(",")[2]), float(source.split(",")[1]), rel_tol=1e-4)
    future = (folder / "forecasts" / "future.csv").read_text().splitlines()
    assert future[1].startswith("2018-06-26 20:00:00")
    assert len(future) == 97
    pictures = sorted((folder / "plots").glob("*.png"))
    assert [path.name for path in pictures] == [
        "future_OT_HULL.png", "window_00000_OT_HULL.png", "window_02784_OT_HULL.png"
    ]  # fmt: skip
    assert all(picture.read_bytes()[:4] == b"\x89PNG" for picture in pictures)
    assert all(b"<svg" in picture.with_suffix(".svg").read_bytes() for picture in pictures)


@pytest.mark.slow
def test_init_from_says_which_keys_did_not_match(exp):
    exp.train("run")
    state = checkpoint.read(exp.path("run") / "checkpoints" / "best.pth")["state_dict"]
    foreign = {f"module.{key}": value for key, value in state.items() if not key.startswith("decoder")}
    foreign["module.surplus.weight"] = torch.zeros(2)
    torch.save(foreign, str(exp.folder / "authors.pth"))
    done = exp(*TINY, "init_from=authors.pth", "output_dir=second")
    assert done.returncode == 0, done.stderr
    assert "missing in the file: decoder.1.weight" in done.stdout
    assert "surplus.weight" in done.stdout


def test_a_dead_rank_is_restarted_from_the_newest_checkpoint(exp):
    exp.train("straight", *NO_DROPOUT, "nproc=2", "max_steps=40")
    process = start_two_ranks(exp, "launcher.max_restarts=1")
    kill_rank_1(exp, process)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    result = exp.result("run")
    assert result["restarts"] == 1
    assert result["steps"] == 40
    assert result["resumed_from"] is not None
    assert result["metrics"] == exp.result("straight")["metrics"]


def start_two_ranks(exp, *arguments: str) -> subprocess.Popen:
    settings = [*TINY, *NO_DROPOUT, "nproc=2", "max_steps=40", "checkpoint.every_steps=1", "output_dir=run"]
    return subprocess.Popen(
        [sys.executable, "-m", "exp", *settings, *arguments],
        cwd=exp.folder,
        env=clean_environment(EXP_TEST_MARK=str(exp.folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(exp) -> dict[int, int]:
    """Process ids of this test's workers, by rank."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            name = (entry / "comm").read_text().strip()
        except OSError:
            continue
        if f"EXP_TEST_MARK={exp.folder}".encode() in variables and name.startswith("exp-rank"):
            found[int(name[len("exp-rank") :])] = int(entry.name)
    return found


def kill_rank_1(exp, process: subprocess.Popen) -> None:
    """Wait for the first checkpoints, then kill -9 rank 1."""
    folder = exp.path("run") / "checkpoints"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        if any(path.name >= "step_00000002.pth" for path in checkpoint.list_checkpoints(folder)):
            os.kill(workers(exp)[1], signal.SIGKILL)
            return
        time.sleep(0.02)
    raise AssertionError(f"no checkpoint was written: {process.communicate()}")


@pytest.mark.slow
def test_mmengines_hooks_and_visualisers_work_from_the_config(exp):
    hooks = "hooks=[{type: EMAHook, momentum: 0.5}]"
    exp.train("run", hooks, "logger.vis_backends=[{type: LocalVisBackend}]")
    exp.train("plain")
    averaged = checkpoint.read(exp.path("run") / "checkpoints" / "step_00000004.pth")
    plain = checkpoint.read(exp.path("plain") / "checkpoints" / "step_00000004.pth")
    key = "decoder.1.weight"
    assert not torch.equal(averaged["state_dict"][key], plain["state_dict"][key])
    scalars = list(exp.path("run").rglob("scalars.json"))
    assert scalars
    assert "train/loss" in scalars[0].read_text()
    assert "global_batch_size = " in scalars[0].with_name("config.py").read_text()
