"""Scenes and segmentation through the command line: training, evaluation, prediction, features."""

from __future__ import annotations

import csv
import json
import re
import shutil

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from tests.conftest import run_exp
from tests.simulators import needs_card
from tests.vision.data.conftest import SAMPLES

MODEL = ["model.embed_dim=16", "model.depth=2", "model.num_heads=2", "model.patch_size=16"]
SHORT = ["max_steps=4", "log_every=1", "schedule.warmup_steps=2", "checkpoint.every_steps=2", "checkpoint.keep_last=9"]
SCENES = ["experiment=dinov3_eurosat", *MODEL, *SHORT, "data.split=[0.4,0.3,0.3]", "global_batch_size=8"]
TILES = [
    "experiment=dinov3_dubai",
    *MODEL,
    *SHORT,
    "model.head_channels=16",
    "model.window=96",
    "val_every=2",
    "data.size=64",
    "global_batch_size=8",
    "data.parts={train:['tile1/*_00[1-3].*','tile2/*_00[1-3].*','tile6/*_00[1-3].*'],val:['tile5/*_008.*']}",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One training of each kind; ``<folder>/scenes`` and ``<folder>/tiles``."""
    folder = tmp_path_factory.mktemp("images")
    for name, settings in (("scenes", SCENES), ("tiles", TILES)):
        done = run_exp(folder, *settings, "backend=cpu", f"output_dir={name}")
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder


def result(folder, name):
    return json.loads((folder / name / "result.json").read_text())


def losses(folder, name):
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["split"] == "train"]


def size(path):
    with Image.open(path) as picture:
        return picture.size


def test_a_training_leaves_metrics_and_pictures(trained):
    scenes, tiles = result(trained, "scenes"), result(trained, "tiles")
    assert scenes["metric_name"] == "accuracy"
    assert set(scenes["metrics"]) == {"accuracy", "macro_f1"}
    assert scenes["data"] == {"train": 200, "val": 150, "test": 150, "tested_on": "test"}
    assert tiles["metric_name"] == "mIoU"
    assert tiles["measured_on"] == "val"
    assert set(tiles["metrics"]) == {"mIoU", "mFscore", "pixel_accuracy"}
    assert tiles["metric"] == tiles["metrics"]["mIoU"] > 0
    plots = {path.name: size(path) for path in (trained / "tiles" / "plots").iterdir()}
    assert set(plots) == {"curves.png", "confusion.png", "val_0.png"}
    assert min(plots["val_0.png"]) > 300
    assert {path.name for path in (trained / "scenes" / "plots").iterdir()} == {
        "curves.png",
        "confusion.png",
        "val.png",
    }


@pytest.mark.parametrize(
    ("name", "settings", "where", "same"),
    [
        pytest.param("scenes", SCENES, ["backend=cpu", "nproc=2"], 1e-6),
        pytest.param("tiles", TILES, ["backend=gcu", "backend.simulate=true", "nproc=4"], 1e-5, marks=needs_card),
    ],
)
def test_several_devices_compute_what_one_does(trained, name, settings, where, same):
    other = f"{name}-{len(where)}"
    done = run_exp(trained, *settings, *where, f"output_dir={other}", "plots=false", SIM_GCU_STRICT="1")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert losses(trained, other) == pytest.approx(losses(trained, name), rel=same)
    assert result(trained, other)["metrics"] == pytest.approx(result(trained, name)["metrics"], abs=1e-3)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("scenes", SCENES), pytest.param("tiles", [*TILES, "data.num_workers=1"])],
)
def test_a_resumed_run_ends_in_the_same_state_bit_for_bit(trained, name, settings):
    halves = trained / f"{name}-halves"
    shutil.copytree(trained / name / "checkpoints", halves / "checkpoints")
    (halves / "checkpoints" / "step_00000004.pth").unlink()
    done = run_exp(trained, *settings, "backend=cpu", f"output_dir={halves}", "resume=auto", "plots=false")
    assert done.returncode == 0, done.stderr
    ends = [torch.load(folder / "checkpoints" / "step_00000004.pth") for folder in (trained / name, halves)]
    for key, value in ends[0]["state_dict"].items():
        assert torch.equal(value, ends[1]["state_dict"][key]), key
    assert result(trained, halves.name)["metrics"] == result(trained, name)["metrics"]


def test_evaluation_tells_every_class(trained):
    done = run_exp(trained, *TILES, "backend=cpu", "task=eval", "init_from=tiles", "output_dir=eval")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (trained / "eval" / "plots").iterdir()] == ["worst_1.png"]  # of the only image
    assert result(trained, "eval")["metrics"] == pytest.approx(result(trained, "tiles")["metrics"], abs=1e-9)
    with (trained / "eval" / "metrics_per_class.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["building", "land", "road", "vegetation", "water"]
    assert {"iou", "fscore", "precision", "recall", "count"} <= set(rows[0])
    with (trained / "eval" / "metrics_confusion.csv").open() as file:
        confused = {row.pop("class"): [int(count) for count in row.values()] for row in csv.DictReader(file)}
    assert [int(row["count"]) for row in rows] == [sum(confused[row["class"]]) for row in rows]
    assert sum(int(row["count"]) for row in rows) > 100_000


def test_segmentation_predicts_files_as_maps_overlays_and_areas(trained, tmp_path):
    """A large picture is cut into windows; one that is broken stops nothing, but is told."""
    images = tmp_path / "new"
    images.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (150, 230, 3), dtype=np.uint8)
    cv2.imwrite(str(images / "large.png"), pixels)
    cv2.imwrite(str(images / "small.jpg"), pixels[:50, :40])
    (images / "broken.png").write_bytes(b"no image")
    settings = [*TILES, "backend=cpu", "task=predict", "init_from=tiles", f"task.input={images}", "model.window=96"]
    done = run_exp(trained, *settings, "output_dir=maps", "task.metres_per_pixel=0.5", "task.on_error=skip")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    folder = trained / "maps" / "predictions"
    with Image.open(folder / "classes" / "large.png") as picture:
        labels = np.asarray(picture)
    assert labels.shape == (150, 230)
    assert set(np.unique(labels)) <= set(range(5))
    assert size(folder / "overlays" / "large.png")[0] >= 230
    with (folder / "areas.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["file"].endswith("large.png")]
    assert [int(row["pixels"]) for row in rows] == np.bincount(labels.reshape(-1), minlength=5).tolist()
    assert sum(float(row["square_metres"]) for row in rows) == 150 * 230 * 0.25
    assert result(trained, "maps")["metrics"]["failed"] == 1
    failed = run_exp(trained, *settings, "output_dir=maps2")
    assert failed.returncode == 1
    assert "broken.png" in failed.stderr
    assert (trained / "maps2" / "predictions" / "classes" / "large.png").is_file()


def test_scenes_are_predicted_with_a_table_and_a_sheet(trained):
    """Of the test split, where the truth is known: the same accuracy as in training."""
    done = run_exp(trained, *SCENES, "backend=cpu", "task=predict", "init_from=scenes", "output_dir=classes", "nproc=2")
    assert done.returncode == 0, done.stderr
    with (trained / "classes" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 150
    right = sum(row["class"] == row["truth"] for row in rows) / len(rows)
    assert right == pytest.approx(result(trained, "scenes")["metrics"]["accuracy"])
    assert all(1 >= float(row["probability"]) >= float(row["probability_2"]) > 0 for row in rows)
    assert min(size(trained / "classes" / "plots" / "predictions.png")) > 400


def test_features_are_files_and_maps(trained):
    image = SAMPLES / "mmrs1m" / "data" / "classification" / "DUBAI_split" / "test" / "road"
    settings = [*TILES, "backend=cpu", "task=features", "init_from=tiles", f"task.input={image}", "task.max_images=2"]
    done = run_exp(trained, *settings, "output_dir=features", "task.feature_dtype=float32", "nproc=2")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    folder = trained / "features"
    with (folder / "features.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4
    path = sorted((folder / "features").glob("*.safetensors"))[0]
    with safe_open(str(path), "pt") as tensors:
        assert tensors.get_tensor("cls").shape == (16,)
        assert tensors.get_tensor("patches").shape == (6, 6, 16)
    assert len(list((folder / "plots" / "features").glob("*.png"))) == 2
    assert min(size(folder / "plots" / "features.png")) > 100


def test_mmrs1m_by_the_users_recipe(trained):
    """At a small size, on the sample; what is not there is told."""
    root = SAMPLES / "mmrs1m" / "data"
    settings = ["experiment=dinov3_mmrs1m", f"data.root={root}", "data.size=32", "data.num_workers=0", *MODEL, *SHORT]
    settings += ["val_every=2", "model.size=vits16", "global_batch_size=4"]
    done = run_exp(trained, *settings, "backend=cpu", "output_dir=mmrs1m", "plots=false")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    data = result(trained, "mmrs1m")["data"]
    assert data["datasets"] == ["DUBAI_split"]
    assert "UCMerced" in data["missing_datasets"]
    refused = run_exp(trained, *settings, "backend=cpu", "output_dir=refused", "data.datasets=[UCMerced]")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: data.datasets: UCMerced is not in")


def test_a_file_that_cannot_be_used_is_the_first_line(trained, tmp_path):
    root = tmp_path / "scenes"
    for name in ("Forest", "River"):
        (root / name).mkdir(parents=True)
        for number in range(10):
            cv2.imwrite(str(root / name / f"{number}.jpg"), np.full((64, 64, 3), number, np.uint8))
    cut = root / "River" / "4.jpg"
    cut.write_bytes(cut.read_bytes()[:200])
    settings = [*SCENES, "backend=cpu", f"data.root={root}", "plots=false", "max_steps=2"]
    failed = run_exp(trained, *settings, "output_dir=cut")
    assert failed.returncode == 2
    assert f"{cut} is truncated" in failed.stderr.splitlines()[0]
    done = run_exp(trained, *settings, "output_dir=cut2", "data.on_error=skip")
    assert done.returncode == 0, done.stderr
    assert result(trained, "cut2")["data"]["skipped"]["count"] == 1


def test_weights_of_a_bare_backbone_give_features_but_predict_nothing(trained):
    state = torch.load(trained / "scenes" / "checkpoints" / "best.pth")["state_dict"]
    bare = {key[len("backbone.") :]: value for key, value in state.items() if key.startswith("backbone.")}
    torch.save(bare, trained / "backbone.pth")
    image = next(iter(sorted(SAMPLES.rglob("*.jpg"))))
    settings = [*SCENES, "backend=cpu", "init_from=backbone.pth", f"task.input={image}"]
    done = run_exp(trained, *settings, "task=features", "output_dir=bare-features", "task.max_images=1")
    assert done.returncode == 0, done.stderr
    done = run_exp(trained, *settings, "task=predict", "output_dir=bare-predict")
    assert done.returncode == 2
    first = done.stderr.splitlines()[0]
    assert "needs all weights of the model" in first
    assert "its head is not in the file" in first
    done = run_exp(trained, "backend=cpu", "task=eval", "init_from=scenes", "data.channels=5", "output_dir=bands")
    assert done.returncode == 2
    assert "the weights were trained with data.channels=3, but it is 5 here" in done.stderr.splitlines()[0]


def test_a_range_is_asked_for_and_stays_with_the_weights(trained, tmp_path):
    """16-bit scenes: the range is measured on the training images, and evaluation and prediction have it from there."""
    for name in ("Forest", "River"):
        (tmp_path / name).mkdir()
        sample = cv2.imread(str(next((SAMPLES / "eurosat_nir" / name).iterdir())), cv2.IMREAD_UNCHANGED)
        for number in range(20):
            cv2.imwrite(str(tmp_path / name / f"{number}.png"), np.roll(sample, number, axis=1))
    settings = [*SCENES, "backend=cpu", f"data.root={tmp_path}", "data.channels=1", "plots=false"]
    refused = run_exp(trained, *settings, "output_dir=nir-refused")
    assert refused.returncode == 2
    assert "holds uint16 values from" in refused.stderr.splitlines()[0]
    assert "data.value_range=auto" in refused.stderr.splitlines()[0]
    done = run_exp(trained, *settings, "data.value_range=auto", "output_dir=nir")
    assert done.returncode == 0, done.stderr
    limits = result(trained, "nir")["data"]["value_range"]
    assert 0 < limits[0] < 1000 < limits[1] < 65535
    best = trained / "nir" / "checkpoints" / "best.pth"
    state = torch.load(best)
    assert state["data"]["value_range"] == limits
    state["data"]["value_range"] = [0.0, 65535.0]  # what the weights say is what counts
    torch.save(state, best)
    done = run_exp(trained, "backend=cpu", "task=eval", "init_from=nir", "output_dir=nir-eval")
    assert done.returncode == 0, done.stderr
    assert result(trained, "nir-eval")["data"]["value_range"] == [0.0, 65535.0]


def test_masks_of_mostly_unknown_colours_do_not_train(trained, tmp_path):
    """Dubai's masks as JPEG: hardly a colour is what it was."""
    for number in range(1, 4):
        for kind in ("images", "masks"):
            (tmp_path / kind).mkdir(exist_ok=True)
        sample = next((SAMPLES.parents[1] / "data" / "dubai").rglob(f"tile1/masks/*_00{number}.png"))
        with Image.open(sample) as mask:
            mask.convert("RGB").save(tmp_path / "masks" / f"{number}.jpg", quality=95)
        shutil.copy(next(sample.parents[1].glob(f"images/{sample.stem}.*")), tmp_path / "images" / f"{number}.jpg")
    parts = "data.parts={train: ['*/[12].*'], val: ['*/3.*']}"
    done = run_exp(
        trained, *TILES, "backend=cpu", f"data.root={tmp_path}", parts, "global_batch_size=2", "output_dir=jpeg"
    )
    first = done.stderr.splitlines()[0]
    assert done.returncode == 2
    assert re.search(
        r"[12]\.jpg: [0-9.]+ % of the pixels have no colour of data.palette \(at most 1 % may\): [0-9A-F]{6}", first
    )
    assert "it is a JPEG, which changes colours" in first


def test_dictionaries_on_top_of_a_run_take_any_member(trained):
    done = run_exp(trained, "task=eval", "init_from=tiles", "data.palette.pond=ABCDEF", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "pond: ABCDEF" in done.stdout
