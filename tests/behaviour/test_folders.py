"""Folders of images as people have them: what is odd is reported before the training, and the training goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from tests.behaviour.conftest import BACKBONE, SHORT, result

SCENES = [
    "experiment=dinov3_eurosat", "data=imagefolder", "data.name=mine", "backend=cpu", *BACKBONE, *SHORT, "data.size=16",
    "global_batch_size=4", "data.num_workers=0", "max_steps=1", "schedule=constant", "data.mean=null", "data.std=null",
]  # fmt: skip


def images(folder: Path, count: int, seed: int) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for number in range(count):
        pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{folder.name}{seed}_{number}.png")


def test_odd_folders_of_scenes_are_reported(exp):
    root = exp.folder / "data"
    for seed, split in enumerate(("train", "val", "test")):
        for number, name in enumerate(("Forest", "forest", "lake")):
            images(root / split / name, 6, 10 * seed + number)
    (root / "__MACOSX" / "train").mkdir(parents=True)
    (root / "__MACOSX" / "train" / "._x.png").write_bytes(b"\0")
    copied = next((root / "train" / "lake").iterdir())
    shutil.copy(str(copied), str(root / "test" / "lake" / "renamed.png"))
    done = exp(*SCENES, f"data.root={root}", "output_dir=run")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith(("warning: ", "note: "))]
    assert any("Forest and forest" in line for line in said), done.stdout
    assert any("renamed.png" in line for line in said), done.stdout
    assert any("__MACOSX" in line for line in said), done.stdout
    assert result(exp.path("run"))["data"]["files_in_two_parts"] == 1

    for split in ("train", "val", "test"):
        for name in ("Forest", "forest"):
            shutil.rmtree(root / split / name)
    done = exp(*SCENES, f"data.root={root}", "output_dir=one")
    assert done.returncode == 0, done.stderr
    assert any("lake is the only class" in line for line in done.stdout.splitlines()), done.stdout


def test_a_layout_of_ones_own_is_a_class_and_a_file(exp, page):
    """docs/guide/data-images.md, done to the letter: scenes whose names tell their classes."""
    page("data-images", python=["named.py"], yaml=["my_conf/data/named.yaml"])
    for seed, name in enumerate(("forest", "lake")):
        images(exp.folder / "made" / name, 10, seed)
    root = exp.folder / "flat"
    root.mkdir()
    for path in (exp.folder / "made").glob("*/*.png"):
        path.rename(root / path.name.replace(path.parent.name, f"{path.parent.name}_", 1))
    done = exp("--config-dir", "my_conf", *SCENES[:1], "data=named", *SCENES[3:], f"data.root={root}", "output_dir=run")
    assert done.returncode == 0, done.stderr
    data = result(exp.path("run"))["data"]
    assert (data["train"], data["val"], data["test"]) == (14, 2, 4)
