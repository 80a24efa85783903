"""Image data sets: scenes, distillation and segmentation."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np
import torch

from exp.data.base import Data, ExampleBatch, Prediction
from exp.data.extensions import DataExtensions, Units
from exp.data.fingerprint import dataset_fingerprint, shortened
from exp.errors import ConfigError, DataError
from exp.runs.files import write_json
from exp.vision.data.dataset import NO_LABEL, ImageDataset
from exp.vision.data.decode import image_size, open_raster, uses_rasterio
from exp.vision.data.keys import DistillationDataConfig, ImageDataConfig, SceneDataConfig, SegmentationDataConfig
from exp.vision.data.layouts import NAMED_FILES, archive_notes, unread_note
from exp.vision.data.masks import IGNORED, NO_DATA, IndexMasks, distinct_colors
from exp.vision.data.mixing import Mixer
from exp.vision.data.sources import (
    MasksBySource,
    SourceDraw,
    find_sources,
    join_classes,
    join_splits,
    read_sources,
)
from exp.vision.data.statistics import STATISTICS, Normalization
from exp.vision.data.transforms import Pipeline, is_resized
from exp.vision.metrics import (
    FeatureSimilarity,
    PixelAccuracy,
    SceneMetrics,
    SegmentationMetrics,
    SourceMetric,
    TrueClassProbability,
)

if TYPE_CHECKING:
    from exp.data.fingerprint import Fingerprint
    from exp.metrics import Metric, SampleMetric

__all__ = ["DistillationData", "ImageData", "SceneData", "SegmentationData"]

_ASSUMED_CLASSES = 50
_MOST_FILES = 4096  # largest data set whose splits are searched for copies
_MASKS = 16  # masks of each split that are read before a training, and images whose size is
_SAME_SCALE = 0.05  # sizes that differ by less are the same but for rounding


class ImageData(Data):
    """A data set of image files in splits.

    Attributes:
        name: of the data set.
        classes: names of the K classes.
        palette: RGB of each class.
        read: reads an image file.
        normalization: range, mean and standard deviation of each band.
        test_split_name: name of the split that is :attr:`test`: ``test``, or ``val`` if there is no test split.
        classes_key: the key of the configuration that orders the classes.
        learns_classes: whether models for these data predict classes.
        ignore_index: the label of ignored samples or pixels.
        per_pixel: whether each pixel has a label.
        gsd: ground sampling distance in meters per pixel, of files without georeference; None: not known.
        hint: end of the messages about classes without labels.
        has_eval_pipeline: whether ``data.eval_pipeline`` does anything.
        resized: images that :meth:`prepare_for_map` has not resized as the pipeline would: path -> width, height.

    Args:
        **keys: the keys of ``data``, of the class ``keys``.

    Raises:
        DataError: files are missing, or not where the layout expects them.
        ConfigError: a pipeline is wrong.
    """

    classes_key = "data.classes"
    learns_classes = True
    per_pixel = False
    hint = ""
    keys: type[ImageDataConfig]
    classes: list[str]
    palette: Sequence[tuple[int, ...]]
    raw_arguments = ("layout", "sources")
    ignore_index: int

    def __init__(self, **keys: Any) -> None:
        config = self.keys(**keys)
        self._config: Any = config
        self.sources = find_sources(config)
        self.set_classes()
        splits = join_splits(self.sources, self.classes, labels=not self.per_pixel)
        self._masks = self.build_mask_reader()
        self.name = config.name
        self.test_split_name = "test" if "test" in splits else "val"
        self.eval_batch_size, self.num_workers = config.eval_batch_size, config.num_workers
        self.gsd: float | None = getattr(config, "gsd", None)
        trained_on = [path for path, _ in splits["train"]]
        self.read = read_sources(self.sources)
        self.normalization = Normalization(self.read, trained_on, config)
        self._has_loaded_state = False
        self._class_mismatch: DataError | None = None  # of classes; features have none
        self._record: dict[str, Any] = {}
        self.notes = []
        for source in self.sources:
            self._record.update(source.index.notes)
            first = source.index.splits["train"][0][0]
            self.notes += [*archive_notes(source.root), *source.index.warnings, *source.read.band_order_notes(first)]
        self._eval_pipeline = Pipeline("data.eval_pipeline", config.eval_pipeline)
        self.has_eval_pipeline = bool(config.eval_pipeline)
        self.resized: dict[str, list[int]] = {}
        training = Pipeline("data.train_pipeline", config.train_pipeline)
        self._splits: dict[str, Any] = {}
        for split, samples in splits.items():
            is_train = split == "train"
            pipeline = training if is_train else self._eval_pipeline
            mixer = self._build_mixer() if is_train else None
            self._splits[split] = ImageDataset(samples, self.read, pipeline, config, self._masks, is_train, mixer)
        self.train, self.val, self.test = (self._splits[split] for split in ("train", "val", self.test_split_name))
        if len(self.sources) > 1:
            self._mix_sources()

    def _build_mixer(self) -> Mixer | None:
        """What ``data.mixup_alpha`` and ``data.cutmix_alpha`` ask for; None: no images are mixed."""
        num_classes = len(self.classes) if self.learns_classes and not self.per_pixel else None
        mixer = Mixer(self._config, num_classes, self.per_pixel)
        return mixer if mixer.methods else None

    def _mix_sources(self) -> None:
        """Draw training samples by the weights of the sources, and note which samples are of which."""
        counts = {split: [len(source.index.splits[split]) for source in self.sources] for split in self._splits}
        for split, data in self._splits.items():
            data.ends = np.cumsum(counts[split]).tolist()
        weights = [source.keys.get("weight", count) for source, count in zip(self.sources, counts["train"])]
        self.train.draw = draw = SourceDraw(counts["train"], weights, self._config.seed)
        self._record["sources"] = {
            source.name: {"share": share, **{split: counts[split][number] for split in counts}}
            for number, (source, share) in enumerate(zip(self.sources, draw.shares))
        }

    def set_classes(self) -> None:
        """Set ``classes`` and ``palette``."""
        self.classes = join_classes(self.sources, self._config.classes or ())
        self.palette = distinct_colors(len(self.classes))

    @property
    def legend(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and colors for plots of labels."""
        return list(zip(self.classes, self.palette))

    def build_mask_reader(self) -> Any:
        """The reader of masks; None: samples have no masks."""
        return None

    # -- samples -------------------------------------------------------------------------------------------------------

    def eval_splits(self) -> dict[str, ImageDataset]:
        """All splits, also train, with ``data.eval_pipeline`` and without augmentation."""
        return {
            split: ImageDataset(data.samples, self.read, self._eval_pipeline, self._config, self._masks)
            for split, data in self._splits.items()
        }

    def apply_eval_pipeline(
        self,
        pixels: np.ndarray,
        path: str | os.PathLike[str],
        missing: np.ndarray | None = None,
    ) -> np.ndarray:
        """Apply ``data.eval_pipeline`` to one image.

        Args:
            pixels: (H, W, C), the result of :attr:`read`.
            path: of the file.
            missing: True where a pixel has no data, bool (H, W); None: all have data.

        Returns:
            (h, w, C), of the same dtype.
        """
        return self._run_eval_pipeline(pixels, path, missing)[0]

    def _run_eval_pipeline(self, pixels: np.ndarray, path: Any, missing: np.ndarray | None, scale: Any = None) -> Any:
        mask = None if missing is None else missing.astype(np.uint8) * np.uint8(NO_DATA)
        results = self._eval_pipeline(pixels, str(path), mask, scale)
        return self.test.fill_missing(results, str(path)), results

    def prepare_for_map(
        self, pixels: np.ndarray, path: str | os.PathLike[str], missing: np.ndarray | None = None, factor: float = 1.0
    ) -> np.ndarray:
        """Like :meth:`apply_eval_pipeline`, for a class map: an image from outside the data is scaled as the data are.

        First it is resized by ``factor``, to the ground resolution of the data.

        A pipeline that makes 512 x 512 pixels of tiles of 1024 halves their ground resolution, and would divide that of
        a scene of 6000 by twelve. So the factors stay within those of the images of the data.

        Raises:
            DataError: the pipeline changes the size other than by one ``Resize``: its output cannot be mapped back.
        """
        if factor != 1.0:
            scale = tuple(max(round(side * factor), 1) for side in pixels.shape[1::-1])
            resize = {"type": "Resize", "scale": scale, "interpolation": "area" if factor < 1.0 else "bilinear"}
            mask = None if missing is None else missing.astype(np.uint8)
            resized = Pipeline("task.gsd", [resize])(pixels, str(path), mask)
            pixels, missing = resized["img"], None if mask is None else resized["gt_seg_map"] > 0
        prepared: np.ndarray
        prepared, results = self._run_eval_pipeline(pixels, path, missing)
        size, prepared_size = np.array(pixels.shape[:2]), np.array(prepared.shape[:2])
        if is_resized(results) and self._is_outside_data(path) and len(self._sizes):
            factors = self._sizes[:, 1] / self._sizes[:, 0]
            factor = (prepared_size / size).clip(factors.min(axis=0), factors.max(axis=0))
            target_size = np.rint(size * factor).astype(int).clip(min=1)
            if (np.abs(target_size - prepared_size) > _SAME_SCALE * prepared_size).any():
                prepared, results = self._run_eval_pipeline(pixels, path, missing, tuple(target_size[::-1].tolist()))
                self.resized[str(path)] = [int(side) for side in prepared.shape[1::-1]]
        if not is_resized(results) and prepared.shape != pixels.shape:
            sizes = [f"{width} x {height}" for height, width in (pixels.shape[:2], prepared.shape[:2])]
            raise DataError(
                f"{path}: data.eval_pipeline makes {sizes[1]} of {sizes[0]} pixels by more than one Resize, so "
                "there is no map of the image; predict with another pipeline, such as data.eval_pipeline=[]"
            )
        return prepared

    @functools.cached_property
    def training_gsd(self) -> float | None:
        """Ground resolution of the training images in meters per pixel: ``data.gsd``, or that of the first; None: not
        known.
        """
        from exp.vision.raster import ground_resolution

        path = self._splits["train"].samples[0][0]
        if self.gsd is not None or not uses_rasterio(path):
            return self.gsd
        with open_raster(path) as dataset:
            return ground_resolution(dataset)

    def scale_to_training(self, path: str | os.PathLike[str], gsd: float | None) -> float:
        """The factor that gives an image of ``gsd`` meters per pixel the ground resolution of the training images.

        Images of the data, and those that differ by less than a twentieth, stay as they are: 1.
        """
        if gsd is None or self.training_gsd is None or not self._is_outside_data(path):
            return 1.0
        factor = gsd / self.training_gsd
        return 1.0 if abs(factor - 1.0) < _SAME_SCALE else factor

    def longest_prepared_side(self, path: str | os.PathLike[str]) -> int | None:
        """The longest side, in pixels, that the model sees of images of the data; None: not known, or this is one."""
        return int(self._sizes[:, 1].max()) if self._is_outside_data(path) and len(self._sizes) else None

    def _is_outside_data(self, path: str | os.PathLike[str]) -> bool:
        return os.path.abspath(path) not in self._files  # noqa: PTH100

    @functools.cached_property
    def _files(self) -> frozenset[str]:
        return frozenset(path for data in self._splits.values() for path, _ in data.samples)

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        """(height, width) of some images of each split before and after ``data.eval_pipeline``, (N, 2, 2)."""
        sizes = []
        for data in self._splits.values():
            for path, _ in evenly_spaced(data.samples):
                size = image_size(path)
                if size is not None:
                    prepared = self._eval_pipeline(np.zeros((*size, self.read.channels), np.uint8), path)["img"]
                    sizes.append((size, prepared.shape[:2]))
        return np.array(sizes, float).reshape(-1, 2, 2)

    def read_model_input(self, path: str | os.PathLike[str]) -> np.ndarray:
        """Read an image file as the model's input, without a pipeline: (H, W, C), 0..255."""
        return self.read.modalities.map_statistics(self.read(path), path)

    # -- what models and weights need ----------------------------------------------------------------------------------

    @classmethod
    def example_batch(cls, **keys: Any) -> ExampleBatch:
        """An image of ``data.size`` pixels a side, with the classes of ``data.palette`` or ``data.classes``."""
        size, channels = int(keys["size"]), len(keys.get("bands") or ()) or int(keys["channels"])
        notes = [f"validation images are taken to be {size} x {size}"]
        arguments = {"in_channels": channels}
        if cls.learns_classes:
            num_classes = len(keys.get("palette") or keys.get("classes") or ())
            arguments.update(num_classes=num_classes or _ASSUMED_CLASSES, ignore_index=cls.ignore_index)
            notes += [f"the number of classes is not known; assumed: {_ASSUMED_CLASSES}"] * (not num_classes)
        image = torch.zeros(1, channels, size, size, dtype=torch.uint8)
        label = torch.zeros(1, size, size, dtype=torch.uint8) if cls.per_pixel else torch.zeros(1, dtype=torch.int64)
        train = {"image": image, "label": label, "index": torch.zeros(1, dtype=torch.int64)}
        val = {**train, "sizes": [(size, size)]} if cls.per_pixel else train
        return ExampleBatch(train, val, arguments, int(keys["eval_batch_size"]), notes)

    def model_arguments(self) -> dict[str, Any]:
        """Arguments of the model: ``num_classes``, ``in_channels`` and ``ignore_index``; if known, ``band_names``,
        ``pixel_mean`` and ``pixel_std``.
        """
        self.normalization.inspect_bands()
        return {
            "num_classes": len(self.classes),
            "in_channels": self.read.channels,
            "ignore_index": self.ignore_index,
            **self.normalization.model_arguments(),
        }

    def use_model_statistics(self, model: Any) -> None:
        """From now on, fill values without data with the model's mean, which its normalization makes 0; record both."""
        mean = getattr(model, "pixel_mean", None)
        if isinstance(mean, torch.Tensor) and mean.numel() == self.read.channels:
            self.read.fill = mean.detach().cpu().reshape(-1).numpy().astype("float32")
            std = model.pixel_std.detach().cpu().reshape(-1).numpy()
            self.read.modalities.use_model_statistics(self.read.fill, std)
            values = {
                key: [round(float(value), 3) for value in array]
                for key, array in (("mean", self.read.fill), ("std", std))
            }
            self._record["normalization"] = {"images": getattr(model, "normalization", "own"), **values}

    def state_dict(self) -> dict[str, Any]:
        """What is saved with weights trained on these data.

        Returns:
            ``{"classes": [name], "channels": count, "value_range": [low, high] | None}``; with ``data.bands`` also
            ``bands``, ``band_names`` and ``band_count``, with ``data.mean`` also ``mean``, ``std`` and ``scaled``, with
            ``data.modality_statistics`` also ``modality_statistics``.
        """
        return {"classes": list(self.classes), **self.normalization.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read files like the data that the weights were trained on; call before any file is read.

        Args:
            state: the :meth:`state_dict` of the training data.

        Raises:
            DataError: the weights have other channels. :meth:`setup` refuses other classes if they matter.
        """
        weight_classes = state.get("classes")
        if self.learns_classes and weight_classes is not None and list(weight_classes) != list(self.classes):
            self._class_mismatch = DataError(
                f"the weights were trained with {len(weight_classes)} classes, {shortened(weight_classes)}, but the "
                f"data have {len(self.classes)}: {shortened(self.classes)}; use the data that the weights were trained "
                f"on, or give the same classes in the same order ({self.classes_key})"
            )
        self.normalization.load_state(state)
        self._has_loaded_state = True

    def setup(self, session: Any) -> None:
        """Measure mean and standard deviation of the training images if the keys ask for it. Every rank must call this.

        Rank 0 writes them to ``statistics.json``; a resumed training reads them from there. Before a training, rank 0
        checks some files (:meth:`check_files`).

        Raises:
            DataError: the weights have other classes; or see :meth:`check_files`.
        """

        def model_built(model: Any) -> None:
            self.use_model_statistics(model)
            if getattr(model, "distillation", None) is not None and not session.task.needs_weights:
                self._use_teacher(session, model.distillation)
            if session.weights is not None and "normalization" in self._record:
                session.print(
                    "normalization: images={images}, mean {mean}, std {std}".format(**self._record["normalization"])
                )

        session.on_model(model_built)
        pictures = functools.partial(self.pictures, session)
        session.extensions = DataExtensions(
            self.fingerprint, self.record, pictures, self.ranking(), self.draw_samples, self.units
        )
        if not self._has_loaded_state:
            self._fit_normalization(session)
        elif self._class_mismatch is not None and session.config.task.name != "features":
            raise self._class_mismatch
        if session.config.task.name == "train":
            session.distributed.on_main(functools.partial(self.check_files, session.print))

    def units(self) -> dict[str, Units]:
        """What programs that read files themselves must know (``task=export``).

        ``image`` has ``range``: the two values, one pair for all bands or for each band, to which those of a file are
        clipped; ``bands`` of a file, by name or number (null: all); ``no_data``: for each band, the value to set where
        a file has no data; with sensors of their own statistics also ``modality_statistics``, of values in 0..255.
        """
        reader, limits = self.read, self.read.value_range
        about: dict[str, Any] = {
            "range": limits or [0, 255],
            "bands": None if reader.bands is None else list(self.normalization.names or reader.bands),
            "no_data": None,
        }
        if reader.modalities.statistics:
            about["modality_statistics"] = reader.modalities.statistics
        image = Units(about=about)
        if limits is not None:
            low, high = (torch.tensor(limit, dtype=torch.float64).view(-1, 1, 1) for limit in limits)
            image = Units(low, (high - low) / 255.0, (0.0, 255.0), about)
        if reader.fill is not None:
            about["no_data"] = image.to_file(torch.from_numpy(reader.fill).view(1, -1, 1, 1)).flatten().tolist()
        return {"image": image, "output": Units(about={"classes": list(self.classes)})}

    def _use_teacher(self, session: Any, distillation: Any) -> None:
        """Check that a teacher fits the data, and record its weights, which a resumed training compares."""
        session.warn(*distillation.check_data(self.state_dict()))
        files = distillation.teacher.start(self)
        if session.distributed.is_main:
            self._record["teacher"] = files()

    def _fit_normalization(self, session: Any) -> None:
        self.normalization.inspect_bands()
        if self.normalization.is_measured:
            session.print("measuring the training images")
        earlier = session.folder.path if session.config.resume == "auto" else None
        table = self.normalization.fit(session.distributed, earlier)
        if table is not None:
            session.on_start(functools.partial(write_json, session.folder.path / STATISTICS, table))

    def check_files(self, say: Callable[[str], None]) -> None:
        """Warn of files that are not read, of held-out images that are also in the training split, and of classes
        without labels.

        Args:
            say: shows a line.

        Raises:
            DataError: all labels of a split are ignored.
        """
        for unread in filter(None, map(unread_note, {source.root: None for source in self.sources})):
            say(unread)
        splits = {split: [path for path, _ in data.samples] for split, data in self._splits.items()}
        copies = _duplicates(splits.pop("train"), [path for paths in splits.values() for path in paths])
        if copies:
            self._record["files_in_two_parts"] = len(copies)
            say(
                f"warning: {len(copies)} images of {self.name} are in two splits, such as {copies[0]}: metrics would "
                "include images of the training; remove them from one"
            )
        unit = "pixel" if self.per_pixel else "image"
        for split, data in self._splits.items() if self.learns_classes else ():
            present, num_read = self.classes_present(data.samples)
            absent = [name for number, name in enumerate(self.classes) if number not in present]
            is_complete, scope = num_read == len(data), f"{num_read} of {len(data)} {split} labels"
            if is_complete and len(absent) == len(self.classes):
                raise DataError(f"no class is in {scope}{self.hint}")
            # If only a sample of the masks was read, a few lacking classes may be chance.
            if num_read and absent and (is_complete or len(absent) >= len(self.classes) - 1):
                say(f"warning: no {unit} of class {', '.join(absent)} in {scope}{self.hint}")
                self._record.setdefault("classes_without_labels", {})[split] = absent

    def classes_present(self, samples: Sequence[tuple[str, Any]]) -> tuple[set[int], int]:
        """The class numbers that occur in some samples, and the number of samples whose labels were read."""
        return {label for _, label in samples}, len(samples)

    # -- figures and pictures ------------------------------------------------------------------------------------------

    def predict(self, session: Any, model: Any) -> Prediction:
        """Predict images, and write files and plots (:func:`exp.vision.predict.predict`)."""
        from exp.vision.predict import predict

        return predict(session, self, model)

    def metrics_by_source(self, make: Callable[[], Metric]) -> list[Metric]:
        """A metric for the samples of each source, if there are several."""
        labeled = [(number, source) for number, source in enumerate(self.sources) if source.labeled]
        return [SourceMetric(make(), source.name, number) for number, source in labeled * (len(labeled) > 1)]

    def ranking(self) -> SampleMetric | None:
        """The metric by which ``task=eval`` finds the worst and the best images; None: it draws none."""
        return None

    def pictures(self, session: Any, model: Any, evaluator: Any = None) -> dict[str, Any]:
        """Plots of validation images after a training, by file name (:func:`exp.vision.plots.draw_images`)."""
        from exp.vision.plots import draw_images  # slow to load, and only one rank draws

        metrics = [metric for metric in (evaluator.metrics if evaluator else ()) if hasattr(metric, "confusion")]
        return draw_images(session, self, model, metrics[0] if metrics else None)

    def draw_samples(self, worst: Sequence[Any], best: Sequence[Any]) -> dict[str, Any]:
        """Plots of test images with truth and prediction (:func:`exp.vision.plots.draw_samples`)."""
        from exp.vision.plots import draw_samples

        return draw_samples(self, worst, best)

    def fingerprint(self) -> Fingerprint:
        """A digest of names, labels and sizes of the files, and of a teacher's (:mod:`exp.data.fingerprint`)."""
        teacher = self._record.get("teacher", {})
        return {
            **dataset_fingerprint({split: data.samples for split, data in self._splits.items()}),
            **{f"teacher/{name}": [1, 0, digest] for name, digest in teacher.items()},
        }

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Entries for ``result.json``. Every rank must call this, with ``gather`` of its ``Distributed``."""
        record: dict[str, Any] = {split: len(data) for split, data in self._splits.items()}
        record.update(tested_on=self.test_split_name, **self.normalization.record(), **self._record)
        # By sample: several ranks may have skipped the same one in different epochs.
        skipped = [(split, int(number)) for split, data in self._splits.items() for number in data.skipped.nonzero()]
        ranks = gather((skipped, self.resized))
        skipped_samples = sorted({sample for samples, _ in ranks for sample in samples})
        if skipped_samples:
            files = [self._splits[split].samples[number][0] for split, number in skipped_samples[:NAMED_FILES]]
            record["skipped"] = {"count": len(skipped_samples), "files": files}
        resized = {path: size for _, sizes in ranks for path, size in sizes.items()}
        if resized:
            record["resized"] = {"count": len(resized), "files": dict(sorted(resized.items())[:NAMED_FILES])}
        return record


class SceneData(ImageData):
    """A scene classification data set; its keys are those of :class:`exp.vision.data.keys.SceneDataConfig`."""

    ignore_index = NO_LABEL
    keys = SceneDataConfig

    def metrics(self, detailed: bool = False) -> list[Metric]:
        """New metrics of scenes."""
        return [SceneMetrics(self.classes), *self.metrics_by_source(lambda: SceneMetrics(self.classes))]

    def ranking(self) -> TrueClassProbability:
        """The probability of the true class."""
        return TrueClassProbability()


class DistillationData(ImageData):
    """Images without labels, for distillation; folders are no classes, and each is divided among all splits."""

    learns_classes = False
    ignore_index = NO_LABEL
    keys = DistillationDataConfig

    def model_arguments(self) -> dict[str, int]:
        """``in_channels`` alone, without classes."""
        return {"in_channels": self.read.channels}

    def metrics(self, detailed: bool = False) -> list[FeatureSimilarity]:
        """New metrics: the cosine of student and teacher, of CLS tokens and of patches."""
        return [FeatureSimilarity("cls"), FeatureSimilarity("patches")]

    def pictures(self, session: Any, model: Any, evaluator: Any = None) -> dict[str, Any]:
        """No plots; ``task=features`` draws features."""
        return {}

    def predict(self, session: Any, model: Any) -> Prediction:
        """Not supported.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("task=predict: a student of features predicts no classes; use task=features, or train a head")


class SegmentationData(ImageData):
    """A segmentation data set; its keys are those of :class:`exp.vision.data.keys.SegmentationDataConfig`."""

    ignore_index = IGNORED
    per_pixel = True
    classes_key = "data.palette or data.classes"
    keys = SegmentationDataConfig

    def set_classes(self) -> None:
        """Set ``classes`` and ``palette``; masks have colors if ``data.palette`` is set, unless the layout decides."""
        config = self._config
        self.classes = list(config.palette or config.classes or ())
        if not self.classes or (len(self.sources) == 1 and self.sources[0].index.classes):
            self.classes = join_classes(self.sources, ())
        self.palette = distinct_colors(len(self.classes))
        if config.palette:
            self.palette = [tuple(bytes.fromhex(color)) for color in config.palette.values()]

    def build_mask_reader(self) -> Any:
        """See :class:`ImageData`."""
        for source in self.sources:
            if not source.labeled:
                continue
            index, masks = source.index, source.masks_for(self.classes)
            source.masks, self.hint = masks, f"; {masks.ignored_note}"
            if isinstance(masks, IndexMasks):
                paths = [path for samples in index.splits.values() for _, path in evenly_spaced(samples)]
                for value, path in masks.nodata_values(paths).items():
                    effect = "does not count; if it is a class, set data.label_map={value in the file: class number}"
                    effect = "is a class in data.label_map, and counts" if value in masks.mapped_values else effect
                    index.warnings.append(f"note: masks such as {path} declare {value:g} as no data: it {effect}")
                    index.notes.setdefault("mask_nodata", []).append(value)
        return self.sources[0].masks if len(self.sources) == 1 else MasksBySource(self.sources)

    def classes_present(self, samples: Sequence[tuple[str, str]]) -> tuple[set[int], int]:
        """See :class:`ImageData`; reads at most 16 masks, evenly spaced, and records their unknown pixels."""
        labels: set[int] = set()
        num_read, masks = 0, self.train.masks
        for _, path in evenly_spaced([sample for sample in samples if sample[1] is not None]):
            with contextlib.suppress(DataError):  # reported when the mask is loaded
                labels.update(np.unique(masks.read(path)).tolist())
                num_read += 1
        if getattr(masks, "unknown", 0):
            self._record["unknown_pixels"] = masks.unknown
        return labels, num_read

    def metrics(self, detailed: bool = False) -> list[Metric]:
        """New metrics of segmentation."""
        return [SegmentationMetrics(self.classes), *self.metrics_by_source(lambda: SegmentationMetrics(self.classes))]

    def ranking(self) -> PixelAccuracy:
        """The share of an image's pixels that are predicted right."""
        return PixelAccuracy(len(self.classes))


def evenly_spaced(samples: Sequence[Any]) -> Sequence[Any]:
    """At most 16 of some samples, evenly spaced."""
    return samples[:: -(-len(samples) // _MASKS) or 1]


def _duplicates(training: Sequence[str], held_out: Sequence[str]) -> list[str]:
    """Held-out images whose content is also in the training split; empty for more than 4096 files."""
    if len(training) + len(held_out) > _MOST_FILES:
        return []
    with contextlib.suppress(OSError):  # reported when the file is loaded
        sizes = {path: os.stat(path).st_size for path in (*training, *held_out)}  # noqa: PTH116
        shared_sizes = {sizes[path] for path in training} & {sizes[path] for path in held_out}
        held_out, training = ([path for path in paths if sizes[path] in shared_sizes] for paths in (held_out, training))
        training_digests = {_content(path) for path in training}
        return sorted({path for path in held_out if _content(path) in training_digests}.difference(training))
    return []


def _content(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()
