"""What data sets of scenes and of segmentation share: their splits, and what others ask of the data."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import functools
import os
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

import numpy as np
import torch

from exp.config.trained import run_folder_of
from exp.data.base import Data, Prediction, Sketch
from exp.data.fingerprint import of_samples
from exp.data.places import shortened
from exp.errors import DataError
from exp.runs.files import write_json
from exp.vision.data.bands import BandChoice, colors_in
from exp.vision.data.dataset import ImageDataset, ModalityDraw
from exp.vision.data.decode import reordered_bands
from exp.vision.data.labels import NO_DATA
from exp.vision.data.layouts import NAMED_FILES, SUFFIXES, Listing, archive_notes, data_root, layout_of, other_files
from exp.vision.data.statistics import STATISTICS, Normalization
from exp.vision.data.transforms import Pipeline, is_resized
from exp.vision.data.values import ImageReader, Modalities

if TYPE_CHECKING:
    from exp.data.fingerprint import Fingerprint
    from exp.engine.fit import Weights
    from exp.vision.data.config import ImageDataConfig

__all__ = ["ImageData", "fit_classes"]

_ASSUMED_CLASSES = 50
_MOST_FILES, _ALIKE, _END = 4096, 8, 4096  # compared by size; of one name, where there are more; bytes
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
        input_record: what ``task=predict`` has found of the files of ``task.input``, for the record.

    Args:
        config: the keys of ``data``.

    Raises:
        DataError: files are missing, or not laid out as expected.
        ConfigError: a pipeline is wrong.
    """

    classes_key = "data.classes"
    learns_classes = True
    makes = ("layout",)
    ignore_index: int

    def __init__(self, config: ImageDataConfig) -> None:
        root = data_root(config.root, config.sample_data, config.name)
        listing = layout_of(config).find(root)
        self._make, self.classes, self.palette = self.interpret(listing, config)
        self.name = config.name
        self.tested_on = "test" if "test" in listing.splits else "val"
        self.eval_batch_size, self.num_workers = config.eval_batch_size, config.num_workers
        trained_on = [path for path, _ in listing.splits["train"]]
        wanted = config.band_names if config.bands is None else config.bands
        choice = None if wanted is None else BandChoice(wanted, config.band_names, config.alpha)
        by_image = config.stretch_scope == "image"
        channels = config.channels if choice is None else len(choice.wanted)
        self.read = ImageReader(channels, config.value_range, config.alpha, choice, config.stretch, by_image)
        self.read.modalities = Modalities(getattr(config, "modality", None), config.modality_statistics)
        skips = config.on_error == "skip"
        self.normalization = Normalization(
            self.read, trained_on, config.mean, config.std, config.num_workers, skip_errors=skips
        )
        self._adopted = False
        self._misfit: DataError | None = None  # of classes; features have none
        self._config = config
        self._record = dict(listing.notes)
        self.notes = [*archive_notes(root), *listing.warnings, *self._odd(listing, wanted or ())]
        self.input_record: dict[str, Any] = {}
        self._eval_pipeline = Pipeline("data.eval_pipeline", config.eval_pipeline)
        training = Pipeline("data.train_pipeline", config.train_pipeline)
        self._splits: dict[str, Any] = {}
        for split, samples in listing.splits.items():
            is_train = split == "train"
            pipeline = training if is_train else self._eval_pipeline
            self._splits[split] = self._make(samples, self.read, pipeline, config, is_train, cached=True)
        if config.modality_weights:
            groups = [self.read.modalities.of(path) for path in trained_on]
            draw = self._splits["train"].draw = ModalityDraw(groups, config.modality_weights, config.seed)
            self._record["modality_shares"] = draw.shares

    def interpret(
        self, listing: Listing, config: Any
    ) -> tuple[Callable[..., ImageDataset], list[str], list[tuple[int, int, int]]]:
        """What a kind of data makes of the files: the class of its datasets, the names of its classes, their colors."""
        raise NotImplementedError

    def _odd(self, listing: Listing, wanted: Sequence[Any]) -> list[str]:
        """Lines on what is remarkable about files and bands, which goes into the record, too."""
        lines = []
        samples = [sample for members in listing.splits.values() for sample in members]
        others = other_files({os.path.dirname(path) for sample in samples for path in sample if isinstance(path, str)})  # noqa: PTH120
        if others:
            self._record["other_files"] = others
            counts = ", ".join(f"{count} {suffix}" for suffix, count in others.items())
            lines.append(
                f"warning: files beside the images of {self.name} are not read, as exp reads {' '.join(SUFFIXES)} "
                f"only: {counts}; convert them, or move them elsewhere"
            )
        twice = sorted({str(band) for band in wanted if list(wanted).count(band) > 1})
        if twice:
            lines.append(f"note: data.bands names {', '.join(twice)} more than once: the model gets it as often")
        reordered = reordered_bands(listing.splits["train"][0][0]) if self.read.takes_colors else []
        if reordered:
            self._record["bands_read_as_rgb"] = reordered
            lines.append(f"note: bands named {', '.join(reordered)} are read as red, green, blue")
        return lines

    # -- samples -------------------------------------------------------------------------------------------------------

    @property
    def train(self) -> ImageDataset:
        """The split to train on."""
        return self._split("train")

    @property
    def val(self) -> ImageDataset:
        """The split by which the best model is chosen."""
        return self._split("val")

    @property
    def test(self) -> ImageDataset:
        """The split that is tested on: ``val`` where there is no test split."""
        return self._split(self.tested_on)

    def plain_parts(self) -> dict[str, ImageDataset]:
        """All splits as an evaluation sees them: the training images, too, through ``data.eval_pipeline``."""
        self._look()
        make = functools.partial(self._make, read=self.read, pipeline=self._eval_pipeline, config=self._config)
        return {split: make(data.samples) for split, data in self._splits.items()}

    def _split(self, name: str) -> ImageDataset:
        self._look()  # measured here once, where need be, and not in each process that loads
        split: ImageDataset = self._splits[name]
        return split

    def _look(self) -> None:
        self.normalization.look()
        self.normalization.find_range()

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
        made: np.ndarray = self._splits[self.tested_on].filled(results, str(path))
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
    def sketch(cls, **keys: Any) -> Sketch:
        """Images of ``data.size``; the classes of ``data.palette`` or ``data.classes``."""
        wanted = keys.get("bands") or keys.get("band_names")
        size, channels = int(keys["size"]), len(wanted) if wanted else int(keys["channels"])
        classes = len(keys.get("palette") or keys.get("classes") or ())
        notes = [f"validation images are taken to be {size} x {size}"]
        if not classes:
            classes = _ASSUMED_CLASSES
            notes.append(f"how many classes the data have is not known; taken are {classes}")
        image = torch.zeros(1, channels, size, size, dtype=torch.uint8)
        sample = {"image": image, **{name: torch.zeros(1, dtype=torch.int64) for name in ("label", "index")}}
        arguments = {"num_classes": classes, "in_channels": channels, "ignore_index": cls.ignore_index}
        return Sketch(sample, sample, arguments, int(keys["eval_batch_size"]), notes)

    def model_arguments(self) -> dict[str, Any]:
        """What the model must know of the files; names of bands, mean and deviation only where there are some."""
        self._look()
        self._check_classes()
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

    def meet(self, model: Any) -> None:
        """Values without data become those that the model's normalization makes 0."""
        mean = getattr(model, "pixel_mean", None)
        if isinstance(mean, torch.Tensor) and mean.numel() == self.read.channels:
            self.read.fill = mean.detach().cpu().reshape(-1).numpy().astype("float32")
            self.read.modalities.on_model(self.read.fill, model.pixel_std.detach().cpu().reshape(-1).numpy())

    def state(self) -> dict[str, Any]:
        """What belongs to the weights trained on these data.

        Returns:
            ``{"classes": [name], "channels": count, "value_range": [low, high] | None}``; with ``data.bands`` also
            ``bands``, ``band_names`` and ``band_count``, with ``data.mean`` also ``mean``, ``std`` and ``scaled``, with
            those of modalities also ``modality_statistics``.
        """
        self._look()
        return {"classes": list(self.classes), **self.normalization.state()}

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Be used with weights that were trained on other files: call it before anything is loaded.

        Args:
            state: of the data that they were trained on.

        Raises:
            DataError: they have other channels. :meth:`settle` refuses other classes where they matter.
        """
        theirs, mine = state.get("classes"), self.classes
        if self.learns_classes and theirs is not None and list(theirs) != list(mine):
            have = "them in another order" if sorted(theirs) == sorted(mine) else f"{len(mine)}"
            self._misfit = DataError(
                f"the weights know the {len(theirs)} classes {shortened(theirs)}, but the data have {have}: "
                f"{shortened(mine)}; use the data that the weights were trained on, or give the same classes in the "
                f"same order ({self.classes_key})"
            )
        self.normalization.load_state(state)
        self._adopted = True

    def _check_classes(self) -> None:
        if self._misfit is not None:
            raise self._misfit

    def settle(self, session: Any) -> None:
        """Measure over all training images what is to be measured; a collective.

        Before a training, rank 0 looks at some files (:meth:`look_at_files`). It keeps the figures in
        ``statistics.json``, which a training that goes on takes them from.

        Raises:
            DataError: the weights are to tell other classes, or had the bands in another order; or see
                :meth:`look_at_files`.
        """
        if self._adopted:
            if session.config.task.name != "features":
                self._check_classes()
            self._misfit = None
        else:
            self._settle_values(session)
        if session.config.task.name != "train":
            return
        trouble = None
        if session.distributed.is_main:
            try:
                self.look_at_files(session.say)
            except DataError as error:
                trouble = error
        trouble = session.distributed.gather(trouble)[0]
        if trouble is not None:
            raise trouble

    def _settle_values(self, session: Any) -> None:
        self.normalization.look()
        if session.weights is not None:
            state = session.weights.data or {}
            self._refuse_another_order(list(state.get("band_names") or ()))
            if self.learns_classes:
                session.weights = fit_classes(session.weights, self.classes, session.say)
        if self.normalization.waits:
            session.wait_for("measuring the training images")
        resume, earlier = session.config.resume, None
        if resume is not None:
            earlier = session.folder.path if resume == "auto" else run_folder_of(str(resume))
        table = self.normalization.settle(session.distributed, earlier)
        if table is not None:
            path = session.folder.path / STATISTICS
            session.when_started(functools.partial(write_json, path, table))

    def _refuse_another_order(self, theirs: list[str]) -> None:
        """Refuse to train on the bands of the weights in another order: nothing else would tell.

        Args:
            theirs: names of the bands of the weights.
        """
        mine = self.normalization.names
        if not theirs or not mine:
            return
        if mine != theirs and sorted(mine) == sorted(theirs):
            raise DataError(
                f"init_from: the weights were trained on the bands {', '.join(theirs)}, but data.bands gives "
                f"{', '.join(mine)}; give them in the same order"
            )
        if len(mine) != len(theirs) == 3 and colors_in(theirs) != [0, 1, 2] and None not in colors_in(mine):
            raise DataError(
                f"init_from: the weights were trained on the bands {', '.join(theirs)}, whose kernels would be taken "
                "for those of red, green and blue; give the bands of the data other names (data.band_names)"
            )

    def look_at_files(self, say: Callable[[str], None]) -> None:
        """Warn of images that are trained on and tested on; rank 0 does so before a training.

        Args:
            say: shows a line.

        Raises:
            DataError: nothing can be learned or measured.
        """
        splits = {split: [path for path, _ in data.samples] for split, data in self._splits.items()}
        copies = _copies(splits.pop("train"), {path for paths in splits.values() for path in paths})
        if copies:
            self._record["files_in_two_parts"] = len(copies)
            say(
                f"warning: {len(copies)} images of {self.name} are in two parts, such as {copies[0]}: figures are "
                "measured on what was trained on; remove them from one"
            )

    # -- figures and pictures ------------------------------------------------------------------------------------------

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

    def fingerprint(self) -> Fingerprint:
        """Names, labels and sizes of the files, in short (:mod:`exp.data.fingerprint`)."""
        return of_samples({split: data.samples for split, data in self._splits.items()})

    def record(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """What ``result.json`` says of the data; all ranks call it, with ``gather`` of their ``Distributed``."""
        counts = {split: len(data) for split, data in self._splits.items()}
        found = self.found_in(gather({split: data.met() for split, data in self._splits.items()}))
        measured = self.normalization.record()
        return {**counts, "tested_on": self.tested_on, **measured, **self._record, **found, **self.input_record}

    def found_in(self, gathered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What was left out while loading, over all ranks and loader workers.

        Args:
            gathered: of each rank: what :meth:`ImageDataset.met` gives, by split.

        Returns:
            ``{"skipped": {"count", "files"}, "unknown_pixels": {split: count}}``; only what there is.
        """
        found: dict[str, Any] = {}
        skipped = sorted({(split, number) for rank in gathered for split in rank for number in rank[split]["skipped"]})
        if skipped:
            files = [self._splits[split].reason(number) for split, number in skipped[:NAMED_FILES]]
            found["skipped"] = {"count": len(skipped), "files": files}
        unknown = {}
        for split in self._splits:
            # By sample: several ranks may have met the same one, in different epochs.
            pixels = {number: count for rank in gathered for number, count in rank[split]["unknown"].items()}
            if pixels:
                unknown[split] = sum(pixels.values())
        if unknown:
            found["unknown_pixels"] = unknown
        return found


def _copies(trained: Sequence[str], held: set[str]) -> list[str]:
    """Held-out images of which the training split has a file of the same content.

    Compared are files of the same size and end; among more than 4096 files, which would take long to look into, those
    of the same name. A name that many files have, as of numbered tiles, tells nothing then.
    """
    many = len(trained) + len(held) > _MOST_FILES

    def key(path: str) -> Any:
        if many:
            return os.path.basename(path)  # noqa: PTH119 - of a million
        with contextlib.suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _END, 0))
            return size, file.read()
        return None

    alike: dict[Any, list[str]] = defaultdict(list)
    for path in trained:
        alike[key(path)].append(path)
    others = {path: alike[key(path)] for path in held.difference(trained)}
    return sorted(
        path
        for path, originals in others.items()
        if not (many and len(originals) > _ALIKE) and any(_same(path, other) for other in originals)
    )


def _same(path: str, other: str) -> bool:
    with contextlib.suppress(OSError):  # it is reported when it is read
        return filecmp.cmp(path, other, shallow=False)
    return False


def fit_classes(weights: Weights, classes: Sequence[str], say: Callable[[str], None]) -> Weights:
    """Weights to begin a training with, whose head has the classes of the data, by name.

    The same classes in another order: the rows of the head are put into the order of the data. As many others: its last
    layer is left out, and begins anew, as it does for another number of them.

    Args:
        weights: of another run.
        classes: of the data.
        say: shows a line.
    """
    theirs = list((weights.data or {}).get("classes") or ())
    rows = {key for key, value in weights.state.items() if _CLASS_ROWS.match(key) and value.shape[:1] == (len(theirs),)}
    if theirs == list(classes) or len(theirs) != len(classes) or not rows:
        return weights
    state = {key: value for key, value in weights.state.items() if key not in rows}
    if sorted(theirs) == sorted(classes):
        order = [theirs.index(name) for name in classes]
        state.update({key: weights.state[key][order] for key in sorted(rows)})
        say(f"init_from: the weights know the same {len(theirs)} classes in another order; the head's rows go by name")
    else:
        say(
            f"init_from: the weights know other classes ({shortened(theirs)}) than the data have "
            f"({shortened(classes)}); the head's last layer begins anew"
        )
    return dataclasses.replace(weights, state=state)
