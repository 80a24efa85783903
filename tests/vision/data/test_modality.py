"""MMRS-1M with masks, and with images of several kinds of sensors in one training."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from exp.errors import DataError
from exp.vision.data.mmrs1m import modality_in
from exp.vision.data.modality import ModalityDraw

CLASSES = ["a", "b"]


@pytest.fixture
def root(tmp_path, noise):
    """Masks under the three names that users give their folders; SSDD is SAR, IR_ship infrared; one comes in parts."""
    for name, place, masks, count in (
        ("Potsdam", "", "labels", 12),
        ("SSDD", "", "masks", 10),
        ("IR_ship", "train/", "annotations", 10),
        ("IR_ship", "test/", "annotations", 2),
    ):
        above = tmp_path / "segmentation" / name / place
        for number in range(count):
            noise(above / "images" / f"{number}.png", 20, 30, channels=3)
            (above / masks).mkdir(exist_ok=True)
            Image.fromarray(np.full((20, 30), number % 2, np.uint8)).save(above / masks / f"{number}.png")
    return tmp_path


@pytest.fixture
def masked(segmentation, root):
    return lambda **values: segmentation(root=str(root), layout="mmrs1m", classes=CLASSES, **{"size": 20, **values})


def test_masks_are_found_whatever_their_folder_is_called(masked):
    data = masked()
    assert {part: len(getattr(data, part)) for part in ("train", "val", "test")} == {"train": 24, "val": 4, "test": 6}
    assert data.record(lambda value: [value])["datasets"] == ["IR_ship", "Potsdam", "SSDD"]
    assert len(masked(modality="infrared").test) == 2
    assert len(masked(datasets=["ssdd"], split=[0.5, 0.5, 0.0]).train) == 5
    image, label = (data.train[torch.tensor([[0, 0]])][key] for key in ("image", "label"))
    assert label.shape == image.shape[:1] + image.shape[2:]


def test_a_single_set_lies_in_the_folder_itself(segmentation, tmp_path, noise):
    for number in range(5):
        noise(tmp_path / "segmentation" / "images" / f"{number}.png")
        (tmp_path / "segmentation" / "labels").mkdir(exist_ok=True)
        Image.fromarray(np.zeros((40, 50), np.uint8)).save(tmp_path / "segmentation" / "labels" / f"{number}.png")
    data = segmentation(root=str(tmp_path), layout="mmrs1m", classes=CLASSES, split=[0.6, 0.2, 0.2])
    assert len(data.train) == 3


def test_what_is_missing_is_told(masked, root, segmentation, tmp_path_factory):
    with pytest.raises(DataError, match=r"data.datasets: Vaihingen is not in .*; there are IR_ship, Potsdam, SSDD"):
        masked(datasets=["Vaihingen"])
    (root / "segmentation" / "SSDD" / "masks" / "1.png").unlink()
    with pytest.raises(DataError, match=r"1.png has no mask in .*masks; add it"):
        masked()
    bare = tmp_path_factory.mktemp("bare")
    with pytest.raises(DataError, match="has no folder segmentation; MMRS-1M as published has no masks"):
        segmentation(root=str(bare), layout="mmrs1m", classes=CLASSES)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"modality_weights": {"radar": 1.0}}, "data.modality_weights: radar is not one of optical, sar, infrared"),
        ({"modality_weights": {"sar": -1.0}}, "the share of sar must not be negative"),
        ({"modality_weights": {"optical": 1.0, "sar": 1.0}}, "data.modality_weights has no share for infrared"),
        ({"modality_statistics": {"sar": {"mean": [1.0]}}}, r"data.modality_statistics.sar=.* must be \{mean"),
    ],
)
def test_wrong_shares_and_statistics_are_refused(masked, values, said):
    with pytest.raises(DataError, match=said):
        masked(**values)


def test_the_folder_of_a_data_set_tells_the_modality():
    assert modality_in("/d/segmentation/SSDD/images/x.png") == "sar"
    assert modality_in("/d/detection/HIT-UAV/images/x.png") == "infrared"
    assert modality_in("/d/segmentation/images/x.png") == "optical"


def test_every_epoch_has_the_shares_and_all_samples_come_before_one_comes_again():
    groups = ["optical"] * 70 + ["sar"] * 20 + ["infrared"] * 10
    draw = ModalityDraw(groups, {"optical": 0.6, "sar": 0.3, "infrared": 0.1}, seed=1)
    epochs = [[draw(place, epoch) for place in range(100)] for epoch in range(7)]
    for epoch in epochs:
        assert Counter(groups[number] for number in epoch) == {"optical": 60, "sar": 30, "infrared": 10}
    counts = Counter(number for epoch in epochs for number in epoch)
    assert {counts[number] for number in range(70)} == {6}, "7 times 60 places, 70 samples"
    assert {counts[number] for number in range(70, 90)} <= {10, 11}
    assert {counts[number] for number in range(90, 100)} == {7}
    again = ModalityDraw(groups, {"optical": 6, "sar": 3, "infrared": 1}, seed=1)
    assert [again(place, 5) for place in range(100)] == epochs[5]
    assert epochs[0] != epochs[1]


def test_a_data_set_draws_by_shares_in_training_alone(masked):
    shares = {"optical": 0.2, "sar": 0.2, "infrared": 0.6}
    data = masked(modality_weights=shares)
    drawn = [data.train.draw(place, 0) for place in range(len(data.train))]
    kinds = Counter(modality_in(data.train.samples[number][0]) for number in drawn)
    assert kinds["infrared"] == pytest.approx(0.6 * len(data.train), abs=1)
    batch = data.train[torch.tensor([[0, 0], [1, 0]])]
    assert batch["index"].tolist() == [0, 1]
    assert data.val.draw is None
    assert data.record(lambda value: [value])["modality_shares"] == pytest.approx(shares)


def test_a_modality_has_statistics_of_its_own(masked):
    data = masked(modality_statistics={"sar": {"mean": [100.0], "std": [20.0]}})

    class Model:
        pixel_mean = torch.tensor([123.675, 116.28, 103.53]).reshape(1, 3, 1, 1)
        pixel_std = torch.tensor([58.395, 57.12, 57.375]).reshape(1, 3, 1, 1)

    data.meet(Model)
    for number, (path, _) in enumerate(data.test.samples):
        raw = torch.from_numpy(data.read(path)).permute(2, 0, 1).float()
        batch = data.test[torch.tensor([number])]["image"]
        seen = ((batch - Model.pixel_mean) / Model.pixel_std)[0]
        sar = modality_in(path) == "sar"
        expected = (raw - 100.0) / 20.0 if sar else ((raw - Model.pixel_mean) / Model.pixel_std)[0]
        torch.testing.assert_close(seen, expected, rtol=0, atol=1e-4)
        prepared = torch.from_numpy(data.prepare(data.read(path), path)).permute(2, 0, 1)
        assert torch.equal(prepared, batch[0])
    state = data.state()
    other = masked()
    other.adopt(state)
    assert other.state()["modality_statistics"] == state["modality_statistics"]
