"""Class maps: held in a file while they grow, then counted and written as PNG and GeoTIFF."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import numpy as np
from PIL import Image

from exp.vision.draw.overlay import palette_table
from exp.vision.draw.pictures import middles

if TYPE_CHECKING:
    from pathlib import Path

    from exp.vision.predict.raster import DecodedImage, RasterImage

__all__ = ["NO_DATA", "at_size", "counted", "label_map", "probability_tiff", "write_png", "write_tiff"]

NO_DATA = 255
_ROWS = 256  # at a time; also pixels along each side of a tile of a TIFF
_TIFF = {"driver": "GTiff", "compress": "deflate", "BIGTIFF": "IF_SAFER"}


def at_size(
    rows: np.ndarray, top: int, seen: tuple[int, int], size: tuple[int, int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of a map at another size: each pixel gets the value at its middle, as in an evaluation.

    Args:
        rows: (..., rows, w), those from ``top`` on of a map of the size ``seen``, (h, w).
        top: see there.
        seen: see there.
        size: wanted, (H, W).

    Yields:
        The number of the first of some rows, and these (..., rows, W).
    """
    if seen == size:
        yield top, rows
        return
    down, across = middles(seen[0], size[0]), middles(seen[1], size[1])
    first, last = np.searchsorted(down, (top, top + rows.shape[-2])).tolist()
    for begin in range(first, last, _ROWS):
        some = down[begin : min(begin + _ROWS, last)] - top
        yield begin, rows[..., some, :][..., across]


@contextmanager
def label_map(path: Path, size: tuple[int, int]) -> Iterator[np.ndarray]:
    """Labels of an image of any size, in a temporary file that is mapped: uint8 (H, W).

    Args:
        path: of the map that it becomes; the temporary file is beside it.
        size: (H, W).
    """
    with _temporary(path.with_suffix(".map")) as temporary:
        yield np.memmap(temporary, np.uint8, "w+", shape=size)


def counted(labels: np.ndarray, areas: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Pixels of each label, int64 (256,), and square meters, float64 (256,); None: not known.

    Args:
        labels: uint8 (H, W).
        areas: square meters of a pixel in each row, (H,); None: not known.
    """
    counts, meters = np.zeros(256, np.int64), np.zeros(256)
    for top in range(0, len(labels), _ROWS):
        part = labels[top : top + _ROWS]
        row = np.arange(len(part))[:, None] * 256
        by_row = np.bincount((part + row).ravel(), minlength=256 * len(part)).reshape(-1, 256)
        counts += by_row.sum(axis=0)
        if areas is not None:
            meters += areas[top : top + _ROWS] @ by_row
    return counts, None if areas is None else meters


def write_png(path: Path, labels: np.ndarray, palette: Sequence[tuple[int, int, int]]) -> None:
    """Write a palette PNG, 8 bits for each pixel: programs read class numbers, viewers show the classes' colors.

    Args:
        path: of the new file, which is there once it is complete.
        labels: uint8 (H, W).
        palette: RGB of each class.
    """
    image = Image.frombuffer("P", (labels.shape[1], labels.shape[0]), labels, "raw", "P", 0, 1)
    image.putpalette(palette_table(palette).tobytes())
    with _complete(path) as temporary:
        image.save(temporary, format="PNG")


def write_tiff(path: Path, labels: np.ndarray, dataset: Any, palette: Sequence[tuple[int, int, int]]) -> None:
    """Write a GeoTIFF: one band, uint8, 255 is no data, with the palette.

    Args:
        path: of the new file, which is there once it is complete; its folder is made.
        labels: uint8 (H, W).
        dataset: of ``rasterio.open``, whose georeference it gets.
        palette: RGB of each class.
    """
    import rasterio
    from rasterio.windows import Window

    height, width = labels.shape
    profile = {**_TIFF, "tiled": True, "blockxsize": _ROWS, "blockysize": _ROWS, "height": height, "width": width,
               "count": 1, "dtype": "uint8", "crs": dataset.crs, "transform": dataset.transform,
               "nodata": NO_DATA}  # fmt: skip
    with _complete(path) as temporary, rasterio.open(temporary, "w", **profile) as file:
        file.write_colormap(1, {number: (*color, 255) for number, color in enumerate(palette)})
        for top in range(0, height, _ROWS):
            part = labels[top : top + _ROWS]
            file.write(part, 1, window=Window(0, top, width, len(part)))


@contextmanager
def probability_tiff(
    path: Path, image: DecodedImage | RasterImage, classes: Sequence[str]
) -> Iterator[Callable[[int, int, np.ndarray], None]]:
    """Write a GeoTIFF at the place of ``image``, as far as that is known: a float32 band for each class, named by it.

    Args:
        path: of the new file, which is there once it is complete; its folder is made.
        image: whose size, georeference and missing pixels it gets; these are nan.
        classes: names of the K classes.

    Yields:
        A function of top, left and probabilities (K, h, w), float32, from left to right and then from top to bottom.
    """
    import rasterio
    from rasterio.errors import NotGeoreferencedWarning
    from rasterio.windows import Window

    # Rows are its blocks: they come in any number, and no block is compressed twice.
    profile = {**_TIFF, "blockysize": 1, "height": image.height, "width": image.width, "count": len(classes),
               "dtype": "float32", "nodata": float("nan")}  # fmt: skip
    if image.dataset is not None and image.dataset.crs is not None:
        profile.update(crs=image.dataset.crs, transform=image.dataset.transform)
    seen, size = (image.seen.height, image.seen.width), (image.height, image.width)
    with _complete(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(temporary, "w", **profile) as file:
            file.descriptions = tuple(classes)
            rows = np.empty(0, np.float32)

            def take(top: int, left: int, probabilities: np.ndarray) -> None:
                nonlocal rows
                count, height, width = probabilities.shape
                if left == 0:
                    rows = np.empty((count, height, seen[1]), np.float32)
                rows[:, :, left : left + width] = probabilities
                for begin, part in at_size(rows, top, seen, size) if left + width == seen[1] else ():
                    missing = image.without_data(begin, part.shape[1])
                    if missing is not None:
                        part[:, missing] = np.nan
                    file.write(part, window=Window(0, begin, size[1], part.shape[1]))

            yield take


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which it becomes at the end; after an error there is neither."""
    with _temporary(path) as temporary:
        yield temporary
        temporary.replace(path)


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
    finally:
        if temporary.exists():
            temporary.unlink()
