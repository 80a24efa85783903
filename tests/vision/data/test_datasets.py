from __future__ import annotations

import random
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch

from exp.data.loader import TrainBatchSampler, make_loader
from exp.distributed import Distributed
from exp.errors import ConfigError
from tests.vision.data.conftest import CROP, cut, keys, record, refused


@pytest.fixture
def thirty(scenes, tmp_path, noise):
    """Makes a data set of three classes of ten images."""
    for number in range(30):
        noise(tmp_path / "abc"[number % 3] / f"{number}.png", seed=number)
    return lambda **values: scenes(**{"root": str(tmp_path), "train_pipeline": CROP, **values})


@pytest.fixture
def masked(segmentation, pairs):
    """Makes a data set of ten images of different sizes, with masks of two classes and 255."""
    root = pairs(10, lambda number: np.random.default_rng(number).choice([0, 1, 255], (40 + number, 50)))
    return lambda **values: segmentation(**{"root": root, "classes": ["x", "y"], "train_pipeline": CROP, **values})


def test_scenes_come_as_models_take_them(thirty):
    data = thirty()
    assert data.classes == ["a", "b", "c"]
    assert record(data) == {"train": 21, "val": 3, "test": 6, "tested_on": "test"}
    batch = data.train[keys(0, 5, 20)]
    assert (batch["image"].shape, batch["image"].dtype) == ((3, 3, 32, 32), torch.uint8)
    assert batch["label"].tolist() == [data.train.samples[number][1] for number in (0, 5, 20)]
    whole, (path, label) = data.val[torch.arange(3)], data.val.samples[1]
    np.testing.assert_array_equal(whole["image"][1].permute(1, 2, 0).numpy(), cv2.imread(path)[..., ::-1])
    assert whole["label"][1] == label


def test_masks_come_with_their_images(masked):
    data = masked(split_ratio=[0.5, 0.5, 0.0])
    assert (data.test_split_name, data.test) == ("val", data.val)
    batch = data.train[keys(0, 3)]
    assert (batch["image"].shape, batch["label"].shape) == ((2, 3, 32, 32), (2, 32, 32))
    whole = data.val[torch.arange(5)]
    heights = [cv2.imread(path).shape[0] for path, _ in data.val.samples]
    assert whole["sizes"] == [(height, 50) for height in heights]
    assert whole["image"].shape == (5, 3, max(heights), 50)
    for image, label, height, (_, mask) in zip(whole["image"], whole["label"], heights, data.val.samples):
        np.testing.assert_array_equal(label[:height].numpy(), cv2.imread(mask, -1))
        assert (label[height:] == 255).all()
        assert (image[:, height:] == 0).all()


def test_augmentation_depends_on_seed_epoch_and_sample_only(thirty):
    """Not on the batch, nor on the random state, in which ranks and loader workers differ."""
    data = thirty()
    together = data.train[keys(4, 9, 2)]["image"]
    np.random.seed(1)
    random.seed(1)
    alone = [data.train[keys(number)]["image"][0] for number in (4, 9, 2)]
    assert torch.equal(together, torch.stack(alone))
    drawn = random.random(), np.random.random()  # which go on as if nothing had been drawn
    assert drawn == (random.Random(1).random(), np.random.RandomState(1).random_sample())
    for other in (data.train[keys(4, epoch=1)], thirty(seed=1).train[keys(4)]):
        assert not torch.equal(together[0], other["image"][0])


def test_decoded_files_are_kept_as_far_as_allowed(thirty):
    data = thirty(cache_mb=1)
    first = data.train[keys(1, 2)]["image"]
    for path, _ in data.train.samples:  # whoever still shows it has kept it
        cut(path, 0)
    assert torch.equal(data.train[keys(1, 2)]["image"], first)
    refused(f"{data.train.samples[3][0]} is empty", data.train.__getitem__, keys(3))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_skipped_does_not_count_and_is_told(masked, workers):
    data = masked(on_error="skip", splits={"train": ["*/[0-5].png"], "val": ["*/[6-9].png"]})
    cut(data.train.samples[3][0])
    cv2.imwrite(data.train.samples[4][1], np.zeros((3, 4), np.uint8))
    refused(r"4\.png is 4x3 pixels, .*4\.png is 50x44", data.train.load, 4)
    for batch in make_loader(data.train, TrainBatchSampler(6, 2, with_epoch=True), workers, seed=0):
        for number, image, label in zip(batch["index"].tolist(), batch["image"], batch["label"]):
            assert (image == 0).all().item() == (label == 255).all().item() == (number in (3, 4))
    assert record(data)["skipped"] == {"count": 2, "files": [path for path, _ in data.train.samples[3:5]]}


def test_a_scene_is_resized_by_the_factor_of_the_images_of_the_data(segmentation, pairs):
    """Data of 100 x 80 pixels, seen at half the size: a scene of 600 x 400 is not seen at a twelfth of it."""
    root = pairs(10, lambda number: np.zeros((80, 100)))
    half = [{"type": "Resize", "scale": [50, 50], "keep_ratio": True}]
    data = segmentation(root=root, classes=["a"], eval_pipeline=half)
    own = data.test.samples[0][0]
    for path, size, seen in [
        (own, (80, 100), (40, 50)), ("x.png", (80, 100), (40, 50)), ("x.png", (400, 600), (200, 300)),
        ("x.png", (50, 50), (25, 25)), ("x.png", (100, 81), (50, 41)), (own, (400, 600), (33, 50)),
    ]:  # fmt: skip
        assert data.prepare_for_map(np.zeros((*size, 3), np.uint8), path).shape[:2] == seen
    assert (data.longest_prepared_side(own), data.longest_prepared_side("x.png")) == (None, 50)
    assert record(data)["resized"] == {"count": 1, "files": {"x.png": [25, 25]}}
    for pipeline in ([*half, {"type": "PadTo", "size": 64}], [*half, {"type": "RandomFlip", "prob": 1.0}]):
        data = segmentation(root=root, classes=["a"], eval_pipeline=pipeline)
        refused("more than one Resize", data.prepare_for_map, np.zeros((400, 600, 3), np.uint8), "x.png")


def test_sizes_that_make_no_batch_are_explained(thirty, tmp_path, noise):
    noise(tmp_path / "a" / "0.png", 30, 30)
    data = thirty(train_pipeline=[{"type": "RandomFlip", "prob": 0.5}], split_ratio=[0.9, 0.1, 0.0])
    with pytest.raises(ConfigError, match=r"data.train_pipeline .* \(30x30, 40x50\)"):
        data.train[keys(*range(len(data.train)))]


def test_a_range_belongs_to_the_weights(scenes, tmp_path):
    """16-bit scenes of a sensor that uses values from 200 to 2600."""
    for number in range(20):
        values = np.random.default_rng(number).integers(200, 2601, (40, 50)).astype(np.uint16)
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        assert cv2.imwrite(str(tmp_path / "ab"[number % 2] / f"{number}.png"), values)
    given = {"root": str(tmp_path), "channels": 1}
    data = scenes(**given, value_range=[200, 2600])
    assert data.val[torch.arange(2)]["image"].mean() == pytest.approx(127.5, abs=3)
    state = data.state_dict()
    assert state == {"classes": ["a", "b"], "channels": 1, "value_range": [200.0, 2600.0]}
    # Used with weights that were trained on other files, it is theirs where none is given.
    theirs = {**state, "value_range": [0.0, 20000.0]}
    for own, expected in (({}, 20000.0), ({"value_range": [0, 100]}, 100.0)):
        other = scenes(**given, **own)
        other.load_state_dict(theirs)
        assert other.state_dict()["value_range"] == [0.0, expected]
        mean = min(1400 / expected, 1.0) * 255
        assert other.val[torch.arange(2)]["image"].mean() == pytest.approx(mean, abs=1)
    refused("holds uint16 values", scenes(**given).val.__getitem__, torch.arange(2))


# -- classes without a pixel ------------------------------------------------------------------------------------------

EIGHT_TWO = {"train": ["*/[0-7].png"], "val": ["*/[89].png"]}


def settled(data):
    """The lines that a training shows before it begins."""
    said = []
    config = SimpleNamespace(task=SimpleNamespace(name="train"), resume=None)
    rank = {"info": SimpleNamespace(rank=0, world_size=1), "distributed": Distributed(), "on_model": lambda _: None}
    data.setup(SimpleNamespace(config=config, weights=None, print=said.append, **rank))
    return said


def test_a_class_without_a_pixel_is_said_before_a_training_with_a_hint(segmentation, pairs):
    """Masks of 0 and 255: 255 does not count unless it is asked for."""
    root = pairs(10, lambda number: np.random.default_rng(number).choice([0, 255], (32, 32)))
    given = {"root": root, "classes": ["land", "water"], "splits": EIGHT_TWO}
    data = segmentation(**given)
    said, found = settled(data), record(data)
    assert found["classes_without_labels"] == {"train": ["water"], "val": ["water"]}
    assert len(said) == 2
    assert all("water" in line and "'data.label_map={0: 0, 255: 1}'" in line for line in said)
    assert settled(segmentation(**given, label_map={0: 0, 255: 1})) == []


def test_a_part_in_which_no_pixel_counts_is_refused_before_the_training(segmentation, pairs):
    root = pairs(10, lambda number: np.full((4, 4), number % 2 if number < 8 else 255))
    data = segmentation(root=root, classes=["land", "water"], splits=EIGHT_TWO)
    refused(r"no class is in 2 of 2 val labels.*data.ignore_values=\[255\]", settled, data)


def test_no_data_in_masks_and_files_that_are_not_read_are_reported(segmentation, pairs, tiff, tmp_path):
    """Labels from 1 to 2; 0 is declared as no data, and would be the first class."""
    root = pairs(10, lambda number: np.full((8, 8), number % 2 + 1))
    for number in range(10):
        (tmp_path / "masks" / f"{number}.png").unlink()
        labels = np.array([[[0, number % 2 + 1] * 4] * 8], np.uint8)
        tiff(tmp_path / "masks" / f"{number}.tif", labels, nodata=0)
    for name in ("images/10.avif", "images/more.ZIP", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    data = segmentation(root=root, classes=["x", "y", "z"], splits=EIGHT_TWO)
    assert torch.bincount(data.val[torch.arange(2)]["label"].flatten().int()).nonzero().flatten().tolist() == [
        1,
        2,
        255,
    ]
    assert [note for note in data.notes if "declare 0 as no data: it does not count" in note]
    said = settled(data)
    assert record(data)["mask_nodata"] == [0]
    assert [line for line in said if "2 files (.avif, .zip) are not read" in line]
    data = segmentation(root=root, classes=["x", "y", "z"], splits=EIGHT_TWO, label_map={0: 0, 1: 1, 2: 2})
    assert data.val[torch.arange(2)]["label"].unique().tolist() == [0, 1, 2]
    assert [note for note in data.notes if "declare 0 as no data: it is a class" in note]
