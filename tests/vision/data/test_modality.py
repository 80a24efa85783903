"""MMRS-1M with masks, and with images of several kinds of sensors in one training."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.vision.data.dataset import ModalityDraw
from exp.vision.data.mmrs1m import modality_of_path
from tests.vision.data.conftest import layout, record, refused

GIVEN = {"layout": layout("mmrs1m.MMRS1MMasks"), "classes": ["a", "b"]}


@pytest.fixture
def masked(segmentation, pairs):
    """Masks under the three names that users give their folders; SSDD is SAR, IR_ship infrared; one comes in parts."""
    places = {"Potsdam/labels": 12, "SSDD/masks": 10, "IR_ship/train/annotations": 10, "IR_ship/test/annotations": 2}
    for masks, count in places.items():
        images = f"segmentation/{masks.rpartition('/')[0]}/images"
        root = pairs(count, lambda number: np.full((20, 30), number % 2), images, f"segmentation/{masks}")
    return lambda **values: segmentation(root=root, **GIVEN, **{"size": 20, **values})


def test_masks_are_found_whatever_their_folder_is_called(masked):
    data = masked()
    expected = {"train": 24, "val": 4, "test": 6, "tested_on": "test", "datasets": ["IR_ship", "Potsdam", "SSDD"]}
    assert record(data) == expected
    assert len(masked(modality="infrared").test) == 2
    assert len(masked(datasets=["ssdd"], split_ratio=[0.5, 0.5, 0.0]).train) == 5


@pytest.mark.parametrize(("values", "said"), [
    ({"datasets": ["Vaihingen"]}, "data.datasets=.*Vaihingen.*; available: IR_ship .*, Potsdam .*, SSDD"),
    ({"datasets": ["SSDD"]}, "1.png has no mask in .*masks"),
    ({"modality": "optical", "modality_weights": {"sar": 1.0}}, "data.modality_weights has no share for optical"),
])  # fmt: skip
def test_what_is_missing_is_refused(masked, tmp_path, values, said):
    (tmp_path / "segmentation" / "SSDD" / "masks" / "1.png").unlink()
    refused(said, masked, **values)


def test_a_modality_is_declared_for_a_data_set_or_its_guess_is_reported(masked, tmp_path):
    own = {"sar": {"mean": [10.0], "std": [20.0]}}
    (tmp_path / "segmentation" / "Potsdam").rename(tmp_path / "segmentation" / "Radar7")
    data = masked(modality_statistics=own)
    assert record(data)["modalities"] == {"IR_ship": "infrared", "Radar7": "optical", "SSDD": "sar"}
    assert any("Radar7 optical" in note for note in data.notes)
    data = masked(modality_statistics=own, modalities={"radar7": "sar", "SSDD": "optical"})
    assert record(data)["modalities"] == {"IR_ship": "infrared", "Radar7": "sar", "SSDD": "optical"}
    assert not any("Radar7" in note for note in data.notes)
    assert {data.read.modalities.of(path) for path, _ in data.train.samples if "Radar7" in path} == {"sar"}
    assert len(masked(modality="sar", modalities={"Radar7": "sar", "SSDD": "optical"}).train) == 8
    refused("data.modalities=.*Radar8.*did you mean 'Radar7'", masked, modalities={"Radar8": "sar"})
    refused("data.modalities=.*radar.*optical, sar, infrared", masked, modalities={"Radar7": "radar"})


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


def test_a_data_set_draws_by_shares_in_training_alone(masked):
    shares = {"optical": 0.2, "sar": 0.2, "infrared": 0.6}
    data = masked(modality_weights=shares)
    drawn = [data.train.samples[data.train.draw(place, 0)][0] for place in range(len(data.train))]
    assert sum(modality_of_path(path) == "infrared" for path in drawn) == pytest.approx(0.6 * len(drawn), abs=1)
    assert data.val.draw is None
    assert record(data)["modality_shares"] == pytest.approx(shares)


def test_a_modality_has_statistics_of_its_own(masked):
    data = masked(modality_statistics={"sar": {"mean": [100.0], "std": [20.0]}})
    pixel_mean = torch.tensor([123.675, 116.28, 103.53]).reshape(1, 3, 1, 1)
    pixel_std = torch.tensor([58.395, 57.12, 57.375]).reshape(1, 3, 1, 1)
    data.use_model_statistics(SimpleNamespace(pixel_mean=pixel_mean, pixel_std=pixel_std))
    for number, (path, _) in enumerate(data.test.samples):
        raw = torch.from_numpy(data.read(path)).permute(2, 0, 1).float()
        batch = data.test[torch.tensor([number])]["image"]
        mean, std = (100.0, 20.0) if modality_of_path(path) == "sar" else (pixel_mean, pixel_std)
        torch.testing.assert_close((batch - pixel_mean) / pixel_std, (raw[None] - mean) / std, rtol=0, atol=1e-4)
        prepared = torch.from_numpy(data.apply_eval_pipeline(data.read(path), path)).permute(2, 0, 1)
        assert torch.equal(prepared, batch[0])
    other = masked()
    other.load_state_dict(data.state_dict())
    assert other.state_dict()["modality_statistics"] == data.state_dict()["modality_statistics"]
