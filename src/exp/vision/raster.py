"""Images for prediction: decoded whole, or, with the optional package rasterio, read a band of rows at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator

import numpy as np
import torch

from exp.errors import DataError
from exp.vision.data.bands import is_data_band
from exp.vision.data.decode import (
    has_rasterio,
    image_size,
    name_errors,
    open_raster,
    read_band_info,
    read_dataset_mask,  # fmt: skip
    uses_rasterio,
)
from exp.vision.rendering import shrink, to_rgb
from exp.vision.tiling import InMemoryImage

if TYPE_CHECKING:
    from pathlib import Path

    from exp.vision.data.bands import ImageReader

__all__ = ["DecodedImage", "RasterImage", "check_pixels", "open_image", "pixel_area"]

# Largest number of pixels of an image that is decoded whole.
MOST_PIXELS = 2**27
_WHOLE = 2**26  # pixels of three bands; larger images are read by rows if possible
_EXAMPLE = 1024  # most pixels along a side of the sample that decides whether a band is transparency


def pixel_area(dataset: Any) -> float | None:
    """Area of a pixel in square meters, in the plane of the file's projection; None: not known.

    None, too, for degrees and Web Mercator (EPSG:3857), where the area depends on the latitude.

    Args:
        dataset: result of ``rasterio.open``.
    """
    crs = dataset.crs
    if crs is None or not crs.is_projected or crs.to_epsg() == 3857:
        return None
    return float(abs(dataset.transform.determinant) * crs.linear_units_factor[1] ** 2)


class DecodedImage:
    """An image in memory.

    Attributes:
        height: in pixels.
        width: in pixels.
        pixel_area: area of a pixel in square meters; None: not known.
        dataset: result of ``rasterio.open``, for the georeference; None: there is none.
        seen: the model's input, of any size (:class:`exp.vision.tiling.Image`).

    Args:
        pixels: (H, W, C), uint8 or float32, 0..255.
        missing: True where a pixel has no data, bool (H, W); None: all have data.
        seen: (h, w, C), the pixels after ``data.eval_pipeline``; None: the same as ``pixels``.
        dataset: see above.
    """

    def __init__(
        self,
        pixels: np.ndarray,
        missing: np.ndarray | None = None,
        seen: np.ndarray | None = None,
        dataset: Any = None,
    ) -> None:
        self.pixels = pixels
        self.missing = missing
        self.height, self.width = pixels.shape[:2]
        self.seen = InMemoryImage(_tensor(pixels if seen is None else seen))
        self.dataset = dataset
        self.pixel_area = None if dataset is None else pixel_area(dataset)

    def thumbnail(self, longest: int) -> np.ndarray:
        """RGB for the eye, with at most ``longest`` pixels on its longer side: (h, w, 3), uint8."""
        return to_rgb(shrink(self.pixels, longest))

    def missing_rows(self, top: int, height: int) -> np.ndarray | None:
        """Which pixels of these rows hold no data: bool (height, width); None: all do."""
        return None if self.missing is None else self.missing[top : top + height]


class RasterImage:
    """An image on disk that may be larger than the memory: only the rows of the current windows are in memory.

    Each row is read once, in the order of the windows: for files in strips, and compressed files, reading single
    windows would decode rows again and again.

    Attributes:
        height: in pixels.
        width: in pixels.
        pixel_area: area of a pixel in square meters; None: not known.
        seen: the model's input: the image itself.

    Args:
        dataset: result of ``rasterio.open``.
        path: of the file, for messages.
        reader: converts values of the file to the model's input.
    """

    def __init__(self, dataset: Any, path: Path, reader: ImageReader) -> None:
        self.dataset = dataset
        self.path = path
        self.reader = reader
        self.height, self.width = dataset.height, dataset.width
        self.seen = self
        self.pixel_area = pixel_area(dataset)
        has_alpha, names = read_band_info(dataset)
        selection = reader.select_bands(dataset.count, names, has_alpha, path)
        self._bands = [index + 1 for index in selection.indexes]
        self._alpha: list[int] = []
        if selection.alpha is not None:
            example = self._read([selection.alpha + 1], out_shape=[1, *(min(side, _EXAMPLE) for side in dataset.shape)])
            if not is_data_band(example):
                self._alpha = [selection.alpha + 1]
        self._top = 0
        self._rows = np.empty((len(self._bands + self._alpha), 0, self.width), dataset.dtypes[0])

    def crop(self, top: int, left: int, height: int, width: int) -> torch.Tensor:
        """A part of the model's input, (C, height, width)."""
        values, invalid, _ = self._part(top, left, height, width)
        image = self.reader.to_model_range(values, invalid, self.path)
        return _tensor(self.reader.modalities.map_statistics(image, self.path))

    def thumbnail(self, longest: int) -> np.ndarray:
        """RGB for the eye, with at most ``longest`` pixels on its longer side: (h, w, 3), uint8."""
        from rasterio.enums import Resampling

        factor = min(longest / max(self.height, self.width), 1.0)
        size = [max(round(extent * factor), 1) for extent in (self.height, self.width)]
        bands = self._bands + self._alpha
        small = self._read(bands, out_shape=[len(bands), *size], resampling=Resampling.average)
        pixels = self.reader.to_model_range(*self._to_channels(small, None)[:2], self.path)
        return to_rgb(self.reader.modalities.map_statistics(pixels, self.path)[..., :3])

    def missing_rows(self, top: int, height: int) -> np.ndarray | None:
        """Which pixels of these rows hold no data: bool (height, width); None: all do."""
        return self._part(top, 0, height, self.width)[2]

    def _part(self, top: int, left: int, height: int, width: int) -> tuple[Any, Any, Any]:
        from rasterio.windows import Window

        masked = read_dataset_mask(self.dataset, Window(left, top, width, height))
        return self._to_channels(self._cached_rows(top, height)[:, :, left : left + width], masked)

    def _to_channels(self, rows: np.ndarray, masked: np.ndarray | None) -> tuple[Any, Any, Any]:
        """:meth:`ImageReader.to_channels` for rows of the file, (bands, h, w)."""
        pixels, count = np.moveaxis(rows, 0, -1), len(self._bands)
        transparency = pixels[..., count] if self._alpha else None
        return self.reader.to_channels(pixels[..., :count], transparency, self.dataset.nodata, masked, self.path)

    def _cached_rows(self, top: int, height: int) -> np.ndarray:
        """Whole rows (bands, height, W) of the file; rows that are in memory are not read again."""
        from rasterio.windows import Window

        num_cached = self._rows.shape[1]
        if top < self._top or top + height > self._top + num_cached:
            rows = np.empty((len(self._rows), height, self.width), self._rows.dtype)
            num_kept = max(min(self._top + num_cached - top, height), 0) if top >= self._top else 0
            if num_kept:
                rows[:, :num_kept] = self._rows[:, top - self._top : top - self._top + num_kept]
            self._rows = rows  # frees the old rows before new ones are read
            self._top = top
            window = Window(0, top + num_kept, self.width, height - num_kept)
            rows[:, num_kept:] = self._read(self._bands + self._alpha, window=window)
        return self._rows[:, top - self._top : top - self._top + height]

    def _read(self, bands: list[int], **options: Any) -> np.ndarray:
        with name_errors(self.path):
            return np.asarray(self.dataset.read(bands, **options))


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    """(H, W, C) -> (C, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


@contextmanager
def open_image(
    path: Path,
    reader: ImageReader,
    prepare: Callable[[np.ndarray, Path, np.ndarray | None], np.ndarray] | None = None,
    max_pixels: int = _WHOLE,
) -> Iterator[DecodedImage | RasterImage]:
    """Open an image: decoded whole, or, if it is large and rasterio is installed, to be read by rows.

    Args:
        path: of the file.
        reader: converts values of the file to the model's input.
        prepare: ``data.eval_pipeline`` (:meth:`exp.vision.data.base.ImageData.prepare_for_map`); None: there is none.
        max_pixels: images of up to this many pixels (of three bands) are decoded whole.

    Raises:
        DataError: the file cannot be read, has other channels, or is too large to be decoded whole.
    """
    size = None if uses_rasterio(path) else image_size(path)
    if not uses_rasterio(path) and (size is None or size[0] * size[1] <= max_pixels or not has_rasterio()):
        yield _decoded(path, reader, prepare)
        return
    with open_raster(path) as dataset:
        small = dataset.height * dataset.width * dataset.count <= 3 * max_pixels
        if small or prepare is not None or dataset.colorinterp[0].name == "palette":  # color numbers
            yield _decoded(path, reader, prepare, dataset)
        else:
            yield RasterImage(dataset, path, reader)


def _decoded(path: Path, reader: ImageReader, prepare: Any, dataset: Any = None) -> DecodedImage:
    check_pixels(path)
    pixels, missing = reader.read_with_missing(path)
    if prepare is None:
        return DecodedImage(reader.modalities.map_statistics(pixels, path), missing, None, dataset)
    return DecodedImage(pixels, missing, prepare(pixels, path, missing), dataset)


def check_pixels(path: Path) -> None:
    """Refuse an image that is too large to be decoded whole, by its header.

    Raises:
        DataError: the image has more than ``MOST_PIXELS`` pixels.
    """
    size = image_size(path)
    if size is not None and size[0] * size[1] > MOST_PIXELS:
        raise DataError(
            f"{path} has {size[1]} x {size[0]} pixels, and at most {MOST_PIXELS / 1e6:.0f} million are decoded "
            "at once; cut it into tiles"
        )
