from __future__ import annotations

import itertools
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from exp.config.resolve import create
from exp.data.base import Data
from exp.errors import DataError
from exp.vision.data.bands import ImageReader
from exp.vision.data.keys import ImageDataConfig, SceneDataConfig, SegmentationDataConfig
from exp.vision.data.preflight import preflight
from exp.vision.raster import open_image

SAMPLES = Path(__file__).parents[2] / "samples"
CROP = [
    {"type": "RandomResize", "scale": [50, 40], "ratio_range": [0.8, 1.5], "keep_ratio": True},
    {"type": "RandomCrop", "crop_size": 32, "cat_max_ratio": 0.75},
    {"type": "RandomFlip", "prob": 0.5, "direction": ["horizontal", "vertical"]}, {"type": "RandomRotate90"},
    {"type": "PhotoMetricDistortion"}, {"type": "PadTo", "size": 32},
]  # fmt: skip
"""A training's pipeline."""


@pytest.fixture
def noise():
    """Writes an image of random 8-bit values; the folder is made."""

    def write(path: Path, height: int = 40, width: int = 50, channels: int = 3, seed: int = 0) -> np.ndarray:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
        bgr = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if channels == 3 else pixels
        assert cv2.imwrite(str(path), bgr)
        return pixels

    return write


def write_tiff(path, bands, names=None, mask=None, **more):
    """Write (bands, H, W) as a GeoTIFF; returns ``path``."""
    import rasterio

    path.parent.mkdir(parents=True, exist_ok=True)
    profile = {"driver": "GTiff", "height": bands.shape[1], "width": bands.shape[2], "count": len(bands),
               "dtype": bands.dtype, "crs": "EPSG:32633",
               "transform": rasterio.transform.from_origin(3e5, 5.8e6, 10, 10), **more}  # fmt: skip
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), rasterio.open(path, "w", **profile) as file:
        file.write(bands)
        for number, name in enumerate(names or [], 1):
            file.set_band_description(number, name)
        if mask is not None:
            file.write_mask(mask)
    return path


@pytest.fixture
def tiff():
    pytest.importorskip("rasterio")
    return write_tiff


@pytest.fixture
def without_rasterio(monkeypatch):
    """Hides rasterio from now on."""
    return lambda: monkeypatch.setitem(sys.modules, "rasterio", None)


@pytest.fixture
def make_data():
    """Makes a data set as a run does: from a checked configuration."""

    def make(schema, **values):
        config = OmegaConf.merge(OmegaConf.structured(schema), {"name": "mine", "seed": 0, **values})
        preflight(config)
        data = create(config, Data, "data")
        data.normalization.inspect_bands()
        return data

    return make


@pytest.fixture
def scenes(make_data):
    return lambda **values: make_data(SceneDataConfig, **values)


@pytest.fixture
def segmentation(make_data):
    return lambda **values: make_data(SegmentationDataConfig, **values)


@pytest.fixture
def pairs(tmp_path, noise):
    """Writes images, each of its own, and masks with the values ``labels(number)``, (H, W); gives the root."""
    seeds = itertools.count()

    def write(count, labels, images="images", masks="masks"):
        for number in range(count):
            values = labels(number)
            noise(tmp_path / images / f"{number}.png", *values.shape[:2], seed=next(seeds))
            (tmp_path / masks).mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(tmp_path / masks / f"{number}.png"), values.astype(np.uint8))
        return str(tmp_path)

    return write


def reads(**keys):
    """A reader of files with some keys of ``data``."""
    return ImageReader(ImageDataConfig(**keys))


def layout(name):
    """The key that names a layout of exp's."""
    return {"_target_": f"exp.vision.data.{name}"}


def part(image, top, left, height, width):
    """What the model sees of an open image: (height, width, C)."""
    return image.seen.crop(top, left, height, width).permute(1, 2, 0).numpy()


def by_rows(path, reader):
    """A file as a prediction reads it that never holds it whole: the image, and which pixels hold no data."""
    with open_image(path, reader, max_pixels=0) as image:
        return part(image, 0, 0, image.height, image.width), image.missing_rows(0, image.height)


def keys(*numbers, epoch=0):
    """Of samples, as a training asks for them."""
    return torch.tensor([[number, epoch] for number in numbers])


def record(data):
    """What ``result.json`` says of the data, of one process."""
    return data.record(lambda value: [value])


def refused(said, call, *arguments, **keywords):
    """Whether it is a :class:`DataError` that says this."""
    with pytest.raises(DataError, match=said):
        call(*arguments, **keywords)


def cut(path, size=100):
    """What a copy leaves that has been interrupted."""
    with open(path, "r+b") as file:  # noqa: PTH123
        file.truncate(size)
