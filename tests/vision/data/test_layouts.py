from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from exp.vision.data.keys import DistillationDataConfig
from exp.vision.data.layouts import split_by_hash
from tests.vision.data.conftest import SAMPLES, layout, record, refused


@pytest.fixture
def tree(tmp_path, noise):
    """Writes files below a root: small images, each of its own content, and files that are none."""

    def write(*names):
        for number, name in enumerate(names):
            path = tmp_path / name
            if path.suffix.lower() in (".png", ".jpg"):
                noise(path, 4, 4, seed=number)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"?")
        return str(tmp_path)

    return write


def numbered(folder, count):
    return [f"{folder}/{number}.png" for number in range(count)]


def samples(found):
    return sum(found.get(part, 0) for part in ("train", "val", "test"))


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "expected"), [
    ((".",), {"train": 14, "val": 2, "test": 4}),
    (("train", "val", "test"), {"train": 20, "val": 20, "test": 20}),
    (("Train", "valid"), {"train": 20, "val": 20}),
    (("train", "test"), {"train": 18, "val": 2, "test": 20}),
])  # fmt: skip
def test_folders_of_classes_with_and_without_parts(tree, scenes, parts, expected):
    root = tree(*(name for part in parts for label in "ab" for name in numbered(f"{part}/{label}", 10)))
    tested_on = "test" if "test" in expected else "val"
    assert record(scenes(root=root)) == {**expected, "tested_on": tested_on}


def test_a_split_is_the_same_everywhere_and_hardly_moves(tmp_path):
    def dealt(root, numbers):
        images = [(str(root / f"{number}.png"), number % 3) for number in numbers]
        return split_by_hash(images, (0.7, 0.1, 0.2), root, by_class=True)

    parts = dealt(tmp_path, range(300))
    assert {part: len(members) for part, members in parts.items()} == {"train": 210, "val": 30, "test": 60}
    assert all(sum(label == 0 for _, label in members) == len(members) // 3 for members in parts.values())
    elsewhere = dealt(tmp_path / "elsewhere", reversed(range(300)))["test"]
    assert [path.replace("/elsewhere", "") for path, _ in elsewhere] == [path for path, _ in parts["test"]]
    assert len(set(dealt(tmp_path, range(301))["test"]) ^ set(parts["test"])) <= 2


def test_classes_may_be_given_in_an_order_and_those_that_cannot_be_learned_or_measured_are_noted(tree, scenes):
    """A folder of another case in test; and one that train alone has."""
    folders = ("train/a", "train/b", "train/rare", "val/a", "val/b", "test/a", "test/B")
    root = tree(*(f"{name}/0.png" for name in folders))
    data = scenes(root=root)
    said = []
    data.check_files(said.append)
    found = record(data)
    assert len(said) == 3
    assert found["classes_without_labels"] == {"train": ["B"], "val": ["B", "rare"], "test": ["b", "rare"]}
    given = scenes(root=root, classes=["rare", "b", "B", "a"])
    assert [label for _, label in given.val.samples] == [3, 1]
    refused("rare is none of the classes a, b, B; .*data.classes", scenes, root=root, classes=["a", "b", "B"])


@pytest.mark.parametrize("parts", [(".",), ("train", "val", "test")])
def test_images_without_labels_may_lie_in_one_folder(tree, make_data, parts):
    root = tree(*(name for part in parts for name in [*numbered(part, 20), *numbered(f"{part}/more", 10)]))
    found = record(make_data(DistillationDataConfig, root=root))
    assert samples(found) == 30 * len(parts)
    assert min(found["train"], found["val"], found["test"]) > 0


def test_what_is_no_class_becomes_none(tree, tmp_path, scenes):
    """An empty folder, links back to the root, hidden files of other systems; names of any kind are taken."""
    root = tree(
        *(f"öde Wüste/a b {number}.JPG" for number in range(10)), *numbered("b", 10), *numbered("b/deeper", 10),
        "b/.ipynb_checkpoints/0.png", "b/.DS_Store", "b/Thumbs.db", "b/._1.png", "empty/y.gif", "more/x.png",
    )  # fmt: skip
    more = (tmp_path / "more").rename(tmp_path.with_name(f"{tmp_path.name}_more"))
    for link, target in (("loop", "."), ("b/loop", "b"), ("b/up", "."), ("b/linked", more)):
        (tmp_path / link).symlink_to(tmp_path / target)
    data = scenes(root=root)
    assert data.classes == ["b", "öde Wüste"]
    assert samples(record(data)) == 31


@pytest.mark.parametrize(("names", "root", "said"), [
    (["train/a/1.png", "val/a/1.png", "validation/a/1.png"], "", "val and .*validation are both the val split"),
    (["a/1.png", "a/2.png"], "", r"data.split_ratio=\[0.7, 0.1, 0.2\] leaves nothing of the 2 samples"),
    (["scenes/a/1.png", "scenes/b/1.png"], "", "has no folders of images by class.*: scenes/$"),
    (["scenes/a/1.png", "scenes/b/1.png"], "scenes/a", "has no folders of images by class.*: 1.png$"),
    (["b/x.gif", "b/y.gif", "c/z.npy"], "", "files that are read: .png .*: b/, c/$"),
])  # fmt: skip
def test_a_root_that_cannot_be_meant_is_refused_with_what_may_be(tree, tmp_path, scenes, names, root, said):
    tree(*names)
    refused(f"(?ms){said.replace('ROOT', str(tmp_path))}", scenes, root=str(tmp_path / root))


# -- MMRS-1M ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mmrs(tmp_path, tree, scenes):
    """The sample, a second set whose categories are spelt in another way, and one with answers only."""
    root = tmp_path / "data"
    shutil.copytree(SAMPLES / "mmrs1m" / "data", root)
    ucmerced = "data/classification/UCMerced_split/train"
    tree(*numbered(f"{ucmerced}/Water", 20), *numbered(f"{ucmerced}/dense_residential", 20))
    answers = []
    for number, path in enumerate(numbered("classification/DCSR/images", 30)):
        tree(f"data/{path}")
        answer = ("WATER", "DenseResidential", "sea-lake")[number % 3]
        place = {"image_path": path} if number % 2 else {"image": f"data/{path}"}
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": answer}]
        answers.append({**place, "conversations": turns})
    (root / "json" / "classification" / "DSCR_cls.json").write_text(json.dumps(answers))
    return lambda **values: scenes(**{"root": str(root), "layout": layout("mmrs1m.MMRS1M"), **values})


def test_mmrs1m_unites_the_classes_of_its_sets_and_one_keeps_its_own(mmrs, tree):
    tree("data/classification/DCSR/images/more.png")
    data = mmrs()
    found, three = record(data), ["DCSR", "DUBAI_split", "UCMerced_split"]
    assert (found["datasets"], found["without_label"], samples(found)) == (three, {"DCSR": 1}, 60 + 40 + 30)
    assert data.classes == ["building", "dense residential", "land", "road", "sea lake", "vegetation", "water"]
    by_class = {name: set() for name in data.classes}
    for path, label in (*data.train.samples, *data.val.samples, *data.test.samples):
        by_class[data.classes[label]].add(path.split("classification/")[1].split("/")[0])
    assert (by_class["water"], by_class["dense residential"]) == (set(three), {three[0], three[2]})
    assert mmrs(datasets=["ucmerced"]).classes == ["Water", "dense_residential"]
    alone = mmrs(datasets=["DCSR"])
    assert alone.classes == ["DenseResidential", "WATER", "sea-lake"]


def test_what_mmrs1m_lacks_is_told(mmrs, tmp_path):
    refused("data.datasets=.*WHU-RS19.*; available: DCSR, DUBAI_split, UCMerced", mmrs, datasets=["DCSR", "WHU-RS19"])
    refused(f"(?m)data.root={tmp_path} has no folder classification of MMRS-1M$", mmrs, root=str(tmp_path))
    (tmp_path / "data" / "classification" / "DCSR" / "images" / "3.png").unlink()
    refused("DCSR/images/3.png is missing", mmrs)
    answers = tmp_path / "data" / "json" / "classification" / "DSCR_cls.json"
    answers.write_text('[{"image": "x.jpg"}]')
    refused("DSCR_cls.json is no list of images and answers .*conversations", mmrs)
    answers.unlink()
    refused("DCSR has neither train and test folders nor the images of", mmrs)


# -- LoveDA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("images", "masks", "no_data"), [
    ("{part}/{area}/images_png", "{part}/{area}/masks_png", 0),  # as published
    ("img_dir/{lower}", "ann_dir/{lower}", 255),  # as OpenMMLab's tools convert it
])  # fmt: skip
def test_both_layouts_of_loveda_give_the_same_labels(pairs, segmentation, images, masks, no_data):
    numbers = np.random.default_rng(0).integers(0, 8, (32, 32))
    expected = np.where(numbers == 0, 255, numbers - 1)
    written = expected if no_data else numbers
    for part, area in itertools.product(("Train", "Val"), ("Urban", "Rural")):
        place = {"part": part, "area": area, "lower": part.lower()}
        root = pairs(1, lambda _: written, images.format(**place), masks.format(**place))
    data = segmentation(root=root, layout=layout("layouts.LoveDA"))
    assert (len(data.classes), data.test_split_name, len(data.train)) == (7, "val", 1 if no_data else 2)
    np.testing.assert_array_equal(data.val.load(0)[1], expected)
    shutil.rmtree(Path(root, masks.format(part="Train", area="Urban", lower="train")))
    refused(
        "has no mask in .*(Urban/masks_png|ann_dir/train)", segmentation, root=root, layout=layout("layouts.LoveDA")
    )


# -- images and masks -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiles(pairs, segmentation):
    """Makes a data set of two tiles of five images."""
    for tile in ("tile1", "deep/tile2"):
        root = pairs(5, lambda _: np.zeros((8, 8)), f"{tile}/pictures", f"{tile}/masks")
    return lambda **values: segmentation(root=root, images="pictures", classes=["a", "b"], **values)


def test_pairs_are_found_at_any_depth_and_what_has_no_partner_is_named(tiles, tmp_path):
    data = tiles(splits={"train": ["*/[0-2].*"], "val": ["deep/*/3.*"], "test": ["*/4.*"]})
    assert record(data) == {"train": 6, "val": 1, "test": 2, "tested_on": "test"}
    place = tmp_path / "deep" / "tile2"
    assert data.val.samples == [(str(place / "pictures" / "3.png"), str(place / "masks" / "3.png"))]
    assert samples(record(tiles())) == 10
    (place / "masks" / "0.png").rename(place / "masks" / "other.png")
    refused("pictures/0.png has no mask in .*2 such files", tiles)
    found = record(tiles(on_error="skip"))
    assert (found["without_partner"], samples(found)) == (2, 9)


def test_images_that_would_count_twice_are_refused(tiles, tmp_path):
    splits = {"train": ["*/[0-2].*"], "val": ["*/[23].*"]}
    refused("data.splits: .*/2.png and 1 more are in train and in another split", tiles, splits=splits)
    (tmp_path / "tile1" / "loop").symlink_to(tmp_path)
    assert samples(record(tiles())) == 10
    (tmp_path / "tile1" / "pictures" / "0.JPEG").touch()
    refused(r"0.(png|JPEG) and .*0.(png|JPEG) have the same name", tiles)


# -- before anything starts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "value"), [
    ("root", "/nowhere"), ("root", None),
    ("split_ratio", [0.7, 0.2, 0.2]), ("split_ratio", [1.0, 0.0, 0.0]),
    ("value_range", [3, 3]), ("value_range", "auto2"), ("value_range", [[0, 0], [1, 1]]),
    ("bands", [0, 1]), ("bands", [1.5]), ("mean", [1.0]), ("mean", "nowhere"),
])  # fmt: skip
def test_a_key_that_means_nothing_is_refused_by_its_name(scenes, tree, tmp_path, key, value):
    tree(*numbered("a", 10), *numbered("b", 10))
    refused(rf"data\.{key}[= ]", scenes, **{"root": str(tmp_path), key: value})


GREY, TWO = {"palette": {"a": "aaaaaa"}}, {"classes": ["a", "b"]}
MMRS = {**TWO, "layout": layout("mmrs1m.MMRS1MMasks")}


@pytest.mark.parametrize(("kind", "values", "said"), [
    ("scenes", {"root": None, "sample_data": "dubay"}, "sample data dubay"),
    ("scenes", {"mean": [1.0], "std": [0.0]}, r"data.std=\[0.0\]"),
    ("segmentation", {}, "neither data.palette nor data.classes is set"),
    ("segmentation", {**GREY, "ignore_colors": ["inf"]}, r"'data.ignore_colors=\[\"6E1234\"\]'"),
    ("segmentation", {**GREY, "ignore_colors": ["AAAAAA"]}, "ignore_colors: 'aaaaaa' must be a color of its own"),
    ("segmentation", {**TWO, "splits": {"train": ["*"]}}, "data.splits names train"),
    ("segmentation", MMRS, "data.root=.* has no folder segmentation"),
])  # fmt: skip
def test_keys_that_do_not_fit_each_other_are_refused(request, tree, tmp_path, kind, values, said):
    tree(*numbered("a", 10), *numbered("b", 10))
    refused(said, request.getfixturevalue(kind), **{"root": str(tmp_path), **values})
