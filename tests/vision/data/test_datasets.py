from __future__ import annotations

import random
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch

from exp.data.loader import train_loader
from exp.data.sampler import TrainBatchSampler
from exp.errors import ConfigError, DataError

CROP = [
    {"type": "RandomResize", "scale": [50, 40], "ratio_range": [0.8, 1.5], "keep_ratio": True},
    {"type": "RandomCrop", "crop_size": 32, "cat_max_ratio": 0.75},
    {"type": "RandomFlip", "prob": 0.5},
    {"type": "RandomRotate90"},
    {"type": "PhotoMetricDistortion"},
    {"type": "PadTo", "size": 32},
]


@pytest.fixture
def scene_root(tmp_path, noise):
    """Three classes of ten images."""
    for number in range(30):
        noise(tmp_path / "root" / "abc"[number % 3] / f"{number}.png", seed=number)
    return tmp_path / "root"


@pytest.fixture
def mask_root(tmp_path, noise):
    """Ten images of different sizes, with masks of two classes and 255."""
    for number in range(10):
        noise(tmp_path / "root" / "images" / f"{number}.jpg", 40 + number, 50, seed=number)
        labels = np.random.default_rng(number).choice([0, 1, 255], (40 + number, 50)).astype(np.uint8)
        (tmp_path / "root" / "masks").mkdir(exist_ok=True)
        cv2.imwrite(str(tmp_path / "root" / "masks" / f"{number}.png"), labels)
    return tmp_path / "root"


def keys(numbers, epoch=0):
    return torch.tensor([[number, epoch] for number in numbers])


def one(value):
    """A gather of one process."""
    return [value]


def test_scenes_come_as_models_take_them(scenes, scene_root):
    data = scenes(root=str(scene_root), train_pipeline=CROP)
    assert data.classes == ["a", "b", "c"]
    assert data.record(one) == {"train": 21, "val": 3, "test": 6, "tested_on": "test"}
    batch = data.train[keys([0, 5, 20])]
    assert batch["image"].shape == (3, 3, 32, 32)
    assert batch["image"].dtype == torch.uint8
    assert batch["image"].is_contiguous()
    assert batch["label"].dtype == torch.int64
    assert [data.train.samples[number][1] for number in (0, 5, 20)] == batch["label"].tolist()
    whole = data.val[torch.arange(3)]
    path, label = data.val.samples[1]
    pixels = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)
    np.testing.assert_array_equal(whole["image"][1].permute(1, 2, 0).numpy(), pixels)
    assert whole["label"][1] == label


def test_masks_come_with_their_images(segmentation, mask_root):
    data = segmentation(root=str(mask_root), classes=["x", "y"], train_pipeline=CROP, split=[0.5, 0.5, 0.0])
    assert data.tested_on == "val"
    assert data.test is data.val
    batch = data.train[keys([0, 3])]
    assert batch["image"].shape == (2, 3, 32, 32)
    assert batch["label"].shape == (2, 32, 32)
    assert set(batch["label"].unique().tolist()) <= {0, 1, 255}
    assert "sizes" not in batch
    whole = data.val[torch.arange(5)]
    heights = [cv2.imread(path).shape[0] for path, _ in data.val.samples]
    assert whole["sizes"] == [(height, 50) for height in heights]
    assert whole["image"].shape == (5, 3, max(heights), 50)
    for row, (_, mask) in enumerate(data.val.samples):
        np.testing.assert_array_equal(whole["label"][row, : heights[row]].numpy(), cv2.imread(mask, -1))
        assert (whole["label"][row, heights[row] :] == 255).all()
        assert (whole["image"][row, :, heights[row] :] == 0).all()


def test_augmentation_depends_on_seed_epoch_and_sample_only(scenes, scene_root):
    data = scenes(root=str(scene_root), train_pipeline=CROP)
    together = data.train[keys([4, 9, 2])]["image"]
    np.random.seed(1)
    random.seed(1)
    alone = [data.train[keys([number])]["image"][0] for number in (4, 9, 2)]
    assert torch.equal(together, torch.stack(alone))
    assert not torch.equal(together[0], data.train[keys([4], epoch=1)]["image"][0])
    other = scenes(root=str(scene_root), train_pipeline=CROP, seed=1)
    assert not torch.equal(together[0], other.train[keys([4])]["image"][0])


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_change_nothing(scenes, scene_root, workers):
    """Two ranks with workers see what one process sees without."""
    data = scenes(root=str(scene_root), train_pipeline=CROP)

    def epoch(rank, world_size, workers):
        sampler = TrainBatchSampler(21, 6 // world_size, rank, world_size, with_epoch=True)
        sampler.set_position(2, 6)
        return {int(number): image for batch in train_loader(data.train, sampler, workers, seed=0)
                for number, image in zip(batch["index"], batch["image"])}  # fmt: skip

    alone = epoch(0, 1, 0)
    shared = {**epoch(0, 2, workers), **epoch(1, 2, 0)}
    assert len(alone) == 12
    assert alone.keys() == shared.keys()
    assert all(torch.equal(alone[number], shared[number]) for number in alone)


def test_decoded_files_are_kept_as_far_as_allowed(scenes, scene_root):
    data = scenes(root=str(scene_root), train_pipeline=CROP, cache_megabytes=1)
    first = data.train[keys([1, 2])]["image"]
    for path, _ in data.train.samples:
        with open(path, "wb"):  # noqa: PTH123 - emptied: whoever still shows it has kept it
            pass
    assert torch.equal(data.train[keys([1, 2])]["image"], first)
    with pytest.raises(DataError, match="is empty"):
        data.train[keys([3])]


def test_a_file_that_cannot_be_used_is_named(scenes, scene_root):
    data = scenes(root=str(scene_root), train_pipeline=CROP)
    path = data.train.samples[7][0]
    with open(path, "r+b") as file:  # noqa: PTH123
        file.truncate(100)
    with pytest.raises(DataError, match=f"{path} is truncated"):
        data.train[keys([6, 7])]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_skipped_does_not_count_and_is_told(segmentation, mask_root, workers):
    data = segmentation(
        root=str(mask_root),
        classes=["x", "y"],
        train_pipeline=CROP,
        on_error="skip",
        parts={"train": ["*/[0-5].jpg"], "val": ["*/[6-9].jpg"]},
    )
    cut, other = data.train.samples[3][0], data.train.samples[4][1]
    with open(cut, "r+b") as file:  # noqa: PTH123
        file.truncate(100)
    cv2.imwrite(other, np.zeros((3, 4), np.uint8))
    sampler = TrainBatchSampler(6, 2, with_epoch=True)
    batches = list(train_loader(data.train, sampler, workers, seed=0))
    images = torch.cat([batch["image"] for batch in batches])
    labels = torch.cat([batch["label"] for batch in batches])
    numbers = torch.cat([batch["index"] for batch in batches])
    for number, image, label in zip(numbers.tolist(), images, labels):
        left_out = number in (3, 4)
        assert (image == 0).all().item() == left_out
        assert (label == 255).all().item() == left_out
    assert data.record(one)["skipped"] == {
        "count": 2,
        "files": [
            f"{cut} is truncated: the end of the JPEG is missing; copy it anew",
            f"{other} is 4x3 pixels, but its image {data.train.samples[4][0]} is 50x44; make the mask anew",
        ],
    }


def test_a_batch_of_nothing_but_skipped_files_has_the_usual_shape(scenes, scene_root):
    data = scenes(root=str(scene_root), train_pipeline=CROP, on_error="skip", size=32)
    for path, _ in data.train.samples[:2]:
        with open(path, "r+b") as file:  # noqa: PTH123
            file.truncate(100)
    batch = data.train[keys([0, 1])]
    assert batch["image"].shape == (2, 3, 32, 32)
    assert batch["label"].tolist() == [-1, -1]


def test_ranks_add_up_what_they_found(segmentation, mask_root):
    """Rank 0 met samples 0 and 1, rank 1 met 1 and 2; each has a pixel of no known colour in masks of 2 and more."""
    for number in range(10):
        path = mask_root / "masks" / f"{number}.png"
        labels = cv2.imread(str(path), -1)
        colours = np.zeros((*labels.shape, 3), np.uint8)
        colours[labels == 1] = (0, 0, 255)  # BGR: FF0000
        colours[labels == 255] = (255, 255, 255)
        colours[0, :number] = 7
        cv2.imwrite(str(path), colours)
    values = {
        "root": str(mask_root),
        "palette": {"x": "000000", "y": "FF0000"},
        "ignore_colours": ["FFFFFF"],
        "parts": {"train": ["*/[0-5].jpg"], "val": ["*/[6-9].jpg"]},
        "train_pipeline": CROP,
    }
    ranks = [segmentation(**values), segmentation(**values)]
    sent = []
    for data, numbers in zip(ranks, ([0, 1], [1, 2])):
        data.train[keys(numbers)]
        data.record(lambda value: sent.append(value) or [value])
    assert ranks[0].record(lambda _: sent)["unknown_pixels"] == {"train": 0 + 1 + 2}


def test_sizes_that_make_no_batch_are_explained(scenes, scene_root, noise):
    noise(scene_root / "a" / "0.png", 30, 30)
    data = scenes(root=str(scene_root), train_pipeline=[{"type": "RandomFlip", "prob": 0.5}], split=[0.9, 0.1, 0.0])
    numbers = [number for number in range(27) if data.train.samples[number][0].endswith(("/0.png", "/1.png"))]
    with pytest.raises(ConfigError, match=r"data.train_pipeline gives images of different sizes \(30x30, 40x50\)"):
        data.train[keys(numbers)]


def test_one_image_is_prepared_as_in_evaluation(scenes, scene_root):
    data = scenes(
        root=str(scene_root),
        train_pipeline=CROP,
        eval_pipeline=[{"type": "Resize", "scale": [20, 20], "keep_ratio": False}],
    )
    path, _ = data.val.samples[0]
    pixels = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)
    prepared = data.prepare(pixels, path)
    assert prepared.shape == (20, 20, 3)
    np.testing.assert_array_equal(data.val[torch.tensor([0])]["image"][0].permute(1, 2, 0).numpy(), prepared)


@pytest.fixture
def deep_root(tmp_path):
    """Two classes of ten 16-bit scenes of a sensor that uses values from 200 to 2600, and a few that stick out."""
    for number in range(20):
        values = np.random.default_rng(number).integers(200, 2601, (40, 50)).astype(np.uint16)
        values[0, :5] = 65535
        path = tmp_path / "deep" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(path), values)
    return tmp_path / "deep"


def test_a_range_is_given_or_measured_and_belongs_to_the_weights(scenes, deep_root):
    values = {"root": str(deep_root), "channels": 1}
    with pytest.raises(DataError, match=r"holds uint16 values from .* to 65535; set data.value_range=\[low,high\]"):
        scenes(**values).val[torch.arange(2)]
    data = scenes(**values, value_range="auto")
    assert data.val[torch.arange(2)]["image"].dtype == torch.float32
    state = data.state()
    assert state["classes"] == ["a", "b"]
    assert state["channels"] == 1
    low, high = state["value_range"]
    assert 200 <= low < 240
    assert 2560 < high <= 2600
    assert data.record(one)["value_range"] == [low, high]
    assert data.val[torch.arange(2)]["image"].mean() == pytest.approx(127.5, abs=3)
    # Used with weights that were trained on other files, it is theirs: measured, unset and given.
    theirs = {**state, "value_range": [0.0, 20000.0]}
    for own in ("auto", None):
        other = scenes(**values, value_range=own)
        other.adopt(theirs)
        assert other.state() == theirs
        assert other.val[torch.arange(2)]["image"].mean() == pytest.approx(1400 / 20000 * 255, abs=1)
    given = scenes(**values, value_range=[0, 100])
    given.adopt(theirs)
    assert given.state()["value_range"] == [0.0, 100.0]
    plain = scenes(**values, value_range="auto")
    plain.adopt({**state, "value_range": None})
    with pytest.raises(DataError, match="holds uint16 values"):
        plain.val[torch.arange(2)]


def test_other_classes_or_channels_than_those_of_the_weights_are_refused(scenes, scene_root):
    data = scenes(root=str(scene_root))
    assert data.state() == {"classes": ["a", "b", "c"], "channels": 3, "value_range": None}
    data.adopt(data.state())
    for theirs, said in (
        (["a", "d"], r"weights know the 2 classes a, d, but the data have 3: a, b, c; .*data.classes"),
        (["b", "a", "c"], r"3 classes b, a, c, but the data have them in another order: a, b, c"),
    ):
        for task in ("eval", "predict", "export", "features"):
            data.adopt({"classes": theirs})
            session = SimpleNamespace(config=SimpleNamespace(task=SimpleNamespace(name=task)))
            if task == "features":  # which the head, and so the classes, play no part in
                data.settle(session)
                assert data.model_arguments()["num_classes"] == 3
                continue
            with pytest.raises(DataError, match=said):
                data.model_arguments()
            with pytest.raises(DataError, match=said):
                data.settle(session)
    with pytest.raises(DataError, match=r"trained with data.channels=4, but it is 3 here; set data.channels=4"):
        data.adopt({**data.state(), "channels": 4})


def test_skipping_does_not_hide_that_nothing_can_be_used(scenes, deep_root):
    data = scenes(root=str(deep_root), channels=1, on_error="skip")
    with pytest.raises(
        DataError, match=r"all of the first 14 samples had to be left out; the last: .* holds uint16 values"
    ):
        data.train[keys(range(len(data.train)))]
