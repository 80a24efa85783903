"""The home folder of somebody who reads the documentation: small files, made from the bundled data."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any, Iterable

__all__ = ["make_home"]

DATA = Path(__file__).parents[2] / "data"


def make_home(home: Path) -> Path:
    """Make it; returns ``home``."""
    home.mkdir()
    with (DATA / "ett" / "ETTh1.csv").open() as file:
        rows = [row for _, row in zip(range(1201), csv.reader(file))][1:]
    for name, channels in (("weather/weather.csv", 21), ("traffic/traffic.csv", 862), ("plant.csv", 2)):
        names = ["temperature", "load"] if channels == 2 else [f"channel{number}" for number in range(channels)]
        path = home / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["date", *names])
            writer.writerows([row[0], *(row[1 + number % 7] for number in range(channels))] for row in rows)
    scenes_below = home / "data" / "mmrs1m" / "data" / "classification" / "UCMerced_split"
    for kind in ("Forest", "River"):
        scenes = sorted((DATA / "eurosat_rgb" / kind).glob("*.jpg"))
        assert len(scenes) >= 8
        _copy(scenes, home / "roofs" / kind)
        _copy(scenes[:6], scenes_below / "train" / kind)
        _copy(scenes[6:8], scenes_below / "test" / kind)
    tiles = sorted((DATA / "dubai" / "tile1" / "images").glob("*.jpg"))
    _copy(tiles[:2], home / "scenes")
    _masks(home, tiles[0])
    _fields(home / "fields")
    _georeferenced(home, tiles[0])
    _weights(home / "tiny.pth")
    return home


def _copy(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in files:
        shutil.copy(str(file), str(folder / file.name))


def _masks(home: Path, tile: Path) -> None:
    """Tiles with masks of two colors, of two numbers, and as LoveDA has them."""
    import numpy as np
    from PIL import Image

    picture = Image.open(tile).resize((128, 128))
    half = np.arange(128)[:, None] + np.arange(128)[None] > 127
    colors = np.where(half[..., None], (0x6E, 0xC1, 0xE4), (0x3C, 0x10, 0x98))

    def save(folder: Path, images: str, masks: str, mask: Any, numbers: Iterable[int]) -> None:
        for name in (images, masks):
            (folder / name).mkdir(parents=True)
        for number in numbers:
            picture.rotate(9 * number).save(folder / images / f"{number}.png")
            Image.fromarray(mask.astype(np.uint8)).save(folder / masks / f"{number}.png")

    for each in range(3):
        save(home / "city" / f"tile{each}", "images", "masks", colors, range(each, 10, 3))
        save(home / "town" / f"tile{each}", "images", "masks", half, range(each, 10, 3))
    for name in ("Town", "SSDD"):
        save(home / "data" / "mmrs1m" / "data" / "segmentation" / name, "images", "labels", half, range(10))
    for place in ("Train/Urban", "Train/Rural", "Val/Urban", "Val/Rural"):
        save(home / "data" / "LoveDA" / place, "images_png", "masks_png", 1 + half, range(4))


def _fields(folder: Path) -> None:
    """Scenes of Sentinel-2: 16 bits, whose first column holds no data."""
    import numpy as np

    from tests.vision.data.conftest import write_tiff

    names = [*(f"B{number:02}" for number in range(1, 9)), "B8A", *(f"B{number:02}" for number in range(9, 13))]
    for number in range(12):
        values = np.random.default_rng(number).integers(1, 3000, (13, 32, 32)).astype(np.uint16)
        values[:, :, 0] = 0
        write_tiff(folder / ("wheat", "maize")[number % 2] / f"{number}.tif", values, names, nodata=0)


def _georeferenced(home: Path, tile: Path) -> None:
    """A scene of half a meter per pixel, and two files that overlap."""
    import numpy as np
    import rasterio
    from PIL import Image

    from tests.vision.data.conftest import write_tiff

    pixels = np.asarray(Image.open(tile)).transpose(2, 0, 1)[:, :300, :400]
    for name, left, right in (("scene", 0, 400), ("mosaic/west", 0, 210), ("mosaic/east", 190, 400)):
        place = rasterio.transform.from_origin(3.3e5 + left / 2, 2.78e6, 0.5, 0.5)
        write_tiff(home / f"{name}.tif", pixels[:, :, left:right], crs="EPSG:32640", transform=place)


def _weights(path: Path) -> None:
    """A backbone as its authors' files have it, of the smallest size."""
    import torch

    from exp.vision.backbones.vit import VisionTransformer

    torch.save(VisionTransformer(size="tiny").state_dict(), str(path))
