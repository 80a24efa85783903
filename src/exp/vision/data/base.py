"""Data sets of scenes and of segmentation: their splits, and what others ask of the data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np
import torch

from exp.config.compose import run_folder_of
from exp.data.base import Data, ExampleBatch, Extras, Prediction
from exp.data.fingerprint import of_samples
from exp.data.places import shortened
from exp.errors import ConfigError, DataError
from exp.runs.files import write_json
from exp.vision.data.config import DistillationDataConfig, ImageDataConfig, SceneDataConfig, SegmentationDataConfig
from exp.vision.data.dataset import NO_LABEL, ImageDataset, ModalityDraw
from exp.vision.data.labels import IGNORED, NO_DATA, ColorMasks, IndexMasks, distinct_colors
from exp.vision.data.layouts import NAMED_FILES, Listing, archive_notes, data_root, layout_of
from exp.vision.data.statistics import STATISTICS, Normalization
from exp.vision.data.transforms import Pipeline, is_resized
from exp.vision.data.values import ImageReader
from exp.vision.metrics import FeatureAgreement, PixelsRight, SceneMetrics, SegmentationMetrics, TrueClassProbability

if TYPE_CHECKING:
    from exp.data.fingerprint import Fingerprint
    from exp.engine.building import Weights
    from exp.metrics import SampleMetric

__all__ = ["DistillationData", "ImageData", "SceneData", "SegmentationData", "fit_classes"]

_ASSUMED_CLASSES = 50
_MOST_FILES = 4096  # that are compared
_MASKS = 16  # of each split, that are looked at before a training
_CLASS_ROWS = re.compile(r"^(auxiliary_)?head\.(classify\.)?(weight|bias)$")
"""Tensors of a head (:mod:`exp.vision.dinov3`) whose rows are classes."""


class ImageData(Data):
    """A data set of image files in splits.

    Attributes:
        name: of the data set.
        classes: names of the K classes.
        palette: RGB of each.
        read: reads an image file.
        normalization: range, mean and standard deviation of each band.
        tested_on: which split :attr:`test` is.
        classes_key: the key of the configuration that orders the classes.
        learns_classes: whether a model for these data tells classes.
        ignore_index: the label that does not count.
        per_pixel: whether each pixel has a label.
        hint: what may be meant where a class has no label.

    Args:
        config: the keys of ``data``.

    Raises:
        DataError: files are missing, or not laid out as expected.
        ConfigError: a pipeline is wrong.
    """

    classes_key = "data.classes"
    learns_classes = True
    per_pixel = False
    hint = ""
    classes: list[str]
    palette: list[tuple[int, int, int]]
    makes = ("layout",)
    ignore_index: int

    def __init__(self, config: ImageDataConfig) -> None:
        root = data_root(config.root, config.sample_data, config.name)
        listing = layout_of(config).find(root)
        self._masks = self.masks_of(listing, config)
        self.name = config.name
        self.tested_on = "test" if "test" in listing.splits else "val"
        self.eval_batch_size, self.num_workers = config.eval_batch_size, config.num_workers
        trained_on = [path for path, _ in listing.splits["train"]]
        self.read = ImageReader(config)
        self.normalization = Normalization(self.read, trained_on, config)
        self._adopted = False
        self._misfit: DataError | None = None  # of classes; features have none
        self._config = config
        self._record = dict(listing.notes)
        self.notes = [*archive_notes(root), *listing.warnings]
        self._eval_pipeline = Pipeline("data.eval_pipeline", config.eval_pipeline)
        training = Pipeline("data.train_pipeline", config.train_pipeline)
        self._splits: dict[str, Any] = {}
        for split, samples in listing.splits.items():
            is_train = split == "train"
            pipeline = training if is_train else self._eval_pipeline
            self._splits[split] = ImageDataset(samples, self.read, pipeline, config, self._masks, is_train)
        self.train, self.val, self.test = (self._splits[split] for split in ("train", "val", self.tested_on))
        if config.modality_weights:
            groups = [self.read.modalities.of(path) for path in trained_on]
            draw = self.train.draw = ModalityDraw(groups, config.modality_weights, config.seed)
            self._record["modality_shares"] = draw.shares

    def masks_of(self, listing: Listing, config: Any) -> ColorMasks | IndexMasks | None:
        """Set ``classes`` and ``palette``; returns what reads masks, where samples have some."""
        self.classes, self.palette = listing.classes, distinct_colors(len(listing.classes))
        return None

    # -- samples -------------------------------------------------------------------------------------------------------

    def plain_parts(self) -> dict[str, ImageDataset]:
        """All splits as an evaluation sees them: the training images, too, through ``data.eval_pipeline``."""
        return {
            split: ImageDataset(data.samples, self.read, self._eval_pipeline, self._config, self._masks)
            for split, data in self._splits.items()
        }

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
        made: np.ndarray = self.test.filled(results, str(path))
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

    # -- what models and weights need ----------------------------------------------------------------------------------

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """Images of ``data.size``; the classes of ``data.palette`` or ``data.classes``."""
        size, channels = int(keys["size"]), len(keys.get("bands") or ()) or int(keys["channels"])
        classes = len(keys.get("palette") or keys.get("classes") or ())
        notes = [f"validation images are taken to be {size} x {size}"]
        if not classes:
            classes = _ASSUMED_CLASSES
            notes.append(f"how many classes the data have is not known; taken are {classes}")
        image = torch.zeros(1, channels, size, size, dtype=torch.uint8)
        sample = {"image": image, **{name: torch.zeros(1, dtype=torch.int64) for name in ("label", "index")}}
        arguments = {"num_classes": classes, "in_channels": channels, "ignore_index": cls.ignore_index}
        return ExampleBatch(sample, sample, arguments, int(keys["eval_batch_size"]), notes)

    def model_arguments(self) -> dict[str, Any]:
        """What the model must know of the files; names of bands, mean and deviation only where there are some."""
        self.normalization.look()
        arguments: dict[str, Any] = {
            "num_classes": len(self.classes),
            "in_channels": self.read.channels,
            "ignore_index": self.ignore_index,
        }
        if self.normalization.names:
            arguments["band_names"] = list(self.normalization.names)
        values = self.normalization.in_bytes()
        if values is not None:
            arguments["pixel_mean"], arguments["pixel_std"] = values
        return arguments

    def on_model(self, model: Any) -> None:
        """Values without data become those that the model's normalization makes 0."""
        mean = getattr(model, "pixel_mean", None)
        if isinstance(mean, torch.Tensor) and mean.numel() == self.read.channels:
            self.read.fill = mean.detach().cpu().reshape(-1).numpy().astype("float32")
            self.read.modalities.on_model(self.read.fill, model.pixel_std.detach().cpu().reshape(-1).numpy())

    def state_dict(self) -> dict[str, Any]:
        """What belongs to the weights trained on these data.

        Returns:
            ``{"classes": [name], "channels": count, "value_range": [low, high] | None}``; with ``data.bands`` also
            ``bands``, ``band_names`` and ``band_count``, with ``data.mean`` also ``mean``, ``std`` and ``scaled``, with
            those of modalities also ``modality_statistics``.
        """
        return {"classes": list(self.classes), **self.normalization.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be used with weights that were trained on other files: call it before anything is loaded.

        Args:
            state: of the data that they were trained on.

        Raises:
            DataError: they have other channels. :meth:`setup` refuses other classes where they matter.
        """
        theirs = state.get("classes")
        if self.learns_classes and theirs is not None and list(theirs) != list(self.classes):
            self._misfit = DataError(
                f"the weights know the {len(theirs)} classes {shortened(theirs)}, but the data have "
                f"{len(self.classes)}: {shortened(self.classes)}; use the data that the weights were trained on, or "
                f"give the same classes in the same order ({self.classes_key})"
            )
        self.normalization.load_state(state)
        self._adopted = True

    def setup(self, session: Any) -> None:
        """Measure over all training images what is to be measured; a collective.

        Before a training, rank 0 looks at some files (:meth:`look_at_files`). It keeps the figures in
        ``statistics.json``, which a training that goes on takes them from.

        Raises:
            DataError: the weights are to tell other classes, or had the bands in another order; or see
                :meth:`look_at_files`.
        """
        session.when_built(self.on_model)
        pictures = functools.partial(self.pictures, session)
        session.extras = Extras(self.fingerprint, self.record, pictures, self.ranking(), self.draw_samples)
        if not self._adopted:
            self._settle_values(session)
        elif self._misfit is not None and session.config.task.name != "features":
            raise self._misfit
        if session.config.task.name == "train":
            session.distributed.on_main(functools.partial(self.look_at_files, session.say))

    def _settle_values(self, session: Any) -> None:
        self.normalization.look()
        if session.weights is not None and self.learns_classes:
            session.weights = fit_classes(session.weights, self.classes, session.say)
        if self.normalization.is_measured:
            session.wait_for("measuring the training images")
        resume = session.config.resume
        earlier = resume and (session.folder.path if resume == "auto" else run_folder_of(str(resume)))
        table = self.normalization.settle(session.distributed, earlier)
        if table is not None:
            path = session.folder.path / STATISTICS
            session.when_started(functools.partial(write_json, path, table))

    def look_at_files(self, say: Callable[[str], None]) -> None:
        """Warn of images that are trained on and tested on, and of classes that are not there; rank 0 does so before a
        training.

        Args:
            say: shows a line.

        Raises:
            DataError: no label of a split counts.
        """
        splits = {split: [path for path, _ in data.samples] for split, data in self._splits.items()}
        copies = _copies(splits.pop("train"), [path for paths in splits.values() for path in paths])
        if copies:
            self._record["files_in_two_parts"] = len(copies)
            say(
                f"warning: {len(copies)} images of {self.name} are in two parts, such as {copies[0]}: figures are "
                "measured on what was trained on; remove them from one"
            )
        meanings = {
            "train": ("classes_without_training_images", "cannot be learned"),
            self.tested_on: ("classes_not_measured", "no figure tells of it"),
        }
        for split, data in self._splits.items() if self.learns_classes else ():
            samples, (key, means) = data.samples, meanings.get(split, ("", ""))
            found, looked_at = self.labels_in(samples)
            lacking = [name for number, name in enumerate(self.classes) if number not in found]
            whole, where = looked_at == len(samples), f"{looked_at} of {len(samples)} {split} labels"
            if whole and len(lacking) == len(self.classes):
                raise DataError(f"no class is in {where}{self.hint}")
            # Of a few of many only what is no chance is a warning.
            if key and looked_at and lacking and (whole or len(lacking) >= len(self.classes) - 1):
                say(f"warning: {', '.join(lacking)}: in none of {where}: {means}{self.hint}")
                if whole:
                    self._record[key] = lacking

    def labels_in(self, samples: Sequence[tuple[str, Any]]) -> tuple[set[int], int]:
        """The class numbers among some samples, and how many of these were looked at."""
        return {label for _, label in samples}, len(samples)

    # -- figures and pictures ------------------------------------------------------------------------------------------

    def predict(self, session: Any, model: Any) -> Prediction:
        """Images as files and pictures (:func:`exp.vision.predict.predict`)."""
        from exp.vision.predict import predict

        return predict(session, self, model)

    def ranking(self) -> SampleMetric | None:
        """The figure by which ``task=eval`` finds the worst and the best images; None: it draws none."""
        return None

    def pictures(self, session: Any, model: Any, evaluator: Any = None) -> dict[str, Any]:
        """Pictures by name, of what a training has come to (:func:`exp.vision.figures.draw_images`)."""
        from exp.vision.figures import draw_images  # which takes its time to load, and only one rank draws

        counted = next((each for each in evaluator.metrics if hasattr(each, "confusion")), None) if evaluator else None
        return draw_images(session, self, model, counted)

    def draw_samples(self, worst: Sequence[Any], best: Sequence[Any]) -> dict[str, Any]:
        """Truth beside prediction, of images of the test split (:func:`exp.vision.figures.draw_samples`)."""
        from exp.vision.figures import draw_samples

        return draw_samples(self, worst, best)

    def fingerprint(self) -> Fingerprint:
        """Names, labels and sizes of the files, in short (:mod:`exp.data.fingerprint`)."""
        return of_samples({split: data.samples for split, data in self._splits.items()})

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """What ``result.json`` says of the data; all ranks call it, with ``gather`` of their ``Distributed``."""
        found: dict[str, Any] = {split: len(data) for split, data in self._splits.items()}
        found.update(tested_on=self.tested_on, **self.normalization.record(), **self._record)
        # By sample: several ranks may have met the same one, in different epochs.
        ranks = gather({split: data.met() for split, data in self._splits.items()})
        lost = sorted({(split, number) for rank in ranks for split in rank for number in rank[split][0]})
        unknown = {split: {n: c for rank in ranks for n, c in rank[split][1].items()} for split in self._splits}
        if lost:
            files = [self._splits[split].reason(number) for split, number in lost[:NAMED_FILES]]
            found["skipped"] = {"count": len(lost), "files": files}
        if any(unknown.values()):
            found["unknown_pixels"] = {split: sum(pixels.values()) for split, pixels in unknown.items() if pixels}
        return found


class SceneData(ImageData):
    """A scene classification data set; its keys are those of :class:`exp.vision.data.config.SceneDataConfig`."""

    ignore_index = NO_LABEL
    keys = SceneDataConfig

    def __init__(self, **keys: Any) -> None:
        super().__init__(self.keys(**keys))

    def metrics(self, detailed: bool = False) -> SceneMetrics:
        """A new accumulator of this data set's metrics."""
        return SceneMetrics(self.classes)

    def ranking(self) -> TrueClassProbability:
        """The probability of the class that an image has."""
        return TrueClassProbability()


class DistillationData(SceneData):
    """Folders of images as of scenes, or one of images alone; folders are not classes here, they only divide splits."""

    learns_classes = False
    keys = DistillationDataConfig

    def model_arguments(self) -> dict[str, int]:
        """Channels alone: a model for classes does not go with these data."""
        return {"in_channels": self.read.channels}

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """As of scenes, without classes."""
        example = super().example_batch(**keys)
        arguments = {"in_channels": example.model_arguments["in_channels"]}
        return example._replace(model_arguments=arguments, notes=example.notes[:1])

    def metrics(self, detailed: bool = False) -> list[FeatureAgreement]:  # type: ignore[override]
        """How alike student and teacher are."""
        return [FeatureAgreement("cls"), FeatureAgreement("patches")]

    def ranking(self) -> None:  # type: ignore[override]
        """None: there is no truth to draw beside a prediction."""

    def pictures(self, session: Any, model: Any, evaluator: Any = None) -> dict[str, Any]:
        """None; ``task=features`` draws what a student sees."""
        return {}

    def predict(self, session: Any, model: Any) -> Prediction:
        """Refused.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("task=predict: a student of features predicts no classes; use task=features, or train a head")


class SegmentationData(ImageData):
    """A segmentation data set; its keys are those of :class:`exp.vision.data.config.SegmentationDataConfig`.

    Attributes:
        gsd: on the ground, of files that do not tell it; None: not known.
    """

    ignore_index = IGNORED
    per_pixel = True
    classes_key = "data.palette or data.classes"

    def __init__(self, **keys: Any) -> None:
        config = SegmentationDataConfig(**keys)
        self.gsd = config.gsd
        super().__init__(config)

    def masks_of(self, listing: Listing, config: Any) -> ColorMasks | IndexMasks:
        """See :meth:`ImageData.masks_of`; masks hold colors where there is a palette, and the layout knows none."""
        self.classes = listing.classes or list(config.palette or config.classes or ())
        self.palette = distinct_colors(len(self.classes))
        if config.palette:
            values = [int(color, 16) for color in config.palette.values()]
            self.palette = [(value >> 16, value >> 8 & 255, value & 255) for value in values]
        if listing.ignored is not None:
            masks: ColorMasks | IndexMasks = IndexMasks(len(self.classes), listing.mask_values, listing.ignored)
        elif config.palette:
            masks = ColorMasks(list(config.palette.values()), config.ignore_colors, config.max_unknown)
        else:
            masks = IndexMasks(len(self.classes), config.mask_values, config.ignore_values)
        self.hint = f"; {masks.left_out}"
        return masks

    def labels_in(self, samples: Sequence[tuple[str, str]]) -> tuple[set[int], int]:
        """See :meth:`ImageData.labels_in`; 16 masks are looked at, spread over all."""
        found: set[int] = set()
        looked_at = 0
        for _, path in samples[:: -(-len(samples) // _MASKS) or 1]:
            with contextlib.suppress(DataError):  # reported when it is its turn, if it is not left out
                found.update(np.unique(self.train.masks.read(path).values).tolist())
                looked_at += 1
        return found, looked_at

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """As for scenes, with a label for each pixel."""
        made, size = super().example_batch(**keys), int(keys["size"])
        sample = {**made.train, "label": torch.zeros(1, size, size, dtype=torch.uint8)}
        return made._replace(train=sample, val={**sample, "sizes": [(size, size)]})

    def metrics(self, detailed: bool = False) -> SegmentationMetrics:
        """A new accumulator of this data set's metrics."""
        return SegmentationMetrics(self.classes)

    def ranking(self) -> PixelsRight:
        """The share of an image's pixels that are right."""
        return PixelsRight(len(self.classes))


def _copies(trained: Sequence[str], held: Sequence[str]) -> list[str]:
    """Held-out images of which the training split has a file of the same content; of up to 4096 files."""
    if len(trained) + len(held) > _MOST_FILES:
        return []
    with contextlib.suppress(OSError):  # it is reported when it is read
        sizes = {path: os.stat(path).st_size for path in (*trained, *held)}  # noqa: PTH116
        alike = {sizes[path] for path in trained} & {sizes[path] for path in held}
        held, trained = ([path for path in paths if sizes[path] in alike] for paths in (held, trained))
        known = {_content(path) for path in trained}
        return sorted({path for path in held if _content(path) in known}.difference(trained))
    return []


def _content(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


def fit_classes(weights: Weights, classes: Sequence[str], say: Callable[[str], None]) -> Weights:
    """Weights to begin a training with, whose head has the classes of the data, by name.

    The same classes in another order: the rows of the head are put into the order of the data. As many others: its last
    layer is left out, and begins anew, as it does for another number of them.

    Args:
        weights: of another run.
        classes: of the data.
        say: shows a line.
    """
    theirs, state = list((weights.data or {}).get("classes") or ()), dict(weights.state)
    rows = [key for key, value in state.items() if _CLASS_ROWS.match(key) and value.shape[:1] == (len(theirs),)]
    if theirs == list(classes) or len(theirs) != len(classes) or not rows:
        return weights
    if sorted(theirs) == sorted(classes):
        order = [theirs.index(name) for name in classes]
        state.update({key: state[key][order] for key in rows})
        say(f"init_from: the weights know the same {len(theirs)} classes in another order; the head's rows go by name")
    else:
        for key in rows:
            del state[key]
        say(
            f"init_from: the weights know other classes ({shortened(theirs)}) than the data have "
            f"({shortened(classes)}); the head's last layer begins anew"
        )
    return dataclasses.replace(weights, state=state)
