from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from omegaconf import OmegaConf

from exp.config.create import create
from exp.data.base import Data
from exp.vision.config import SceneDataConfig, SegmentationDataConfig
from exp.vision.data.preflight import preflight

SAMPLES = Path(__file__).parents[2] / "samples"


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


@pytest.fixture
def make_data():
    """Makes a data set as a run does: from a checked configuration."""

    def make(schema, **values):
        config = OmegaConf.merge(OmegaConf.structured(schema), {"name": "mine", "seed": 0, **values})
        preflight(config)
        return create(config, Data, "data")

    return make


@pytest.fixture
def scenes(make_data):
    return lambda **values: make_data(SceneDataConfig, **values)


@pytest.fixture
def segmentation(make_data):
    return lambda **values: make_data(SegmentationDataConfig, **values)


def part(image, top, left, height, width):
    """What the model sees of an open image: (height, width, C)."""
    return image.seen.crop(top, left, height, width).permute(1, 2, 0).numpy()
