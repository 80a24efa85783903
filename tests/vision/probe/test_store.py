"""task=features task.store=<folder>: kept once, by blocks, for what they were made of."""

from __future__ import annotations

import os
import shutil
import signal

import numpy as np
import pytest
import torch

from exp.errors import ConfigError, RunError
from exp.vision.data.scenes import SceneData
from exp.vision.dinov3 import SceneClassifier
from exp.vision.narrowing import narrowed
from exp.vision.probe.linear import Scale, fit_logistic
from exp.vision.probe.rows import patch_labels, rows_of
from exp.vision.probe.scoring import of_pixels
from exp.vision.probe.store import BLOCK, ArraySpec, Store
from tests.conftest import Forked, read_strictly, run_exp
from tests.vision.probe.conftest import make_store

SMALL = ["backend=cpu", "model.embed_dim=32", "model.depth=2", "model.num_heads=2", "model.layer_scale=1.0"]
SCENES = ["experiment=dinov3_eurosat", *SMALL, "data.size=32", "data.eval_batch_size=32", "task=features"]
SIZE = {"size": "tiny", "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Holds ``weights.pth``, and ``other.pth``."""
    folder = tmp_path_factory.mktemp("features")
    for seed, name in enumerate(("weights.pth", "other.pth")):
        torch.manual_seed(seed)
        torch.save(SceneClassifier(num_classes=10, layer_scale=1.0, **SIZE).state_dict(), str(folder / name))
    return folder


def keep(place, *arguments, code=0):
    done = run_exp(
        place, *SCENES, "init_from=weights.pth", "task.store=kept", "overwrite=true", "output_dir=run", *arguments
    )
    assert done.returncode == code, done.stderr
    return done


def test_kept_by_all_ranks_reused_and_refused_by_what_differs(place):
    keep(place, "nproc=2", "task.feature_dtype=float32")
    result = read_strictly((place / "run" / "result.json").read_text())
    assert result["metrics"] == {"images": 500, "computed": 500}
    store = Store(place / "kept")
    assert store.about["parts"] == {"train": 350, "val": 50, "test": 100}
    assert store.about["kinds"] == ["cls", "mean"]

    data = SceneData("EuroSAT", sample_data="eurosat_rgb", size=64, eval_pipeline=[],
                     train_pipeline=[{"type": "RandomFlip", "prob": 1.0}])  # fmt: skip
    model = SceneClassifier(num_classes=10, layer_scale=1.0, **SIZE).eval()
    model.load_state_dict(torch.load(str(place / "weights.pth")))
    numbers = torch.tensor([0, 100, 349])
    batch = data.plain_parts()["train"][numbers]
    assert np.array(store.array("train", "labels"))[numbers].tolist() == batch["label"].tolist()
    with torch.no_grad():
        found = model.features(batch["image"])[0]
    assert np.abs(np.array(store.array("train", "cls"))[numbers] - found.cls.numpy()).max() < 1e-4
    mean = np.array(store.array("train", "mean"))[numbers]
    assert np.abs(mean - found.patches.mean(dim=(1, 2)).numpy()).max() < 1e-4

    keep(place, "task.feature_dtype=float32")
    assert read_strictly((place / "run" / "result.json").read_text())["metrics"]["computed"] == 0
    shutil.rmtree(str(place / "run"))
    for changed, text in {
        "init_from=other.pth": "by weights (",
        "data.eval_pipeline=[{type: Resize, scale: [48, 48]}]": "by preprocessing (eval_pipeline [], now [",
        "data.split=[0.6,0.2,0.2]": "by data (",
    }.items():
        line = keep(place, "task.feature_dtype=float32", changed, code=2).stderr.splitlines()[0]
        assert "task.store=" in line
        assert "holds other features, " in line
        assert text in line, line
    assert not (place / "run").exists()
    line = keep(place, "task.feature_dtype=float32", "task.patches=true", code=2).stderr.splitlines()[0]
    assert "was made without patches" in line
    assert (
        "task.patches=True needs task.store"
        in run_exp(place, *SCENES, "init_from=weights.pth", "task.patches=true", "output_dir=run").stderr
    )


@pytest.mark.slow
def test_another_run_is_kept_out_and_a_killed_one_continued_at_a_block(place):
    whole = place / "whole"
    keep(place, f"task.store={whole}", "task.feature_dtype=float32")
    part, store = place / "part", Store(place / "whole")
    process = Forked(place, *SCENES, "init_from=weights.pth", f"task.store={part}", "output_dir=killed",
                     "task.feature_dtype=float32", "data.eval_batch_size=1", new_session=True)  # fmt: skip
    for _ in range(1200):
        if (part / "about.json").exists() and 0 < len(Store(part).missing("train")) < 2:
            break
        process._process.join(0.05)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGSTOP)
    second = keep(place, f"task.store={part}", "task.feature_dtype=float32", code=2).stderr.splitlines()[0]
    assert "part is in use by another run: host " in second
    assert second.endswith("use another task.store")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(60)
    left = sum(len(Store(part).missing(name)) for name in ("train", "val", "test"))
    assert left == 3, "one block of 256 images was done"
    done = run_exp(place, "task=probe", "backend=cpu", f"task.store={part}", "output_dir=refused")
    assert done.returncode == 2
    assert "is not done (3 blocks of 256 images are missing)" in done.stderr.splitlines()[0]
    keep(place, f"task.store={part}", "task.feature_dtype=float32", "data.eval_batch_size=1", "nproc=2")
    assert read_strictly((place / "run" / "result.json").read_text())["metrics"]["computed"] == 500 - BLOCK
    for name in ("train_cls", "train_mean", "val_cls", "test_labels"):
        kept, again = (np.load(str(folder / f"{name}.npy")) for folder in (whole, part))
        assert np.abs(kept - again).max() < 1e-5, name
    assert store.missing("train") == []


def test_patches_and_pixels(tmp_path):
    """Patches of two kinds, in masks with a border that does not count and one that is no whole patch."""
    patch, generator = 4, np.random.default_rng(1)
    arrays = {"cls": ArraySpec((2,), "float32"), "mean": ArraySpec((2,), "float32"),
              "patches": ArraySpec((3, 3, 2), "float16"), "labels": ArraySpec((10, 12), "uint8")}  # fmt: skip
    kinds = {part: generator.integers(0, 2, (20, 3, 3)) for part in ("train", "val")}
    about = {"experiment": "x", "classes": ["a", "b"], "patch_size": patch, "fingerprint": {}, "weights": {}}
    Store.prepare(tmp_path, about, arrays, dict.fromkeys(kinds, 20))
    store = Store(tmp_path)
    for part, classes in kinds.items():
        mask = classes.repeat(patch, 1).repeat(patch, 2)[:, :10].astype(np.uint8)
        mask[:, :, 0] = 255
        mask[0, :4, :4] = 255
        features = np.stack([classes * 2.0 - 1, generator.normal(size=classes.shape)], axis=-1)
        empty = np.zeros((20, 2))
        store.write_block(part, 0, {"cls": empty, "mean": empty, "patches": features, "labels": mask})
    labels = patch_labels(store, "train", 2)
    assert labels[0] == -1
    assert (labels[1:] == kinds["train"].reshape(-1)[1:]).all()
    rows = rows_of(store, "train", "patches", torch.device("cpu"), 0, 2, images=np.arange(1, 20))
    assert len(rows) == 19 * 9
    scale = Scale(rows)
    weights, _ = fit_logistic(rows, scale, 2, 10.0, 100)
    found = of_pixels(store, "val", np.arange(20), scale, [weights, -weights], torch.device("cpu"))
    assert found[0]["mIoU"] > 0.75
    assert found[1]["mIoU"] < 0.25


@pytest.mark.slow
def test_segmentation_from_its_data_to_its_probe(tmp_path):
    from exp.vision.dinov3 import Segmenter

    torch.manual_seed(0)
    model = Segmenter(num_classes=5, head="linear", layer_scale=1.0, **{**SIZE, "patch_size": 16})
    torch.save(model.state_dict(), str(tmp_path / "weights.pth"))
    small = [*SMALL, "experiment=dinov3_dubai", "model.size=tiny", "model.head=linear", "model.patch_size=16"]
    command = [*small, "task=features", "init_from=weights.pth", "task.store=kept", "task.patches=true"]
    done = run_exp(tmp_path, *command, "output_dir=refused")
    assert done.returncode == 2
    assert "task.patches=true needs images of one size" in done.stderr.splitlines()[0]
    resize = "data.eval_pipeline=[{type: Resize, scale: [128, 128], keep_ratio: false}]"
    done = run_exp(tmp_path, *command, resize, "output_dir=run")
    assert done.returncode == 0, done.stderr
    done = run_exp(tmp_path, "task=probe", "backend=cpu", "task.store=kept", "task.epochs=2", "output_dir=probed")
    assert done.returncode == 0, done.stderr
    result = read_strictly((tmp_path / "probed" / "result.json").read_text())
    assert result["metric_name"] == "mIoU"
    assert result["measured_on"] == "val"
    assert set(result["metrics"]) >= {"mIoU", "pixel_accuracy", "logistic_mIoU", "sgd_mIoU"}
    assert "chosen on train, results are of val" in done.stdout


@pytest.mark.slow
def test_images_that_are_left_out_are_told_by_all_who_use_the_store(place):
    """By the run that keeps features, one that finds them there, and a probe."""
    from tests.vision.data.conftest import SAMPLES

    for name in ("Forest", "River"):
        (place / "mine" / name).mkdir(parents=True)
        for number, path in enumerate(sorted((SAMPLES.parents[1] / "data" / "eurosat_rgb" / name).iterdir())[:20]):
            shutil.copy(str(path), str(place / "mine" / name / f"{number:02d}{path.suffix}"))
    broken = sorted((place / "mine" / "River").iterdir())[3]
    broken.write_bytes(b"no image")
    mine = [f"data.root={place / 'mine'}", "data.on_error=skip", "task.store=mine_kept", "data.split=[0.6,0.2,0.2]"]
    for computed in (40, 0):
        keep(place, *mine)
        result = read_strictly((place / "run" / "result.json").read_text())
        assert result["metrics"]["computed"] == computed
        assert result["data"]["skipped"]["count"] == 1
        assert str(broken) in result["data"]["skipped"]["files"][0]
    assert sum(result["data"][part] for part in ("train", "val", "test")) == 40
    assert Store(place / "mine_kept").about["skipped"] == result["data"]["skipped"]
    done = run_exp(place, "task=probe", "backend=cpu", "task.store=mine_kept", "task.probes=[knn]", "output_dir=probed")
    assert done.returncode == 0, done.stderr
    probed = read_strictly((place / "probed" / "result.json").read_text())
    assert probed["data"]["skipped"] == result["data"]["skipped"]
    assert "task.k=[100]: left out" in probed["notes"][0]


def test_a_damaged_store_is_named_and_refused(tmp_path):
    store = make_store(tmp_path / "store", {"train": 10, "val": 4})
    store.check_complete()
    rows = rows_of(store, "train", "cls", torch.device("cpu"), 0, 4)
    rows.check_finite("x")
    store.write_block("train", 0, {"cls": np.where(np.arange(10)[:, None] == 7, np.nan, np.zeros((10, 12)))})
    with pytest.raises(ConfigError, match=r"task.store=s, train: features of row 7 are not finite"):
        rows.check_finite("task.store=s, train")
    path = tmp_path / "store" / "val_mean.npy"
    whole = path.read_bytes()
    for content in (whole[:-5], b"", None):
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is damaged: val_mean.npy is missing or truncated .*; remove"):
            Store(tmp_path / "store").check_complete()
        path.write_bytes(whole)
    np.save(str(path), np.zeros((3, 12), np.float32))
    with pytest.raises(ConfigError, match=r"val_mean.npy has 3 rows, not 4"):
        Store(tmp_path / "store").check_complete()


def test_features_that_are_not_finite_say_why():
    with pytest.raises(RunError, match=r"\(cls\) are not finite: values of the weights"):
        narrowed("cls", np.array([np.nan], np.float32), "float32")
    with pytest.raises(RunError, match=r"are too large for float16; take task.feature_dtype=float32"):
        narrowed("cls", np.array([1e6], np.float32), "float16")
    assert narrowed("cls", np.array([1.0], np.float32), "float16").dtype == np.float16


def test_a_store_of_something_else(tmp_path):
    make_store(tmp_path / "store", {"train": 10, "val": 4})
    (tmp_path / "store" / "about.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no features \(about.json is missing or damaged\)"):
        Store(tmp_path / "store")
