"""Class maps of images: files with class numbers, overlays to look at, GeoTIFFs, and how much each class covers."""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Iterator, Sequence

import numpy as np

from exp.draw.overlay import class_png, overlay_with_legend
from exp.draw.pictures import png, shrunk_labels
from exp.predict.areas import Area, areas_csv, count_labels, shares, total_csv
from exp.predict.inputs import Failure, Input, each_of_mine
from exp.predict.raster import DecodedImage, TiffImage, is_georeferenced, open_image, write_class_tiff
from exp.predict.scores import pixel_scores
from exp.predict.windows import Tiling, label_map
from exp.runfolder import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from exp.session import Session

__all__ = ["OVERLAY_PIXELS", "SegmentationWriter", "predict_segmentation"]

OVERLAY_PIXELS = 4096
"""The longer side of an overlay, at most."""
_IN_MEMORY = 2**28  # pixels of a label map; larger ones are mapped from a temporary file
_ROWS_AT_ONCE = 1024
_NO_DATA = 255

logger = logging.getLogger(__name__)


def predict_segmentation(
    session: Session, data: Any, model: Any, inputs: Sequence[Input]
) -> tuple[dict[str, float], list[str], list[Failure]]:
    """Predict this rank's share of the images; rank 0 adds the tables over all of them.

    Args:
        session: the session.
        data: has ``classes``, ``palette``, ``channels`` and ``value_range``.
        model: gives logits of pixels.
        inputs: all images, the same on every rank.

    Returns:
        Metrics; on rank 0 all files, below the run folder; the images of all ranks that could not be used.
    """
    writer = SegmentationWriter(session, data, model)
    began = time.perf_counter()
    failures = each_of_mine(session, inputs, writer.predict)
    seconds = max(session.distributed.gather(time.perf_counter() - began))
    gathered = session.distributed.gather((writer.areas, writer.files, failures))
    areas = [area for _, area in sorted(pair for part, _, _ in gathered for pair in part.items())]
    files = sorted(file for _, part, _ in gathered for file in part)
    failed = [failure for _, _, part in gathered for failure in part]
    pixels = sum(sum(area.counts) for area in areas)
    metrics = {"images": len(areas), "failed": len(failed), "megapixels_per_second": pixels / 1e6 / seconds}
    if session.distributed.is_main and areas:
        for name, content in (("areas.csv", areas_csv), ("areas_total.csv", total_csv)):
            write_atomically(writer.folder / name, content(areas, data.classes))
            files.append(f"predictions/{name}")
    return metrics, files, failed


class SegmentationWriter:
    """Predicts one image after the other.

    Attributes:
        folder: ``predictions`` in the run folder.
        areas: what each image holds, by its number.
        files: written so far, below the run folder.
    """

    def __init__(self, session: Session, data: Any, model: Any) -> None:
        self.session = session
        self.data = data
        self.scores = pixel_scores(session, model)
        self.folder = session.folder.path / "predictions"
        self.areas: dict[int, Area] = {}
        self.files: list[str] = []
        task = session.config.task
        window = task.window or session.config.model.window
        self.tiling = Tiling(window, task.overlap)

    def predict(self, number: int, entry: Input) -> None:
        """Predict an image and write what is to be known of it.

        Raises:
            DataError: it cannot be read.
        """
        began = time.perf_counter()
        with open_image(entry.path, self.data.channels, self.data.value_range) as image:
            with self._label_array(image.height, image.width) as labels:
                label_map(image, self.scores, len(self.data.classes), self.tiling, labels)
                _forget_where_there_is_no_data(image, labels)
                self._write(number, entry, image, labels)
            seconds = time.perf_counter() - began
            logger.info("%s: %d x %d pixels in %.1f s", entry.path, image.width, image.height, seconds)

    @contextmanager
    def _label_array(self, height: int, width: int) -> Iterator[np.ndarray]:
        if height * width <= _IN_MEMORY:
            yield np.empty((height, width), np.uint8)
            return
        # Without a name: it is gone with the process, however that ends.
        with tempfile.TemporaryFile(dir=self.session.folder.path) as file:
            yield np.memmap(file, np.uint8, "w+", shape=(height, width))

    def _write(self, number: int, entry: Input, image: DecodedImage | TiffImage, labels: np.ndarray) -> None:
        data = self.data
        counts = count_labels(labels, len(data.classes))
        own = self.session.config.task.metres_per_pixel
        area = image.pixel_area if image.pixel_area is not None or own is None else own**2
        self.areas[number] = Area(str(entry.path), counts, area)
        self._save(f"classes/{entry.name}.png", class_png(labels, data.palette))
        picture = image.thumbnail(OVERLAY_PIXELS)
        notes = [f"{100 * share:.1f} %" for share in shares(counts)]
        small = shrunk_labels(labels, *picture.shape[:2])
        self._save(f"overlays/{entry.name}.png",
                   png(overlay_with_legend(picture, small, data.classes, data.palette, notes)))  # fmt: skip
        if isinstance(image, TiffImage) and is_georeferenced(image):
            path = self.folder / "geo" / f"{entry.name}.tif"
            write_class_tiff(path, image, labels, data.palette)
            self._note(path)

    def _save(self, name: str, content: bytes) -> None:
        write_atomically(self.folder / name, content)
        self._note(self.folder / name)

    def _note(self, path: Path) -> None:
        self.files.append(path.relative_to(self.session.folder.path).as_posix())


def _forget_where_there_is_no_data(image: DecodedImage | TiffImage, labels: np.ndarray) -> None:
    """Pixels that the file marks as no data get no class."""
    for top in range(0, labels.shape[0], _ROWS_AT_ONCE):
        rows = labels[top : top + _ROWS_AT_ONCE]
        missing = image.without_data(top, len(rows))
        if missing is not None:
            rows[missing] = _NO_DATA
