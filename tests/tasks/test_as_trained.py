"""A run is used as it was trained, and weights fit wholly or are refused, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from exp.engine import checkpoint
from tests.conftest import TINY, run_exp

PLANT = ["data=csv", "data.name=plant", "data.root=files", "data.file=plant.csv", "data.channels=2", "data.horizon=24"]
ETT = Path(__file__).parents[2] / "data" / "ett" / "ETTh1.csv"
SMALL = [setting for setting in TINY if not setting.startswith("data.")]


def plant(path: Path, hours: int, level: float = 50.0) -> None:
    """Two series of a user's own, hourly."""
    lines = ["date,pressure,flow"]
    for hour in range(hours):
        wave = (hour % 24) / 24
        lines.append(
            f"2024-01-{1 + hour // 24 % 28:02d} {hour % 24:02d}:00:00,{level + wave:.4f},{level - wave * 2:.4f}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds ``plant/``, a run on a user's own two series, and ``other/``, one with another lookback."""
    place = tmp_path_factory.mktemp("trained")
    plant(place / "files" / "plant.csv", 28 * 24)
    for name, lookback in (("plant", 48), ("other", 72)):
        done = run_exp(place, *SMALL, *PLANT, f"data.lookback={lookback}", f"output_dir={name}")
        assert done.returncode == 0, done.stderr
    return place


def result(place: Path) -> dict:
    return json.loads((place / "result.json").read_text())


def refused(folder: Path, *arguments: str, words: tuple[str, ...]) -> str:
    """The error of a command that ends with 2 and says all these words in its first line."""
    done = run_exp(folder, *arguments, "backend=cpu", "output_dir=refused")
    assert done.returncode == 2, done.stdout + done.stderr
    first = done.stderr.splitlines()[0]
    assert all(word in first for word in words), first
    shutil.rmtree(folder / "refused", ignore_errors=True)
    return done.stderr


def test_predict_takes_model_and_data_from_the_run(folder, tmp_path):
    done = run_exp(tmp_path, "task=predict", f"init_from={folder / 'plant'}", "output_dir=out", "task.num_windows=1")
    assert done.returncode == 0, done.stderr
    assert "as trained in" in done.stdout
    assert " but " not in done.stdout
    future = (tmp_path / "out" / "forecasts" / "future.csv").read_text().splitlines()
    assert future[0] == "date,pressure,flow"
    assert len(future) == 25
    assert result(tmp_path / "out")["trained_in"] == str(folder / "plant")


@pytest.mark.slow
def test_eval_measures_what_the_training_measured(folder):
    done = run_exp(folder, "task=eval", "init_from=files/../plant/checkpoints/best.pth", "output_dir=evaluated")
    assert done.returncode == 0, done.stderr
    assert result(folder / "evaluated")["trained_in"] == str(folder / "plant")
    assert result(folder / "evaluated")["metrics"] == pytest.approx(result(folder / "plant")["metrics"], rel=1e-6)


@pytest.mark.slow
def test_what_the_command_line_says_comes_on_top_and_is_shown(folder):
    plant(folder / "more" / "new.csv", 28 * 24, level=80.0)
    done = run_exp(folder, "task=eval", "init_from=plant", "output_dir=new", "data.root=more", "data.file=new.csv")
    assert done.returncode == 0, done.stderr
    assert "but data.file=new.csv (trained with: plant.csv)" in done.stdout
    assert any(line.startswith("data.file=new.csv") for line in result(folder / "new")["differs"])


@pytest.mark.slow
def test_repeating_the_choices_of_the_run_changes_nothing(folder):
    repeated = ["experiment=timebridge_small", "data=csv", "model=timebridge_small"]
    done = run_exp(folder, "task=eval", "init_from=plant", "output_dir=repeated", *repeated)
    assert done.returncode == 0, done.stderr
    assert " but " not in done.stdout
    assert result(folder / "repeated")["metrics"] == result(folder / "plant")["metrics"]


@pytest.mark.slow
def test_a_sweep_over_runs_uses_each_as_it_was_trained(folder):
    done = run_exp(folder, "-m", "task=eval", "init_from=plant,other", "output_dir=both", "sweep.plots=false")
    assert done.returncode == 0, done.stdout + done.stderr
    for number, name in enumerate(("plant", "other")):
        assert result(folder / "both" / str(number))["metric"] == pytest.approx(result(folder / name)["metric"])


@pytest.mark.slow
def test_another_horizon_than_the_run_had_is_refused(folder):
    said = refused(folder, "task=predict", "init_from=plant", "data.horizon=12", words=("35 of 36", "data.horizon"))
    assert "decoder.1.weight: (24, " in said


@pytest.mark.slow
def test_weights_that_are_not_finite_are_refused(folder):
    content = torch.load(str(folder / "plant" / "checkpoints" / "best.pth"))
    name = next(iter(content["state_dict"]))
    content["state_dict"][name].flatten()[0] = float("nan")
    torch.save(content, str(folder / "nan.pth"))
    for task in ("eval", "train"):
        refused(
            folder, *SMALL, *PLANT, "data.lookback=48", f"task={task}", "init_from=nan.pth",
            words=("nan.pth has weights that are not finite", name),
        )  # fmt: skip


@pytest.mark.slow
def test_weights_of_another_kind_of_model_are_refused_in_one_line(folder):
    for experiment, task in (("dinov3_dubai", "predict"), ("dinov3_eurosat", "features")):
        said = refused(
            folder, f"experiment={experiment}", f"task={task}", "init_from=plant", words=("plant", "for forecasting")
        )
        assert len(said.splitlines()) == 1


@pytest.mark.slow
def test_bare_weights_with_other_settings_are_refused(folder):
    shutil.copy(str(folder / "plant" / "checkpoints" / "best.pth"), str(folder / "weights.pth"))
    fitting = [*PLANT, "data.lookback=48"]
    said = refused(folder, *fitting, "task=eval", "init_from=weights.pth", words=("needs all weights", "weights.pth"))
    assert "other shape" in said
    fewer = [*fitting, *SMALL, "model.integrated_layers=0"]  # fits, and would be another model than was trained
    said = refused(folder, *fewer, "task=eval", "init_from=weights.pth", words=("needs all weights",))
    assert "unknown to the model" in said


@pytest.mark.slow
def test_training_begins_with_a_new_head_but_not_with_less_unless_told_to(folder):
    settings = [*SMALL, *PLANT, "data.lookback=48", "init_from=plant"]
    done = run_exp(folder, *settings, "data.horizon=12", "output_dir=head")
    assert done.returncode == 0, done.stderr
    assert "other shape: decoder.1.weight" in done.stdout
    words = ("in part only", "init_partial=true")
    refused(folder, *settings, "model.d_model=32", words=words)
    done = run_exp(folder, *settings, "model.d_model=32", "init_partial=true", "output_dir=partial")
    assert done.returncode == 0, done.stderr
    state = checkpoint.read(folder / "plant" / "checkpoints" / "best.pth")["state_dict"]
    torch.save({f"{name}.strange": value for name, value in state.items()}, str(folder / "strange.pth"))
    refused(folder, *settings[:-1], "init_from=strange.pth", words=("nothing in", "strange.pth"))


@pytest.mark.slow
def test_published_figures_stand_beside_runs_that_can_be_compared(tmp_path):
    done = run_exp(tmp_path, *TINY, "output_dir=run")
    assert done.returncode == 0, done.stderr
    assert "this run is not as experiment=timebridge_small: " in done.stdout
    assert "model.d_model=16 (there: 64)" in result(tmp_path / "run")["published"]["differs"]


@pytest.mark.slow
def test_a_tilde_is_the_home_folder_in_any_key(folder):
    arguments = ["task=eval", "init_from=~/plant", "output_dir=~/tilde", "data.root=~/files"]
    done = run_exp(folder, *arguments, HOME=str(folder))
    assert done.returncode == 0, done.stderr
    assert result(folder / "tilde")["status"] == "completed"
    assert not (folder / "~").exists()


@pytest.mark.slow
def test_a_run_of_an_experiment_whose_file_is_not_here_is_used_all_the_same(folder):
    place = folder / "own" / "experiment"
    place.mkdir(parents=True)
    (place / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /data: csv, override /model: timebridge_small]\nname: mine\n"
        "published_for: plant\npublished_source: nobody\npublished: {24: {mse: 0.1}}\n"
    )
    settings = [*SMALL, *PLANT[1:], "data.lookback=48", "experiment=mine", "output_dir=mine"]
    done = run_exp(folder, "--config-dir", "own", *settings)
    assert done.returncode == 0, done.stderr
    done = run_exp(folder, "task=eval", "init_from=mine", "output_dir=mine-eval")
    assert done.returncode == 0, done.stderr
    assert result(folder / "mine-eval")["published"]["differs"] == ["experiment=mine is not here to compare with"]


@pytest.mark.slow
def test_another_file_is_a_difference_to_what_published_figures_are_of(folder):
    (folder / "hourly").mkdir()
    shutil.copy(str(ETT), str(folder / "hourly" / "mine.csv"))
    done = run_exp(folder, *TINY, "data.root=hourly", "data.file=mine.csv", "output_dir=hourly-run")
    assert done.returncode == 0, done.stderr
    assert "data.file=mine.csv (there: ETTh1.csv)" in result(folder / "hourly-run")["published"]["differs"]
