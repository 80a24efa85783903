"""One image of many georeferenced files: a VRT, which GDAL reads like a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Sequence
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from exp.errors import DataError
from exp.vision.data.decode import open_raster

if TYPE_CHECKING:
    from pathlib import Path

_TOLERANCE = 0.05  # of a pixel: how far files may be off the common grid


class _Tile(NamedTuple):
    """What must be alike in all files, and the rest.

    Attributes:
        alike: band count, type, names of band colors, no-data value, coordinate system.
        transform: of the file.
        height: in pixels.
        width: in pixels.
    """

    alike: dict[str, Any]
    transform: Any
    height: int
    width: int


def mosaic_xml(paths: Sequence[Path]) -> str:
    """The content of a VRT of files on one grid.

    Where files overlap, the last one counts whose value is not missing. Where there is no file, the value that the
    files declare as no data says so; if they declare none, a mask, which also has their transparency and masks.

    Args:
        paths: of the files.

    Raises:
        DataError: a file has no transform, or another grid, coordinate system, type or number of bands.
    """
    tiles = [_read(path) for path in paths]
    first = tiles[0]
    corners = []
    for path, tile in zip(paths, tiles):
        different = [f"{key} {tile.alike[key]}, not {value}" for key, value in first.alike.items()
                     if tile.alike[key] != value]  # fmt: skip
        # From the file's columns and rows to those of the first: a shift by whole pixels, if it lies on the grid.
        within = np.linalg.inv(np.reshape(first.transform, (3, 3))) @ np.reshape(tile.transform, (3, 3))
        left, top = np.rint(within[:2, 2]).astype(int).tolist()
        expected = np.array([[1.0, 0.0, left], [0.0, 1.0, top]])
        off = np.abs((within[:2] - expected) @ [tile.width, tile.height, 1])
        if different or off.max() > _TOLERANCE:
            reason = "; ".join(different) or "another size of pixels, or a shift by a part of a pixel"
            raise DataError(
                f"task.mosaic: {path} does not fit {paths[0]}: {reason}",
                "warp the files to one grid, such as with gdalwarp, or predict them apart",
            )
        corners.append((left, top))
    left, top = (min(corner[axis] for corner in corners) for axis in (0, 1))
    rectangles = [(column - left, row - top, tile.width, tile.height) for (column, row), tile in zip(corners, tiles)]
    width, height = (max(transform[axis] + transform[axis + 2] for transform in rectangles) for axis in (0, 1))

    def band(number: str | int, attributes: str = "", head: str = "", nodata: float | None = None) -> str:
        skipped = "<UseMaskBand>true</UseMaskBand>" if nodata is None else f"<NODATA>{nodata:g}</NODATA>"
        sources = "".join(
            f'<ComplexSource><SourceFilename relativeToVRT="0">{escape(str(path.absolute()))}</SourceFilename>'
            f'<SourceBand>{number}</SourceBand><SrcRect xOff="0" yOff="0" xSize="{across}" ySize="{down}"/>'
            f'<DstRect xOff="{x}" yOff="{y}" xSize="{across}" ySize="{down}"/>{skipped}</ComplexSource>\n'
            for path, (x, y, across, down) in zip(paths, rectangles)
        )
        return f"<VRTRasterBand {attributes}>{head}{sources}</VRTRasterBand>\n"

    alike, nodata = first.alike, first.alike["no-data value"]
    bands = [
        band(
            number, f'dataType={quoteattr(alike["type"])} band="{number}"',
            f"<ColorInterp>{color.capitalize()}</ColorInterp><Description>{escape(name or '')}</Description>"
            + ("" if nodata is None else f"<NoDataValue>{nodata}</NoDataValue>"),
        )
        for number, (color, name) in enumerate(zip(alike["colors"], alike["band names"]), 1)
    ]  # fmt: skip
    # With a value for no data, the mask of a band marks pixels that lack data in this band alone.
    mask = band("mask,1", 'dataType="Byte"', nodata=0.0)
    mask = f"<MaskBand>{mask}</MaskBand>" if nodata is None else ""
    a, b, c, d, e, f = first.transform[:6]
    transform = (a * left + b * top + c, a, b, d * left + e * top + f, d, e)  # in GDAL's order
    return (
        f'<VRTDataset rasterXSize="{width}" rasterYSize="{height}">'
        f"<SRS>{escape(alike['coordinate system'])}</SRS>"
        f"<GeoTransform>{', '.join(map(repr, transform))}</GeoTransform>\n"
        f"{''.join(bands)}{mask}</VRTDataset>\n"
    )


def _read(path: Path) -> _Tile:
    with open_raster(path) as file:
        if file.transform.is_identity:
            raise DataError(f"task.mosaic: {path} has no transform, which says where it lies; predict it apart")
        alike = {
            "type": _gdal_type(file.dtypes[0]), "colors": tuple(color.name for color in file.colorinterp),
            "band names": file.descriptions,
            "no-data value": None if file.nodata is None else repr(file.nodata),
            "coordinate system": "" if file.crs is None else file.crs.to_wkt(),
        }  # fmt: skip
        return _Tile(alike, file.transform, file.height, file.width)


def _gdal_type(dtype: str) -> str:
    return "Byte" if dtype == "uint8" else dtype.capitalize().replace("Uint", "UInt")
