"""A run is used as it was trained, and weights fit wholly or are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.behaviour.conftest import FORECAST, SCENES, result

DATA = Path(__file__).parents[2] / "data"
SHORT = ["max_steps=1", "optim.lr=0", "schedule.warmup_steps=0", "backend=cpu", "plots=false"]


def refused(exp, *arguments):
    """The first line of a command's error that ends with 2 and leaves nothing."""
    done = exp(*arguments, "backend=cpu", "output_dir=refused")
    assert done.returncode == 2, done.stdout + done.stderr
    assert not exp.path("refused").exists()
    return next(line for line in done.stderr.splitlines() if line.strip())


def state(run):
    return torch.load(str(run / "checkpoints" / "best.pth"))["state_dict"]


def test_a_run_is_used_as_it_was_trained_and_what_differs_is_recorded(exp, trained):
    run = trained("forecast")
    assert "model.d_model=16 (there: 64)" in result(run)["reference"]["differs"]
    same = ["experiment=timebridge_small", "model=timebridge_small"]
    done = exp("task=eval", f"init_from={run}/../{run.name}/checkpoints/best.pth", "output_dir=same", *same)
    assert done.returncode == 0, done.stderr
    found = exp.result("same")
    assert found["trained_in"] == str(run)
    assert found["metrics"] == pytest.approx(result(run)["metrics"], rel=1e-6)
    assert found["differs"] == []

    (exp.folder / "mine").mkdir()
    shutil.copy(str(DATA / "ett" / "ETTh1.csv"), str(exp.folder / "mine" / "mine.csv"))
    other = ["data.root=~/mine", "data.file=mine.csv"]  # a tilde is the home folder in any key
    done = exp("task=eval", f"init_from={run}", "output_dir=~/other", *other, HOME=str(exp.folder))
    assert done.returncode == 0, done.stderr
    found = exp.result("other")
    assert any(line.startswith("data.file=mine.csv") for line in found["differs"])
    assert any(line.startswith("data.file=mine.csv") for line in found["reference"]["differs"])


def test_what_does_not_fit_is_refused_by_its_key(exp, trained):
    run = trained("forecast")
    assert "data.horizon" in refused(exp, "task=predict", f"init_from={run}", "data.horizon=12")
    assert "for forecasting" in refused(exp, "experiment=dinov3_eurosat", "task=features", f"init_from={run}")
    weights = state(run)
    torch.save(weights, str(exp.folder / "bare.pth"))
    fewer = [*FORECAST, "model.integrated_layers=0"]  # fits, and would be another model than was trained
    assert "bare.pth" in refused(exp, *fewer, "task=eval", "init_from=bare.pth")
    name = next(iter(weights))
    weights[name].flatten()[0] = float("nan")
    torch.save(weights, str(exp.folder / "nan.pth"))
    assert name in refused(exp, *FORECAST, "init_from=nan.pth")
    torch.save({f"{key}.strange": value for key, value in weights.items()}, str(exp.folder / "strange.pth"))
    assert "strange.pth" in refused(exp, *FORECAST, "init_from=strange.pth")


@pytest.mark.extended
def test_a_training_begins_with_a_new_head_but_with_less_only_where_told(exp, trained):
    settings = [*FORECAST, f"init_from={trained('forecast')}", *SHORT]
    done = exp(*settings, "data.horizon=12", "output_dir=head")
    assert done.returncode == 0, done.stderr
    assert "decoder.1.weight" in done.stdout
    assert "init_partial" in refused(exp, *settings, "model.d_model=32")
    done = exp(*settings, "model.d_model=32", "init_partial=true", "output_dir=partial")
    assert done.returncode == 0, done.stderr


def test_weights_of_other_tools_give_the_same_features(exp, trained):
    run = trained("scenes")
    weights = {key: value for key, value in state(run).items() if key.startswith("backbone.")}
    periods = weights.pop("backbone.rope.periods")
    weights["backbone.rope_embed.periods"] = periods.bfloat16()  # as the authors round them
    teacher = {**weights, "dino_head.mlp.0.weight": torch.ones(2)}
    student = {key: torch.zeros_like(value) for key, value in teacher.items()}
    torch.save({"student": student, "teacher": teacher, "epoch": 3}, str(exp.folder / "dino.pth"))
    made = []
    for number, source in enumerate((run, "dino.pth")):
        done = exp(
            *SCENES, "task=features", f"task.input={DATA}/eurosat_rgb/River/*_1.jpg", "task.max_images=0",
            "task.feature_dtype=float32", f"init_from={source}", f"output_dir=features{number}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        made.append(load_file(str(next((exp.path(f"features{number}") / "features").glob("*.safetensors")))))
    torch.testing.assert_close(made[1]["patches"], made[0]["patches"], rtol=1e-3, atol=1e-3)


@pytest.mark.extended
def test_other_classes_are_for_features_alone(exp, trained):
    for name in ("roof", "road"):
        (exp.folder / "mine" / name).mkdir(parents=True)
        for number, path in enumerate(sorted((DATA / "eurosat_rgb" / "Forest").iterdir())[:10]):
            shutil.copy(str(path), str(exp.folder / "mine" / name / f"{number}{path.suffix}"))
    mine = [f"init_from={trained('scenes')}", "data.root=mine"]
    done = exp(*mine, "backend=cpu", "task=features", "task.store=store", "output_dir=kept")
    assert done.returncode == 0, done.stderr
    assert "road, roof" in refused(exp, *mine, "task=predict")


@pytest.mark.extended
def test_a_sweep_over_runs_uses_each_as_it_was_trained(exp, trained):
    runs = [trained("forecast"), trained("forecast_bf16")]
    done = exp("-m", "task=eval", f"init_from={runs[0]},{runs[1]}", "output_dir=both", "sweep.plots=false")
    assert done.returncode == 0, done.stdout + done.stderr
    for number, run in enumerate(runs):
        found = exp.result(f"both/{number}")
        assert found["trained_in"] == str(run)
        assert found["metrics"] == pytest.approx(result(run)["metrics"], rel=1e-6)


@pytest.mark.extended
def test_a_run_of_an_experiment_whose_file_is_not_here_is_used_all_the_same(exp):
    place = exp.folder / "own" / "experiment"
    place.mkdir(parents=True)
    (place / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /data: etth1, override /model: timebridge_small]\nname: mine\n"
        "reference: {data: ETTh1, source: nobody, metrics: {96: {mse: 0.1}}}\n"
    )
    done = exp("--config-dir", "own", *FORECAST, "experiment=mine", "output_dir=mine")
    assert done.returncode == 0, done.stderr
    done = exp("task=eval", "init_from=mine", "output_dir=again", "backend=cpu")
    assert done.returncode == 0, done.stderr
    assert any("experiment=mine" in line for line in exp.result("again")["reference"]["differs"])
