"""The models: a backbone with a head and losses for scenes (a label per image), segmentation or regression."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, ClassVar, Mapping, Sequence, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from exp.config.compose import run_folder_of
from exp.config.resolve import create, resolve
from exp.errors import ConfigError
from exp.hardware.compat import autocast_disabled
from exp.models.base import Model, strip_prefix
from exp.models.dropout import Dropout
from exp.vision import lora
from exp.vision.backbones.base import Backbone, Features, Published
from exp.vision.data.bands import color_positions
from exp.vision.distillation import Distillation, Outputs, Side
from exp.vision.export import write_huggingface
from exp.vision.heads import Head
from exp.vision.keys import (
    EncoderConfig,
    ImageModelConfig,
    LoraConfig,
    RegressorConfig,
    SceneClassifierConfig,
    SegmenterConfig,
    TeacherConfig,
)
from exp.vision.losses import CrossEntropy, Loss, Losses, ValueLoss
from exp.vision.metrics import CosineSimilarity
from exp.vision.teachers import StoredTeacher, Teacher, collect
from exp.vision.tiling import Tiling

__all__ = ["Encoder", "ImageModel", "SceneClassifier", "Segmenter", "adapt_to_bands", "typed_keys"]

# Mean and standard deviation of the pretraining images, RGB in 0..1 (DINOv3's; web: ImageNet's).
_NORMALIZATION = {
    "web": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "satellite": ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143)),
}
_PREFIX = "backbone."
_DISTILLATION = "distillation."
_STATISTICS = ("pixel_mean", "pixel_std")
_Config = TypeVar("_Config")


def adapt_to_bands(values: torch.Tensor, channels: int, names: Sequence[str]) -> torch.Tensor:
    """Convert values per band (kernels, means, deviations) to the bands of a model.

    Args:
        values: (n, c, ...); with c = 3 of red, green and blue.
        channels: number of the model's bands (C).
        names: of the model's bands; empty: not known.

    Returns:
        (n, C, ...). If c = 3 and ``names`` has red, green and blue: these three get their own values, all other bands
        the mean of the three. Otherwise the values are unchanged if c = C, else each band gets the mean.
    """
    positions = color_positions(names)
    by_name = values.shape[1] == 3 and None not in positions
    if not by_name and channels == values.shape[1]:
        return values
    adapted = values.mean(dim=1, keepdim=True).repeat(1, channels, *[1] * (values.dim() - 2))
    for color, position in enumerate(positions if by_name else ()):
        assert position is not None
        adapted[:, position] = values[:, color]
    return adapted


def typed_keys(kind: type[_Config], keys: Any) -> _Config:
    """Typed keys from a mapping; an instance of ``kind`` is returned unchanged, and None gives the defaults."""
    return keys if isinstance(keys, kind) else kind(**dict(keys or {}))


class ImageModel(Model):
    """A model on a :class:`exp.vision.backbones.base.Backbone`, which takes images as the data set returns them.

    Attributes:
        config_class: class of the typed keys of ``model``.
        raw_arguments: keys whose objects are made here, with the arguments that the data and the backbone determine.
        config: the keys.
        has_head: whether there are scores of classes.
        distillation: the teacher and what is learned from it; None: before :meth:`prepare_training`, or no such terms.

    Args:
        in_channels: of the image (C).
        band_names: of the data's bands; None: not known.
        pixel_mean: mean of each band, 0..255, from the data; None: that of ``normalization``.
        pixel_std: standard deviation of each band, likewise.
        **keys: the keys of ``model``.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    config_class: ClassVar[type] = ImageModelConfig
    raw_arguments: ClassVar[Sequence[str]] = (
        "backbone", "head", "auxiliary_head", "losses", "teacher", "distillation",
    )  # fmt: skip
    has_head: ClassVar[bool] = False
    config: Any
    distillation: Distillation | None
    pixel_mean: torch.Tensor
    pixel_std: torch.Tensor

    def __init__(
        self,
        in_channels: int = 3,
        band_names: Sequence[str] | None = None,
        pixel_mean: Sequence[float] | None = None,
        pixel_std: Sequence[float] | None = None,
        **keys: Any,
    ) -> None:
        super().__init__()
        config = self.config_class(**keys)
        config.lora = typed_keys(LoraConfig, config.lora)
        config.teacher = typed_keys(TeacherConfig, config.teacher)
        self.config, self.band_names = config, list(band_names or ())
        if not config.distillation and config.teacher != TeacherConfig():
            raise ConfigError("model.teacher has no effect without terms in model.distillation")
        if config.normalization not in ("auto", *_NORMALIZATION):
            raise ConfigError(
                f"model.normalization={config.normalization} is not one of auto, {', '.join(_NORMALIZATION)}"
            )
        if pixel_mean is not None and config.normalization != "auto":
            raise ConfigError(
                f"model.normalization={config.normalization} and data.mean both normalize the values; set one of them"
            )
        self.backbone: Backbone = create(config.backbone, Backbone, "model.backbone", in_channels=in_channels)
        self.in_channels = in_channels
        self.distillation = None
        self._freeze()
        self._uses_weights_normalization = config.normalization == "auto" and pixel_mean is None
        if pixel_mean is None or pixel_std is None:
            self._set_normalization("web" if config.normalization == "auto" else config.normalization)
        else:
            self.register_buffer("pixel_mean", torch.tensor(list(pixel_mean)).view(1, -1, 1, 1))
            self.register_buffer("pixel_std", torch.tensor(list(pixel_std)).view(1, -1, 1, 1))

    @property
    def out_indices(self) -> list[int]:
        """Numbers of the levels whose features the head gets."""
        return self.backbone.out_indices

    def _freeze(self) -> None:
        """Freeze the first stages, or all; with low-rank updates, everything but them."""
        freeze, backbone = str(self.config.freeze), self.backbone
        stages = backbone.stages()
        counts = {"none": 0, "all": len(stages), **{str(count): count for count in range(len(stages) + 1)}}
        if freeze not in counts:
            raise ConfigError(
                f"model.freeze={freeze} is not one of none, all, or a number of blocks or stages up to {len(stages)}"
            )
        self.frozen_stages = counts[freeze]
        for name, parameter in backbone.named_parameters() if self.frozen_stages else ():
            if freeze == "all" or backbone.layer_of(name) <= self.frozen_stages:
                parameter.requires_grad_(False)
        if self.config.lora.rank:
            units = [module for stage in stages[self.frozen_stages :] for module in stage]
            lora.add_updates(backbone, units, self.config.lora, backbone.linear_groups)

    def train(self, mode: bool = True) -> ImageModel:
        """Like :meth:`torch.nn.Module.train`, but frozen stages, and what is before them, stay in eval mode."""
        super().train(mode)
        if self.frozen_stages:
            self.backbone.eval()
            for stage in self.backbone.stages()[self.frozen_stages :]:
                for module in stage:
                    module.train(mode)
        return self

    def _set_normalization(self, images: str) -> None:
        for name, values in zip(_STATISTICS, _NORMALIZATION[images]):
            rgb = torch.tensor(values).view(1, 3, 1, 1) * 255.0
            self.register_buffer(name, adapt_to_bands(rgb, self.in_channels, self.band_names))

    @property
    def normalization(self) -> str:
        """The images of whose statistics ``pixel_mean`` and ``pixel_std`` are: ``web``, ``satellite``, or ``own``."""
        statistics = torch.stack([self.pixel_mean, self.pixel_std]).flatten(1).cpu()
        for name, values in _NORMALIZATION.items():
            expected = adapt_to_bands(torch.tensor(values) * 255.0, self.in_channels, self.band_names)
            if torch.allclose(statistics, expected, atol=0.01):
                return name
        return "own"

    def normalize(self, image: torch.Tensor) -> torch.Tensor:
        """The input of the backbone, from (B, C, H, W), 0..255, uint8 or float."""
        return (image.float() - self.pixel_mean) / self.pixel_std

    def features(self, image: torch.Tensor, out_indices: Sequence[int] | None = None) -> Features:
        """Features of raw images.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            out_indices: numbers of the levels, from 0; None: those of the attribute.
        """
        return self.backbone(self.normalize(image), out_indices)

    def prepare_training(self) -> None:
        """Create the teacher of ``model.distillation``, and what learns from it.

        Raises:
            ConfigError: a term does not fit student or teacher.
        """
        if not self.config.distillation or self.distillation is not None:
            return
        teacher: Any
        if self.config.teacher.store:
            teacher = StoredTeacher(self.config.teacher)
        else:
            teacher = Teacher(self.config.teacher, self.backbone, self.band_names, str(vars(self.config)))
        student = Side.of("model", self.backbone, self.has_head)
        self.distillation = Distillation(self.config.distillation, teacher, student, max(self.out_indices) + 1)

    def scores(self, image: torch.Tensor, levels: Sequence[int] = ()) -> tuple[torch.Tensor | None, Features]:
        """Scores of the classes, if there is a head, and features of further levels, in one pass.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            levels: from 0.
        """
        return None, self.features(image, levels)

    @property
    def _distilled_levels(self) -> list[int]:
        return [] if self.distillation is None else self.distillation.levels

    def _all_losses(
        self, batch: Mapping[str, Any], logits: torch.Tensor | None, distilled: Features,
        own: Callable[[], dict[str, torch.Tensor]],
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """The losses of the model, and of the distillation.

        Args:
            batch: with ``image`` (B, C, H, W).
            logits: of the model; None: no term needs them.
            distilled: features of the levels that terms need.
            own: computes the losses by labels.
        """
        if self.distillation is None:
            return rename_single_loss(own())
        return rename_single_loss(self.distillation(self._outputs(batch["image"], logits, distilled), batch, own))

    def _outputs(self, image: torch.Tensor, logits: torch.Tensor | None, distilled: Features) -> Outputs:
        assert self.distillation is not None
        return collect(self, image, logits, distilled, self.distillation.levels, self.distillation.attention_levels)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the submodules in place: backbone, heads and losses. The arguments are those of ``torch.compile``.

        Not the whole call: the windows of a prediction would be compiled as one program, anew for each size of image.
        """
        for submodule in self.children():
            submodule.compile(*args, **kwargs)

    def merge_updates(self) -> None:
        """Add the low-rank updates to the weights of the backbone, and remove them; outputs stay the same."""
        lora.merge_updates(self.backbone)

    def export_batches(self, config: Any) -> list[dict[str, torch.Tensor]]:
        """Random images (``task=export``), of ``task.size`` or ``data.size`` pixels a side; the last are of 8 bits."""
        side = config.task.size or int(config.data.size)
        # Not only whole numbers: files of more than 8 bits give fractions.
        images = [torch.rand(number, self.in_channels, side, side) * 255.0 for number in (2, 3, 1)]
        return [{"image": image} for image in (*images, images[1].to(torch.uint8))]

    def write_huggingface(self, folder: Path, batch: Mapping[str, torch.Tensor], say: Callable[[str], None]) -> float:
        """See :func:`exp.vision.export.write_huggingface`."""
        return write_huggingface(self, folder, batch["image"], say)

    def sharded_units(self) -> list[nn.Module]:
        """The backbone's stages (``wrapper=fsdp``); the head computes in float32, and is small."""
        return [module for stage in self.backbone.stages() for module in stage]

    def layer_of(self, name: str) -> int | None:
        """The backbone's layer of a parameter; None for the head's parameters."""
        return self.backbone.layer_of(name[len(_PREFIX) :]) if name.startswith(_PREFIX) else None

    def is_new_head(self, name: str) -> bool:
        """Whether weights may be missing in a checkpoint: those of heads, and low-rank updates."""
        return not name.startswith(_PREFIX) or lora.is_lora(name)

    @property
    def num_layers(self) -> int:
        """Number of layers as :meth:`layer_of` counts them."""
        return self.backbone.num_layers

    def adapt_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Rename published weights, or our own, to the names of this model; normalization follows the weights.

        Low-rank updates are merged unless this model has the same ones.

        Args:
            state: tensors by name.
            source: the file of the tensors.

        Returns:
            The weights; the input layers have the number of channels of the file.

        Raises:
            ConfigError: the weights are of another family, size or patch size.
        """
        prefixes = [key[: -len(_STATISTICS[0])] + _PREFIX for key in state if key.endswith(_STATISTICS[0])]
        is_ours = any(key.startswith(prefix) for prefix in prefixes for key in state)
        published = None if is_ours else self.backbone.adapt_state_dict(state, source)
        self.unverifiable_keys = [f"{_PREFIX}{key}" for key in self.backbone.unverifiable_keys]
        adapted = strip_prefix(state, self.state_dict()) if published is None else self._from_published(published)
        if self.distillation is None:  # projections to a teacher's width, of no use without it
            adapted = {key: value for key, value in adapted.items() if not key.startswith(_DISTILLATION)}
        if not self._uses_weights_normalization:
            adapted.update(pixel_mean=self.pixel_mean, pixel_std=self.pixel_std)
        backbone = {key[len(_PREFIX) :]: value for key, value in adapted.items() if key.startswith(_PREFIX)}
        plain = {key: value for key, value in backbone.items() if not lora.is_lora(key)}
        self.backbone.check_state_dict(plain, source)
        model_state = self.backbone.state_dict()
        file_updates, model_updates = ({key: tensors[key] for key in tensors if lora.is_lora(key)}
                                       for tensors in (backbone, model_state))  # fmt: skip
        has_same_updates = file_updates.keys() == model_updates.keys() and all(
            value.shape == model_updates[key].shape and (value.dim() > 0 or float(value) == float(model_updates[key]))
            for key, value in file_updates.items()
        )
        return adapted if has_same_updates else lora.merge_lora(adapted, self)

    def _from_published(self, published: Published) -> dict[str, torch.Tensor]:
        """Published weights by this model's names, with pixel statistics."""
        names, statistics = self.state_dict(), published.statistics
        tensors = {f"{key} of the file" if key in names else key: value for key, value in published.others.items()}
        tensors.update({_PREFIX + key: value for key, value in published.weights.items()})
        if self._uses_weights_normalization and isinstance(statistics, str):
            self._set_normalization(statistics)
        tensors.update(pixel_mean=self.pixel_mean, pixel_std=self.pixel_std)
        if self._uses_weights_normalization and isinstance(statistics, tuple):
            tensors.update({name: torch.tensor(values).view(1, -1, 1, 1)
                            for name, values in zip(_STATISTICS, statistics)})  # fmt: skip
        # The data's bands may have another order.
        for name in () if published.bands_of_data else (*self._input_weights, *_STATISTICS):
            if name in tensors and tensors[name].shape[1] == 3 and (self.in_channels == 3 or name in _STATISTICS):
                tensors[name] = adapt_to_bands(tensors[name], self.in_channels, self.band_names)
        return tensors

    @property
    def _input_weights(self) -> list[str]:
        return [_PREFIX + name for name in self.backbone.input_weights]

    def fit_state_dict(self, state: Mapping[str, torch.Tensor], source: Path) -> dict[str, torch.Tensor]:
        """Convert input layers and pixel statistics to this model's bands (:func:`adapt_to_bands`)."""
        fitted = super().fit_state_dict(state, source)
        for name in (*self._input_weights, *_STATISTICS):
            if name in fitted and fitted[name].shape[1] != self.in_channels:
                # The sum of the kernels stays the same, so that a gray image keeps its embedding.
                factor = 1.0 if name in _STATISTICS else fitted[name].shape[1] / self.in_channels
                fitted[name] = adapt_to_bands(fitted[name], self.in_channels, self.band_names) * factor
        return fitted


def rename_single_loss(losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename a single loss to ``loss``; several losses are returned unchanged."""
    return {"loss": next(iter(losses.values()))} if len(losses) == 1 else losses


class Encoder(ImageModel):
    """A backbone without a head, which learns the features of a teacher; it is measured by their cosines.

    Args:
        **keys: of :class:`exp.vision.keys.EncoderConfig`, and the arguments of :class:`ImageModel`.
    """

    config_class = EncoderConfig

    def __init__(self, **keys: Any) -> None:
        if "num_classes" in keys:
            raise ConfigError(
                "model=dinov3_distillation learns features, not classes, and these data measure classes; set "
                "data=distillation, with data.root and data.layout as they are here"
            )
        super().__init__(**keys)
        teacher = self.config.teacher
        has_store = teacher.store is not None and (Path(teacher.store) / "about.json").is_file()
        if teacher.backbone or has_store or run_folder_of(teacher.init_from) is not None:
            self.prepare_training()  # for task=eval, too; without the teacher the features can still be used
        self.backbone.freeze_unused(self.out_indices)

    def forward(
        self, image: torch.Tensor, mode: str = "tensor", **others: Any
    ) -> torch.Tensor | CosineSimilarity | dict[str, torch.Tensor]:
        """Features, their agreement with the teacher's, or the losses.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **others: further keys of a batch.

        Returns:
            ``"loss"``: 0-dim float32 tensors by name. ``"predict"``: a :class:`CosineSimilarity`. ``"tensor"``:
            (B, 2 D), the CLS token and the mean of the patches, the input of a linear classifier.
        """
        if mode == "tensor":
            return torch.cat(self.features(image).vectors(), dim=-1)
        self.prepare_training()  # or a message that there is no teacher
        features = self.features(image, self._distilled_levels)
        batch = {"image": image, **others}
        if mode == "loss":
            return self._all_losses(batch, None, features, dict)
        assert self.distillation is not None
        return self.distillation.similarity(self._outputs(image, None, features), batch)


class SceneClassifier(ImageModel):
    """A linear head on the CLS token, if there is one, and the mean of each map, as in DINOv3's evaluation.

    Args:
        num_classes: classes of the data (K).
        ignore_index: the label of samples that are ignored.
        **keys: of :class:`exp.vision.keys.SceneClassifierConfig`, and the arguments of :class:`ImageModel`.
    """

    config_class = SceneClassifierConfig
    has_head = True

    def __init__(self, num_classes: int, ignore_index: int = -1, **keys: Any) -> None:
        super().__init__(**keys)
        config = self.config
        self.losses = Losses(config.losses, Loss, ignore_index=ignore_index, class_weights=config.class_weights)
        self.dropout = Dropout(config.dropout)
        self.head = nn.Linear(sum(self.backbone.channels) * (1 + self.backbone.has_cls), num_classes)
        nn.init.trunc_normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)
        self.backbone.freeze_unused(self.out_indices)

    def forward(
        self, image: torch.Tensor, label: torch.Tensor | None = None, mode: str = "tensor", **others: Any
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Scores of the classes, or their loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B,), int64; for the loss.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **others: further keys of a batch.

        Returns:
            ``"loss"``: 0-dim float32 tensors by name; logits (B, K), float32, for the other modes.
        """
        if mode != "loss":
            return self.scores(image)[0]
        logits, distilled = self.scores(image, self._distilled_levels)
        return self._all_losses({"image": image, **others}, logits, distilled, lambda: self.losses(logits, label))

    def scores(self, image: torch.Tensor, levels: Sequence[int] = ()) -> tuple[torch.Tensor, Features]:
        """See :class:`ImageModel`; scores (B, K), float32."""
        features, further = self.features(image, [*self.out_indices, *levels]).split(len(self.out_indices))
        with autocast_disabled(image.device.type):
            return self.head(self.dropout(torch.cat(features.vectors(), dim=-1))), further


class DenseModel(ImageModel):
    """A head on the maps of a backbone, whose outputs are interpolated to the pixels; large images in windows.

    Args:
        num_outputs: of the head for each pixel (K).
        **keys: of :class:`exp.vision.keys.DenseConfig`, and the arguments of :class:`ImageModel`.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    def __init__(self, num_outputs: int, **keys: Any) -> None:
        super().__init__(**keys)
        config, backbone = self.config, self.backbone
        head_class: type[Head] = resolve("model.head._target_", str(dict(config.head).get("_target_")), Head)
        backbone.select_levels(head_class.num_levels)
        info = backbone.info(self.out_indices)
        self.head: Head = create(config.head, Head, "model.head", info=info, num_classes=num_outputs)
        self.tiling = Tiling(
            config.inference, config.window, config.overlap, config.tta_scales, config.tta_flip, config.blend
        )

    def scores(self, image: torch.Tensor, levels: Sequence[int] = ()) -> tuple[torch.Tensor, Features]:
        """See :class:`ImageModel`; the head's outputs (B, K, H, W), float32."""
        main, further = self.features(image, [*self.out_indices, *levels]).split(len(self.out_indices))
        with autocast_disabled(image.device.type):
            return self._to_pixels(self.head(main.maps, main.cls), image), further

    def _to_pixels(self, scores: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Interpolate (B, K, h', w') to the image that the backbone has padded, and crop to (B, K, H, W)."""
        height, width = image.shape[-2:]
        multiple = self.backbone.multiple
        padded = (-(-height // multiple) * multiple, -(-width // multiple) * multiple)
        pixels = F.interpolate(scores.float(), size=padded, mode="bilinear", align_corners=False)
        return pixels[..., :height, :width]


class Segmenter(DenseModel):
    """Scores of classes for each pixel.

    The loss of the auxiliary head, on an inner level, is the cross-entropy.

    Args:
        num_classes: classes of the data (K).
        ignore_index: the label of pixels that are ignored.
        **keys: of :class:`exp.vision.keys.SegmenterConfig`, and the arguments of :class:`ImageModel`.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    config_class = SegmenterConfig
    has_head = True

    def __init__(self, num_classes: int, ignore_index: int = 255, **keys: Any) -> None:
        super().__init__(num_outputs=num_classes, **keys)
        config, backbone = self.config, self.backbone
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.losses = Losses(config.losses, Loss, ignore_index=ignore_index, class_weights=config.class_weights)
        self.auxiliary_indices: list[int] = []
        if config.auxiliary_weight:
            depth, index = len(backbone.level_channels), config.auxiliary_out_index
            index = (2 * depth - 1) // 3 if index is None else index
            self.auxiliary_indices = backbone.level_numbers([index], "model.auxiliary_out_index")
            info = backbone.info(self.auxiliary_indices)
            self.auxiliary_head: Head = create(
                config.auxiliary_head, Head, "model.auxiliary_head", info=info, num_classes=num_classes
            )
            self.auxiliary_loss = CrossEntropy(ignore_index=ignore_index, class_weights=config.class_weights)
        backbone.freeze_unused([*self.out_indices, *self.auxiliary_indices])

    def forward(
        self,
        image: torch.Tensor,
        label: torch.Tensor | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        label_sizes: Sequence[tuple[int, int]] | None = None,
        mode: str = "tensor",
        **others: Any,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Scores, labels or the loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B, H, W), uint8; for the loss.
            sizes: (height, width) of each image without its padding at right and bottom; None: no image is padded.
            label_sizes: (height, width) at which each image is predicted; None: those of the image.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **others: further keys of a batch.

        Returns:
            ``"loss"``: 0-dim float32 tensors by name. ``"predict"``: labels (B, H, W), uint8, with windows and
            test-time augmentation, of ``label_sizes``; ``ignore_index`` in the padding. ``"tensor"``: logits
            (B, K, H, W) of one pass.
        """
        if mode == "loss":
            return self._losses({"image": image, **others}, label)
        if mode == "predict":
            return self.tiling.labels(self._logits, self.num_classes, image, sizes, self.ignore_index, label_sizes)
        return self._logits(image)

    def _logits(self, image: torch.Tensor) -> torch.Tensor:
        return self.scores(image)[0]

    def _losses(self, batch: Mapping[str, Any], label: torch.Tensor | None) -> dict[str, torch.Tensor]:
        image, auxiliary_indices = batch["image"], self.auxiliary_indices
        features = self.features(image, [*self.out_indices, *auxiliary_indices, *self._distilled_levels])
        main, further = features.split(len(self.out_indices))
        auxiliary, distilled = further.split(len(auxiliary_indices))
        with autocast_disabled(image.device.type):
            logits = None
            if not self.head.owns_loss or (self.distillation is not None and self.distillation.needs_logits):
                logits = self._to_pixels(self.head(main.maps, main.cls), image)

            def own() -> dict[str, torch.Tensor]:
                assert label is not None
                if self.head.owns_loss:
                    losses = self.head.loss(main.maps, main.cls, label, self.ignore_index)
                else:
                    losses = self.losses(logits, label)
                if auxiliary_indices:
                    scores = self._to_pixels(self.auxiliary_head(auxiliary.maps, auxiliary.cls), image)
                    losses["loss_auxiliary"] = self.config.auxiliary_weight * self.auxiliary_loss(scores, label)
                return losses

            return self._all_losses(batch, logits, distilled, own)


class Regressor(DenseModel):
    """A value for each pixel, such as a height.

    Of the head's output, 0 is the middle of the targets' range, and -0.5 and 0.5 its ends.

    Args:
        target_range: the lowest and the highest value, in the unit of the targets.
        **keys: of :class:`exp.vision.keys.RegressorConfig`, and the arguments of :class:`ImageModel`.

    Raises:
        ConfigError: keys are out of range or contradict each other.
    """

    config_class = RegressorConfig

    def __init__(self, target_range: Sequence[float], **keys: Any) -> None:
        super().__init__(num_outputs=1, **keys)
        self.low, self.high = target_range
        if self.head.owns_loss:
            raise ConfigError(f"model.head: {type(self.head).__name__} has a loss of its own, which is one of classes")
        self.losses = Losses(self.config.losses, ValueLoss, target_range=target_range)
        self.backbone.freeze_unused(self.out_indices)

    def forward(
        self,
        image: torch.Tensor,
        label: torch.Tensor | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        label_sizes: Sequence[tuple[int, int]] | None = None,
        mode: str = "tensor",
        **others: Any,
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Values, or the loss.

        Args:
            image: (B, C, H, W), 0..255, uint8 or float.
            label: (B, H, W), float32, NaN where there is no target; for the loss.
            sizes: see :class:`Segmenter`.
            label_sizes: likewise.
            mode: ``"loss"``, ``"predict"`` or ``"tensor"`` (:class:`exp.models.base.Model`).
            **others: further keys of a batch.

        Returns:
            ``"loss"``: 0-dim float32 tensors by name. Values in the unit of the targets, within their range:
            ``"predict"``: (B, H, W), with windows and test-time augmentation, of ``label_sizes``; 0 in the padding.
            ``"tensor"``: (B, 1, H, W) of one pass.
        """
        if mode == "predict":
            return self.tiling.labels(self._values, 1, image, sizes, 0.0, label_sizes, lambda scores: scores[0])
        if mode != "loss":
            return self._values(image)
        output, distilled = self.scores(image, self._distilled_levels)
        values = self._in_units(output)[:, 0]
        batch = {"image": image, **others}
        return self._all_losses(batch, None, distilled, lambda: self.losses(values, label))

    def _in_units(self, output: torch.Tensor) -> torch.Tensor:
        return self.low + (self.high - self.low) * (output + 0.5)

    def _values(self, image: torch.Tensor) -> torch.Tensor:
        return self._in_units(self.scores(image)[0]).clamp(self.low, self.high)
