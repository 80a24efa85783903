"""What data sets of scenes and of segmentation share: their parts, and what others ask of them."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import torch

from exp.data.base import Data, Prediction, Sketch
from exp.data.fingerprint import of_samples
from exp.errors import DataError
from exp.vision.data.dataset import ImageDataset, findings
from exp.vision.data.listing import Listing
from exp.vision.data.pipeline import Pipeline
from exp.vision.data.reader import ImageReader

if TYPE_CHECKING:
    import os

    import numpy as np

    from exp.data.fingerprint import Fingerprint

__all__ = ["ImageData"]

logger = logging.getLogger(__name__)

_ASSUMED_CLASSES = 50


class ImageData(Data):
    """A data set of image files in parts; the arguments are those of :class:`exp.config.schema.ImageDataConfig`.

    Attributes:
        name: of the data set.
        classes: names of the K classes.
        palette: RGB of each.
        read: reads an image file.
        tested_on: which part :attr:`test` is.
        classes_key: the key of the configuration that orders the classes.
        ignore_index: the label that does not count.

    Args:
        listing: the samples, and what else the layout knows.
        make: makes the data set of a part: takes its samples and pipeline, and the arguments of
            :class:`exp.vision.data.dataset.ImageDataset`.
        palette: RGB of each class.

    Raises:
        ConfigError: a pipeline is wrong.
    """

    classes_key = "data.classes"
    ignore_index: int

    def __init__(
        self,
        listing: Listing,
        make: Callable[..., ImageDataset],
        palette: Sequence[tuple[int, int, int]],
        name: str,
        train_pipeline: Sequence[Mapping[str, Any]],
        eval_pipeline: Sequence[Mapping[str, Any]],
        size: int,
        channels: int = 3,
        value_range: Sequence[float] | str | None = None,
        alpha: bool | None = None,
        on_error: str = "raise",
        cache_megabytes: int = 0,
        seed: int = 0,
        eval_batch_size: int = 16,
        num_workers: int = 0,
    ) -> None:
        self.name = name
        self.classes = listing.classes
        self.palette = list(palette)
        self.read = ImageReader(channels, value_range, alpha, [path for path, _ in listing.parts["train"]])
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self._notes = listing.notes
        self._eval_pipeline = Pipeline("data.eval_pipeline", eval_pipeline)
        training = Pipeline("data.train_pipeline", train_pipeline)
        self._make = functools.partial(make, read=self.read, size=size, seed=seed, skip_errors=on_error == "skip")
        self._parts = {
            part: self._make(
                samples,
                training if part == "train" else self._eval_pipeline,
                augmented=part == "train",
                cache_bytes=cache_megabytes * 2**20,
            )
            for part, samples in listing.parts.items()
        }
        self.tested_on = "test" if "test" in self._parts else "val"

    @property
    def train(self) -> ImageDataset:
        """The part to train on."""
        return self._part("train")

    @property
    def val(self) -> ImageDataset:
        """The part by which the best model is chosen."""
        return self._part("val")

    @property
    def test(self) -> ImageDataset:
        """The part that is tested on: ``val`` where there is no test split."""
        return self._part(self.tested_on)

    def plain_parts(self) -> dict[str, ImageDataset]:
        """All parts as an evaluation sees them: the training images, too, through ``data.eval_pipeline``."""
        _ = self.read.value_range
        return {
            part: self._make(data.samples, self._eval_pipeline, augmented=False) for part, data in self._parts.items()
        }

    def _part(self, name: str) -> ImageDataset:
        _ = self.read.value_range  # measured here once, where need be, and not in each process that loads
        return self._parts[name]

    @classmethod
    def sketch(cls, **keys: Any) -> Sketch:
        """Images of ``data.size``; the classes of ``data.palette`` or ``data.classes``."""
        size, channels = int(keys["size"]), int(keys["channels"])
        classes = len(keys.get("palette") or keys.get("classes") or ())
        notes = [f"validation images are taken to be {size} x {size}"]
        if not classes:
            classes = _ASSUMED_CLASSES
            notes.append(f"how many classes the data have is not known; taken are {classes}")
        image = torch.zeros(1, channels, size, size, dtype=torch.uint8)
        sample = {"image": image, **{name: torch.zeros(1, dtype=torch.int64) for name in ("label", "index")}}
        arguments = {"num_classes": classes, "in_channels": channels, "ignore_index": cls.ignore_index}
        return Sketch(sample, sample, arguments, int(keys["eval_batch_size"]), notes)

    def state(self) -> dict[str, Any]:
        """What belongs to the weights trained on these data.

        Returns:
            ``{"classes": [name], "channels": count, "value_range": [low, high] | None}``.
        """
        limits = self.read.value_range
        return {
            "classes": list(self.classes),
            "channels": self.read.channels,
            "value_range": None if limits is None else [float(limit) for limit in limits],
        }

    def fingerprint(self) -> Fingerprint:
        """Names, labels and sizes of the files, in short (:mod:`exp.data.fingerprint`)."""
        return of_samples({part: data.samples for part, data in self._parts.items()})

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Be used with weights that were trained on other files: call it before anything is loaded.

        Args:
            state: of the data that they were trained on.

        Raises:
            DataError: these data have other classes or channels.
        """
        classes, channels, limits = (state.get(key) for key in ("classes", "channels", "value_range"))
        if classes is not None and list(classes) != list(self.classes):
            same = sorted(classes) == sorted(self.classes)
            raise DataError(
                f"the weights know the {len(classes)} classes {_named(classes)}, but the data have "
                f"{'them in another order' if same else len(self.classes)}: {_named(self.classes)}; use the data that "
                f"the weights were trained on, or give the same classes in the same order ({self.classes_key})"
            )
        if channels is not None and channels != self.read.channels:
            raise DataError(
                f"the weights were trained with data.channels={channels}, but it is {self.read.channels} here; set "
                f"data.channels={channels}"
            )
        if "value_range" not in state:
            return
        if self.read.is_measured or self.read.value_range is None:
            self.read.value_range = None if limits is None else list(limits)
        elif limits is not None and list(self.read.value_range) != list(limits):
            logger.warning(
                "data.value_range=%s, but the weights were trained with %s", list(self.read.value_range), list(limits)
            )

    def model_arguments(self) -> dict[str, int]:
        """What the model must know of the files."""
        return {"num_classes": len(self.classes), "in_channels": self.read.channels, "ignore_index": self.ignore_index}

    def prepare(self, pixels: np.ndarray, path: str | os.PathLike[str]) -> np.ndarray:
        """The evaluation pipeline for one image.

        Args:
            pixels: as :attr:`read` gives them.
            path: of its file.

        Returns:
            (H, W, C), of the same dtype.
        """
        image: np.ndarray = self._eval_pipeline(pixels, str(path))["img"]
        return image

    def predict(self, session: Any, model: Any) -> Prediction:
        """Images as files and pictures (:func:`exp.vision.predict.images.predict`)."""
        from exp.vision.predict.images import predict

        return predict(session, self, model)

    def pictures(self, session: Any, model: Any, evaluator: Any = None) -> dict[str, Any]:
        """Pictures by name, of what a training has come to (:func:`exp.vision.plots.draw_images`)."""
        from exp.vision.plots import draw_images  # which takes its time to load, and only one rank draws

        counted = next((each for each in evaluator.metrics if hasattr(each, "confusion")), None) if evaluator else None
        return draw_images(session, self, model, counted)

    def draw_samples(self, worst: Sequence[Any], best: Sequence[Any]) -> dict[str, Any]:
        """Truth beside prediction, of images of the test split (:func:`exp.vision.plots.draw_samples`)."""
        from exp.vision.plots import draw_samples

        return draw_samples(self, worst, best)

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """What ``result.json`` says of the data; all ranks must call it.

        Args:
            gather: of :class:`exp.engine.distributed.Distributed`.
        """
        sizes = {part: len(data) for part, data in self._parts.items()}
        used = (
            {}
            if self.read.is_measured or self.read.value_range is None
            else {"value_range": self.state()["value_range"]}
        )
        return {**sizes, "tested_on": self.tested_on, **used, **self._notes, **findings(self._parts, gather)}


def _named(classes: Sequence[str], most: int = 12) -> str:
    return ", ".join(classes[:most]) + (f" and {len(classes) - most} more" if len(classes) > most else "")
