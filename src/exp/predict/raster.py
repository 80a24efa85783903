"""Images that are read part by part: decoded whole, or, with the optional package rasterio, TIFFs by window."""

from __future__ import annotations

import importlib.util
import math
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np

from exp.data.images.decode import convert, read_image
from exp.draw.pictures import shrunk, to_rgb
from exp.errors import DataError

__all__ = ["DecodedImage", "TiffImage", "is_georeferenced", "open_image", "write_class_tiff"]

_NO_DATA = 255


class DecodedImage:
    """An image in memory.

    Attributes:
        height: pixels.
        width: pixels.
        pixel_area: square metres of a pixel; None: not known.

    Args:
        pixels: (H, W, C), uint8 or float32, 0..255.
    """

    pixel_area: float | None = None

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels
        self.height, self.width = pixels.shape[:2]

    def read(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """That part: (height, width, C)."""
        return self.pixels[top : top + height, left : left + width]

    def thumbnail(self, longest: int) -> np.ndarray:
        """RGB for the eye, with at most ``longest`` pixels on its longer side: (h, w, 3), uint8."""
        return to_rgb(shrunk(self.pixels, longest))

    def without_data(self, top: int, height: int) -> np.ndarray | None:
        """Which pixels of these rows hold no data: bool (height, width); None: all do."""
        return None


class TiffImage:
    """A TIFF on disk, of which only windows are read; it may be far larger than the memory.

    Attributes:
        height: pixels.
        width: pixels.
        pixel_area: square metres of a pixel; None: not known.

    Args:
        dataset: of ``rasterio.open``.
        path: for messages.
        channels: that the model gets.
        value_range: of 16-bit values (:func:`exp.data.images.decode.convert`).
    """

    def __init__(self, dataset: Any, path: Path, channels: int, value_range: Sequence[float] | None) -> None:
        self.dataset = dataset
        self.path = path
        self.channels = channels
        self.value_range = value_range
        self.height, self.width = dataset.height, dataset.width
        self.pixel_area = _pixel_area(dataset)
        self._all_data = all("all_valid" in [flag.name for flag in flags] for flags in dataset.mask_flag_enums)

    def read(self, top: int, left: int, height: int, width: int) -> np.ndarray:
        """That part: (height, width, C)."""
        from rasterio.windows import Window

        return self._converted(self._bands(window=Window(left, top, width, height)))

    def thumbnail(self, longest: int) -> np.ndarray:
        """RGB for the eye, with at most ``longest`` pixels on its longer side: (h, w, 3), uint8."""
        from rasterio.enums import Resampling

        factor = min(longest / max(self.height, self.width), 1.0)
        size = (max(round(self.height * factor), 1), max(round(self.width * factor), 1))
        return to_rgb(
            self._converted(self._bands(out_shape=(self.dataset.count, *size), resampling=Resampling.average))
        )

    def without_data(self, top: int, height: int) -> np.ndarray | None:
        """Which pixels of these rows hold no data: bool (height, width); None: all do."""
        if self._all_data:
            return None
        from rasterio.windows import Window

        return self.dataset.dataset_mask(window=Window(0, top, self.width, height)) == 0

    def _bands(self, **how: Any) -> np.ndarray:
        from rasterio.errors import RasterioError

        try:
            return self.dataset.read(**how)
        except (RasterioError, OSError) as error:  # its own I/O error is no RasterioError before 1.4
            raise DataError(f"{self.path} cannot be read: {error}; copy it anew") from error

    def _converted(self, bands: np.ndarray) -> np.ndarray:
        return convert(np.moveaxis(bands, 0, -1), self.path, self.channels, self.value_range)


@contextmanager
def open_image(path: Path, channels: int, value_range: Sequence[float] | None) -> Iterator[DecodedImage | TiffImage]:
    """Open an image: a TIFF by window where rasterio is installed, everything else decoded whole.

    Args:
        path: of the file.
        channels: that the model gets.
        value_range: of 16-bit values.

    Raises:
        DataError: it cannot be read, or has other channels.
    """
    by_window = path.suffix.lower() in (".tif", ".tiff") and importlib.util.find_spec("rasterio") is not None
    if not by_window:
        yield DecodedImage(read_image(path, channels, value_range))
        return
    import rasterio
    from rasterio.enums import ColorInterp
    from rasterio.errors import NotGeoreferencedWarning, RasterioError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotGeoreferencedWarning)  # plain TIFFs are welcome
        try:
            dataset = rasterio.open(path)
        except (RasterioError, OSError) as error:  # its own I/O error is no RasterioError before 1.4
            raise DataError(f"{path} cannot be read: {error}; copy it anew") from error
    with dataset:
        if dataset.colorinterp[0] == ColorInterp.palette:  # colour numbers are no colours
            yield DecodedImage(read_image(path, channels, value_range))
        else:
            yield TiffImage(dataset, path, channels, value_range)


def write_class_tiff(path: Path, image: TiffImage, labels: np.ndarray, palette: Sequence[tuple[int, int, int]]) -> None:
    """Write labels as a GeoTIFF at the place of ``image``: one band, uint8, 255 is no data, with the palette.

    Args:
        path: of the new file; its folder is made.
        image: whose georeference it gets.
        labels: (H, W), uint8.
        palette: RGB of each class.
    """
    import rasterio

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    profile = {"driver": "GTiff", "height": image.height, "width": image.width, "count": 1, "dtype": "uint8",
               "crs": image.dataset.crs, "transform": image.dataset.transform, "nodata": _NO_DATA,
               "compress": "deflate", "tiled": True, "blockxsize": 256, "blockysize": 256,
               "BIGTIFF": "IF_SAFER"}  # fmt: skip
    try:
        with rasterio.open(temporary, "w", **profile) as file:
            file.write(labels, 1)
            file.write_colormap(1, {number: (*color, 255) for number, color in enumerate(palette)})
        temporary.replace(path)
    finally:
        if temporary.exists():
            temporary.unlink()


def is_georeferenced(image: DecodedImage | TiffImage) -> bool:
    """Whether the file says where on Earth it is."""
    return isinstance(image, TiffImage) and image.dataset.crs is not None


def _pixel_area(dataset: Any) -> float | None:
    """Square metres of a pixel of a georeferenced file; in degrees: at the middle of the image."""
    if dataset.crs is None:
        return None
    area = abs(dataset.transform.determinant)
    if dataset.crs.is_projected:
        _, metres = dataset.crs.linear_units_factor
        return float(area * metres**2)
    if not dataset.crs.is_geographic:
        return None
    place = dataset.transform
    latitude = place.d * dataset.width / 2 + place.e * dataset.height / 2 + place.f
    return float(area * _metres_per_degree(latitude))


def _metres_per_degree(latitude: float) -> float:
    """Square metres of a square degree on the WGS 84 ellipsoid: product of its two radii of curvature."""
    equator, eccentricity = 6378137.0, 0.00669437999014  # metres; the first eccentricity squared
    phi = math.radians(latitude)
    shrink = 1.0 - eccentricity * math.sin(phi) ** 2
    meridian = equator * (1.0 - eccentricity) / shrink**1.5
    normal = equator / math.sqrt(shrink)
    return math.radians(1.0) ** 2 * meridian * normal * math.cos(phi)
