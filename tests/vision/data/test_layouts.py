from __future__ import annotations

import json
import shutil

import cv2
import numpy as np
import pytest

from exp.errors import DataError
from exp.vision.config import DistillationDataConfig
from exp.vision.data import mmrs1m
from exp.vision.data.listing import split
from tests.vision.data.conftest import SAMPLES


def one(value):
    return [value]


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((), {"train": 14, "val": 2, "test": 4}),
        (("train", "val", "test"), {"train": 20, "val": 20, "test": 20}),
        (("Train", "valid"), {"train": 20, "val": 20}),
        (("train", "test"), {"train": 18, "val": 2, "test": 20}),
    ],
)
def test_folders_of_classes_with_and_without_parts(tmp_path, noise, scenes, parts, expected):
    for part in parts or ("",):
        for number in range(20):
            noise(tmp_path / part / "ab"[number % 2] / f"{number}.png", 4, 4)
    record = scenes(root=str(tmp_path)).record(one)
    assert record.pop("tested_on") == ("test" if "test" in expected else "val")
    assert record.pop("files_in_two_parts")  # noise writes the same content everywhere
    assert record == expected


def test_a_split_is_the_same_everywhere_and_hardly_moves(tmp_path):
    samples = [(str(tmp_path / f"{number}.png"), number % 3) for number in range(300)]
    parts = split(samples, (0.7, 0.1, 0.2), tmp_path, by_class=True)
    assert {part: len(members) for part, members in parts.items()} == {"train": 210, "val": 30, "test": 60}
    assert all(sum(label == 0 for _, label in members) == len(members) // 3 for members in parts.values())
    moved = [(str(tmp_path / "elsewhere" / f"{number}.png"), number % 3) for number in reversed(range(300))]
    again = split(moved, (0.7, 0.1, 0.2), tmp_path / "elsewhere", by_class=True)
    assert [path.rsplit("/")[-1] for path, _ in again["test"]] == [path.rsplit("/")[-1] for path, _ in parts["test"]]
    more = split([*samples, (str(tmp_path / "new.png"), 0)], (0.7, 0.1, 0.2), tmp_path, by_class=True)
    assert len(set(more["test"]) ^ set(parts["test"])) <= 2


def test_classes_may_be_given_in_an_order(tmp_path, noise, scenes):
    for number in range(30):
        noise(tmp_path / "abc"[number % 3] / f"{number}.png", 4, 4)
    assert scenes(root=str(tmp_path), classes=["c", "b", "a"]).val.samples[0][1] == 2
    with pytest.raises(DataError, match=r"/c is none of the classes a, b; correct data.classes"):
        scenes(root=str(tmp_path), classes=["a", "b"])


def test_classes_that_cannot_be_learned_or_measured_are_noted(tmp_path, noise, scenes):
    """A folder of another case in test; and one that train alone has."""
    for name in ("train/a", "train/b", "train/rare", "val/a", "val/b", "test/a", "test/B"):
        noise(tmp_path / name / "0.png", 4, 4)
    data = scenes(root=str(tmp_path))
    record = data.record(one)
    assert record["classes_without_training_images"] == ["B"]
    assert record["classes_not_measured"] == ["rare"]
    for words in (("class B", "do you mean b?"), ("class rare",), ("B and b",)):
        assert any(all(word in note for word in words) for note in data.notes), (words, data.notes)
    given = scenes(root=str(tmp_path), classes=["a", "b", "B", "rare"]).record(one)
    assert given["classes_without_training_images"] == ["B"]
    for number in range(20):
        noise(tmp_path / "flat" / "ab"[number % 2] / f"{number}.png", 4, 4)
    noise(tmp_path / "flat" / "single" / "x.png", 4, 4)
    record = scenes(root=str(tmp_path / "flat")).record(one)
    assert "single" in record.get("classes_without_training_images", record.get("classes_not_measured"))


@pytest.mark.parametrize("parts", [(), ("train",), ("train", "val", "test")])
def test_images_without_labels_may_lie_in_one_folder(tmp_path, noise, make_data, scenes, parts):
    for part in parts or ("",):
        for number in range(20):
            noise(tmp_path / part / f"{number}.png", 4, 4)
        for number in range(10):
            noise(tmp_path / part / "more" / f"{number}.png", 4, 4)
    record = make_data(DistillationDataConfig, root=str(tmp_path)).record(one)
    count = {part: record[part] for part in ("train", "val", "test") if part in record}
    assert sum(count.values()) == 30 * max(len(parts), 1)
    assert min(count.values()) > 0
    assert "classes_not_measured" not in record
    shutil.rmtree(str(tmp_path / (parts[0] if parts else "") / "more"))
    with pytest.raises(DataError, match="has no folders of images by class"):
        scenes(root=str(tmp_path))


def test_what_is_no_class_becomes_none(tmp_path, noise, scenes):
    """An empty folder, a link back to the root, hidden files of other systems; names of any kind are taken."""
    for number in range(10):
        noise(tmp_path / "öde Wüste" / f"a b {number}.JPG", 4, 4)
        noise(tmp_path / "b" / "deeper" / f"{number}.png", 4, 4)
        noise(tmp_path / "b" / f"{number}.png", 4, 4)
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "b" / "loop").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    noise(tmp_path / "b" / ".ipynb_checkpoints" / "0.png", 4, 4)
    noise(tmp_path / "__MACOSX" / "x.png", 4, 4)
    (tmp_path / "__MACOSX" / "x.png").rename(tmp_path / "__MACOSX" / "._x.png")
    for name in (".DS_Store", "Thumbs.db", "._1.png"):
        (tmp_path / "b" / name).write_bytes(b"no image")
    data = scenes(root=str(tmp_path))
    assert data.classes == ["b", "öde Wüste"]
    record = data.record(one)
    assert record["train"] + record["val"] + record["test"] == 30
    assert record["empty_folders"] == ["empty"]
    given = scenes(root=str(tmp_path), classes=["öde Wüste", "sea", "b"])
    assert given.record(one)["classes_without_images"] == ["sea"]
    noise(tmp_path / "elsewhere" / "x.png", 4, 4)
    (tmp_path / "elsewhere").rename(tmp_path.parent / f"{tmp_path.name}_more")
    (tmp_path / "b" / "linked").symlink_to(tmp_path.parent / f"{tmp_path.name}_more")
    assert sum(scenes(root=str(tmp_path)).record(one)[part] for part in ("train", "val", "test")) == 31
    (tmp_path / "twin").symlink_to(tmp_path / "b")
    with pytest.raises(DataError, match=r"twin and .*b are the same folder, by a link, but two classes"):
        scenes(root=str(tmp_path))


def test_two_folders_for_one_part_are_refused(tmp_path, noise, scenes):
    for part in ("train", "val", "validation"):
        noise(tmp_path / part / "a" / "1.png", 4, 4)
    with pytest.raises(DataError, match=r"val and .*validation are both the val split"):
        scenes(root=str(tmp_path))


def test_a_share_that_leaves_nothing_is_told(tmp_path, noise, scenes):
    noise(tmp_path / "a" / "1.png", 4, 4)
    noise(tmp_path / "a" / "2.png", 4, 4)
    with pytest.raises(DataError, match=r"data.split=\[0.7, 0.1, 0.2\] leaves nothing of the 2 samples .* for"):
        scenes(root=str(tmp_path))


# -- MMRS-1M ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mmrs(tmp_path, noise):
    """The sample, a second set whose categories are spelt in another way, and one with answers only."""
    root = tmp_path / "mmrs1m" / "data"
    shutil.copytree(SAMPLES / "mmrs1m" / "data", root)
    for number in range(20):
        for name in ("Water", "dense_residential"):
            noise(root / "classification" / "UCMerced_split" / "train" / name / f"{number}.jpg", 8, 8)
    answers = []
    for number in range(30):
        noise(root / "classification" / "DCSR" / "images" / f"{number}.jpg", 8, 8)
        answer = ("WATER", "DenseResidential", "sea-lake")[number % 3]
        path = f"classification/DCSR/images/{number}.jpg"
        key, path = (("image", f"data/{path}"), ("image_path", path))[number % 2], path
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": answer}]
        answers.append({key[0]: key[1], "conversations": turns})
    (root / "json" / "classification" / "DSCR_cls.json").write_text(json.dumps(answers))
    return root


def test_mmrs1m_unites_the_classes_of_its_sets(mmrs, scenes):
    data = scenes(root=str(mmrs), layout="mmrs1m")
    assert data.classes == ["building", "dense residential", "land", "road", "sea lake", "vegetation", "water"]
    record = data.record(one)
    assert record["datasets"] == ["DCSR", "DUBAI_split", "UCMerced_split"]
    assert record["missing_datasets"] == ["EuroSAT", "FGSCR", "NWPU-RESISC45", "RSSCN7", "WHU-RS19"]
    assert record["train"] + record["val"] + record["test"] == 60 + 40 + 30
    by_class = {}
    for part in (data.train, data.val, data.test):
        for path, label in part.samples:
            by_class.setdefault(data.classes[label], set()).add(path.split("classification/")[1].split("/")[0])
    assert by_class["water"] == {"DCSR", "DUBAI_split", "UCMerced_split"}
    assert by_class["dense residential"] == {"DCSR", "UCMerced_split"}


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("ucmerced", ["Water", "dense_residential"]),
        ("DCSR", ["DenseResidential", "WATER", "sea-lake"]),
        ("DUBAI", ["building", "land", "road", "vegetation", "water"]),
    ],
)
def test_one_set_of_mmrs1m_keeps_its_names(mmrs, scenes, name, classes):
    data = scenes(root=str(mmrs), layout="mmrs1m", datasets=[name])
    assert data.classes == classes
    assert "missing_datasets" not in data.record(one)
    if name == "DUBAI":
        assert data.tested_on == "test"
        assert len(data.test) == 20


def test_what_mmrs1m_lacks_is_told(mmrs, scenes):
    with pytest.raises(DataError, match=r"data.datasets: WHU-RS19 is not in .*; there are DCSR, DUBAI_split, UCMerced"):
        scenes(root=str(mmrs), layout="mmrs1m", datasets=["DCSR", "WHU-RS19"])
    with pytest.raises(DataError, match=r"no data set of data.modality=sar; there are DCSR \(optical\)"):
        scenes(root=str(mmrs), layout="mmrs1m", modality="sar")
    with pytest.raises(DataError, match=r"holds no MMRS-1M(.|\n)*there is one here: data.root="):
        scenes(root=str(mmrs.parent), layout="mmrs1m")
    (mmrs / "classification" / "DCSR" / "images" / "3.jpg").unlink()
    with pytest.raises(DataError, match=r"DCSR/images/3.jpg is missing, and 0 more"):
        scenes(root=str(mmrs), layout="mmrs1m")
    (mmrs / "json" / "classification" / "DSCR_cls.json").write_text('[{"image": "x.jpg"}]')
    with pytest.raises(DataError, match=r"DSCR_cls.json, entry 0: has no image and answer"):
        scenes(root=str(mmrs), layout="mmrs1m")
    (mmrs / "json" / "classification" / "DSCR_cls.json").unlink()
    with pytest.raises(DataError, match=r"DCSR has neither train and test folders nor answers in"):
        scenes(root=str(mmrs), layout="mmrs1m")


def test_images_without_an_answer_are_counted(mmrs, noise, scenes):
    noise(mmrs / "classification" / "DCSR" / "images" / "more.jpg", 8, 8)
    assert scenes(root=str(mmrs), layout="mmrs1m").record(one)["without_label"] == {"DCSR": 1}


@pytest.mark.parametrize(
    ("name", "modality"),
    [("HRSID", "sar"), ("SARV2", "sar"), ("SSDD", "sar"), ("IR", "infrared"), ("HIT-UAV", "infrared"),
     ("infrared_city", "infrared"), ("FGSCR_split", "optical"), ("AIRPORT", "optical")],
)  # fmt: skip
def test_names_tell_the_modality(name, modality):
    assert mmrs1m.modality_of(name) == modality


# -- LoveDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["published", "converted"])
def test_both_layouts_of_loveda_give_the_same_labels(tmp_path, noise, segmentation, layout):
    numbers = np.random.default_rng(0).integers(0, 8, (32, 32)).astype(np.uint8)
    for part in ("train", "val"):
        if layout == "published":
            folders = [tmp_path / part.capitalize() / area / "{}_png" for area in ("Urban", "Rural")]
            written = numbers
        else:
            folders = [tmp_path / "{}_dir" / part]
            written = np.where(numbers == 0, 255, numbers.astype(int) - 1).astype(np.uint8)
        for number, folder in enumerate(folders):
            kinds = ("images", "masks") if layout == "published" else ("img", "ann")
            image, mask = (str(folder).format(kind) for kind in kinds)
            noise(tmp_path / image / f"{number}.png", 32, 32)
            (tmp_path / mask).mkdir(parents=True)
            cv2.imwrite(f"{mask}/{number}.png", written)
    data = segmentation(root=str(tmp_path), layout="loveda")
    assert len(data.classes) == 7
    assert data.tested_on == "val"
    assert len(data.train) == (2 if layout == "published" else 1)
    _, labels = data.val.load(0)
    np.testing.assert_array_equal(labels, np.where(numbers == 0, 255, numbers.astype(int) - 1))


def test_a_root_beside_loveda_is_told(tmp_path, noise, segmentation):
    noise(tmp_path / "LoveDA" / "Train" / "Urban" / "images_png" / "0.png", 8, 8)
    with pytest.raises(DataError, match=r"holds no LoveDA(.|\n)*there is one here: data.root=.*LoveDA$"):
        segmentation(root=str(tmp_path), layout="loveda")
    with pytest.raises(DataError, match=r"Urban/masks_png is missing"):
        segmentation(root=str(tmp_path / "LoveDA"), layout="loveda")


# -- images and masks -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiles(tmp_path, noise):
    for tile in ("tile1", "deep/tile2"):
        for number in range(5):
            noise(tmp_path / tile / "pictures" / f"part_{number}.jpg", 8, 8)
            (tmp_path / tile / "masks").mkdir(exist_ok=True)
            cv2.imwrite(str(tmp_path / tile / "masks" / f"part_{number}.png"), np.zeros((8, 8), np.uint8))
    return tmp_path


def test_pairs_are_found_at_any_depth(tiles, segmentation):
    values = {"root": str(tiles), "images": "pictures", "classes": ["a", "b"]}
    data = segmentation(**values, parts={"train": ["*_[0-2].*"], "val": ["deep/*_3.*"], "test": ["*_4.*"]})
    assert data.record(one) == {
        "train": 6,
        "val": 1,
        "test": 2,
        "tested_on": "test",
        "in_no_part": 1,
        "files_in_two_parts": 3,
    }
    image, mask = data.val.samples[0]
    assert image.endswith("deep/tile2/pictures/part_3.jpg")
    assert mask.endswith("deep/tile2/masks/part_3.png")
    assert segmentation(**values, split=[0.8, 0.2, 0.0]).record(one)["train"] == 8


def test_what_has_no_partner_is_named(tiles, segmentation):
    values = {"root": str(tiles), "images": "pictures", "classes": ["a", "b"], "split": [0.8, 0.2, 0.0]}
    lone = tiles / "tile1" / "masks" / "part_0.png"
    lone.rename(lone.with_name("other.png"))
    with pytest.raises(DataError, match=r"pictures/part_0.jpg has no mask in .*(.|\n)*and 1 more"):
        segmentation(**values)
    record = segmentation(**values, on_error="skip").record(one)
    assert record["without_partner"] == 2
    assert record["train"] + record["val"] == 9


# -- before anything starts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"root": "/nowhere"}, r"data.root=/nowhere is no folder; set it to where mine lies"),
        ({"root": None}, r"data.root is not set, and mine does not come with exp"),
        ({"sample_data": "dubay"}, r"the sample data dubay of exp are not installed"),
        ({"layout": "mmrs"}, r"data.layout=mmrs is not one of folders, mmrs1m"),
        ({"layout": "mmrs1m", "modality": "radar"}, r"data.modality=radar is not one of optical, sar, infrared"),
        ({"on_error": "ignore"}, r"data.on_error=ignore is not one of raise, skip"),
        ({"split": [0.7, 0.2, 0.2]}, r"data.split=\[0.7, 0.2, 0.2\] must be three shares that add up to 1"),
        ({"split": [1.0, 0.0, 0.0]}, r"only the last may be 0"),
        ({"value_range": [3, 3]}, r"data.value_range=\[3.*\] must be \[low, high\]"),
        ({"value_range": "auto2"}, r"data.value_range=auto2 must be \[low, high\]"),
        ({"value_range": 3000}, r"data.value_range=3000 must be \[low, high\]"),
        ({"num_workers": -1}, r"data.num_workers=-1 must be at least 0"),
    ],
)
def test_wrong_values_of_scenes_are_told(scenes, tmp_path, values, said):
    with pytest.raises(DataError, match=said):
        scenes(**{"root": None if "sample_data" in values else str(tmp_path), **values})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "neither data.palette nor data.classes is set"),
        ({"palette": {"a": "12345"}}, "the colour '12345' of a must be RRGGBB in hexadecimal, quoted twice"),
        ({"palette": {"a": "aaaaaa"}, "ignore_colours": ["inf"]}, r"'data.ignore_colours=\[\"6E1234\"\]'"),
        (
            {"palette": {"a": "aaaaaa"}, "classes": ["a", "b"]},
            "data.palette has the classes a, but data.classes=.*null",
        ),
        ({"palette": {"a": "aaaaaa"}, "mask_values": {1: 0}}, "data.mask_values is for masks of class numbers"),
        ({"classes": ["a", "b", "a"]}, r"data.classes=\['a', 'b', 'a'\] names a twice"),
        ({"classes": ["a", "b"], "mask_values": {255: 1}}, "255 is in data.mask_values and in data.ignore_values"),
        ({"classes": ["a"], "ignore_values": [2**31]}, "data.ignore_values names 2147483648, which no mask can hold"),
        ({"classes": ["a"], "layout": "loveda"}, "data.classes names a, but LoveDA has the classes background"),
        ({"palette": {"a": "aaaaaa", "b": "AAAAAA"}}, "b and a have the same colour AAAAAA"),
        ({"palette": {"a": "aaaaaa"}, "ignore_colours": ["AAAAAA"]}, "ignore_colours and a have the same colour"),
        ({"classes": ["a"], "mask_values": {1: 0, 2: 1}}, "data.mask_values: 2: 1 is no class number; there are 1"),
        ({"classes": ["a"], "parts": {"train": ["*"]}}, "data.parts names train; it must have train and val"),
        ({"classes": ["a"], "masks": "x"}, "data.root=.* has no folder images"),
    ],
)
def test_wrong_values_of_segmentation_are_told(segmentation, tmp_path, values, said):
    with pytest.raises(DataError, match=said):
        segmentation(root=str(tmp_path), **values)


def test_images_that_would_count_twice_are_refused(tiles, segmentation):
    values = {"root": str(tiles), "images": "pictures", "classes": ["a", "b"]}
    with pytest.raises(DataError, match=r"data.parts: .*part_2.jpg and 1 more are in train and in val"):
        segmentation(**values, parts={"train": ["*_[0-2].*"], "val": ["*_[23].*"]})
    (tiles / "again").symlink_to(tiles / "tile1")
    with pytest.raises(DataError, match=r"tile1/pictures and .*again/pictures are the same folder|again.*tile1"):
        segmentation(**values)
    (tiles / "again").unlink()
    (tiles / "tile1" / "loop").symlink_to(tiles)
    assert segmentation(**values, split=[0.8, 0.2, 0.0]).record(one)["train"] == 8
    shutil.copy(tiles / "tile1" / "pictures" / "part_0.jpg", tiles / "tile1" / "pictures" / "part_0.JPEG")
    with pytest.raises(DataError, match=r"part_0.(jpg|JPEG) and .*part_0.(jpg|JPEG) have the same name"):
        segmentation(**values)


@pytest.mark.parametrize(
    ("root", "said"),
    [
        (".", "a level deeper there is one: data.root={tmp}/scenes"),
        ("scenes/a", "data.root seems to be the folder of one class: data.root={tmp}/scenes"),
    ],
)
def test_a_root_too_high_or_too_deep_is_told(tmp_path, noise, scenes, root, said):
    for name in "ab":
        noise(tmp_path / "scenes" / name / "1.png", 4, 4)
    with pytest.raises(DataError) as caught:
        scenes(root=str(tmp_path / root))
    assert said.format(tmp=tmp_path) in str(caught.value)
    assert "expected: <data.root>/<class>/*.jpg" in str(caught.value)
