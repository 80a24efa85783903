"""How much ground the pixels of a georeferenced image cover, row by row: most maps have no single scale."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

__all__ = ["row_areas"]

logger = logging.getLogger(__name__)

_EQUATOR, _ECCENTRICITY = 6378137.0, 0.00669437999014  # WGS 84: meters; the first eccentricity squared
_TRUE = 0.01
"""Projections for surveying keep areas better than this; theirs are taken as they are, as is usual."""
_ROWS, _COLUMNS = 513, 9  # looked at, at most; between rows it is interpolated, over columns averaged
_STEP = 100.0  # meters or so between the points that an area is measured with


def row_areas(dataset: Any) -> np.ndarray | None:
    """Square meters of a pixel in each row, on the ellipsoid.

    In degrees, and in Mercator's projection (EPSG:3857), a pixel shrinks with the latitude. A projection whose areas
    are true within a hundredth gives those of its own plane.

    Args:
        dataset: of ``rasterio.open``.

    Returns:
        float64 (H,); None: the file does not tell where on Earth it is.
    """
    crs = dataset.crs
    if crs is None or not (crs.is_projected or crs.is_geographic):
        return None
    plane = abs(dataset.transform.determinant)
    if crs.is_projected:
        plane *= crs.linear_units_factor[1] ** 2
    rows = np.linspace(0.5, dataset.height - 0.5, min(dataset.height, _ROWS))
    columns = np.linspace(0.5, dataset.width - 0.5, min(dataset.width, _COLUMNS))
    found = _measured(dataset, rows, columns, plane)
    if crs.is_projected:
        strange = ~np.isfinite(found)  # beyond where the projection is defined
        found = np.where(strange, plane, found)
        if (np.abs(found / plane - 1.0) <= _TRUE).all():
            return np.full(dataset.height, plane)
    return np.interp(np.arange(dataset.height) + 0.5, rows, found.mean(axis=1))


def _measured(dataset: Any, rows: np.ndarray, columns: np.ndarray, plane: float) -> np.ndarray:
    """Square meters of the pixels around these places: (rows, columns); nan where there is no ground.

    The cross product of two short ways along a row and a column, in space: so it holds at poles and at the date line.
    """
    meters = plane**0.5 if dataset.crs.is_projected else plane**0.5 * _EQUATOR * np.pi / 180.0
    step = max(_STEP / meters, 1.0) if meters > 0.0 else 1.0  # pixels
    down, right = (each.ravel() for each in np.meshgrid(rows, columns, indexing="ij"))
    ends = [(0.0, 0.5), (0.0, -0.5), (0.5, 0.0), (-0.5, 0.0)]
    places = [_in_space(dataset, down + step * tall, right + step * wide) for tall, wide in ends]
    across, along = places[0] - places[1], places[2] - places[3]
    area = np.linalg.norm(np.cross(across, along), axis=1) / step**2
    return area.reshape(len(rows), len(columns))


def _in_space(dataset: Any, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Metres from the middle of the Earth: (n, 3); nan where a place is not on Earth."""
    place = dataset.transform
    x, y = (each[0] * columns + each[1] * rows + each[2] for each in (place[:3], place[3:6]))
    if dataset.crs.is_projected:
        from rasterio.warp import transform

        try:
            x, y = map(np.asarray, transform(dataset.crs, "EPSG:4326", x.tolist(), y.tolist())[:2])
        except Exception as error:  # noqa: BLE001 - GDAL's have no public base
            logger.warning("%s: areas are those of the map's own plane: %s", dataset.crs, error)
            x = y = np.full(len(rows), np.nan)
    with np.errstate(invalid="ignore"):
        longitude, latitude = np.radians(x), np.radians(y)
        normal = _EQUATOR / np.sqrt(1.0 - _ECCENTRICITY * np.sin(latitude) ** 2)
        level = normal * np.cos(latitude)
        height = normal * (1.0 - _ECCENTRICITY) * np.sin(latitude)
        return np.stack([level * np.cos(longitude), level * np.sin(longitude), height], axis=1)
