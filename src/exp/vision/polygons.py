"""Polygons of a class map, of any size, by rasterio, shapely and pyogrio."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Sequence

import numpy as np

from exp.errors import UnavailableError
from exp.vision.data.decode import gdal_settings
from exp.vision.maps import temporary_name

if TYPE_CHECKING:
    from pathlib import Path

DRIVERS = {"geojson": "GeoJSON", "gpkg": "GPKG"}  # by suffix
_ROWS = 256  # of the confidence that are read at a time


def write_polygons(
    path: Path,
    class_map: Path,
    confidence: Path,
    classes: Sequence[str],
    pixel_area: float | None,
    min_area: float = 0.0,
    tolerance: float = 0.0,
) -> None:
    """Write the connected areas of each class as polygons, with class, area and mean confidence.

    GeoJSON has longitude and latitude (RFC 7946), a GeoPackage the coordinates of the map; without a transform both
    have columns and rows.

    Args:
        path: of the new file, whose suffix is one of ``DRIVERS``; it appears once it is complete.
        class_map: a raster of class numbers.
        confidence: a raster of the same size.
        classes: names of the classes; other values of the map give no polygons.
        pixel_area: in square meters; None: not known.
        min_area: smaller areas are left out; in square meters, or pixels where ``pixel_area`` is not known.
        tolerance: in pixels; borders between areas are simplified alike for both. 0: they follow the pixels.

    Raises:
        UnavailableError: ``tolerance`` needs shapely 2.1.
    """
    import pyogrio
    import shapely

    if tolerance and tuple(map(int, shapely.__version__.split(".")[:2])) < (2, 1):
        raise UnavailableError(f"task.simplify needs shapely 2.1 or newer, not {shapely.__version__}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with gdal_settings() as rasterio, rasterio.open(class_map) as labels:
        shapes, numbers = _areas(rasterio, labels, len(classes), min_area / (pixel_area or 1.0))
        pixels = np.rint(shapely.area(shapes))
        with rasterio.open(confidence) as raster:
            means = _sums(rasterio, raster, shapes, raster.scales[0]) / np.maximum(pixels, 1)
        if tolerance:  # vertices at all pixels, so that neighbors have the same ones
            shapes = shapely.transform(shapely.segmentize(shapes, 1.0), np.rint)
            shapes = shapely.coverage_simplify(shapes, tolerance)
        shapes = _transformed(shapes, labels.transform)
        crs = None if labels.crs is None else labels.crs.to_wkt()
    fields: dict[str, np.ndarray] = {
        "class": np.array([classes[number] for number in numbers], object),
        "pixels": pixels.astype(np.int64),
        **({} if pixel_area is None else {"square_meters": (pixels * pixel_area).round(2)}),
        "confidence": means.round(4),
    }
    driver = DRIVERS[path.suffix[1:]]
    options = {"RFC7946": "YES"} if driver == "GeoJSON" and crs else {}
    with temporary_name(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'crs' was not provided")
        pyogrio.raw.write(
            temporary, shapely.to_wkb(shapes), list(fields.values()), list(fields), geometry_type="Polygon",
            crs=crs, driver=driver, layer=path.stem, **options,
        )  # fmt: skip


def _areas(rasterio: Any, labels: Any, num_classes: int, min_pixels: float) -> tuple[np.ndarray, np.ndarray]:
    """The connected areas of a map, in columns and rows, and their class numbers."""
    import shapely
    from rasterio.features import shapes

    cell, polygons, numbers = abs(labels.transform.determinant), [], []
    for geometry, value in shapes(rasterio.band(labels, 1)):
        if value < num_classes:
            polygon = shapely.geometry.shape(geometry)
            if polygon.area / cell >= min_pixels * (1 - 1e-6):
                polygons.append(polygon)
                numbers.append(int(value))
    in_pixels = _transformed(np.array(polygons, object), ~labels.transform)
    return shapely.transform(in_pixels, np.rint), np.array(numbers, np.int64)


def _transformed(shapes: np.ndarray, transform: Any) -> np.ndarray:
    import shapely

    a, b, c, d, e, f = transform[:6]
    result: np.ndarray = shapely.transform(shapes, lambda points: points @ np.array([[a, d], [b, e]]) + (c, f))
    return result


def _sums(rasterio: Any, raster: Any, shapes: np.ndarray, scale: float) -> np.ndarray:
    """The sum of the values of a raster in each polygon."""
    import shapely
    from rasterio.features import rasterize

    sums = np.zeros(len(shapes) + 1)
    first_rows, last_rows = (shapely.bounds(shapes).reshape(-1, 4)[:, column] for column in (1, 3))
    for top in range(0, raster.height, _ROWS):
        window = rasterio.windows.Window(0, top, raster.width, min(_ROWS, raster.height - top))
        here = np.flatnonzero((first_rows < top + window.height) & (last_rows > top))
        if len(here):
            values = raster.read(1, window=window).astype(np.float64).ravel() * scale
            numbers = rasterize(
                zip(shapes[here], here + 1), (window.height, window.width), dtype="int32",
                transform=rasterio.Affine.translation(0, top),
            )  # fmt: skip
            sums += np.bincount(numbers.ravel(), values, len(sums))
    return sums[1:]
