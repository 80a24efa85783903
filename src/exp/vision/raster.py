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
_EARTH_RADIUS = 6371008.8  # mean, in meters
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


def ground_resolution(dataset: Any) -> float | None:
    """Meters per pixel, in the middle of the image; None: not known.

    Args:
        dataset: result of ``rasterio.open``; None: not known.
    """
    if dataset is None or dataset.crs is None or not (dataset.crs.is_projected or dataset.crs.is_geographic):
        return None
    area = pixel_area(dataset)
    if area is not None:
        return float(area**0.5)
    from rasterio.warp import transform

    # Degrees, or Web Mercator: the distances to the next pixels on a sphere.
    column, row = dataset.width / 2, dataset.height / 2
    points = [dataset.xy(row + down, column + across) for down, across in ((0, 0), (0, 1), (1, 0))]
    longitudes, latitudes = np.radians(transform(dataset.crs, "EPSG:4326", *zip(*points)))
    steps = [np.diff(longitudes[[0, other]]) * np.cos(latitudes[0]) for other in (1, 2)]
    sides = [np.hypot(step, latitudes[other] - latitudes[0]) for other, step in enumerate(steps, 1)]
    return float(_EARTH_RADIUS * np.sqrt(sides[0] * sides[1]).item())


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
        seen: the model's input: the image itself, or the same file read at another resolution.

    Args:
        dataset: result of ``rasterio.open``.
        path: of the file, for messages.
        reader: converts values of the file to the model's input.
        size: (height, width) at which the file is read; None: its own.
        seen_size: the same of ``seen``; None: ``size``.
    """

    def __init__(
        self,
        dataset: Any,
        path: Path,
        reader: ImageReader,
        size: tuple[int, int] | None = None,
        seen_size: tuple[int, int] | None = None,
    ) -> None:
        self.dataset = dataset
        self.path = path
        self.reader = reader
        self.height: int
        self.width: int
        self.height, self.width = size or dataset.shape
        self.seen = self if seen_size is None else RasterImage(dataset, path, reader, seen_size)
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
        masked = read_dataset_mask(self.dataset, **self._window(top, left, height, width))
        return self._to_channels(self._cached_rows(top, height)[:, :, left : left + width], masked)

    def _window(self, top: int, left: int, height: int, width: int) -> dict[str, Any]:
        """Keys of rasterio to read a part; at another resolution than the file's, means or interpolated values."""
        from rasterio.enums import Resampling
        from rasterio.windows import Window

        if (self.height, self.width) == self.dataset.shape:
            return {"window": Window(left, top, width, height)}
        down, across = self.dataset.height / self.height, self.dataset.width / self.width
        resampling = Resampling.average if down > 1 else Resampling.bilinear
        window = Window(left * across, top * down, width * across, height * down)
        return {"window": window, "out_shape": (height, width), "resampling": resampling}

    def _to_channels(self, rows: np.ndarray, masked: np.ndarray | None) -> tuple[Any, Any, Any]:
        """:meth:`ImageReader.to_channels` for rows of the file, (bands, h, w)."""
        pixels, count = np.moveaxis(rows, 0, -1), len(self._bands)
        transparency = pixels[..., count] if self._alpha else None
        return self.reader.to_channels(pixels[..., :count], transparency, self.dataset.nodata, masked, self.path)

    def _cached_rows(self, top: int, height: int) -> np.ndarray:
        """Whole rows (bands, height, W) of the file; rows that are in memory are not read again."""
        num_cached = self._rows.shape[1]
        if top < self._top or top + height > self._top + num_cached:
            rows = np.empty((len(self._rows), height, self.width), self._rows.dtype)
            num_kept = max(min(self._top + num_cached - top, height), 0) if top >= self._top else 0
            if num_kept:
                rows[:, :num_kept] = self._rows[:, top - self._top : top - self._top + num_kept]
            self._rows = rows  # frees the old rows before new ones are read
            self._top = top
            bands, keys = self._bands + self._alpha, self._window(top + num_kept, 0, height - num_kept, self.width)
            if "out_shape" in keys:
                keys["out_shape"] = (len(bands), *keys["out_shape"])
            rows[:, num_kept:] = self._read(bands, **keys)
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
    prepare: Callable[[np.ndarray, Path, np.ndarray | None, float], np.ndarray] | None = None,
    max_pixels: int = _WHOLE,
    factor: Callable[[Any], float] = lambda _: 1.0,
    has_pipeline: bool = False,
) -> Iterator[DecodedImage | RasterImage]:
    """Open an image: decoded whole, or, if it is large and rasterio is installed, to be read by rows.

    Args:
        path: of the file.
        reader: converts values of the file to the model's input.
        prepare: resizes the image by a factor, and applies ``data.eval_pipeline``
            (:meth:`exp.vision.data.base.ImageData.prepare_for_map`); None: the model sees the image as it is.
        max_pixels: images of up to this many pixels (of three bands) are decoded whole.
        factor: of the size of the image that the model sees, from the open dataset, or None where there is none.
        has_pipeline: whether ``prepare`` does more than to resize by the factor, which needs the whole image.

    Raises:
        DataError: the file cannot be read, has other channels, or is too large to be decoded whole.
    """
    size = None if uses_rasterio(path) else image_size(path)
    if not uses_rasterio(path) and (size is None or size[0] * size[1] <= max_pixels or not has_rasterio()):
        yield _decoded(path, reader, prepare, factor(None))
        return
    with open_raster(path) as dataset:
        scale = factor(dataset)
        small = dataset.height * dataset.width * dataset.count <= 3 * max_pixels
        if small or has_pipeline or dataset.colorinterp[0].name == "palette":  # color numbers
            yield _decoded(path, reader, prepare, scale, dataset)
        else:
            yield RasterImage(dataset, path, reader, None, None if scale == 1.0 else scaled_size(dataset.shape, scale))


def scaled_size(size: tuple[int, int], factor: float) -> tuple[int, int]:
    """(height, width) times a factor, in whole pixels, at least 1."""
    return max(round(size[0] * factor), 1), max(round(size[1] * factor), 1)


def _decoded(path: Path, reader: ImageReader, prepare: Any, factor: float, dataset: Any = None) -> DecodedImage:
    check_pixels(path)
    pixels, missing = reader.read_with_missing(path)
    if prepare is None:
        return DecodedImage(reader.modalities.map_statistics(pixels, path), missing, None, dataset)
    return DecodedImage(pixels, missing, prepare(pixels, path, missing, factor), dataset)


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
