"""The home folder of somebody who reads the documentation: small files, made from the bundled data."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

__all__ = ["make_home"]

DATA = Path(__file__).parents[2] / "data"


def make_home(home: Path) -> Path:
    """Make it; returns ``home``."""
    home.mkdir()
    with (DATA / "ett" / "ETTh1.csv").open() as file:
        rows = [row for _, row in zip(range(1201), csv.reader(file))][1:]
    for name, channels in (("weather/weather.csv", 21), ("traffic/traffic.csv", 862), ("plant.csv", 2)):
        path = home / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            names = ["temperature", "load"] if channels == 2 else [f"channel{number}" for number in range(channels)]
            writer.writerow(["date", *names])
            writer.writerows([row[0], *(row[1 + number % 7] for number in range(channels))] for row in rows)
    for kind in ("Forest", "River"):
        scenes = sorted((DATA / "eurosat_rgb" / kind).glob("*.jpg"))
        assert len(scenes) >= 8
        _copy(scenes, home / "roofs" / kind)
        below = home / "data" / "mmrs1m" / "data" / "classification" / "UCMerced_split"
        _copy(scenes[:6], below / "train" / kind)
        _copy(scenes[6:8], below / "test" / kind)
    tiles = sorted((DATA / "dubai" / "tile1" / "images").glob("*.jpg"))
    _copy(tiles[:2], home / "scenes")
    _masks(home)
    _fields(home)
    _weights(home / "tiny.pth")
    return home


def _copy(files: list[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in files:
        shutil.copy(str(file), str(folder / file.name))


def _masks(home: Path) -> None:
    """Tiles with masks of two colours, of two numbers, and as LoveDA has them."""
    import numpy as np
    from PIL import Image

    tile = next(iter(sorted((DATA / "dubai" / "tile1" / "images").glob("*.jpg"))))
    pictures = [Image.open(tile).resize((128, 128)).rotate(9 * turn) for turn in range(10)]
    half = np.arange(128)[:, None] + np.arange(128)[None] > 127
    colours = np.where(half[..., None], (0x6E, 0xC1, 0xE4), (0x3C, 0x10, 0x98)).astype(np.uint8)
    for town, mask in (("city", colours), ("town", half.astype(np.uint8))):
        for number in range(10):
            images, masks = (home / town / f"tile{number % 3}" / kind for kind in ("images", "masks"))
            images.mkdir(parents=True, exist_ok=True)
            masks.mkdir(exist_ok=True)
            pictures[number].save(images / f"{number}.png")
            Image.fromarray(mask).save(masks / f"{number}.png")
    for number in range(10):
        for kind, picture in (("images", pictures[number]), ("labels", Image.fromarray(half.astype(np.uint8)))):
            folder = home / "data" / "mmrs1m" / "data" / "segmentation" / "Town" / kind
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{number}.png")
    for part in ("Train", "Val"):
        for area in ("Urban", "Rural"):
            images, masks = (home / "data" / "LoveDA" / part / area / kind for kind in ("images_png", "masks_png"))
            images.mkdir(parents=True)
            masks.mkdir()
            for number in range(4):
                pictures[number].save(images / f"{number}.png")
                Image.fromarray((1 + half).astype(np.uint8)).save(masks / f"{number}.png")


def _fields(home: Path) -> None:
    """Scenes of Sentinel-2: 16 bits, whose first column holds no data."""
    import warnings

    import numpy as np
    import rasterio

    names = [*(f"B{number:02}" for number in range(1, 9)), "B8A", *(f"B{number:02}" for number in range(9, 13))]
    profile = {"driver": "GTiff", "height": 32, "width": 32, "count": 13, "dtype": "uint16", "nodata": 0}
    for number in range(12):
        path = home / "fields" / ("wheat", "maize")[number % 2] / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(1, 3000, (13, 32, 32)).astype(np.uint16)
        values[:, :, 0] = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with rasterio.open(path, "w", **profile) as file:
                file.write(values)
                for band, name in enumerate(names, 1):
                    file.set_band_description(band, name)


def _weights(path: Path) -> None:
    """A backbone as its authors' files have it, of the smallest size."""
    import torch

    from exp.vision.dinov3.backbone import VisionTransformer
    from exp.vision.dinov3.sizes import SIZES

    torch.save(VisionTransformer(SIZES["tiny"]).state_dict(), str(path))
