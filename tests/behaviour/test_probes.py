"""Features that are kept once, and probes of them (docs/guide/probes.md)."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

import exp as public
from tests.behaviour.conftest import family, result, table
from tests.conftest import Forked
from tests.simulators import needs_current_card

IMAGES = Path(__file__).parents[2] / "data" / "eurosat_rgb"
FEW = ["task.C=[0.01,1]", "task.k=[5,16]", "task.shots=[4]", "task.seeds=[1,2]", "task.epochs=4"]
PARTS = ("train", "val", "test")


def keep(run, *settings):
    return ["task=features", "backend=cpu", f"init_from={run}", "task.store=kept", "task.feature_dtype=float32",
            "overwrite=true", "output_dir=run", *settings]  # fmt: skip


def probe(*settings):
    return ["task=probe", "backend=cpu", "task.store=kept", *settings]


def computed(exp):
    return result(exp.path("run"))["metrics"]["computed"]


def test_features_are_kept_once_and_probed(exp, trained):
    scenes = trained("scenes")
    done = exp(*keep(scenes, "nproc=2"))
    assert done.returncode == 0, done.stderr
    assert result(exp.path("run"))["metrics"] == {"images": 500, "computed": 500}
    kept = np.concatenate([np.load(str(exp.path("kept") / f"{part}_cls.npy")) for part in PARTS])
    files = sorted((IMAGES / "River").glob("*.jpg"))[:3]
    pixels = torch.stack([torch.from_numpy(cv2.imread(str(file))[..., ::-1].copy()) for file in files])
    with torch.no_grad():
        (cls,) = public.open_run(scenes).model().features(pixels.permute(0, 3, 1, 2)).cls
    far = np.abs(kept[:, None] - cls.numpy()).max(axis=-1).min(axis=0)
    assert far.max() < 1e-4, "the model's, of each image"

    done = exp(*keep(scenes))
    assert done.returncode == 0, done.stderr
    assert computed(exp) == 0
    shutil.rmtree(str(exp.path("run")))
    for other in ("data.eval_pipeline=[{type: Resize, scale: [48, 48]}]", "model.normalization=satellite"):
        done = exp(*keep(scenes, other))
        assert done.returncode == 2, other
        assert "task.store=" in done.stderr.splitlines()[0]
        assert not exp.path("run").exists()

    done = exp(*probe(*FEW, "output_dir=probed"))
    assert done.returncode == 0, done.stderr
    found = result(exp.path("probed"))
    assert found["metric"] == found["metrics"][f"{found['probe']}_4_shots_accuracy"]
    rows = table(exp.path("probed") / "probes.csv")
    assert len(rows) == 2 * 2 + 2 * 2 + 2 * 13
    drawn = [row for row in rows if (row["probe"], row["seed"]) == ("knn", "2")]
    best = max(drawn, key=lambda row: float(row["val_accuracy"]))
    chosen = next(each for each in found["chosen"] if (each["probe"], each["seed"]) == ("knn", 2))
    assert chosen["setting"] == best["setting"], "the first of the best on validation"
    assert chosen["test"]["accuracy"] == pytest.approx(float(best["test_accuracy"]))
    done = exp(*probe("task.probes=[logistic]", "task.C=[1e-4,100]", "task.max_iter=8"))
    assert done.returncode == 0, done.stderr
    (short,) = exp.path("outputs/dinov3_eurosat").iterdir()  # of the experiment that has kept the features
    assert "not converged" in result(short)["notes"][0]
    for wrong in ("task.store=nowhere", "task.probes=[kNN]", "task.features=patches"):
        done = exp(*probe(wrong, "output_dir=refused"))
        assert done.returncode == 2, wrong
        assert wrong.partition("=")[0] in done.stderr.splitlines()[0]
        assert not exp.path("refused").exists()


@pytest.mark.extended
def test_images_that_are_left_out_are_said_by_all_who_use_the_store(exp, trained):
    for name in ("Forest", "River"):
        (exp.path("mine") / name).mkdir(parents=True)
        for number, path in enumerate(sorted((IMAGES / name).iterdir())[:20]):
            shutil.copy(str(path), str(exp.path("mine") / name / f"{number:02d}{path.suffix}"))
    broken = exp.path("mine") / "River" / "03.jpg"
    broken.write_bytes(b"no image")
    for count in (40, 0):
        done = exp(*keep(trained("scenes"), "data.root=mine", "data.on_error=skip", "data.split_ratio=[0.6,0.2,0.2]"))
        assert done.returncode == 0, done.stderr
        found = result(exp.path("run"))
        assert found["metrics"]["computed"] == count
        assert found["data"]["skipped"]["count"] == 1
        assert str(broken) in found["data"]["skipped"]["files"][0]
    assert sum(found["data"][part] for part in PARTS) == 40
    done = exp(*probe("task.probes=[knn]", "output_dir=probed"))
    assert done.returncode == 0, done.stderr
    probed = result(exp.path("probed"))
    assert probed["data"]["skipped"] == found["data"]["skipped"]
    assert "task.k=[100]" in probed["notes"][0]


@pytest.mark.extended
def test_another_run_is_kept_out_and_a_killed_one_continued(exp, trained):
    scenes = trained("scenes")
    assert exp(*keep(scenes, "task.store=whole")).returncode == 0
    slow = keep(scenes, "data.eval_batch_size=1", "output_dir=killed")
    process, about = Forked(exp.folder, *slow, new_session=True), exp.path("kept") / "about.json"
    for _ in range(1200):
        if about.exists() and np.load(str(exp.path("kept") / "train_state.npy"), mmap_mode="r").any():
            break
        process._process.join(0.05)
        assert process.poll() is None
    everybody = family(process.pid)
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    done = exp(*keep(scenes))
    assert done.returncode == 2
    assert "kept" in done.stderr.splitlines()[0]
    for pid in everybody:
        os.kill(pid, signal.SIGKILL)
    process.communicate(60)
    done = exp(*probe("output_dir=refused"))
    assert done.returncode == 2
    assert "kept" in done.stderr.splitlines()[0]
    done = exp(*keep(scenes, "nproc=2"))
    assert done.returncode == 0, done.stderr
    assert 0 < computed(exp) < 500
    for name in ("train_cls", "train_mean", "val_cls", "test_labels"):
        whole, again = (np.load(str(exp.path(folder) / f"{name}.npy")) for folder in ("whole", "kept"))
        assert np.abs(whole - again).max() < 1e-5, name


@pytest.mark.extended
@needs_current_card
def test_probes_on_any_number_of_processes_and_on_cards_that_lack_operators(exp, trained):
    assert exp(*keep(trained("scenes"))).returncode == 0
    card = {"SIM_GCU_PROFILE": "s60", "SIM_GCU_STRICT": "1"}
    for name, how, extra in (("one", [], {}), ("three", ["nproc=3"], {}),
                             ("card", ["backend=gcu_simulated", "nproc=2"], card)):  # fmt: skip
        done = exp(*probe(*FEW, *how, f"output_dir={name}"), **extra)
        assert done.returncode == 0, done.stderr
        assert not result(exp.path(name))["cpu_fallbacks"]
    one, three, on_card = (result(exp.path(name))["metrics"] for name in ("one", "three", "card"))
    assert three == one
    assert on_card == pytest.approx(one, abs=1e-2)


@pytest.mark.extended
def test_levels_of_different_cells_make_no_patches(exp):
    words = ["experiment=dinov3_eurosat", "backend=cpu", "model/backbone=segformer_b0", "data.num_workers=0"]
    done = exp(*words, "model.backbone.out_indices=[0,3]", "max_epochs=null", "max_steps=1", "plots=false",
               "output_dir=run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    for more, code in (([], 2), (["model.backbone.out_indices=[3]"], 0)):
        done = exp("task=features", "init_from=run", "backend=cpu", "task.store=kept", "task.patches=true", *more)
        assert done.returncode == code, done.stderr
        assert ("cells of [4, 32] pixels" in done.stderr) is (code == 2)
    assert np.load(str(exp.path("kept/train_patches.npy")), mmap_mode="r").shape[1:] == (2, 2, 256)


@pytest.mark.extended
def test_segmentation_from_its_data_to_its_probe(exp, trained):
    patches = keep(trained("tiles"), "task.patches=true")
    done = exp(*patches)
    assert done.returncode == 2
    assert "task.patches" in done.stderr.splitlines()[0]
    done = exp(*patches, "data.eval_pipeline=[{type: Resize, scale: [128, 128], keep_ratio: false}]")
    assert done.returncode == 0, done.stderr
    assert json.loads((exp.path("kept") / "about.json").read_text())["kinds"] == ["cls", "mean", "patches"]
    done = exp(*probe("task.epochs=2", "output_dir=probed"))
    assert done.returncode == 0, done.stderr
    found = result(exp.path("probed"))
    assert (found["metric_name"], found["measured_on"]) == ("mIoU", "val")
    assert set(found["metrics"]) >= {"mIoU", "pixel_accuracy", "logistic_mIoU", "sgd_mIoU"}
