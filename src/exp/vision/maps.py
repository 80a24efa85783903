"""Write maps of scenes of any size, by rows or blocks: PNG, and Cloud Optimized GeoTIFF with the place of the image."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any, Iterator, Sequence
from xml.sax.saxutils import escape

import numpy as np
import torch
from PIL import Image

from exp.runs.files import write_atomically
from exp.vision.data.decode import gdal_settings
from exp.vision.rendering import Color, palette_table

if TYPE_CHECKING:
    from exp.vision.raster import DecodedImage, RasterImage

NO_DATA = 255
_STEPS = 254  # of a share from 0 to 1 in 8 bits
_ROWS = 512  # rows processed at a time; also the side of a tile of a TIFF in pixels


@contextmanager
def label_map(path: Path, image: Any) -> Iterator[np.ndarray]:
    """A memory-mapped temporary file for the labels of an image of any size, uint8 (H, W).

    Args:
        path: of the final file; the temporary file is in its folder, which is made.
        image: has ``height`` and ``width``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=path.parent) as file:  # without a name: nothing is left of it if the process is killed
        yield np.memmap(file, np.uint8, "w+", shape=(image.height, image.width))


def count_labels(labels: np.ndarray) -> np.ndarray:
    """Count the pixels of each label, int64 (256,); ``labels``: uint8 (H, W), of any size."""
    parts = (labels[top : top + _ROWS].ravel() for top in range(0, len(labels), _ROWS))
    return sum((np.bincount(part, minlength=256) for part in parts), np.zeros(256, np.int64))


def write_png(path: Path, labels: np.ndarray, palette: Sequence[Color]) -> None:
    """Write an 8-bit palette PNG: programs read class numbers, viewers show the classes' colors.

    Args:
        path: of the new file, which appears once it is complete.
        labels: uint8 (H, W).
        palette: RGB of each class.
    """
    image = Image.frombuffer("P", (labels.shape[1], labels.shape[0]), labels, "raw", "P", 0, 1)
    image.putpalette(palette_table(palette).tobytes())
    write_atomically(path, lambda file: image.save(file, format="PNG"))


def is_georeferenced(dataset: Any) -> bool:
    """Whether an open dataset has coordinates: a transform, ground control points, or rational polynomials."""
    return bool(dataset.gcps[0] or dataset.rpcs or dataset.crs is not None or not dataset.transform.is_identity)


def write_class_tiff(
    path: Path, labels: np.ndarray, image: DecodedImage | RasterImage, classes: Sequence[str], palette: Sequence[Color]
) -> None:
    """Write class numbers as a raster (:func:`new_raster`), with the names and the colors of the classes.

    The names are in the tags ``class_<number>`` of the band; and in ``<path>.aux.xml``, where GDAL and QGIS look for
    them.

    Args:
        path: of the new file.
        labels: uint8 (H, W); 255: no data.
        image: of the map.
        classes: their names.
        palette: RGB of each class.
    """
    from rasterio.windows import Window

    with new_raster(path, image, ["class"], "uint8", "mode", nodata=NO_DATA) as file:
        file.write_colormap(1, {number: (*color, 255) for number, color in enumerate(palette)})
        file.update_tags(1, **{f"class_{number}": name for number, name in enumerate(classes)})
        for top in range(0, image.height, _ROWS):
            part = labels[top : top + _ROWS]
            file.write(part, 1, window=Window(0, top, image.width, len(part)))
    names = "".join(f"<Category>{escape(name)}</Category>" for name in classes)
    band = f'<PAMRasterBand band="1"><CategoryNames>{names}</CategoryNames></PAMRasterBand>'
    write_atomically(path.with_name(f"{path.name}.aux.xml"), f"<PAMDataset>{band}</PAMDataset>\n".encode())


@contextmanager
def new_raster(
    path: Path,
    image: DecodedImage | RasterImage,
    names: Sequence[str],
    dtype: str,
    resampling: str,
    scale: float = 1.0,
    **profile: Any,
) -> Iterator[Any]:
    """A raster with the size and the place of an image; afterwards it is a Cloud Optimized GeoTIFF with overviews.

    Args:
        path: of the new file, which appears once it is complete; its folder is made.
        image: its ``dataset`` has the coordinate system, and the transform, ground control points or RPCs.
        names: of the bands.
        dtype: of the values; of float16, which GDAL knows as float32 with 16 bits, float32 is written to the dataset.
        resampling: of the overviews.
        scale: factor from the values to what they mean, which the file says.
        **profile: further keys of rasterio.

    Yields:
        The dataset to be written, in any order of blocks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    place: dict[str, Any] = {}
    if image.dataset is not None:
        points, crs_of_points = image.dataset.gcps
        place = {"transform": image.dataset.transform, "crs": image.dataset.crs}
        place = {"rpcs": image.dataset.rpcs, **({"gcps": points, "crs": crs_of_points} if points else place)}
    half = {"nbits": 16} if dtype == "float16" else {}
    profile.update(
        driver="GTiff", height=image.height, width=image.width, count=len(names), dtype="float32" if half else dtype,
        tiled=True, blockxsize=_ROWS, blockysize=_ROWS, interleave="band", BIGTIFF="IF_SAFER", **place,
    )  # fmt: skip
    with gdal_settings() as rasterio, temporary_name(path) as finished:
        plain = finished.with_name(f"plain_{path.name}")  # this format cannot be written in blocks
        with rasterio.open(plain, "w", **profile) as file:
            for number, name in enumerate(names, 1):
                file.set_band_description(number, name)
            file.scales = [scale] * len(names)
            yield file
        rasterio.shutil.copy(
            plain,
            finished,
            driver="COG",
            compress="deflate",
            BIGTIFF="IF_SAFER",
            overview_resampling=resampling,
            **half,
        )


@contextmanager
def temporary_name(path: Path) -> Iterator[Path]:
    """A path with the same name in a temporary folder beside ``path``; the file there becomes ``path`` at the end."""
    with TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        temporary = Path(folder) / path.name
        yield temporary
        temporary.replace(path)


def shares_profile(dtype: str) -> dict[str, Any]:
    """Keys of :func:`new_raster` for shares in ``uint8`` (0 to 254; 255: no data) or ``float16`` (NaN: no data)."""
    nodata: float = NO_DATA if dtype == "uint8" else float("nan")
    return {"dtype": dtype, "resampling": "average", "nodata": nodata, "scale": 1 / _STEPS if dtype == "uint8" else 1.0}


def encode_shares(shares: torch.Tensor, missing: np.ndarray | None, dtype: str) -> np.ndarray:
    """Convert shares from 0 to 1, float32 (n, h, w), to the values of a raster (:func:`shares_profile`).

    Args:
        shares: probabilities, or differences of them.
        missing: True where there is no data, bool (h, w); None: nowhere.
        dtype: ``uint8`` or ``float16``.
    """
    if dtype == "uint8":
        values, nodata = (shares * _STEPS).round().to(torch.uint8).cpu().numpy(), NO_DATA
    else:
        values, nodata = shares.cpu().numpy(), np.nan  # type: ignore[assignment]
    return values if missing is None else np.where(missing, np.asarray(nodata, values.dtype), values)
