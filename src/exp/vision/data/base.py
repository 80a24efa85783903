"""What data sets of scenes and of segmentation share: their parts, and what others ask of them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np
import torch

from exp.data.base import Data, Prediction, Sketch
from exp.data.fingerprint import of_samples
from exp.errors import DataError
from exp.vision.data.adopting import adopt, begin_with, other_classes, record_of, state_of
from exp.vision.data.bands import BandChoice
from exp.vision.data.dataset import ImageDataset, findings
from exp.vision.data.decode import reordered_bands
from exp.vision.data.labels import NO_DATA
from exp.vision.data.listing import Listing
from exp.vision.data.modality import Modalities, ModalityDraw
from exp.vision.data.normalisation import Normalisation, earlier_folders, keep, limits_of, share_of
from exp.vision.data.pipeline import Pipeline, is_resized
from exp.vision.data.reader import ImageReader
from exp.vision.data.remarks import remarks
from exp.vision.data.sketching import sketch_of

if TYPE_CHECKING:
    import os

    from exp.data.fingerprint import Fingerprint

__all__ = ["ImageData"]


class ImageData(Data):
    """A data set of image files in parts; the arguments are those of :class:`exp.config.schema.ImageDataConfig`.

    Attributes:
        name: of the data set.
        classes: names of the K classes.
        palette: RGB of each.
        read: reads an image file.
        normalisation: mean and standard deviation of each band.
        tested_on: which part :attr:`test` is.
        classes_key: the key of the configuration that orders the classes.
        ignore_index: the label that does not count.
        learns_classes: whether a model for these data tells classes.
        input_record: what ``task=predict`` has found of the files of ``task.input``, for the record.

    Args:
        listing: the samples, and what else the layout knows.
        make: makes the data set of a part: takes its samples and pipeline, and the arguments of
            :class:`exp.vision.data.dataset.ImageDataset`.
        palette: RGB of each class.

    Raises:
        ConfigError: a pipeline is wrong.
    """

    classes_key = "data.classes"
    learns_classes = True
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
        value_range: Sequence[Any] | str | None = None,
        alpha: bool | None = None,
        bands: Sequence[int | str] | None = None,
        band_names: Sequence[str] | None = None,
        stretch: Sequence[float] | None = None,
        stretch_scope: str = "train",
        mean: Sequence[float] | str | None = None,
        std: Sequence[float] | str | None = None,
        modality: str | None = None,
        modality_weights: Mapping[str, float] | None = None,
        modality_statistics: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
        on_error: str = "raise",
        cache_megabytes: int = 0,
        seed: int = 0,
        eval_batch_size: int = 16,
        num_workers: int = 0,
    ) -> None:
        self.name = name
        self.classes = listing.classes
        self.palette = list(palette)
        wanted = band_names if bands is None else bands
        choice = None if wanted is None else BandChoice(wanted, band_names, alpha)
        self.read = ImageReader(
            channels if choice is None else len(choice.wanted),
            value_range,
            alpha,
            [path for path, _ in listing.parts["train"]],
            choice,
            stretch,
            by_image=stretch_scope == "image",
        )
        self.read.modalities = Modalities(modality, modality_statistics)
        self.normalisation = Normalisation(self.read, mean, std)
        self._adopted = self._looked = False
        self._misfit: DataError | None = None  # of classes; features have none
        self.eval_batch_size = eval_batch_size
        self.num_workers = num_workers
        self._skip_errors = on_error == "skip"
        self.input_record: dict[str, Any] = {}
        self._notes, self.notes = remarks(listing, name, wanted)
        reordered = reordered_bands(self.read.examples[0]) if self.read.takes_colours else []
        if reordered:
            self._notes["bands_read_as_rgb"] = reordered
            self.notes.append(f"note: bands named {', '.join(reordered)} are read as red, green, blue")
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
        if modality_weights:
            groups = [self.read.modalities.of(path) for path, _ in listing.parts["train"]]
            draw = self._parts["train"].draw = ModalityDraw(groups, modality_weights, seed)
            self._notes["modality_shares"] = draw.shares
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
        self._look()
        return {
            part: self._make(data.samples, self._eval_pipeline, augmented=False) for part, data in self._parts.items()
        }

    def _part(self, name: str) -> ImageDataset:
        self._look()  # measured here once, where need be, and not in each process that loads
        return self._parts[name]

    def _look(self) -> None:
        if not (self._adopted or self._looked):
            self._looked = True
            self.normalisation.look()
        _ = self.read.value_range

    @classmethod
    def sketch(cls, **keys: Any) -> Sketch:
        """Images of ``data.size``; the classes of ``data.palette`` or ``data.classes``."""
        return sketch_of(keys, cls.ignore_index)

    def state(self) -> dict[str, Any]:
        """What belongs to the weights trained on these data.

        Returns:
            ``{"classes": [name], "channels": count, "value_range": [low, high] | None}``; with ``data.bands`` also
            ``bands``, ``band_names`` and ``band_count``, with ``data.mean`` also ``mean``, ``std`` and ``scaled``, with
            those of modalities also ``modality_statistics``.
        """
        self._look()
        return {
            "classes": list(self.classes),
            "channels": self.read.channels,
            "value_range": limits_of(self.read.value_range),
            **state_of(self.read, self.normalisation),
        }

    def settle(self, session: Any) -> None:
        """Look at the first training image, and measure over all of them what is to be; a collective.

        Rank 0 keeps it in ``statistics.json``, which a training that goes on takes it from.

        Raises:
            DataError: the weights are to tell other classes, or had the bands in another order.
        """
        if self._adopted:
            if session.config.task.name != "features":
                self._check_classes()
            self._misfit = None
            return
        if session.weights is not None:
            begin_with(session, self)
        self.normalisation.look()
        self._looked = True
        if self.normalisation.waits:
            session.wait_for("measuring the training images")
        share = share_of(session, self.num_workers, self._skip_errors)
        table = self.normalisation.settle(share, earlier_folders(session))
        if table is not None:
            keep(session, table)

    def meet(self, model: Any) -> None:
        """Values without data become those that the model's normalisation makes 0."""
        mean = getattr(model, "pixel_mean", None)
        if isinstance(mean, torch.Tensor) and mean.numel() == self.read.channels:
            self.read.fill = mean.detach().cpu().reshape(-1).numpy().astype("float32")
            self.read.modalities.meet(self.read.fill, model.pixel_std.detach().cpu().reshape(-1).numpy())

    def fingerprint(self) -> Fingerprint:
        """Names, labels and sizes of the files, in short (:mod:`exp.data.fingerprint`)."""
        return of_samples({part: data.samples for part, data in self._parts.items()})

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Be used with weights that were trained on other files: call it before anything is loaded.

        Args:
            state: of the data that they were trained on.

        Raises:
            DataError: they have other channels. Other classes :meth:`settle` tells, which knows whether they matter.
        """
        if self.learns_classes:
            self._misfit = other_classes(state.get("classes"), self.classes, self.classes_key)
        adopt(self.read, self.normalisation, state)
        self._adopted = True

    def model_arguments(self) -> dict[str, Any]:
        """What the model must know of the files; names of bands, mean and deviation only where there are some."""
        self._look()
        self._check_classes()
        arguments: dict[str, Any] = {
            "num_classes": len(self.classes),
            "in_channels": self.read.channels,
            "ignore_index": self.ignore_index,
        }
        if self.normalisation.names:
            arguments["band_names"] = list(self.normalisation.names)
        values = self.normalisation.in_bytes()
        if values is not None:
            arguments["pixel_mean"], arguments["pixel_std"] = values
        return arguments

    def _check_classes(self) -> None:
        if self._misfit is not None:
            raise self._misfit

    @property
    def prepares(self) -> bool:
        """Whether ``data.eval_pipeline`` does anything."""
        return bool(self._eval_pipeline.transforms)

    def prepare(
        self,
        pixels: np.ndarray,
        path: str | os.PathLike[str],
        missing: np.ndarray | None = None,
        for_map: bool = False,
    ) -> np.ndarray:
        """The evaluation pipeline for one image, as an evaluation applies it.

        Args:
            pixels: as :attr:`read` gives them.
            path: of its file.
            missing: which of them hold no data, bool (H, W); None: all do.
            for_map: refuse a pipeline that does more than resize: a map of what it gives is none of the image.

        Returns:
            (h, w, C), of the same dtype.

        Raises:
            DataError: see ``for_map``.
        """
        mask = None if missing is None else missing.astype(np.uint8) * np.uint8(NO_DATA)
        results = self._eval_pipeline(pixels, str(path), mask)
        made = self._parts[self.tested_on].filled(results, str(path))
        if for_map and made.shape[:2] != pixels.shape[:2] and not is_resized(results):
            sizes = [f"{width} x {height}" for height, width in (pixels.shape[:2], made.shape[:2])]
            raise DataError(
                f"{path}: data.eval_pipeline makes {sizes[1]} of {sizes[0]} pixels by more than one Resize, so "
                "there is no map of the image; predict with another pipeline, such as data.eval_pipeline=[]"
            )
        return made

    def read_as_seen(self, path: str | os.PathLike[str]) -> np.ndarray:
        """An image file as the model gets it without a pipeline: (H, W, C), 0..255."""
        return self.read.modalities.mapped(self.read(path), path)

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
        """What ``result.json`` says of the data; all ranks call it, with ``gather`` of their ``Distributed``."""
        told = {"tested_on": self.tested_on, **record_of(self.read, self.normalisation), **self._notes}
        told.update(self.found_in(gather({part: data.met() for part, data in self._parts.items()})))
        return {**{part: len(data) for part, data in self._parts.items()}, **told, **self.input_record}

    def found_in(self, gathered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """For the record, of what the datasets of all parts have met on each rank (:meth:`ImageDataset.met`)."""
        return findings(self._parts, gathered)
