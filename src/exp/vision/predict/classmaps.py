"""Files of class numbers that are written row by row, so that a map is never held as a whole."""

from __future__ import annotations

import struct
import warnings
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator, Protocol, Sequence

import numpy as np

from exp.vision.draw.overlay import palette_table
from exp.vision.draw.pictures import middles

if TYPE_CHECKING:
    from pathlib import Path

    from exp.vision.predict.raster import DecodedImage, RasterImage

__all__ = ["Counts", "RowTaker", "SmallMap", "at_size", "class_png", "class_tiff", "probability_tiff"]

_NO_DATA = 255
_BLOCK = 256  # pixels along each side of a tile of a TIFF
_TILED = {"driver": "GTiff", "compress": "deflate", "tiled": True, "blockxsize": _BLOCK, "blockysize": _BLOCK,
          "BIGTIFF": "IF_SAFER"}  # fmt: skip


def at_size(
    rows: np.ndarray, top: int, seen: tuple[int, int], size: tuple[int, int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Rows of a map at another size: every pixel gets what is at its middle, as an evaluation has it.

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
    for begin in range(first, last, _BLOCK):
        some = down[begin : min(begin + _BLOCK, last)] - top
        yield begin, rows[..., some, :][..., across]


class RowTaker(Protocol):
    """Takes a map from top to bottom."""

    def add(self, rows: np.ndarray) -> None:
        """The next rows: labels, uint8 (rows, W)."""


class Counts:
    """How many pixels each label has, and how much ground.

    Attributes:
        counts: by label, int64 (256,).
        metres: square metres by label, float64 (256,); None: not known.

    Args:
        areas: square metres of a pixel in each row, (H,); None: not known.
    """

    def __init__(self, areas: np.ndarray | None = None) -> None:
        self.counts = np.zeros(256, np.int64)
        self.metres = None if areas is None else np.zeros(256)
        self._areas = areas
        self._top = 0

    def add(self, rows: np.ndarray) -> None:
        """Count."""
        counts = np.bincount(rows.ravel(), minlength=256)
        self.counts += counts
        if self.metres is not None and self._areas is not None:
            areas = self._areas[self._top : self._top + len(rows)]
            if (areas == areas[0]).all():
                self.metres += counts * areas[0]
            else:
                weights = np.repeat(areas, rows.shape[1])
                self.metres += np.bincount(rows.ravel(), weights, minlength=256)
        self._top += len(rows)


class SmallMap:
    """A smaller copy of a map, for the eye: every pixel the label at its middle, as labels have no mean.

    Attributes:
        labels: uint8, of the smaller size.

    Args:
        size: of the map, (H, W).
        small: of the copy.
    """

    def __init__(self, size: tuple[int, int], small: tuple[int, int]) -> None:
        self._rows, self._columns = (middles(extent, count) for extent, count in zip(size, small))
        self.labels = np.full(small, _NO_DATA, np.uint8)
        self._top = 0

    def add(self, rows: np.ndarray) -> None:
        """Take what the copy shows of them."""
        shown = (self._rows >= self._top) & (self._rows < self._top + len(rows))
        self.labels[shown] = rows[self._rows[shown] - self._top][:, self._columns]
        self._top += len(rows)


@contextmanager
def class_png(path: Path, size: tuple[int, int], palette: Sequence[tuple[int, int, int]]) -> Iterator[RowTaker]:
    """Write a palette PNG, 8 bits for each pixel: programs read class numbers, viewers show the classes' colours.

    Args:
        path: of the new file, which is there once it is complete; its folder is made.
        size: (H, W).
        palette: RGB of each class.
    """
    with _complete(path) as temporary, temporary.open("wb") as file:
        writer = _Png(file, size)
        writer.begin(palette)
        yield writer
        writer.end()


@contextmanager
def class_tiff(
    path: Path, image: DecodedImage | RasterImage, palette: Sequence[tuple[int, int, int]]
) -> Iterator[RowTaker]:
    """Write a GeoTIFF at the place of ``image``: one band, uint8, 255 is no data, with the palette.

    Args:
        path: of the new file, which is there once it is complete; its folder is made.
        image: whose size and georeference it gets.
        palette: RGB of each class.
    """
    import rasterio

    profile = {**_TILED, "height": image.height, "width": image.width, "count": 1, "dtype": "uint8",
               "crs": image.dataset.crs, "transform": image.dataset.transform, "nodata": _NO_DATA}  # fmt: skip
    with _complete(path) as temporary, rasterio.open(temporary, "w", **profile) as file:
        file.write_colormap(1, {number: (*color, 255) for number, color in enumerate(palette)})
        writer = _Tiff(file)
        yield writer
        writer.end()


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
        What takes top, left and probabilities (K, h, w), float32, from left to right and then from top to bottom.
    """
    import rasterio
    from rasterio.errors import NotGeoreferencedWarning

    profile = {**_TILED, "height": image.height, "width": image.width, "count": len(classes), "dtype": "float32",
               "nodata": float("nan")}  # fmt: skip
    if image.dataset is not None and image.dataset.crs is not None:
        profile.update(crs=image.dataset.crs, transform=image.dataset.transform)
    with _complete(path) as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)
        with rasterio.open(temporary, "w", **profile) as file:
            for band, name in enumerate(classes, start=1):
                file.set_band_description(band, name)
            writer = _Tiff(file)
            rows = np.empty((0,), np.float32)

            def take(top: int, left: int, probabilities: np.ndarray) -> None:
                nonlocal rows
                count, height, width = probabilities.shape
                if left == 0:
                    rows = np.empty((count, height, image.seen.width), np.float32)
                rows[:, :, left : left + width] = probabilities
                if left + width == image.seen.width:
                    seen, size = (image.seen.height, image.seen.width), (image.height, image.width)
                    for begin, part in at_size(rows, top, seen, size):
                        missing = image.without_data(begin, part.shape[1])
                        if missing is not None:
                            part[:, missing] = np.nan
                        writer.add(part)

            yield take
            writer.end()


class _Png:
    """The PNG format (ISO/IEC 15948): rows of palette numbers, each after a filter byte, deflated."""

    def __init__(self, file: Any, size: tuple[int, int]) -> None:
        self._file = file
        self._size = size
        self._deflate = zlib.compressobj(6)

    def begin(self, palette: Sequence[tuple[int, int, int]]) -> None:
        """Signature, header and all 256 colours."""
        height, width = self._size
        self._file.write(b"\x89PNG\r\n\x1a\n")
        self._chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))
        self._chunk(b"PLTE", palette_table(palette).tobytes())

    def add(self, rows: np.ndarray) -> None:
        """Write the next rows."""
        filtered = np.zeros((rows.shape[0], rows.shape[1] + 1), np.uint8)  # filter 0: none, the best for palettes
        filtered[:, 1:] = rows
        self._data(self._deflate.compress(filtered.tobytes()))

    def end(self) -> None:
        """Write what remains."""
        self._data(self._deflate.flush())
        self._chunk(b"IEND", b"")

    def _data(self, content: bytes) -> None:
        if content:
            self._chunk(b"IDAT", content)

    def _chunk(self, kind: bytes, content: bytes) -> None:
        self._file.write(struct.pack(">I", len(content)) + kind + content)
        self._file.write(struct.pack(">I", zlib.crc32(content, zlib.crc32(kind))))


class _Tiff:
    """Rows of whole tiles: a tile that came in parts would be compressed, and stored, again for each."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._waiting = np.empty((file.count, _BLOCK, file.width), file.dtypes[0])
        self._count = self._top = 0

    def add(self, rows: np.ndarray) -> None:
        """Write the next rows: (rows, W), or (bands, rows, W)."""
        rows = rows if rows.ndim == 3 else rows[None]
        while rows.shape[1]:
            part = rows[:, : _BLOCK - self._count]
            self._waiting[:, self._count : self._count + part.shape[1]] = part
            self._count += part.shape[1]
            if self._count == _BLOCK:
                self.end()
            rows = rows[:, part.shape[1] :]

    def end(self) -> None:
        """Write what waits."""
        from rasterio.windows import Window

        if self._count:
            window = Window(0, self._top, self._file.width, self._count)
            self._file.write(self._waiting[:, : self._count], window=window)
            self._top += self._count
            self._count = 0


@contextmanager
def _complete(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path``, which it becomes at the end; after an error there is neither."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        if temporary.exists():
            temporary.unlink()
