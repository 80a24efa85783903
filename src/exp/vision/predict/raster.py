"""Images that are read part by part: decoded whole, or, with the optional package rasterio, rows by rows."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator

import numpy as np
import torch

from exp.errors import DataError
from exp.vision.data.bands import is_measured_band
from exp.vision.data.decode import (
    by_rasterio,
    check_tiff,
    has_mask,
    has_rasterio,
    image_size,
    marks_alpha,
    names_in,
    naming,
    order_in,
    refuse_complex,
)
from exp.vision.data.values import Raw, no_data, split_alpha
from exp.vision.draw.pictures import shrunk, to_rgb
from exp.vision.predict.ground import row_areas
from exp.vision.tiling import InMemory

if TYPE_CHECKING:
    from pathlib import Path

    from exp.vision.data.values import ImageReader, ValueRange

__all__ = [
    "MOST_PATCHES",
    "DecodedImage",
    "RasterImage",
    "check_patches",
    "check_pixels",
    "is_georeferenced",
    "metres_of",
    "open_image",
    "patches_in",
]

MOST_PIXELS = 2**27
"""Of an image that is decoded whole."""
MOST_PATCHES = 2**16
"""That a model sees at once: 4096 x 4096 pixels of 16 x 16."""
_WHOLE = 2**26  # pixels of three bands; larger images are read by rows where they can be
_ROWS_AT_ONCE = 256  # of a picture
_MEASURED = 1024  # pixels along the longer side that an image's own percentiles are measured on
_CACHE_MIB = 64
"""Of GDAL, which would take a twentieth of the machine's memory."""


class DecodedImage:
    """An image in memory.

    Attributes:
        height: pixels.
        width: pixels.
        row_areas: square metres of a pixel in each row, float64 (H,); None: not known.
        dataset: of ``rasterio.open``, for its place on Earth; None: there is none.
        seen: what the model is to see, of any size (:class:`exp.vision.tiling.Image`).

    Args:
        pixels: (H, W, C), uint8 or float32, 0..255.
        missing: which pixels hold no data, bool (H, W); None: all do.
        seen: (h, w, C), what ``data.eval_pipeline`` has made of them; None: they themselves.
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
        self.seen = InMemory(_tensor(pixels if seen is None else seen))
        self.dataset = dataset
        self.row_areas = None if dataset is None else row_areas(dataset)

    def thumbnail(self, longest: int) -> np.ndarray:
        """RGB for the eye, with at most ``longest`` pixels on its longer side: (h, w, 3), uint8."""
        return to_rgb(shrunk(self.pixels, longest))

    def without_data(self, top: int, height: int) -> np.ndarray | None:
        """Which pixels of these rows hold no data: bool (height, width); None: all do."""
        return None if self.missing is None else self.missing[top : top + height]


class RasterImage:
    """A TIFF, a JPEG 2000 file or a PNG on disk, maybe far larger than the memory: only the rows in work are held.

    Rows are read once, in the order of the windows: files in strips, and compressed ones, would be decoded again for
    each window.

    Attributes:
        height: pixels.
        width: pixels.
        row_areas: square metres of a pixel in each row, float64 (H,); None: not known.
        seen: what the model is to see: the image itself.

    Args:
        dataset: of ``rasterio.open``.
        path: for messages.
        reader: channels and range of values that the model gets.
    """

    def __init__(self, dataset: Any, path: Path, reader: ImageReader) -> None:
        self.dataset = dataset
        self.path = path
        self.reader = reader
        self.height, self.width = dataset.height, dataset.width
        self.seen = self
        self.row_areas = row_areas(dataset)
        self._alpha, self._names = marks_alpha(dataset), names_in(dataset)
        self._has_mask = has_mask(dataset)
        self._indexes = list(range(1, dataset.count + 1))  # of what is read, in this order
        self._limits: ValueRange | None = None
        order = order_in(dataset) if reader.takes_colors else None
        if order is not None:
            self._indexes = [index + 1 for index in order]
        if reader.bands is not None:
            plan = reader.bands.plan(dataset.count, self._names, self._alpha, path)
            self._indexes = [index + 1 for index in plan.indexes]
            if plan.alpha is not None and not self._is_measured(plan.alpha + 1):
                self._indexes.append(plan.alpha + 1)
        self._top = 0
        self._rows = np.empty((len(self._indexes), 0, self.width), dataset.dtypes[0])
        if reader.by_image:
            small = np.concatenate(list(self._small(_MEASURED, "nearest")), axis=1)
            values, invalid, _ = reader.measured_of(*self._split(small), dataset.nodata, path)
            self._limits = reader.stretched_by_itself(values, invalid)

    def crop(self, top: int, left: int, height: int, width: int) -> torch.Tensor:
        """That part: (C, height, width)."""
        columns = slice(left, left + width)
        masked = self._masked(top, height)
        part = self._finished(self._held(top, height)[:, :, columns], None if masked is None else masked[:, columns])
        return _tensor(part)

    def thumbnail(self, longest: int) -> np.ndarray:
        """RGB for the eye, with at most ``longest`` pixels on its longer side: (h, w, 3), uint8."""
        return to_rgb(np.concatenate([self._finished(part, None)[..., :3] for part in self._small(longest, "average")]))

    def without_data(self, top: int, height: int) -> np.ndarray | None:
        """Which pixels of these rows hold no data: bool (height, width); None: all do."""
        return no_data(*self._split(self._held(top, height)), self.dataset.nodata, self._masked(top, height))

    def _finished(self, bands: np.ndarray, masked: np.ndarray | None) -> np.ndarray:
        """(bands, h, w) as they are in the file -> (h, w, C), 0..255."""
        pixels, transparency = self._split(bands)
        reader = self.reader
        values, invalid, _ = reader.measured_of(pixels, transparency, self.dataset.nodata, self.path, masked)
        limits = self._limits if reader.by_image else reader.range_for(values)
        return reader.modalities.mapped(reader.finished(values, invalid, limits, self.path), self.path)

    def _small(self, longest: int, resampling: str) -> Iterator[np.ndarray]:
        """The image with at most ``longest`` pixels on its longer side, some rows at a time: (bands, rows, w)."""
        from rasterio.enums import Resampling
        from rasterio.windows import Window

        factor = min(longest / max(self.height, self.width), 1.0)
        height, width = (max(round(extent * factor), 1) for extent in (self.height, self.width))
        for top in range(0, height, _ROWS_AT_ONCE):
            rows = min(_ROWS_AT_ONCE, height - top)
            first, last = (edge * self.height // height for edge in (top, top + rows))
            yield self._bands(
                self._indexes,
                window=Window(0, first, self.width, last - first),
                out_shape=(len(self._indexes), rows, width),
                resampling=Resampling[resampling],
            )

    def _is_measured(self, band: int) -> bool:
        """Whether what is marked as alpha holds measured values; only where no key says what it is."""
        size = tuple(min(side, _MEASURED) for side in (self.height, self.width))
        return self.reader.alpha is None and is_measured_band(self.dataset.read(band, out_shape=size))

    def _masked(self, top: int, height: int) -> np.ndarray | None:
        from rasterio.windows import Window

        if not self._has_mask:
            return None
        window = Window(0, top, self.width, height)
        return np.asarray(self.dataset.dataset_mask(window=window) == 0)

    def _held(self, top: int, height: int) -> np.ndarray:
        """Whole rows (bands, height, W), as they are in the file; those held before are not read again."""
        from rasterio.windows import Window

        held = self._rows.shape[1]
        if top < self._top or top + height > self._top + held:
            rows = np.empty((len(self._indexes), height, self.width), self._rows.dtype)
            known = max(min(self._top + held - top, height), 0) if top >= self._top else 0
            if known:
                rows[:, :known] = self._rows[:, top - self._top : top - self._top + known]
            self._rows = rows  # the old ones may go before new ones come
            self._top = top
            window = Window(0, top + known, self.width, height - known)
            rows[:, known:] = self._bands(self._indexes, window=window)
        return self._rows[:, top - self._top : top - self._top + height]

    def _bands(self, indexes: list[int], **how: Any) -> np.ndarray:
        with naming(self.path):
            return np.asarray(self.dataset.read(indexes, **how))

    def _split(self, bands: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The measured bands (h, w, C), and transparency (h, w), if there is one."""
        pixels = np.moveaxis(bands, 0, -1)
        if self.reader.bands is None:
            return split_alpha(Raw(pixels, self._alpha), self.path, self.reader.channels, self.reader.alpha)
        count = self.reader.channels
        return pixels[..., :count], pixels[..., count] if pixels.shape[2] > count else None


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    """(H, W, C) -> (C, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


@contextmanager
def open_image(
    path: Path,
    reader: ImageReader,
    prepare: Callable[[np.ndarray, Path, np.ndarray | None], np.ndarray] | None = None,
    whole: int = _WHOLE,
) -> Iterator[DecodedImage | RasterImage]:
    """Open an image: decoded whole, or, where rasterio is installed and the image is large, to be read by rows.

    Args:
        path: of the file.
        reader: of the data that the model was trained on.
        prepare: ``data.eval_pipeline`` (:meth:`exp.vision.data.base.ImageData.prepare`); None: there is none.
        whole: images of no more pixels, of three bands, are decoded whole.

    Raises:
        DataError: it cannot be read, has other channels, or is too large for what is to be done with it.
    """
    size = None if by_rasterio(path) else image_size(path)
    if not by_rasterio(path) and (size is None or size[0] * size[1] <= whole or not has_rasterio()):
        yield _decoded(path, reader, prepare)
        return
    import rasterio
    from rasterio.enums import ColorInterp
    from rasterio.errors import NotGeoreferencedWarning

    with rasterio.Env(GDAL_CACHEMAX=_CACHE_MIB), warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)  # plain TIFFs are welcome
        with naming(path):
            dataset = rasterio.open(path)
        with dataset:
            check_tiff(path)
            refuse_complex(path, dataset.dtypes[0])
            small = dataset.height * dataset.width * dataset.count <= 3 * whole
            if small or prepare is not None or dataset.colorinterp[0] == ColorInterp.palette:  # numbers are no colours
                yield _decoded(path, reader, prepare, dataset)
            else:
                yield RasterImage(dataset, path, reader)


def _decoded(path: Path, reader: ImageReader, prepare: Any, dataset: Any = None) -> DecodedImage:
    check_pixels(path)
    pixels, missing = reader.with_missing(path)
    if prepare is None:
        return DecodedImage(reader.modalities.mapped(pixels, path), missing, None, dataset)
    return DecodedImage(pixels, missing, prepare(pixels, path, missing), dataset)


def check_pixels(path: Path) -> None:
    """Refuse to decode an image whole that is too large for it, by its header.

    Raises:
        DataError: names it.
    """
    size = image_size(path)
    if size is not None and size[0] * size[1] > MOST_PIXELS:
        raise DataError(
            f"{path} has {size[1]} x {size[0]} pixels, and at most {MOST_PIXELS / 1e6:.0f} million are decoded "
            "at once; cut it into tiles"
        )


def patches_in(model: Any, height: int, width: int) -> int:
    """How many patches a model makes of an image; 16 x 16 pixels each where it does not say."""
    side = getattr(getattr(model, "backbone", None), "patch_size", 16)
    return -(-height // side) * -(-width // side)


def check_patches(path: Path, model: Any, height: int, width: int) -> None:
    """Refuse to show a model more at once than memory and time allow.

    Raises:
        DataError: names the image.
    """
    count = patches_in(model, height, width)
    if count > MOST_PATCHES:
        raise DataError(
            f"{path}: {width} x {height} pixels at once are {count} patches, more than {MOST_PATCHES}; make "
            "images smaller (data.eval_pipeline), cut them, or, for class maps, set model.inference=slide"
        )


def is_georeferenced(image: DecodedImage | RasterImage) -> bool:
    """Whether the file says where on Earth it is."""
    return image.dataset is not None and image.dataset.crs is not None


def metres_of(image: DecodedImage | RasterImage) -> float | None:
    """Side of a pixel in metres, for a scale bar: in the middle row; None: not known."""
    return None if image.row_areas is None else float(image.row_areas[image.height // 2] ** 0.5)
