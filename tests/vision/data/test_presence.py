"""Classes without a pixel, and files that are not read: nothing of it goes unsaid."""

from __future__ import annotations

import shutil

import cv2
import numpy as np
import pytest
import torch

from exp.errors import DataError
from exp.vision.data.presence import values_in
from tests.conftest import read_strictly, run_exp

TINY = [
    "experiment=dinov3_dubai", "backend=cpu", "plots=false", "model.embed_dim=32", "model.depth=2", "model.num_heads=2",
    "model.patch_size=8", "model.head=linear", "model.window=32", "data=segmentation", "data.name=mine", "data.size=32",
    "data.root=.", "data.palette=null", "data.num_workers=1", "global_batch_size=4", "max_steps=4", "log_every=2",
    "schedule.warmup_steps=0",
]  # fmt: skip
NINE = "train: ['*/[0-7].png'], val: ['*/[89].png']"


@pytest.fixture
def pairs(tmp_path, noise):
    """Writes ten images, with masks of two values."""

    def write(low, high, **of_part):
        for number in range(10):
            noise(tmp_path / "images" / f"{number}.png", 32, 32, seed=number)
            labels = np.random.default_rng(number).choice([low, high], (32, 32)).astype(np.uint8)
            if "val" in of_part and number > 7:
                labels[:] = of_part["val"]
            (tmp_path / "masks").mkdir(exist_ok=True)
            cv2.imwrite(str(tmp_path / "masks" / f"{number}.png"), labels)
        return tmp_path

    return write


def test_values_are_found_in_any_array():
    labels = np.arange(200, dtype=np.uint8).reshape(10, 20)
    assert values_in(labels[2:4, ::2]) == list(range(40, 80, 2))
    assert values_in(np.zeros((0, 4), np.uint8)) == []


def test_a_class_without_a_pixel_is_said_before_and_after_on_any_number_of_processes(pairs):
    """Masks of 0 and 255: 255 does not count unless it is asked for."""
    folder = pairs(0, 255)
    done = run_exp(folder, *TINY, "data.classes=[land,water]", "nproc=2", "output_dir=run")
    assert done.returncode == 0, done.stderr
    hint = "'data.mask_values={0: 0, 255: 1}' 'data.ignore_values=[]'"
    lines = [line for line in done.stdout.splitlines() if line.startswith("warning: no pixel")]
    assert [line.partition("; ")[0] for line in lines] == [
        "warning: no pixel of class water in the 8 training masks: cannot be learned",
        "warning: no pixel of class water in the 2 validation masks: no figure tells of it",
    ]
    assert all(line.endswith(f"if it is a class, set {hint}") for line in lines)
    data = read_strictly((folder / "run" / "result.json").read_text())["data"]
    assert data["classes_without_training_pixels"] == data["classes_not_measured"] == ["water"]


def test_what_the_hint_says_gives_the_class_its_pixels(pairs, segmentation):
    folder = pairs(0, 255)
    data = segmentation(
        root=str(folder), classes=["land", "water"], mask_values={0: 0, 255: 1}, ignore_values=[], split=[0.8, 0.2, 0.0]
    )
    assert "classes_without_training_pixels" not in data.record(lambda value: [value]), "nothing was read"
    data.train[torch.tensor([[number, 0] for number in range(8)])]
    data.val[torch.arange(2)]
    assert not {"classes_without_training_pixels", "classes_not_measured"} & set(data.record(lambda value: [value]))


def test_nothing_is_said_where_every_class_has_pixels(pairs, segmentation):
    data = segmentation(root=str(pairs(0, 1)), classes=["a", "b"], split=[0.8, 0.2, 0.0])
    data._presence.say = pytest.fail
    data._presence.look({"train": data.train})


def test_only_masks_that_were_read_tell(pairs, segmentation):
    folder = pairs(0, 1, val=0)
    ranks = [
        segmentation(root=str(folder), classes=["a", "b", "ghost"], split=[0.8, 0.2, 0.0], parts={
            "train": ["*/[0-7].png"], "val": ["*/[89].png"]})
        for _ in range(2)
    ]  # fmt: skip
    for rank, numbers in enumerate(([0, 1], [1, 2])):
        ranks[rank].train[torch.tensor([[number, 0] for number in numbers])]
    ranks[1].val[torch.arange(2)]
    sent = []
    for data in ranks:
        data.record(lambda value: sent.append(value) or [value])
    said = []
    ranks[0]._presence.say = said.append
    ranks[0]._presence._told.clear()
    told = ranks[0].record(lambda _: sent)
    assert told["classes_without_training_pixels"] == ["ghost"]
    assert told["classes_not_measured"] == ["b", "ghost"]
    assert said[0] == "warning: no pixel of class ghost in 3 of 8 training masks: cannot be learned"


def test_a_part_in_which_no_pixel_counts_is_refused_before_the_training(pairs):
    folder = pairs(0, 1, val=255)
    done = run_exp(folder, *TINY, "data.classes=[a,b]", f"data.parts={{{NINE}}}", "output_dir=run")
    assert done.returncode == 2, done.stderr
    assert "no pixel of the 2 validation masks has a class: all hold values that are ignored" in done.stderr
    assert "data.ignore_values=[255]" in done.stderr.splitlines()[0]
    assert "lower optim.lr" not in done.stderr
    assert not (folder / "run" / "checkpoints").exists() or not any((folder / "run" / "checkpoints").iterdir())


def test_files_that_are_not_read_are_counted_and_said(tmp_path, noise, scenes, segmentation, pairs):
    for number in range(20):
        noise(tmp_path / "scenes" / "ab"[number % 2] / f"{number}.png", 4, 4)
    for name in ("x.gif", "y.GIF", "z.npy", "about.txt", "0.png.aux.xml", ".hidden.gif", "LICENSE"):
        (tmp_path / "scenes" / "b" / name).write_bytes(b"?")
    data = scenes(root=str(tmp_path / "scenes"))
    assert data.record(lambda value: [value])["other_files"] == {".gif": 2, ".npy": 1}
    assert any(
        note.endswith(".bmp .webp only: 2 .gif, 1 .npy; convert them, or move them elsewhere") for note in data.notes
    )
    folder = pairs(0, 1)
    (folder / "masks" / "17.gif").write_bytes(b"?")
    (folder / "images" / "17.gif").write_bytes(b"?")
    assert segmentation(root=str(folder), classes=["a", "b"], split=[0.8, 0.2, 0.0]).record(lambda value: [value])[
        "other_files"
    ] == {".gif": 2}


def test_a_class_whose_folder_was_taken_for_a_part_is_pointed_at(tmp_path, noise, scenes):
    for number in range(6):
        noise(tmp_path / ("train", "plane")[number % 2] / f"{number}.png", 4, 4)
        noise(tmp_path / "parts" / ("train/a", "val/a", "extra")[number % 3] / f"{number}.png", 4, 4)
    with pytest.raises(DataError, match=r"taken for parts of the data: train \(train\); plane beside them is not used"):
        scenes(root=str(tmp_path))
    assert "extra beside them is not used" in scenes(root=str(tmp_path / "parts")).notes[0]


def test_a_band_that_is_named_twice_is_said(tmp_path, noise, scenes):
    for number in range(20):
        noise(tmp_path / "ab"[number % 2] / f"{number}.png", 4, 4)
    data = scenes(root=str(tmp_path), bands=["red", "green", "red"])
    assert data.notes[-1] == "note: data.bands names red more than once: the model gets it as often"


def test_folders_with_nothing_but_other_files_are_not_called_empty_alone(tmp_path, noise, scenes):
    for number in range(20):
        noise(tmp_path / "a" / f"{number}.png", 4, 4)
    for name in ("b/x.gif", "b/y.gif", "c/z.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"?")
    assert any(
        "in empty folders there are files that exp does not read: 2 .gif, 1 .npy; convert them to one of .png" in note
        for note in scenes(root=str(tmp_path)).notes
    )
    shutil.rmtree(str(tmp_path / "a"))
    with pytest.raises(DataError, match=r"no folders of images by class(.|\n)*does not read: 2 .gif, 1 .npy; convert"):
        scenes(root=str(tmp_path))
