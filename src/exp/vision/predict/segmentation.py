"""Class maps of images: files with class numbers, overlays to look at, GeoTIFFs, and how much each class covers."""

from __future__ import annotations

import functools
import logging
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np

from exp.engine.plots import PictureWriter
from exp.runfolder import write_atomically
from exp.vision.draw.overlay import overlay_with_legend
from exp.vision.predict.areas import Area, areas_csv, shares, total_csv
from exp.vision.predict.classmaps import Counts, RowTaker, SmallMap, at_size, class_png, class_tiff, probability_tiff
from exp.vision.predict.inputs import Failure, Input, each_of_mine
from exp.vision.predict.raster import check_patches, is_georeferenced, metres_of, open_image
from exp.vision.predict.scores import pixel_scores
from exp.vision.tiling import TakeScores, Tiling

if TYPE_CHECKING:
    import torch

    from exp.session import Session
    from exp.vision.predict.raster import DecodedImage, RasterImage

__all__ = ["OVERLAY_PIXELS", "SegmentationWriter", "predict_segmentation"]

OVERLAY_PIXELS = 4096
"""The longer side of an overlay, at most."""
_NO_DATA = 255
_WINDOW, _OVERLAP = 2048, 0.25  # of a model without a tiling: it is evaluated on whole images
_SAME = 0.001  # of a scale that is given, and that of the file

logger = logging.getLogger(__name__)


def predict_segmentation(
    session: Session, data: Any, model: Any, inputs: Sequence[Input]
) -> tuple[dict[str, float], list[str], list[Failure]]:
    """Predict this rank's share of the images; rank 0 adds the tables over all of them.

    Args:
        session: the session.
        data: has ``classes``, ``palette`` and ``read``.
        model: gives logits of pixels.
        inputs: all images, the same on every rank.

    Returns:
        Metrics; on rank 0 all files, below the run folder; the images of all ranks that could not be used.
    """
    writer = SegmentationWriter(session, data, model)
    began = time.perf_counter()
    failures = each_of_mine(session, inputs, writer.predict)
    seconds = max(session.distributed.gather(time.perf_counter() - began))
    gathered = session.distributed.gather((writer.areas, writer.files, failures, writer.overruled))
    areas = [area for _, area in sorted(pair for part, *_ in gathered for pair in part.items())]
    files = sorted(file for _, part, *_ in gathered for file in part)
    failed = [failure for _, _, part, _ in gathered for failure in part]
    overruled = sum(count for *_, count in gathered)
    pixels = sum(sum(area.counts) for area in areas)
    metrics = {"images": len(areas), "failed": len(failed), "megapixels_per_second": pixels / 1e6 / seconds}
    if overruled:
        given = session.config.task.metres_per_pixel
        metrics.update(metres_per_pixel=given, images_of_another_scale=overruled)
        session.say(
            f"areas are those of task.metres_per_pixel={given:g}, also of {overruled} images whose files tell another "
            "scale; leave it out to use theirs"
        )
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
        overruled: images whose own scale is not used, as ``task.metres_per_pixel`` is given.
    """

    def __init__(self, session: Session, data: Any, model: Any) -> None:
        self.session = session
        self.data = data
        self.model = model
        self.scores = pixel_scores(session, model)
        self.folder = session.folder.path / "predictions"
        self.pictures = PictureWriter(session)
        self.areas: dict[int, Area] = {}
        self.files: list[str] = []
        self.overruled = 0
        self.tiling: Tiling = getattr(model, "tiling", None) or Tiling("slide", _WINDOW, _OVERLAP)
        self.prepare = functools.partial(data.prepare, for_map=True) if data.prepares else None

    def predict(self, number: int, entry: Input) -> None:
        """Predict an image and write what is to be known of it, rows as they are done.

        Raises:
            DataError: it cannot be read.
        """
        began = time.perf_counter()
        data, classes = self.data, len(self.data.classes)
        with open_image(entry.path, data.read, self.prepare) as image:
            size, seen = (image.height, image.width), (image.seen.height, image.seen.width)
            largest = [round(side * max(self.tiling.scales)) for side in self.tiling.window_of(*seen)]
            check_patches(entry.path, self.model, *largest)
            picture = image.thumbnail(OVERLAY_PIXELS)
            side, row_areas = self._scale(image)
            counts, small = Counts(row_areas), SmallMap(size, (picture.shape[0], picture.shape[1]))
            with ExitStack() as files:
                takers: list[RowTaker] = [counts, small]
                paths = [self.folder / "classes" / f"{entry.name}.png"]
                takers.append(files.enter_context(class_png(paths[0], size, data.palette)))
                if is_georeferenced(image):
                    paths.append(self.folder / "geo" / f"{entry.name}.tif")
                    takers.append(files.enter_context(class_tiff(paths[-1], image, data.palette)))
                take = None
                if self.session.config.task.probabilities:
                    paths.append(self.folder / "probabilities" / f"{entry.name}.tif")
                    take = self._taking(files.enter_context(probability_tiff(paths[-1], image, data.classes)))
                for top, labels in self.tiling.rows(self.scores, classes, image.seen, take):
                    for begin, rows in at_size(labels.cpu().numpy(), top, seen, size):
                        missing = image.without_data(begin, len(rows))
                        if missing is not None:
                            rows[missing] = _NO_DATA
                        for taker in takers:
                            taker.add(rows)
        metres = None if counts.metres is None else counts.metres[:classes].tolist()
        self.areas[number] = Area(str(entry.path), counts.counts[:classes].tolist(), metres)
        notes = [f"{100 * share:.1f} %" for share in shares(self.areas[number].counts)]
        side = None if side is None else side * size[1] / picture.shape[1]  # metres of a pixel of the picture
        page = overlay_with_legend(picture, small.labels, data.classes, data.palette, notes, side)
        self.files += self.pictures.write(f"predictions/overlays/{entry.name}.png", page)
        self.files += [path.relative_to(self.session.folder.path).as_posix() for path in paths]
        seconds = time.perf_counter() - began
        logger.info("%s: %d x %d pixels in %.1f s", entry.path, size[1], size[0], seconds)

    def _scale(self, image: DecodedImage | RasterImage) -> tuple[float | None, np.ndarray | None]:
        """Metres of a pixel for a scale bar, and square metres of a pixel in each row (H,); None: not known."""
        given, told = self.session.config.task.metres_per_pixel, metres_of(image)
        if given is not None and told is not None and abs(told / given - 1.0) > _SAME:
            self.overruled += 1
        if given is None and told is not None:
            return told, image.row_areas
        side = given if given is not None else self.data.metres_per_pixel
        return side, None if side is None else np.full(image.height, side**2)

    def _taking(self, write: Callable[[int, int, Any], None]) -> TakeScores:
        def take(top: int, left: int, scores: torch.Tensor) -> None:
            shares = scores.softmax(dim=0) if self.tiling.gives_logits else scores / scores.sum(dim=0, keepdim=True)
            write(top, left, shares.cpu().numpy())

        return take
