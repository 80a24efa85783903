"""Bands by number and name, values without data, statistics of bands: on files as strangers have them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from exp.vision.data.keys import SceneDataConfig
from exp.vision.data.statistics import Normalization
from exp.vision.models import SceneClassifier
from exp.vision.raster import open_image
from tests.vision.data.conftest import by_rows, part, reads, refused
from tests.vision.parts import vit

rasterio = pytest.importorskip("rasterio")

SENTINEL = ["B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B10", "B11", "B12"]


@pytest.fixture
def scene(tiff, tmp_path):
    """A Sentinel-2 scene: 13 bands of 16 bits, whose values tell the band; the left column holds no data."""

    def write(name="s2.tif", names=SENTINEL, count=13, seed=0):
        bands = np.random.default_rng(seed).integers(1, 100, (count, 20, 30)).astype(np.uint16)
        bands += 200 * np.arange(1, count + 1, dtype=np.uint16)[:, None, None]
        bands[:, :, 0] = 0
        return tiff(tmp_path / name, bands, names, nodata=0), bands

    return write


def choose(wanted, **more):
    return reads(bands=wanted, **more)


@pytest.mark.parametrize(("wanted", "indexes"), [
    ([4, 3, 2, 8], [3, 2, 1, 7]),
    (["B04", "B03", "B02", "B08"], [3, 2, 1, 7]),
    (["b8a", "B4", "Band 12", 1], [8, 3, 12, 0]),
])  # fmt: skip
def test_bands_are_those_asked_for_in_their_order_whole_and_by_rows(scene, wanted, indexes):
    path, bands = scene()
    reader = choose(wanted, value_range=[0, 5100])
    expected = np.moveaxis(bands[indexes], 0, -1) / np.float32(20)
    np.testing.assert_allclose(reader(path), expected, rtol=1e-5)
    with open_image(path, reader, max_pixels=0) as image:
        np.testing.assert_allclose(part(image, 4, 5, 10, 20), expected[4:14, 5:25], rtol=1e-5)
        assert image.thumbnail(16).shape == (11, 16, 3)
        np.testing.assert_array_equal(image.missing_rows(0, 20), bands[0] == 0)


@pytest.mark.parametrize(("wanted", "names", "said"), [
    ([14], SENTINEL, "has no band 14, .*; it has 13: B01, B02"),
    (["B13"], SENTINEL, "has no band B13, .*; it has 13: B01, B02"),
    (["B04"], None, "has no band B04, .*; it has 13: 1, 2"),
    (["nir"], ["nir"] * 13, "has 13 bands nir"),
])  # fmt: skip
def test_a_band_that_is_not_there_is_an_error_in_one_line_that_names_the_file(scene, wanted, names, said):
    path, _ = scene(names=names)
    refused(f"^.*s2.tif {said}.*$", choose(wanted), path)
    refused(f"^.*s2.tif {said}.*$", by_rows, path, choose(wanted))


def test_gdals_long_descriptions_are_names(scene):
    long = [f"{name.replace('B0', 'B')}, central wavelength {number} nm" for number, name in enumerate(SENTINEL)]
    path, bands = scene(names=long)
    np.testing.assert_allclose(choose(["B08"], value_range=[0, 25500])(path)[..., 0], bands[7] / 100, rtol=1e-5)


def test_numbers_do_not_silently_mean_other_bands_in_another_file(scene):
    (first, _), (other, bands) = scene(), scene("rgb.tif", names=SENTINEL[1:5], count=4)
    given = {"value_range": [0, 25500]}
    by_number, by_name = choose([4, 3, 2], **given), choose(["B04", "B03", "B02"], **given)
    normalization = Normalization(by_number, [str(first)], SceneDataConfig())
    normalization.inspect_bands()
    assert normalization.names == ["B04", "B03", "B02"]
    refused("rgb.tif has 4 bands, but the training images 13: .* data.bands", by_number, other)
    np.testing.assert_allclose(by_name(other), np.moveaxis(bands[[2, 1, 0]], 0, -1) / 100, rtol=1e-5)


@pytest.mark.parametrize(("names", "order"), [
    (["blue", "green", "red"], [2, 1, 0]), (["B02", "B03", "B04"], [2, 1, 0]), (["Green", "Red", "Blue"], [1, 0, 2]),
    (["red", "green", "blue"], [0, 1, 2]), (["blue", "green", ""], [0, 1, 2]), (None, [0, 1, 2]),
])  # fmt: skip
def test_three_bands_that_name_their_colors_are_read_as_red_green_and_blue(scene, names, order):
    path, bands = scene(names=names, count=3)
    reader = reads(value_range=[0, 25500])
    expected = np.moveaxis(bands[order], 0, -1) / np.float32(100)
    np.testing.assert_allclose(reader(path), expected, rtol=1e-5)
    np.testing.assert_allclose(by_rows(path, reader)[0], expected, rtol=1e-5)
    assert len(reader.band_order_notes(path)) == (order != [0, 1, 2])


def test_color_tags_count_with_transparency_too_and_more_bands_keep_their_order(scene):
    path, bands = scene(names=None, count=4)
    with rasterio.open(path, "r+") as file:
        file.colorinterp = [rasterio.enums.ColorInterp[name] for name in ("blue", "green", "red", "alpha")]
    expected = np.moveaxis(bands[[2, 1, 0]], 0, -1) / np.float32(100)
    np.testing.assert_allclose(reads(value_range=[0, 25500])(path), expected, rtol=1e-5)
    path, bands = scene("b.tif", names=["blue", "green", "red", "nir"], count=4)
    reader = reads(value_range=[0, 25500], channels=4)
    np.testing.assert_allclose(reader(path), np.moveaxis(bands, 0, -1) / np.float32(100), rtol=1e-5)
    assert reader.band_order_notes(path) == []


def column(bands, dtype=np.uint8):
    """An image of five equal columns: of each band, its values from top to bottom."""
    return np.repeat(np.array(bands, dtype)[..., None], 5, axis=-1)


@pytest.mark.parametrize(
    ("bands", "more", "expected", "missing"),
    [
        (column([[np.nan, 50, np.inf], [np.nan, -9999, 50]], np.float32), {"nodata": -9999.0},
         [[70, 80], [127.5, 80], [70, 127.5]], [True, False, False]),
        # Of 8 bits 0 is a common colour: the second pixel is pure red.
        (column([[0, 9, 9], [0, 0, 9], [0, 0, 9]]), {"nodata": 0},
         [[70, 80, 90], [9, 0, 0], [9, 9, 9]], [True, False, False]),
        (column([[9, 9, 9]] * 3), {"mask": column([255, 255, 0])},
         [[9, 9, 9], [9, 9, 9], [70, 80, 90]], [False, False, True]),
    ],
    ids=["values", "pixels of 8 bits", "a mask inside the file"],
)  # fmt: skip
def test_values_without_data_get_the_fill_and_whole_pixels_are_told(tiff, tmp_path, bands, more, expected, missing):
    path = tiff(tmp_path / "x.tif", bands, **more)
    reader = reads(channels=len(bands), value_range=(0.0, 100.0))
    reader.fill = np.array([70.0, 80.0, 90.4][: len(bands)], np.float32)
    for image, without in (reader.read_with_missing(path), by_rows(path, reader)):
        assert image[:, 0].tolist() == expected
        assert without[:, 0].tolist() == missing


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "far"), [(np.uint16, 1e-3), (np.float32, 1e-2)])
def test_statistics_are_those_of_all_values_with_data_however_they_are_shared(tiff, tmp_path, dtype, far):
    values = []
    for number in range(70):  # more than two chunks
        bands = np.random.default_rng(number).gamma(2.0, 900.0, (2, 6 + number % 3, 5)).astype(dtype) + dtype(1)
        bands[1] *= dtype(3)
        bands[:, 0, :2] = 0
        tiff(tmp_path / f"{number:02}.tif", bands, nodata=0)
        values.append(bands.reshape(2, -1))
    together = np.concatenate(values, axis=1).astype(np.float64)
    together = together[:, together[0] != 0]
    paths = sorted(str(path) for path in tmp_path.glob("*.tif"))

    def measured(high, percentiles, distributed=None):
        reader = reads(channels=2, value_range=(0, high))
        return Normalization(reader, paths, SceneDataConfig(num_workers=3)).measure(percentiles, distributed)

    found = measured(10**6, (2, 50, 98))
    assert found["mean"] == pytest.approx(together.mean(axis=1), rel=1e-12)
    assert found["std"] == pytest.approx(together.std(axis=1), rel=1e-12)
    assert (found["values"], found["without_data"]) == ([together.shape[1]] * 2, [140, 140])
    for percent in (2, 50, 98):
        expected = np.percentile(together, percent, axis=1, method="lower" if dtype == np.uint16 else "linear")
        assert found["percentiles"][f"{percent}"] == pytest.approx(expected, rel=far)
    clipped = measured(2000, (50,))
    assert clipped["mean"] == pytest.approx(together.clip(0, 2000).mean(axis=1), rel=1e-12)
    assert clipped["percentiles"]["50"] == found["percentiles"]["50"]

    # Two processes, one after the other: what each has handed in is what the other gets.
    parts = []
    for rank in range(2):
        alone = SimpleNamespace(rank=rank, world_size=2, gather=lambda error: [error], sum=parts.append)
        with pytest.raises(AttributeError):
            measured(10**6, (), alone)
    both = SimpleNamespace(rank=0, world_size=2, gather=lambda error: [error], sum=lambda _: parts[0] + parts[1])
    shared = measured(10**6, (), both)
    assert [shared[key] for key in ("mean", "std", "max")] == [found[key] for key in ("mean", "std", "max")], "each bit"


@pytest.fixture
def fields(scenes, scene, tmp_path):
    """Makes a data set of two classes of ten scenes of 13 bands."""
    for number in range(20):
        scene(f"fields/{'ab'[number % 2]}/{number}.tif", seed=number)
    given = {"root": str(tmp_path / "fields"), "bands": ["B04", "B03", "B02", "B08"], "size": 32}
    return lambda **values: scenes(**{**given, **values})


def test_an_export_tells_what_becomes_of_the_values_of_a_file(fields):
    data = fields(mean="train", value_range=[0, 4000])
    data.normalization.fit()
    data.use_model_statistics(SceneClassifier(backbone=vit(size="tiny", depth=1), **data.model_arguments()))
    units = data.units()["image"]
    no_data = [float(value) * 4000 / 255 for value in data.read.fill]
    assert json.loads(json.dumps(units.about)) == {
        "range": [0.0, 4000.0], "bands": ["B04", "B03", "B02", "B08"], "no_data": pytest.approx(no_data, rel=1e-6),
    }  # fmt: skip
    values = torch.tensor([0.0, 1000.0, 4000.0]).view(1, 1, 1, 3)
    assert units.to_model(values).flatten().tolist() == pytest.approx([0.0, 63.75, 255.0])
    assert units.to_file(units.to_model(values)).flatten().tolist() == values.flatten().tolist()
    assert units.limits == (0.0, 255.0)


def test_mean_and_deviation_of_the_training_split_make_it_standard(fields):
    data = fields(value_range=[100, 3000], mean="train")
    table = data.normalization.fit()
    assert table["mean"] == pytest.approx([850, 650, 450, 1650], abs=2)
    assert data.state_dict()["mean"] == table["mean"]
    arguments = data.model_arguments()
    assert arguments["band_names"] == table["bands"] == ["B04", "B03", "B02", "B08"]
    assert arguments["pixel_mean"] == pytest.approx([(mean - 100) * 255 / 2900 for mean in table["mean"]], rel=1e-12)
    again = fields(value_range=[100, 3000], mean=table["mean"], std=table["std"])
    assert again.model_arguments() == arguments
    mean, std = (torch.tensor(arguments[name]).reshape(1, -1, 1, 1) for name in ("pixel_mean", "pixel_std"))
    again.use_model_statistics(SimpleNamespace(pixel_mean=mean, pixel_std=std))
    values = (again.val[torch.arange(len(again.val))]["image"] - mean) / std
    assert values[..., 0].abs().max() < 1e-5, "without data: the mean"
    assert values[..., 1:].std(dim=(0, 2, 3)).numpy() == pytest.approx([1.0] * 4, abs=0.1)


def test_other_bands_than_those_of_the_weights_are_read_as_theirs_or_told(fields, caplog):
    state = fields(value_range=[0, 3000]).state_dict()
    assert (state["bands"], state["band_count"]) == (["B04", "B03", "B02", "B08"], 13)
    refused("trained with data.channels=4, but it is 2 here", fields(bands=["B04", "B03"]).load_state_dict, state)
    fields(bands=[4, 3, 2, 8], value_range=[0, 3000]).load_state_dict(state)
    assert "data.bands=[4, 3, 2, 8], but the weights were trained with ['B04'" in caplog.text
    data = fields(value_range=[0, 3000], mean="train")
    data.load_state_dict(state)
    assert "data.mean=train, but the weights were trained with None" in caplog.text
    assert data.normalization.fit() is data.normalization.mean is None


def test_segmentation_does_not_count_pixels_without_data(segmentation, pairs, tiff, tmp_path):
    """Resized, mixed with their neighbours and distorted: they stay the mean, and do not count."""
    root = pairs(5, lambda number: np.full((40, 40), number % 2), images="pictures")
    for number in range(5):
        bands = np.random.default_rng(number).integers(1, 3000, (3, 40, 40)).astype(np.uint16)
        bands[:, :, :20] = 0
        tiff(tmp_path / "images" / f"{number}.tif", bands, nodata=0)
    resize = {"type": "Resize", "scale": [60, 60], "keep_ratio": True}
    pipeline = [resize, {"type": "RandomFlip", "prob": 0.5}, {"type": "PhotoMetricDistortion"}]
    values = {"value_range": [0, 3000], "train_pipeline": pipeline, "size": 60}
    data = segmentation(root=root, classes=["a", "b"], split_ratio=[0.6, 0.4, 0.0], **values)
    data.read.fill = np.array([100.0, 110.0, 120.0], np.float32)
    batch = data.train[torch.tensor([[0, epoch] for epoch in range(8)])]
    ignored, image = batch["label"] == 255, batch["image"].permute(0, 2, 3, 1)
    assert ignored.float().mean() == pytest.approx(0.5)
    assert (image[ignored] == torch.from_numpy(data.read.fill)).all()
    assert (image[~ignored][:, 0] != 100.0).float().mean() > 0.99
