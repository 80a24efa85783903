"""Teachers of distillation: the networks, or their stored features, whose outputs are a student's targets.

A teacher is no submodule of the student: checkpoints, optimizers and wrappers do not see it, and each process has a
full copy.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from exp.config.compose import load, run_folder_of
from exp.config.resolve import instantiate, mark_untrusted, resolve, to_plain
from exp.data.fingerprint import sample_folder
from exp.engine.weights import read_weights
from exp.errors import CheckpointError, ConfigError
from exp.hub.files import files_of
from exp.runs.files import file_digest
from exp.vision.backbones.base import Backbone, Features
from exp.vision.distillation import Outputs, Side
from exp.vision.feature_store import SKIPPED, FeatureStore, order_digest
from exp.vision.keys import TeacherConfig

_EPS = 1e-6
_MODEL = "exp.vision.models.ImageModel"  # a name: models use this module
_NO_TEACHER = "model.teacher.init_from must be set: a run, or published weights with model.teacher.backbone"


class Teacher:
    """A trained network whose outputs are targets: in eval mode, without gradients.

    Args:
        keys: of ``model.teacher``.
        student: the student's backbone, whose channels of the image the teacher gets.
        band_names: of the data's bands; empty: not known.
        user_text: the student's configuration as text; classes that it names may be used.

    Attributes:
        model: an :class:`exp.vision.models.ImageModel`.
        data: state of the data on which a run was trained; empty: not known.
        source: file, run folder or name of the weights; None: not set.
        path: the file of the weights, once it has been read.

    Raises:
        ConfigError: ``init_from`` is no weights, or keys contradict each other.
    """

    def __init__(self, keys: TeacherConfig, student: Backbone, band_names: Sequence[str], user_text: str) -> None:
        self.source = keys.init_from
        if self.source is None and keys.sample_data is not None:
            self.source = str(sample_folder(keys.sample_data))
        self.data: dict[str, Any] = {}
        self.path: Path
        self._is_loaded = False
        arguments: dict[str, Any] = {"in_channels": student.in_channels, "band_names": band_names}
        folder = run_folder_of(self.source)
        if folder is not None and keys.backbone:
            raise ConfigError(
                f"model.teacher.backbone: {folder} is a run, whose own network is the teacher; leave it out"
            )
        if folder is None and not keys.backbone:
            source = f"model.teacher.init_from={self.source} is no run; for published weights choose its backbone, too"
            raise ConfigError(_NO_TEACHER if self.source is None else source)
        # In a fork of the generator: the teacher must not change the student's random numbers.
        with torch.random.fork_rng(devices=[]), _network_errors("model.teacher"):
            if folder is not None:
                self.model = self._of_run(folder, arguments, user_text)
            else:
                target = resolve("model._target_", "exp.vision.models.Encoder", _MODEL)
                self.model = instantiate(target, "model", {"backbone": keys.backbone}, arguments)
        self.model.requires_grad_(False).eval()
        self.side = Side.of("model.teacher", self.model.backbone, self.model.has_head)

    def _of_run(self, folder: Path, arguments: dict[str, Any], user_text: str) -> Any:
        """The model of a run, as it was trained."""
        config = load(folder / "config.yaml")
        mark_untrusted(config, user_text, groups=("model",))
        content = to_plain(config.model)
        target = resolve("model._target_", str(content.pop("_target_")), _MODEL)
        content.update(teacher={}, distillation=[])
        weights = read_weights(Path(str(self.source)).expanduser())
        self.data = dict(weights.data or {})
        if target.has_head:
            arguments = {**arguments, "num_classes": len(self.data.get("classes", ()))}
        return instantiate(target, "model", content, arguments)

    def load(self) -> None:
        """Read the weights, once.

        Raises:
            ConfigError: there are no weights, or not all of them fit.
        """
        if self._is_loaded:
            return
        source = self.source
        if source is None:
            raise ConfigError(_NO_TEACHER)
        expected = self.model.state_dict()
        with _network_errors(f"model.teacher.init_from={source}"):
            weights = read_weights(Path(source).expanduser())
            state = self.model.adapt_state_dict(weights.state, weights.path)
            state = self.model.fit_state_dict(state, weights.path)
            missing = [key for key, value in expected.items() if key not in state or state[key].shape != value.shape]
            if missing:
                raise ConfigError(f"the file lacks {len(missing)} tensors, such as {missing[0]}")
        self.model.load_state_dict({key: state[key] for key in expected})
        self.path, self._is_loaded = weights.path, True

    def start(self, data: Any) -> Callable[[], dict[str, str]]:
        """Read the weights before a training; returns a function that gives the SHA-256 of their files, by name."""
        del data
        self.load()
        return lambda: {path.name: file_digest(path) for path in files_of(self.path)}

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the network in place."""
        self.model.compile(*args, **kwargs)

    def targets(
        self, batch: Mapping[str, torch.Tensor], levels: Sequence[int], attention: Sequence[int], logits: bool
    ) -> Outputs:
        """The targets for a batch.

        Args:
            batch: ``image``: (B, C, H, W), 0..255, uint8 or float.
            levels: whose features are needed.
            attention: levels whose attention is needed.
            logits: whether scores are needed.
        """
        image = batch["image"]
        if image.device.type != "meta":  # task=estimate uses no values, so the file may be missing
            self.load()
        if self.model.pixel_mean.device != image.device:
            self.model.to(image.device)
        with torch.no_grad():
            if logits:
                scores, features = self.model.scores(image, levels)
            else:
                scores, features = None, self.model.features(image, levels) if levels else Features([])
            return collect(self.model, image, scores, features, levels, attention)


class StoredTeacher:
    """Features that task=features has stored: they are read with the images, and no network is needed.

    Args:
        keys: of ``model.teacher``.

    Attributes:
        data: empty.
        source: the folder.

    Raises:
        ConfigError: the folder holds no features, not of all images, or keys contradict each other.
    """

    def __init__(self, keys: TeacherConfig) -> None:
        self.source = str(keys.store)
        self.data: dict[str, Any] = {}
        if keys.init_from or keys.backbone or keys.sample_data:
            raise ConfigError(
                "model.teacher.store has the teacher's features; leave out model.teacher.init_from, backbone and "
                "sample_data (null)"
            )
        try:
            self.store = FeatureStore(self.source)
            self.store.check_complete()
        except ConfigError as error:
            raise ConfigError(str(error).replace("task.store=", "model.teacher.store=", 1)) from error
        self.side = Side(f"model.teacher.store={self.source}", self.store.about["channels"], False, False)
        self._stored_levels = list(self.store.about["fingerprint"]["preprocessing"]["out_indices"])

    def start(self, data: Any) -> Callable[[], dict[str, str]]:
        """Have the data read the features, if they are those of the images; returns a function that gives their digest.

        Args:
            data: an :class:`exp.vision.data.base.ImageData`.

        Raises:
            ConfigError: the data or their preprocessing are others, or images are changed at random.
        """
        splits = {"train": data.train, "val": data.val, data.test_split_name: data.test}
        pipelines = [to_plain(getattr(data.train.config, f"{split}_pipeline")) for split in ("train", "eval")]
        if pipelines[0] != pipelines[1] or data.train.mixer is not None:
            steps = [step for step in pipelines[0] if step not in pipelines[1]]
            other = next(iter(steps), {"type": "the mixing of images, or the order of steps,"})
            raise ConfigError(
                f"{self.side.key}: {other['type']} in data.train_pipeline changes images after their features were "
                "stored",
                "make it equal to data.eval_pipeline (data.train_pipeline=${data.eval_pipeline}), or have the teacher "
                "compute: model.teacher.init_from",
            )
        about = self.store.about["fingerprint"]
        expected = {**data.state_dict(), "eval_pipeline": pipelines[1]}
        differing = [
            key for key, value in expected.items() if key != "classes" and about["preprocessing"].get(key) != value
        ]
        stored = {name: entry for name, entry in about["data"].items() if name.startswith("the list of ")}
        differing += [name for split, dataset in splits.items() for name in [f"the list of {split}"]
                      if stored.get(name) != order_digest(dataset.samples)]  # fmt: skip
        if differing or self.store.images(SKIPPED):
            reason = ", ".join(differing) or "skipped images"
            raise ConfigError(f"{self.side.key} holds features of other data ({reason}); store those of these data")
        for split, dataset in splits.items():
            dataset.stored = functools.partial(self._read, split)
        return lambda: {"features": self.store.used()["weights"]["sha256"]}

    def _read(self, split: str, numbers: Sequence[int]) -> dict[str, np.ndarray]:
        kinds = {"teacher_cls": "cls", "teacher_patches": "patches"}
        return {
            name: np.stack([self.store.array(split, kind)[number] for number in numbers])
            for name, kind in kinds.items()
            if kind in self.store.about["kinds"]
        }

    def compile(self, *_: Any, **__: Any) -> None:
        """Nothing to do."""

    def targets(
        self, batch: Mapping[str, torch.Tensor], levels: Sequence[int], attention: Sequence[int], logits: bool
    ) -> Outputs:
        """The stored features of a batch; see :meth:`Teacher.targets`."""
        del attention, logits
        sizes = [self.side.channels[level] for level in self._stored_levels]
        missing = [level for level in levels if level not in self._stored_levels]
        if missing or "teacher_cls" not in batch or "teacher_patches" not in batch:
            reason = f"level {missing[0]}" if missing else "features of patches, read with the images of a training"
            raise ConfigError(f"{self.side.key} lacks {reason}; store them with task.patches=true, or have the teacher "
                              "compute: model.teacher.init_from")  # fmt: skip
        parts = {name: batch[f"teacher_{name}"].float().split(sizes, dim=-1) for name in ("cls", "patches")}
        maps = {level: part.permute(0, 3, 1, 2) for level, part in zip(self._stored_levels, parts["patches"])}
        return Outputs(maps=maps, tokens=dict(zip(self._stored_levels, parts["cls"])))


def collect(
    model: Any, image: torch.Tensor, logits: torch.Tensor | None, features: Features, levels: Sequence[int],
    attention: Sequence[int],
) -> Outputs:  # fmt: skip
    """The outputs of a model, with its attention.

    Args:
        model: an :class:`exp.vision.models.ImageModel`.
        image: (B, C, H, W).
        logits: of the model.
        features: of ``levels``.
        levels: from 0.
        attention: levels whose attention is needed.
    """
    between: dict[int, torch.Tensor] = {}
    if attention:
        backbone, normalized = model.backbone, model.normalize(image)
        padded = backbone.pad(normalized).shape[-2:]
        for level, weights in zip(attention, backbone.attention(normalized, attention)):
            grid = [extent // backbone.level_strides[level] for extent in padded]
            between[level] = _between_cells(weights.float(), grid[0], grid[1])
    return Outputs(logits, dict(zip(levels, features.maps)), dict(zip(levels, features.tokens())), between)


@contextlib.contextmanager
def _network_errors(key: str) -> Iterator[None]:
    """Errors of the teacher's network begin with the teacher's key; keys that they name are the network's own."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"{key}: {error.finding}", error.advice, error.details, key=key.partition("=")[0]) from error


def _between_cells(weights: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The mean over heads of (B, heads, N, M) between cells, (B, h, w, h', w'), without CLS and other tokens.

    The M cells to which a cell attends are those of the map, or of one that is smaller by the same factor along both
    sides.
    """
    mean = weights.mean(dim=1)
    others = mean.shape[1] - height * width  # tokens before the patches
    mean = mean[:, others:, others if mean.shape[1] == mean.shape[2] else 0 :]
    factor = round((height * width / mean.shape[2]) ** 0.5)
    cells = mean / (mean.sum(dim=-1, keepdim=True) + _EPS)
    return cells.reshape(len(mean), height, width, height // factor, width // factor)
