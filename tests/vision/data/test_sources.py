"""Several sources in one data set: classes, values and modality of each, shares of an epoch, metrics per source."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from exp.distributed import Distributed
from exp.vision.data.sources import SourceDraw
from tests.vision.data.conftest import layout, record, refused

CLASSES = ["water", "road", "forest"]


@pytest.fixture
def folders(tmp_path, noise):
    """Two folders of masks: ``fields`` by numbers from 1, where 0 is ignored and 3 a class that the data lack; ``city``
    by colors."""

    def write(name, count, value):
        for number in range(count):
            noise(tmp_path / name / "images" / f"{number}.png", 20, 30, seed=number + 100 * len(name))
            (tmp_path / name / "masks").mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(tmp_path / name / "masks" / f"{number}.png"), value(number))
        return str(tmp_path / name)

    fields = write("fields", 12, lambda number: np.full((20, 30), number % 4, np.uint8))
    city = write("city", 30, lambda number: np.full((20, 30, 3), (0, 0, 255) if number % 2 else (255, 0, 0), np.uint8))
    return [
        {"root": fields, "classes": ["road", "forest", "hedge"], "label_map": {1: 0, 2: 1, 3: 2}, "ignore_values": [0],
         "class_map": {"hedge": "forest"}, "modality": "sar", "weight": 0.25},
        {"root": city, "palette": {"road": "FF0000", "sea": "0000FF"}, "class_map": {"sea": "water"}, "weight": 0.75},
    ]  # fmt: skip


@pytest.fixture
def mixed(segmentation, folders):
    def make(sources=None, **values):
        return segmentation(sources=folders if sources is None else sources, classes=CLASSES, size=20, **values)

    return make


def test_labels_are_those_of_the_data_whatever_the_source_calls_them(mixed, folders):
    data = mixed(split_ratio=[0.4, 0.6, 0.0])
    assert data.classes == CLASSES
    found = {}
    for number, (path, _) in enumerate(data.val.samples):
        labels = np.unique(data.val[torch.tensor([number])]["label"]).tolist()
        name, file = path.split("/")[-3], int(path.split("/")[-1][:-4])
        found.setdefault((name, file % (4 if name == "fields" else 2)), set()).update(labels)
    expected = {("fields", 0): {255}, ("fields", 1): {1}, ("fields", 2): {2}, ("fields", 3): {2},
                ("city", 0): {0}, ("city", 1): {1}}  # fmt: skip
    assert found == {key: value for key, value in expected.items() if key in found}
    assert len(found) >= 5
    dropped = mixed([{**folders[0], "class_map": {"hedge": None}}, folders[1]])
    assert sum(255 in np.unique(dropped.train.load(n)[1]) for n in range(len(dropped.train.samples))) >= 2


def test_classes_of_scenes_are_joined_by_name(scenes, tmp_path, noise):
    for name, classes in (("a", ("Road", "Sea")), ("b", ("Forest", "Street"))):
        for each in classes:
            for number in range(10):
                noise(tmp_path / name / each / f"{number}.png", 8, 8, seed=number + len(name + each))
    sources = [{"root": str(tmp_path / "a")}, {"root": str(tmp_path / "b"), "class_map": {"Street": "Road"}}]
    data = scenes(sources=sources, size=8)
    assert data.classes == ["Forest", "Road", "Sea"]
    names = {path.split("/")[-2]: data.classes[label] for path, label in data.train.samples}
    assert names == {"Road": "Road", "Sea": "Sea", "Forest": "Forest", "Street": "Road"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"class_map": {}}, "fields has the class hedge, which is none of water, road, forest"),
        ({"weight": 0}, "weight above 0"),
        ({"labels": {}}, "data.sources.0..labels is no key of a source"),
        ({"name": "city"}, "city needs a name of its own"),
        ({"label_map": {"a": 1}}, "data.sources.0..label_map"),
        ({"root": "/nowhere"}, "/nowhere is no folder"),
        ({"bands": [1]}, "other numbers of channels: fields 1, city 3"),
    ],
)
def test_what_does_not_fit_is_refused(mixed, folders, change, said):
    refused(said, mixed, [{**folders[0], **change}, folders[1]])


def test_either_all_sources_have_a_weight_or_none(mixed, folders):
    without = [{key: value for key, value in each.items() if key != "weight"} for each in folders]
    refused("only some have a weight", mixed, [without[0], folders[1]])
    shares = {name: part["share"] for name, part in record(mixed(without))["sources"].items()}
    assert shares == pytest.approx({"fields": 12 / 42, "city": 30 / 42}, abs=0.05)


def test_every_epoch_has_the_shares_and_all_samples_come_before_one_comes_again():
    counts, weights = [70, 20, 10], [0.6, 0.3, 0.1]
    draw = SourceDraw(counts, weights, seed=1)
    groups = ["optical"] * 70 + ["sar"] * 20 + ["infrared"] * 10
    epochs = [[draw(place, epoch) for place in range(100)] for epoch in range(7)]
    for epoch in epochs:
        assert Counter(groups[number] for number in epoch) == {"optical": 60, "sar": 30, "infrared": 10}
    used = Counter(number for epoch in epochs for number in epoch)
    assert {used[number] for number in range(70)} == {6}, "7 times 60 places, 70 samples"
    assert {used[number] for number in range(70, 90)} <= {10, 11}
    assert {used[number] for number in range(90, 100)} == {7}
    again = SourceDraw(counts, [6, 3, 1], seed=1)
    assert [again(place, 5) for place in range(100)] == epochs[5]


def test_a_data_set_draws_by_weight_in_training_alone(mixed):
    data = mixed()
    drawn = [data.train.samples[data.train.draw(place, 0)][0] for place in range(len(data.train))]
    assert sum("/city/" in path for path in drawn) == pytest.approx(0.75 * len(drawn), abs=1)
    assert data.val.draw is None
    assert record(data)["sources"]["city"]["share"] == pytest.approx(0.75)


def test_a_modality_has_statistics_of_its_own(mixed):
    data = mixed(modality_statistics={"sar": {"mean": [100.0], "std": [20.0]}}, split_ratio=[0.5, 0.5, 0.0])
    pixel_mean = torch.tensor([123.675, 116.28, 103.53]).reshape(1, 3, 1, 1)
    pixel_std = torch.tensor([58.395, 57.12, 57.375]).reshape(1, 3, 1, 1)
    data.use_model_statistics(SimpleNamespace(pixel_mean=pixel_mean, pixel_std=pixel_std))
    seen = set()
    for number, (path, _) in enumerate(data.test.samples):
        raw = torch.from_numpy(data.read(path)).permute(2, 0, 1).float()
        batch = data.test[torch.tensor([number])]["image"]
        seen.add("/fields/" in path)
        mean, std = (100.0, 20.0) if "/fields/" in path else (pixel_mean, pixel_std)
        torch.testing.assert_close((batch - pixel_mean) / pixel_std, (raw[None] - mean) / std, rtol=0, atol=1e-4)
        prepared = torch.from_numpy(data.apply_eval_pipeline(data.read(path), path)).permute(2, 0, 1)
        assert torch.equal(prepared.float(), batch[0].float())
    assert seen == {True, False}
    other = mixed()
    other.load_state_dict(data.state_dict())
    assert other.state_dict()["modality_statistics"] == data.state_dict()["modality_statistics"]


def test_metrics_are_those_of_all_and_of_each_source(mixed):
    data = mixed(split_ratio=[0.4, 0.6, 0.0])
    joint, *parts = data.metrics()
    assert [part.names[0] for part in parts] == ["mIoU_fields", "mIoU_city"]
    for metric in (joint, *parts):
        metric.reset()
    for number in range(0, len(data.val), 4):
        batch = data.val[torch.arange(number, min(number + 4, len(data.val)))]
        predicted = torch.where(batch["label"] == 255, torch.zeros_like(batch["label"]), batch["label"])
        for row, source in enumerate(batch["source"]):
            predicted[row] = predicted[row] if source else 0  # all of `city` is right, nothing of `fields`
        for metric in (joint, *parts):
            metric.update(predicted, batch)
    of_all, fields, city = (metric.compute(Distributed()) for metric in (joint, *parts))
    assert (fields["pixel_accuracy_fields"], city["pixel_accuracy_city"]) == (0.0, 1.0)
    assert 0 < of_all["pixel_accuracy"] < 1


# -- MMRS-1M is one use ------------------------------------------------------------------------------------------------

MASKS = {"layout": layout("mmrs1m.MMRS1MMasks"), "classes": ["a", "b"], "size": 20}


@pytest.fixture
def mmrs(pairs):
    """Masks under the three names that users give their folders; one data set comes in parts."""
    places = {"Potsdam/labels": 12, "SSDD/masks": 10, "IR_ship/train/annotations": 10, "IR_ship/test/annotations": 2}
    for masks, count in places.items():
        images = f"segmentation/{masks.rpartition('/')[0]}/images"
        root = pairs(count, lambda number: np.full((20, 30), number % 2), images, f"segmentation/{masks}")
    return root


def test_masks_of_mmrs1m_are_found_whatever_their_folder_is_called(segmentation, mmrs):
    data = segmentation(root=mmrs, **MASKS)
    expected = {"train": 24, "val": 4, "test": 6, "tested_on": "test", "datasets": ["IR_ship", "Potsdam", "SSDD"]}
    assert record(data) == expected
    assert len(segmentation(root=mmrs, **MASKS, datasets=["ssdd"], split_ratio=[0.5, 0.5, 0.0]).train) == 5
    refused("data.datasets=.*Vaihingen.*; available: IR_ship, Potsdam, SSDD", segmentation, root=mmrs, **MASKS,
            datasets=["Vaihingen"])  # fmt: skip


def test_data_sets_of_mmrs1m_are_sources_with_a_modality_each(segmentation, mmrs):
    sources = [
        {"name": "optical", "datasets": ["Potsdam"], "weight": 0.6},
        {"name": "sar", "datasets": ["SSDD"], "modality": "sar", "weight": 0.3},
        {"name": "infrared", "datasets": ["IR_ship"], "modality": "infrared", "weight": 0.1},
    ]
    data = segmentation(root=mmrs, **MASKS, sources=sources)
    assert {data.read.modalities.of(path) for path, _ in data.train.samples} == {None, "sar", "infrared"}
    assert record(data)["sources"]["infrared"]["share"] == pytest.approx(0.1)


@pytest.mark.extended
def test_stats_count_pixels_by_class_and_source_alike_on_two_ranks(exp, folders):
    sources = (
        f"data.sources=[{{root: {folders[0]['root']}, classes: [road, forest, hedge], label_map: {{1: 0, 2: 1, 3: 2}}, "
        f"ignore_values: [0], class_map: {{hedge: forest}}}}, {{root: {folders[1]['root']}, "
        "palette: {road: 'FF0000', water: '0000FF'}}]"
    )
    words = ["experiment=dinov3_dubai", "data=segmentation", "data.name=both", "data.classes=[water,road,forest]",
             sources, "task=stats", "backend=cpu", "data.num_workers=0"]  # fmt: skip
    for name, more in (("one", []), ("two", ["nproc=2"])):
        done = exp(*words, *more, f"output_dir={name}")
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (json.loads((exp.path(name) / "statistics.json").read_text()) for name in ("one", "two"))
    assert one == two
    assert set(one["labels"]) == {"fields", "city"} == set(one["sources"])
    assert one["sources"]["fields"]["images"] + one["sources"]["city"]["images"] == one["images"]
    parts = one["sources"].values()
    for band in range(3):
        total = sum(part["mean"][band] * part["values"][band] for part in parts)
        assert total / sum(part["values"][band] for part in parts) == pytest.approx(one["mean"][band])
        assert min(part["min"][band] for part in parts) == one["min"][band]
        assert {part["percentiles"]["50"][band] for part in parts} != {one["percentiles"]["50"][band]}
    city = one["labels"]["city"]
    assert (city["forest"], city["road"] + city["water"]) == (0, one["sources"]["city"]["images"] * 600)
    assert one["labels"]["fields"]["water"] == 0


@pytest.mark.extended
def test_a_training_on_two_sources_is_the_same_on_two_ranks_and_after_resuming(exp, folders):
    folders[0].update(label_map={0: 0, 1: 0, 2: 1, 3: 2}, ignore_values=[])  # else the loss is no mean over samples
    sources = [{**each, "split_ratio": [0.6, 0.2, 0.2]} for each in folders]
    (exp.folder / "conf" / "data").mkdir(parents=True)
    content = {
        "defaults": ["segmentation", "_self_"],
        "name": "both",
        "classes": CLASSES,
        "sources": sources,
        "size": 16,
    }
    OmegaConf.save(OmegaConf.create({**content, "size": 16}), str(exp.folder / "conf" / "data" / "both.yaml"))
    words = ["--config-dir", "conf", "experiment=plain", "data=both", "model.module._target_=torch.nn.Conv2d",
             "+model.module.out_channels=3", "+model.module.kernel_size=1", "+model.module.in_channels=3",
             "model.inputs=[image]", "model.loss._target_=torch.nn.CrossEntropyLoss", "backend=cpu", "plots=false",
             "data.num_workers=0", "global_batch_size=4", "max_steps=8", "log_every=1", "optim.lr=1e-4",
             "checkpoint.every_steps=4", "checkpoint.keep_last=4"]  # fmt: skip
    for name, more in (
        ("one", []),
        ("two", ["nproc=2"]),
        ("half", ["resume=one/checkpoints/step_00000004.pth"]),
    ):
        done = exp(*words, *more, f"output_dir={name}")
        assert done.returncode == 0, done.stdout + done.stderr
    one = exp.losses("one")
    assert exp.losses("two") == pytest.approx(one, rel=1e-4)
    assert exp.losses("half") == {step: loss for step, loss in one.items() if step > 4}
    metrics = exp.result("one")["metrics"]
    assert {"mIoU", "mIoU_fields", "mIoU_city"} <= set(metrics)
