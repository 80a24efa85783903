"""Bands by number and name, values without data, statistics of bands: on files as strangers have them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from exp.errors import DataError
from exp.vision.data.bands import BandChoice
from exp.vision.data.reader import ImageReader
from exp.vision.data.statistics import Share, measure
from exp.vision.predict.raster import open_image
from tests.vision.data.conftest import part

rasterio = pytest.importorskip("rasterio")

SENTINEL = ["B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B10", "B11", "B12"]


@pytest.fixture
def tiff():
    """Writes (bands, H, W) as a GeoTIFF."""

    def write(path, bands, names=None, nodata=None, mask=None, **more):
        path.parent.mkdir(parents=True, exist_ok=True)
        profile = {"driver": "GTiff", "height": bands.shape[1], "width": bands.shape[2], "count": len(bands)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            place = rasterio.transform.from_origin(3e5, 5.8e6, 10, 10)
            with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), rasterio.open(
                path, "w", dtype=bands.dtype, nodata=nodata, crs="EPSG:32633", transform=place, **profile, **more
            ) as file:
                file.write(bands)
                for number, name in enumerate(names or [], 1):
                    file.set_band_description(number, name)
                if mask is not None:
                    file.write_mask(mask)
        return path

    return write


@pytest.fixture
def scene(tiff, tmp_path):
    """A Sentinel-2 scene: 13 bands of 16 bits, whose values tell the band; the left column holds no data."""

    def write(name="s2.tif", names=SENTINEL, count=13, seed=0):
        noise = np.random.default_rng(seed).integers(1, 100, (count, 20, 30))
        bands = (noise + 200 * np.arange(1, count + 1)[:, None, None]).astype(np.uint16)
        bands[:, :, 0] = 0
        return tiff(tmp_path / name, bands, names, nodata=0), bands

    return write


def choose(wanted, channels=None, **more):
    names, alpha = more.pop("names", None), more.get("alpha")
    return ImageReader(channels or len(wanted), bands=BandChoice(wanted, names, alpha), **more)


@pytest.mark.parametrize(
    ("wanted", "indexes"),
    [
        ([4, 3, 2, 8], [3, 2, 1, 7]),
        (["B04", "B03", "B02", "B08"], [3, 2, 1, 7]),
        (["b8a", "B4", "Band 12", 1], [8, 3, 12, 0]),
        (["B02", "B02", "B02"], [1, 1, 1]),
    ],
)
def test_bands_are_those_asked_for_in_their_order_whole_and_by_rows(scene, wanted, indexes):
    path, bands = scene()
    reader = choose(wanted, value_range=[0, 5100])
    expected = np.moveaxis(bands[indexes], 0, -1) / np.float32(20)
    np.testing.assert_allclose(reader(path), expected, rtol=1e-5)
    with open_image(path, reader, whole=0) as image:
        np.testing.assert_allclose(part(image, 4, 5, 10, 20), expected[4:14, 5:25], rtol=1e-5)
        assert image.thumbnail(16).shape == (11, 16, 3)
        np.testing.assert_array_equal(image.without_data(0, 20), bands[0] == 0)


@pytest.mark.parametrize(
    ("wanted", "names", "said"),
    [
        ([14], SENTINEL, r"s2.tif has no band 14, which data.bands asks for; it has 13: B01, B02"),
        (["B13"], SENTINEL, r"s2.tif has no band B13, which data.bands asks for; it has B01, B02"),
        (["B04"], None, r"s2.tif gives its 13 bands no names, but data.bands asks for B04; choose by number"),
        (["nir"], ["nir"] * 13, r"s2.tif has 13 bands named nir; choose by number"),
    ],
)
def test_a_band_that_is_not_there_is_an_error_in_one_line_that_names_the_file(scene, wanted, names, said):
    path, _ = scene(names=names)
    for read in (lambda: choose(wanted)(path), lambda: open_image(path, choose(wanted), whole=0).__enter__()):
        with pytest.raises(DataError, match=said) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_gdals_long_descriptions_and_given_names(scene):
    path, bands = scene(
        names=[f"{name.replace('B0', 'B')}, central wavelength {n} nm" for n, name in enumerate(SENTINEL)]
    )
    limits = [0, 2550]
    np.testing.assert_allclose(choose(["B08"], value_range=limits)(path)[..., 0], bands[7] / np.float32(10), rtol=1e-5)
    bare, _ = scene("bare.tif", names=None, count=4)
    reader = choose(["blue", "nir"], names=["red", "green", "blue", "nir"], value_range=limits)
    np.testing.assert_allclose(reader(bare)[3, 5], [bands[2, 3, 5] / 10, bands[3, 3, 5] / 10], atol=10)
    with pytest.raises(DataError, match=r"bare.tif has 4 bands, but data.band_names names 2"):
        choose(["a"], names=["a", "b"])(bare)


def test_numbers_do_not_silently_mean_other_bands_in_another_file(scene):
    first, _ = scene()
    other, _ = scene("rgb.tif", names=SENTINEL[1:5], count=4)
    reader = choose([4, 3, 2], value_range=[0, 3000], examples=[str(first)])
    assert reader.example().names == ["B04", "B03", "B02"]
    reader(first)
    with pytest.raises(DataError, match=r"rgb.tif has 4 bands, but the training images 13: the numbers in data.bands"):
        reader(other)
    by_name = choose(["B04", "B03", "B02"], value_range=[0, 3000], examples=[str(first)])
    by_name.example()
    assert by_name(other)[3, 5] == pytest.approx(np.array([650, 450, 250]) * 255 / 3000, abs=5)  # its 3rd, 2nd, 1st


def test_alpha_is_no_colour_unless_it_is_asked_for(tmp_path):
    pixels = np.random.default_rng(0).integers(1, 255, (10, 12, 4), dtype=np.uint8)
    pixels[..., 3] = 255
    pixels[:3, :, 3] = 0
    path = tmp_path / "x.png"
    Image.fromarray(pixels, "RGBA").save(path)
    reader = choose([3, 2, 1])
    image, missing = reader.with_missing(path)
    np.testing.assert_array_equal(image, pixels[..., [2, 1, 0]])
    np.testing.assert_array_equal(missing, pixels[..., 3] == 0)
    np.testing.assert_array_equal(choose(["blue", "alpha"])(path), pixels[..., [2, 3]])
    reader.fill = np.array([1.4, 2.0, 250.6], np.float32)
    assert (reader(path)[:3] == [1, 2, 251]).all()
    with pytest.raises(DataError, match=r"x.png has no band 5, which data.bands asks for; it has 4: red, green, blue"):
        choose([5])(path)


def test_what_gdal_marks_as_alpha_and_is_near_infrared_hides_nothing(tiff, tmp_path):
    bands = np.random.default_rng(0).integers(0, 255, (4, 20, 20), dtype=np.uint8)  # unsaid: GDAL takes it for RGBA
    path = tiff(tmp_path / "rgbn.tif", bands)
    assert choose([1, 2, 3]).with_missing(path)[1] is None
    with open_image(path, choose([4, 1, 2]), whole=0) as image:
        assert image.without_data(0, 20) is None
        np.testing.assert_array_equal(part(image, 0, 0, 20, 20), np.moveaxis(bands[[3, 0, 1]], 0, -1))


def test_values_without_data_get_the_fill_and_whole_pixels_are_told(tiff, tmp_path):
    bands = np.full((2, 4, 5), 50.0, np.float32)
    bands[:, 0] = np.nan
    bands[1, 1] = -9999.0
    bands[0, 2] = np.inf
    path = tiff(tmp_path / "x.tif", bands, nodata=-9999.0)
    reader = ImageReader(2, (0.0, 100.0))
    reader.fill = np.array([7.0, 9.0], np.float32)
    for image, missing in (reader.with_missing(path), _by_rows(path, reader)):
        np.testing.assert_array_equal(image[:, 0], [[7, 9], [127.5, 9], [7, 127.5], [127.5, 127.5]])
        np.testing.assert_array_equal(missing[:, 0], [True, False, False, False])


def test_of_eight_bits_a_pixel_lacks_data_only_where_all_bands_say_so(tiff, tmp_path):
    bands = np.full((3, 4, 5), 9, np.uint8)
    bands[:, 0] = 0
    bands[1:, 1] = 0  # pure red
    path = tiff(tmp_path / "x.tif", bands, nodata=0)
    reader = ImageReader()
    reader.fill = np.array([100.0, 100.0, 100.0], np.float32)
    image, missing = reader.with_missing(path)
    assert image[:2, 0].tolist() == [[100, 100, 100], [9, 0, 0]]
    assert missing[:, 0].tolist() == [True, False, False, False]


def test_a_mask_inside_a_file_counts(tiff, tmp_path):
    mask = np.full((4, 5), 255, np.uint8)
    mask[2] = 0
    path = tiff(tmp_path / "x.tif", np.full((3, 4, 5), 9, np.uint8), mask=mask)
    reader = ImageReader()
    reader.fill = np.array([100.0, 100.0, 100.0], np.float32)
    for image, missing in (reader.with_missing(path), _by_rows(path, reader)):
        assert missing[:, 0].tolist() == [False, False, True, False]
        assert image[:, 0, 0].tolist() == [9, 9, 100, 9]


def _by_rows(path, reader):
    with open_image(path, reader, whole=0) as image:
        return part(image, 0, 0, image.height, image.width), image.without_data(0, image.height)


# -- statistics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_statistics_are_those_of_all_values_with_data_however_they_are_shared(tiff, tmp_path, dtype):
    values = []
    for number in range(70):  # more than two chunks
        size = np.random.default_rng(number)
        bands = size.gamma(2.0, 900.0, (2, 6 + number % 3, 5)).astype(dtype) + dtype(1)
        bands[1] *= dtype(3)
        bands[:, 0, :2] = 0
        tiff(tmp_path / f"{number:02}.tif", bands, nodata=0)
        values.append(bands.reshape(2, -1))
    together = np.concatenate(values, axis=1).astype(np.float64)
    together = together[:, together[0] != 0]
    paths = sorted(str(path) for path in tmp_path.glob("*.tif"))
    reader = ImageReader(2, (0, 20000))
    found = measure(reader, paths, [2, 98], share=Share(workers=3))
    assert found.mean == pytest.approx(together.mean(axis=1), rel=1e-12)
    assert found.std == pytest.approx(together.std(axis=1), rel=1e-12)
    assert found.low.tolist() == together.min(axis=1).tolist()
    assert found.count.tolist() == [together.shape[1]] * 2
    assert found.missing.tolist() == [140, 140]
    for percent in (2, 50, 98):
        expected = np.percentile(together, percent, axis=1, **({} if dtype == np.float32 else _lower()))
        assert found.percentile(percent) == pytest.approx(expected, rel=1e-2 if dtype == np.float32 else 1e-12)
    clipped = measure(reader, paths, clipped=(0, 2000))
    assert clipped.mean == pytest.approx(together.clip(0, 2000).mean(axis=1), rel=1e-12)

    # Two processes, one after the other: what each has handed in is what the other gets.
    parts = []
    for rank in range(2):
        with pytest.raises(StopIteration):
            measure(reader, paths, share=Share(rank, 2, lambda part: parts.append(part) or next(iter(()))))
    shared = measure(reader, paths, share=Share(0, 2, lambda part: parts))
    assert shared.mean.tolist() == found.mean.tolist(), "bit for bit"
    assert shared.std.tolist() == found.std.tolist()


def _lower():
    import inspect

    name = "method" if "method" in inspect.signature(np.percentile).parameters else "interpolation"
    return {name: "lower"}


@pytest.fixture
def fields(scene, tmp_path):
    """Two classes of ten scenes of 13 bands, of which one is brighter; a class folder each."""
    for number in range(20):
        scene(f"fields/{'ab'[number % 2]}/{number}.tif", seed=number)
    return {"root": str(tmp_path / "fields"), "bands": ["B04", "B03", "B02", "B08"], "size": 32}


def test_a_stretch_is_of_each_band_over_the_training_split(scenes, fields):
    data = scenes(**fields, stretch=[2, 98])
    low, high = data.state()["value_range"]
    assert low == pytest.approx([802, 602, 402, 1602], abs=3)
    assert high == pytest.approx([898, 698, 498, 1698], abs=3)
    image = data.train[torch.tensor([[0, 0], [1, 0]])]["image"]
    assert image.shape[1] == 4
    assert image.dtype == torch.float32
    assert image.mean(dim=(0, 2, 3)).numpy() == pytest.approx([123.0] * 4, abs=8)  # the left column is 0 as yet
    other = scenes(**fields, stretch=[2, 98], split=[0.3, 0.5, 0.2])
    other.adopt(data.state())
    assert other.state() == data.state()
    alone = scenes(**{**fields, "bands": ["B04"]}, stretch=[0, 100], stretch_scope="image")
    single = alone.val[torch.tensor([0])]["image"][0, 0, :, 1:]
    assert (single.min(), single.max()) == (0.0, 255.0)


def test_mean_and_deviation_of_the_training_split_make_it_standard(scenes, fields, tmp_path):
    data = scenes(**fields, value_range=[0, 3000], mean="train")
    data.normalisation.look()
    table = data.normalisation.settle()
    assert table["bands"] == ["B04", "B03", "B02", "B08"]
    assert table["mean"] == pytest.approx([850, 650, 450, 1650], abs=2)
    arguments = data.model_arguments()
    assert arguments["band_names"] == ["B04", "B03", "B02", "B08"]
    assert arguments["pixel_mean"] == pytest.approx([mean * 255 / 3000 for mean in table["mean"]], rel=1e-12)
    state = data.state()
    assert state["mean"] == table["mean"]
    file = tmp_path / "kept.json"
    file.write_text(json.dumps(table))
    again = scenes(**fields, value_range=[0, 3000], mean=str(file))
    assert again.model_arguments() == arguments

    class Model:
        pixel_mean = torch.tensor(arguments["pixel_mean"]).reshape(1, -1, 1, 1)
        pixel_std = torch.tensor(arguments["pixel_std"]).reshape(1, -1, 1, 1)

    again.meet(Model)
    image = again.val[torch.arange(len(again.val))]["image"]
    values = (image - Model.pixel_mean) / Model.pixel_std
    assert values[..., 0].abs().max() < 1e-5, "without data: the mean"
    assert values[..., 1:].mean(dim=(0, 2, 3)).abs().max() < 0.15
    assert values[..., 1:].std(dim=(0, 2, 3)).numpy() == pytest.approx([1.0] * 4, abs=0.1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bands": []}, r"data.bands=\[\] names no band"),
        ({"bands": [0, 1]}, r"data.bands=\[0, 1\]: there is no band 0; they count from 1"),
        ({"bands": [1.5]}, r"data.bands=\[1.5\]: 1.5 is neither a number nor a name"),
        ({"bands": [1, 2], "channels": 4}, r"data.channels=4, but data.bands names 2"),
        ({"stretch": [98, 2]}, r"data.stretch=\[98.*\] must be two percentiles"),
        ({"stretch": [2, 98], "value_range": "auto"}, r"data.stretch and data.value_range both say"),
        ({"stretch_scope": "image"}, r"data.stretch_scope=image does nothing without data.stretch"),
        ({"mean": [1.0]}, r"data.mean=\[1.0\], but data.std=null; give numbers for both"),
        ({"mean": [1.0, 2.0], "std": [1.0, 2.0]}, r"data.mean has 2 numbers, but there are 3 bands"),
        ({"mean": [1.0], "std": [0.0]}, r"data.std=\[0.0\] must be more than 0"),
        ({"mean": "nowhere.json"}, r"data.mean=nowhere.json is neither numbers nor train, nor is there such a file"),
        ({"value_range": [[0, 0], [1, 1]]}, r"data.value_range=.* must be \[low, high\]"),
    ],
)
def test_what_means_nothing_is_refused_by_the_parent(scenes, tmp_path, values, said):
    with pytest.raises(DataError, match=said):
        scenes(root=str(tmp_path), **values)


def test_other_bands_than_those_of_the_weights_are_read_as_theirs_or_told(scenes, fields, caplog):
    data = scenes(**fields, value_range=[0, 3000])
    state = data.state()
    assert (state["bands"], state["band_count"]) == (["B04", "B03", "B02", "B08"], 13)
    with pytest.raises(DataError, match=r"trained with data.channels=4, but it is 2 here"):
        scenes(**{**fields, "bands": ["B04", "B03"]}).adopt(state)
    scenes(**{**fields, "bands": [4, 3, 2, 8]}, value_range=[0, 3000]).adopt(state)
    assert "data.bands=[4, 3, 2, 8], but the weights were trained with ['B04'" in caplog.text
    with pytest.raises(DataError, match=r"weights were trained with the mean and standard deviation of the model"):
        scenes(**fields, value_range=[0, 3000], mean="train").adopt(state)


def test_segmentation_does_not_count_pixels_without_data(segmentation, tiff, tmp_path):
    """Resized, mixed with their neighbours and distorted: they stay the mean, and do not count."""
    for number in range(5):
        bands = np.random.default_rng(number).integers(1, 3000, (4, 40, 40)).astype(np.uint16)
        bands[:, :, :20] = 0
        tiff(tmp_path / "images" / f"{number}.tif", bands, nodata=0)
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(np.full((40, 40), number % 2, np.uint8)).save(tmp_path / "masks" / f"{number}.png")
    pipeline = [
        {"type": "Resize", "scale": [60, 60], "keep_ratio": True},
        {"type": "RandomFlip", "prob": 0.5},
        {"type": "PhotoMetricDistortion"},
    ]
    data = segmentation(
        root=str(tmp_path), classes=["a", "b"], value_range=[0, 3000], bands=[3, 2, 1], split=[0.6, 0.4, 0.0],
        train_pipeline=pipeline, size=60,
    )  # fmt: skip
    data.read.fill = np.array([100.0, 110.0, 120.0], np.float32)
    batch = data.train[torch.tensor([[0, epoch] for epoch in range(8)])]
    ignored = batch["label"] == 255
    assert ignored.float().mean() == pytest.approx(0.5)
    assert set(batch["label"].unique().tolist()) == {int(batch["label"].min()), 255}
    for channel, fill in enumerate(data.read.fill):
        assert (batch["image"][:, channel][ignored] == float(fill)).all()
    assert (batch["image"][:, 0][~ignored] != 100.0).float().mean() > 0.99


def test_colours_are_taken_by_their_names(tmp_path, noise, scenes):
    """The bands of a file that says which is which come as red, green, blue, and that is reported."""
    pixels = noise(tmp_path / "rgb.png")
    for number in range(9):
        for name in ("a", "b"):
            path = tmp_path / "data" / name / f"{number}.tif"
            path.parent.mkdir(parents=True, exist_ok=True)
            with rasterio.open(path, "w", driver="GTiff", height=40, width=50, count=3, dtype="uint8") as file:
                for band, channel in enumerate((2, 1, 0), 1):
                    file.write(pixels[..., channel], band)
                    file.set_band_description(band, ("red", "green", "blue")[channel])
    data = scenes(root=str(tmp_path / "data"), size=16)
    path = data.read.examples[0]
    assert (data.read(path) == pixels).all()
    with open_image(Path(path), data.read, whole=0) as image:
        assert (image.crop(3, 4, 20, 30).numpy() == pixels[3:23, 4:34].transpose(2, 0, 1)).all()
    assert data.record(lambda each: [each])["bands_read_as_rgb"] == ["blue", "green", "red"]
    assert any("blue, green, red" in note for note in data.notes)
